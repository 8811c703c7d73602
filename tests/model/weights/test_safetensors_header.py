import json
import os
import shutil
import struct

import pytest
import torch
from fresh_files import write_new
from hypothesis import given
from hypothesis import strategies as st
from pooling_models import pooling_folder
from property_examples import examples
from safetensors import SafetensorError, deserialize
from safetensors.torch import save, save_file
from weight_files import entry, write_raw

from spmd_worker import LLM
from spmd_worker.base.errors import CheckpointError, ModelConfigError, TokenizerError
from spmd_worker.model.weights.safetensors_header import MAX_HEADER_BYTES, TensorEntry, parse_header, read_header
from spmd_worker.model_config.tensor_names import SINGLE_FILE, tensor_names

GOOD = {"a": entry("F32", [2, 3], 0, 24), "b": entry("BF16", [4], 24, 32)}


def parse(header, data_bytes):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return parse_header(text, 8 + len(text) + data_bytes, "model.safetensors")


def test_header_written_by_library_is_read(tmp_path):
    tensors = {"a": torch.ones(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), "empty": torch.ones(0, 5)}
    path = tmp_path / "model.safetensors"
    path.write_bytes(save(tensors, metadata={"format": "pt"}))
    header = read_header(path)
    assert {name: (found.dtype, found.shape) for name, found in header.tensors.items()} == {
        "a": ("F32", (2, 3)),
        "b": ("BF16", (4,)),
        "empty": ("F32", (0, 5)),
    }
    assert header.metadata == {"format": "pt"}
    assert header.file_bytes == path.stat().st_size
    assert header.data_start + 32 == header.file_bytes


def test_correct_header_written_by_hand_is_accepted():
    assert parse(GOOD, 32).tensors == {"a": TensorEntry("F32", (2, 3), 0, 24), "b": TensorEntry("BF16", (4,), 24, 32)}
    assert parse({}, 0).tensors == {}
    assert parse({"scale": entry("F32", [], 0, 4)}, 4).tensors["scale"].shape == ()


