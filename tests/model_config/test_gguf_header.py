"""Headers of GGUF files: what the format's own package reads, and hostile ones, which cost an error and no more."""

import random
import struct
import tracemalloc
from contextlib import suppress
from pathlib import Path

import gguf
import pytest
from gguf_files import tokenizer_metadata, write_gguf
from reference_models import checkpoint_folder
from tokenizer_folders import write_byte_level

from spmd_worker.base.errors import ModelConfigError
from spmd_worker.model_config.gguf.header import read_gguf_header
from spmd_worker.model_config.gguf.tensor_types import TENSOR_TYPES
from spmd_worker.model_config.hub import locate_model

U32, U64, TEXT, LIST = 4, 10, 8, 9


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, *sizes: int, kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


def file_of(pairs: tuple[bytes, ...] = (), tensors: tuple[bytes, ...] = (), data: int = 0, **changed: int) -> bytes:
    counts = {"version": 3, "num_tensors": len(tensors), "num_pairs": len(pairs), **changed}
    head = b"GGUF" + struct.pack("<IQQ", *counts.values()) + b"".join(pairs) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + bytes(data)


HOSTILE = {
    "magic": (b"PK\x03\x04" + bytes(40), "begins with b'PK"),
    "Git LFS": (b"version https://git-lfs.github.com/spec/v1\n", "is a pointer of Git LFS, .*: run `git lfs pull`"),
    "empty": (b"", "truncated: the magic takes 4 bytes, and 0 are left"),
    "version 1": (file_of(version=1), "is GGUF of version 1, only 3 is read"),
    "version 2": (file_of(version=2), "is GGUF of version 2"),
    "zeroed": (b"GGUF" + bytes(60), "is damaged, its version is 0: copy or download it again"),
    "big endian": (file_of(version=3 << 24), "big-endian GGUF"),
    "tensors": (file_of(num_tensors=2**63), "has 9,223,372,036,854,775,808 tensors, more than"),
    "keys": (file_of(num_pairs=2**40), "has 1,099,511,627,776 keys, more than"),
    "fewer keys": (file_of(num_pairs=3), "key 0 of the metadata, '', must be printable"),
    "long key": (file_of((pair("k" * 300, U32, bytes(4)),)), "has 300 bytes, more than 256"),
    "huge text": (
        file_of((pair("a", TEXT, struct.pack("<Q", 2**62)),)),
        "a has 4,611,686,018,427,387,904 bytes, more than",
    ),
    "huge list": (file_of((pair("a", LIST, struct.pack("<IQ", U32, 2**61)),)), "a lists .* items"),
    "long list": (file_of((pair("a", LIST, struct.pack("<IQ", U32, 2**20)),)), "truncated: a takes 4,194,304"),
    "list of lists": (file_of((pair("a", LIST, struct.pack("<IQ", LIST, 1)),)), "is an array of the type 9"),
    "kind": (file_of((pair("a", 77, bytes(8)),)), "a has the unknown type 77"),
    "utf-8": (file_of((pair("a", TEXT, struct.pack("<Q", 1) + b"\xff"),)), "a is not UTF-8"),
    "twice": (file_of((pair("a", U32, bytes(4)),) * 2), "the metadata has a twice"),
    "control key": (file_of((pair("a\x1b[2J", U32, bytes(4)),)), "must be printable text"),
    "alignment": (file_of((pair("general.alignment", U32, struct.pack("<I", 24)),)), "general.alignment=24 must be"),
    "no alignment": (file_of((pair("general.alignment", U32, bytes(4)),)), "general.alignment=0 must be"),
    "dimensions": (file_of((), (tensor("t", 1, 1, 1, 1, 1),), 32), "'t': has 5 dimensions"),
    "type": (file_of((), (tensor("t", 32, kind=27),), 999), "'t': has the type 27, which is not supported, only F32"),
    "rows": (file_of((), (tensor("t", 33, kind=2),), 99), "'t': its rows have 33 elements, and Q4_0 stores 32"),
    "no elements": (file_of((), (tensor("t", 0, 2),), 99), "has an empty dimension, or too many"),
    "elements": (file_of((), (tensor("t", 2**40, 2**40),), 99), "has an empty dimension, or too many"),
    "beyond": (file_of((), (tensor("t", 64),), 32), "truncated: tensor 't' ends at 320, and the file has 96 bytes"),
    "outside": (file_of((), (tensor("t", 8, offset=2**62),), 32), "truncated: tensor 't' ends at"),
    "unaligned": (file_of((), (tensor("t", 1, offset=4),), 64), "'t': the offset 4 is no multiple"),
    "overlap": (file_of((), (tensor("t", 64), tensor("u", 1, offset=32)), 512), "'u' overlaps 't'"),
    "same name": (file_of((), (tensor("t", 1), tensor("t", 1, offset=32)), 64), "two tensors have the name 't'"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("gguf")
    tokens = tokenizer_metadata(write_byte_level(folder))
    return write_gguf(checkpoint_folder("llama3"), folder / "m.gguf", "Q8_0", metadata=tokens).read_bytes()


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_header_is_an_error(case: str, tmp_path: Path):
    content, words = HOSTILE[case]
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(ModelConfigError, match=rf"^{path}: .*{words}"):
            read_gguf_header(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_header_is_what_the_package_reads(model: bytes, tmp_path: Path):
    path = tmp_path / "m.gguf"
    path.write_bytes(model)
    ours, theirs = read_gguf_header(path), gguf.GGUFReader(path)
    assert {
        name: (list(each.shape[::-1]), each.type.name, each.begin, each.end) for name, each in ours.tensors.items()
    } == {
        each.name: (
            each.shape.tolist(),
            each.tensor_type.name,
            each.data_offset,
            each.data_offset + each.n_bytes,
        )
        for each in theirs.tensors
    }
    fields = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert ours.metadata == {
        name: pytest.approx(value, rel=1e-7) if isinstance(value, float) else value for name, value in fields.items()
    }
    assert ours.metadata["llama.attention.layer_norm_rms_epsilon"] == 1e-05


def test_types_are_the_packages():
    for each in TENSOR_TYPES.values():
        theirs = gguf.GGMLQuantizationType(each.number)
        assert (theirs.name, *gguf.GGML_QUANT_SIZES[theirs]) == (each.name, each.block, each.block_bytes)


@pytest.mark.parametrize("seed", range(3))
def test_damaged_model_never_crashes(seed: int, model: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    chance, path, num_errors = random.Random(seed), tmp_path / "m.gguf", 0
    for _ in range(15):
        damaged = bytearray(model)
        for _ in range(chance.choice((1, 4, 30))):
            damaged[chance.randrange(12_000)] = chance.choice((0, 1, 255, chance.randrange(256)))
        path.write_bytes(damaged[: chance.choice((len(damaged), chance.randrange(len(damaged))))])
        with suppress(ModelConfigError):
            locate_model(str(path), None)
            continue
        num_errors += 1
    assert num_errors > 5