BROKEN = [
    # rule, header, data bytes, words of the message
    ("duplicate name", b'{"a": {"dtype":"U8","shape":[0],"data_offsets":[0,0]}, "a": {}}', 0, "'a' appears twice"),
    (
        "duplicate key",
        b'{"a": {"dtype":"U8","dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
        0,
        "'dtype' appears twice",
    ),
    ("not JSON", b'{"a": ', 0, "the header is not JSON"),
    ("not UTF-8", b'{"\xff": 1}', 0, "is not UTF-8"),
    ("NaN", b'{"a": NaN}', 0, "NaN"),
    ("huge number", b'{"a": ' + b"9" * 5000 + b"}", 0, "is not JSON"),
    ("bottomless nesting", b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 0, "nested too deeply"),
    ("not an object", b"[1]", 0, "must begin with '{'"),
    ("leading space", b" {}", 0, "must begin with '{'"),
    ("entry is no object", {"a": 3}, 0, "exactly the keys"),
    ("endless name", {"a" * 257: entry("U8", [0], 0, 0)}, 0, "a'...: the name has more than 256 characters"),
    ("endless shape", {"a": entry("U8", [1] * 17, 0, 1)}, 1, "the shape has more than 16 dimensions"),
    ("missing key", {"a": {"dtype": "F32", "shape": [1]}}, 4, "exactly the keys"),
    ("further key", {"a": {**entry("F32", [1], 0, 4), "code": "x"}}, 4, "exactly the keys"),
    ("unknown dtype", {"a": entry("F31", [1], 0, 4)}, 4, "unknown dtype 'F31'"),
    ("dtype is no string", {"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}, 4, "unknown dtype"),
    ("negative size", {"a": entry("F32", [-1, -1], 0, 4)}, 4, "shape [-1, -1] has a negative number"),
    ("size is a boolean", {"a": entry("F32", [True], 0, 4)}, 4, "shape must be a list of integers"),
    ("size is a float", {"a": entry("F32", [1.0], 0, 4)}, 4, "shape must be a list of integers"),
    ("shape is a string", {"a": {**entry("F32", [], 0, 4), "shape": "12"}}, 4, "shape must be a list of integers"),
    ("one offset", {"a": {**entry("F32", [1], 0, 4), "data_offsets": [0]}}, 4, "must be two integers"),
    ("negative offset", {"a": entry("F32", [1], -4, 0)}, 4, "data_offsets [-4, 0] has a negative number"),
    ("begin after end", {"a": entry("F32", [1], 8, 4)}, 8, "begin at 8, after their end at 4"),
    ("wrong size", {"a": entry("F32", [2, 3], 0, 20)}, 20, "size mismatch: shape [2, 3] of F32 takes 24 bytes"),
    ("half a byte", {"a": entry("F4", [3], 0, 1)}, 1, "size mismatch: shape [3] of F4 takes 1.5 bytes"),
    ("overflowing shape", {"a": entry("U8", [2**40, 2**40], 0, 4)}, 4, "the shape overflows"),
    ("overflow wrapping to the size", {"a": entry("U8", [2**32, 2**32], 0, 0)}, 0, "the shape overflows"),
    ("overflow next to a zero", {"a": entry("U8", [0, 2**62, 2**62], 0, 0)}, 0, "the shape overflows"),
    ("overlap", {"a": entry("U8", [8], 0, 8), "b": entry("U8", [8], 4, 12)}, 12, "overlap the previous tensor"),
    ("same offsets", {"a": entry("U8", [8], 0, 8), "b": entry("U8", [8], 0, 8)}, 8, "overlap the previous tensor"),
    ("gap", {"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 8, 12)}, 12, "leave a gap"),
    ("gap at the start", {"a": entry("U8", [4], 4, 8)}, 8, "leave a gap"),
    ("offsets beyond the end", {"a": entry("U8", [4], 10**12, 10**12 + 4)}, 8, "reach beyond the end of the data at 8"),
    ("truncated data", {"a": entry("U8", [8], 0, 8)}, 7, "truncated: the header describes 8 bytes of data"),
    ("trailing bytes", {"a": entry("U8", [8], 0, 8)}, 9, "1 bytes after the last tensor"),
    ("data without tensors", {}, 3, "3 bytes after the last tensor"),
    ("metadata is a list", {"__metadata__": []}, 0, "__metadata__ must map strings to strings"),
    ("metadata holds a number", {"__metadata__": {"x": 1}}, 0, "__metadata__ must map strings to strings"),
    ("lone surrogate", b'{"\\ud800": {"dtype":"U8","shape":[0],"data_offsets":[0,0]}}', 0, "not printable Unicode"),
    ("terminal escape", {"\x1b[2J": entry("U8", [0], 0, 0)}, 0, "not printable Unicode"),
]


@pytest.mark.parametrize(("header", "data_bytes", "words"), [case[1:] for case in BROKEN], ids=[c[0] for c in BROKEN])
def test_invalid_header_is_rejected_with_its_rule(header, data_bytes, words):
    with pytest.raises(CheckpointError) as error_result:
        parse(header, data_bytes)
    assert words in str(error_result.value)
    assert str(error_result.value).startswith("model.safetensors: ")


def test_messages_name_the_tensor():
    with pytest.raises(CheckpointError, match=r"tensor 'model\.norm\.weight'"):
        parse({"model.norm.weight": entry("F32", [2, 3], 0, 20)}, 20)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "truncated: 0 bytes"),
        (b"\x02\x00\x00", "truncated: 3 bytes"),
        (struct.pack("<Q", 50) + b"{}", r"truncated: .*50 exceeds .*10 bytes"),
        (struct.pack("<Q", MAX_HEADER_BYTES + 1) + b"{}", "exceeds the limit"),
        (struct.pack("<Q", 2**64 - 1) + b"{}", "exceeds the limit"),
    ],
)
def test_truncated_file_is_rejected_before_parsing(tmp_path, content, words):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=words):
        read_header(path)


def test_every_truncation_of_a_file_is_rejected(tmp_path):
    content = save({"a": torch.ones(2, 3), "b": torch.ones(4)})
    path = tmp_path / "model.safetensors"
    for num_bytes in range(len(content)):
        write_new(path, content[:num_bytes])
        with pytest.raises(CheckpointError):
            read_header(path)


def test_pipe_is_rejected_without_blocking(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_header(tmp_path / "model.safetensors")


def test_digest_changes_with_the_header(tmp_path):
    first = read_header(write_raw(tmp_path / "x", GOOD, bytes(32)))
    same = read_header(write_raw(tmp_path / "y", GOOD, bytes(range(32))))
    other = read_header(write_raw(tmp_path / "z", {**GOOD, "__metadata__": {"a": "b"}}, bytes(32)))
    assert first.digest == same.digest != other.digest


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


# Values that fit often enough for mutated headers to be accepted now and then.
NEAR_VALUES = {
    "dtype": ["F32", "I32", "U32", "BF16", "F16", "I16", "F64", "I8", "F4", "BOOL"],
    "shape": [[6], [3, 2], [1, 6], [2, 3, 1], [4], [2, 2], [4, 1], [0], []],
    "data_offsets": [[0, 24], [24, 32], [0, 32], [8, 32], [0, 8], [32, 24], [24, 40]],
    None: [{}, "F32", {"format": "pt"}, entry("F32", [2, 3], 0, 24), entry("I64", [1], 24, 32), entry("U8", [0], 0, 0)],
}


@st.composite
def mutated_header(draw):
    """A good header with some of its values replaced, some of its bytes replaced, or both."""
    header = json.loads(json.dumps(GOOD))
    for _ in range(draw(st.integers(0, 2))):
        name = draw(st.sampled_from(["a", "b", "c", "__metadata__"]))
        key = draw(st.sampled_from(["dtype", "shape", "data_offsets", None]))
        near = st.sampled_from(NEAR_VALUES[key])
        value = draw(near | near | JSON_VALUES | st.lists(st.integers(-1, 40), max_size=3))
        if key is None or not isinstance(header.get(name), dict):
            header[name] = value
        else:
            header[name][key] = value
    text = bytearray(json.dumps(header).encode())
    for _ in range(draw(st.integers(0, 2))):
        text[draw(st.integers(0, len(text) - 1))] = draw(st.integers(0, 255) | st.sampled_from(b' 0123456789"abc'))
    return bytes(text)


@examples(600)
@given(mutated_header(), st.sampled_from([32, 32, 32, 0, 31, 40]))
def test_accepted_mutated_headers_are_valid_to_library(text, data_bytes):
    try:
        header = parse(text, data_bytes)
    except CheckpointError:
        return
    try:
        accepted = dict(deserialize(struct.pack("<Q", len(text)) + text + bytes(data_bytes)))
    except SafetensorError as error:
        pytest.fail(f"accepted what the library refuses: {error}: {text!r}")
    assert {name: list(found.shape) for name, found in header.tensors.items()} == {
        name: found["shape"] for name, found in accepted.items()
    }


WHAT_THE_LIBRARY_TAKES = {
    "a name that stands twice": (
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        8,
        "the key 'a' appears twice",
    ),
    "an unknown key": (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"x":1}}', 8, "exactly the keys"),
    "a size that overflows": (
        b'{"a":{"dtype":"F32","shape":[0,4611686018427387904,4611686018427387904],"data_offsets":[0,0]}}',
        0,
        "the shape overflows",
    ),
    "control characters": (b'{"\\u001b[2J":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', 8, "not printable"),
}


@pytest.mark.parametrize(
    ("text", "data_bytes", "words"), WHAT_THE_LIBRARY_TAKES.values(), ids=WHAT_THE_LIBRARY_TAKES.keys()
)
def test_invalid_headers_that_library_accepts_are_rejected(text, data_bytes, words):
    """The reason for reading headers with our own code."""
    deserialize(struct.pack("<Q", len(text)) + text + bytes(data_bytes))
    with pytest.raises(CheckpointError, match=f"model.safetensors: .*{words}"):
        parse(text, data_bytes)


@examples(200)
@given(st.binary(max_size=60))
def test_random_bytes_are_rejected(text):
    try:
        parse(text, 8)
    except CheckpointError:
        return
    pytest.fail("random bytes cannot describe 8 bytes of data")


def twice(text: bytes) -> bytes:
    """An object with its first key repeated at the end."""
    document = json.loads(text)
    name = next(key for key in document if key != "__metadata__")
    return text.rstrip()[:-1] + b"," + json.dumps({name: document[name]}).encode()[1:]


@pytest.mark.finding(number="D17")
def test_duplicate_names_of_a_header_are_dropped(tmp_path):
    """A plan uses neither of the two; loading rejects the file."""
    save_file({"a": torch.zeros(2), "b": torch.ones(2)}, tmp_path / SINGLE_FILE)
    assert tensor_names(tmp_path) == ("a", "b")
    content = (tmp_path / SINGLE_FILE).read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = twice(content[8 : 8 + length])
    (tmp_path / SINGLE_FILE).write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])
    with pytest.raises(CheckpointError, match=r"key 'a' .*twice .*object"):
        read_header(tmp_path / SINGLE_FILE)
    assert tensor_names(tmp_path) == ()


@pytest.mark.finding(number="D17")
@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("config.json", ModelConfigError),
        ("generation_config.json", ModelConfigError),
        ("modules.json", ModelConfigError),
        ("1_Pooling/config.json", ModelConfigError),
        ("config_sentence_transformers.json", ModelConfigError),
        ("tokenizer_config.json", TokenizerError),
        ("special_tokens_map.json", TokenizerError),
        ("model.safetensors.index.json", CheckpointError),
    ],
)
def test_duplicate_keys_of_a_file_are_rejected(tmp_path, name, error):
    folder = tmp_path / "model"
    shutil.copytree(pooling_folder("mean"), folder)
    path = folder / name
    if name.endswith("index.json"):
        (folder / SINGLE_FILE).rename(folder / "model-00001-of-00001.safetensors")
        path.write_text('{"weight_map": {"a": "model-00001-of-00001.safetensors"}}')
    text = path.read_text() if path.exists() else '{"a": "b"}'
    start = text.index("{")
    key, value = next(iter(json.JSONDecoder().raw_decode(text, start)[0].items()))
    path.write_text(text[: start + 1] + f"{json.dumps(key)}: {json.dumps(value)}, " + text[start + 1 :])
    with pytest.raises(error, match=rf"key '{key}' .*twice .*object"):
        LLM(folder, device="cpu")
