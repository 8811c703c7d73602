import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from json_files import edit
from tokenizer_folders import CHATML, write_byte_level, write_llama_style, write_metaspace
from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerFast

from spmd_worker.base.errors import TokenizerError
from spmd_worker.tokenizer.incremental_decoder import IncrementalDecoder
from spmd_worker.tokenizer.tokenizer import Tokenizer

TEXTS = [
    "hello world",
    " hello",
    "hello  ",
    "",
    "  a  b ",
    "naïve café 你好 😀😀",
    "<s>hello</s> world",
    "a\n\tb\x00c",
    "👩‍👩‍👧 e\u0301",
    "<|im_start|>user\nhello<|im_end|>",
]

WRITERS = {"byte_level": write_byte_level, "llama": write_llama_style, "metaspace": write_metaspace}


@pytest.fixture(scope="module", params=sorted(WRITERS))
def folder(request, tmp_path_factory):
    return WRITERS[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    return Tokenizer.open(write_byte_level(tmp_path_factory.mktemp("byte_level")))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return Tokenizer.open(write_llama_style(tmp_path_factory.mktemp("llama")))


# ---- encode and decode against the reference implementation


@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_ids_equal_transformers(folder, add_special_tokens):
    ours, reference = Tokenizer.open(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    expected = [reference.encode(text, add_special_tokens=add_special_tokens) for text in TEXTS]
    assert [ours.encode(text, add_special_tokens) for text in TEXTS] == expected
    assert ours.vocab_size == len(reference)
    assert (ours.bos_token_id, ours.eos_token_id) == (reference.bos_token_id, reference.eos_token_id)


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_decoded_text_equals_transformers(folder, skip_special_tokens):
    ours, reference = Tokenizer.open(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    for text in TEXTS:
        ids = reference.encode(text)
        assert ours.decode(ids, skip_special_tokens) == reference.decode(ids, skip_special_tokens=skip_special_tokens)


def test_template_processor_prepends_bos_unless_disabled(llama):
    assert llama.encode("hello")[0] == llama.bos_token_id == 1
    assert llama.encode("hello", add_special_tokens=False)[0] != 1
    assert llama.encode("") == [1]


@pytest.mark.parametrize("add_bos_token", [True, False])
def test_tokenizer_json_overrides_add_bos_token_like_transformers(tmp_path, add_bos_token):
    for write in (write_byte_level, write_llama_style):
        folder = write(tmp_path / write.__name__, add_bos_token=add_bos_token)
        reference = PreTrainedTokenizerFast.from_pretrained(folder)
        assert Tokenizer.open(folder).encode("hello") == reference.encode("hello")


def test_special_token_can_be_an_object(tmp_path):
    token = {"__type": "AddedToken", "content": "<|im_end|>", "lstrip": False, "normalized": False}
    tokenizer = Tokenizer.open(write_byte_level(tmp_path, eos_token=token, bos_token=None))
    assert tokenizer.eos_token_id == 3
    assert tokenizer.bos_token_id is None


def test_special_tokens_map_is_read_without_configured_tokens(tmp_path):
    """special_tokens_map.json, when tokenizer_config.json names none."""
    write_byte_level(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "</s>"}}')
    assert Tokenizer.open(tmp_path).eos_token_id == 1


def test_configured_tokens_are_added_like_transformers(tmp_path):
    listed = {"400": {"content": "<tool>", "special": False}, "401": {"content": "<end>", "special": True}}
    folder = write_byte_level(tmp_path, added_tokens_decoder=listed, additional_special_tokens=["<x>"], pad_token="<p>")
    ours, reference = Tokenizer.open(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    text = "a<tool>b<end>c<x>d<p>"
    assert ours.encode(text) == reference.encode(text)
    assert ours.decode(ours.encode(text)) == reference.decode(reference.encode(text), skip_special_tokens=True)
    assert ours.vocab_size == len(reference)


def test_stored_truncation_and_padding_are_not_applied(tmp_path):
    folder = write_byte_level(tmp_path)
    edit(
        folder / "tokenizer.json",
        truncation={"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
    )
    assert len(Tokenizer.open(folder).encode("hello world, this is")) > 2


def test_lone_surrogate_is_a_named_error(byte_level):
    with pytest.raises(ValueError, match="surrogate"):
        byte_level.encode("a\ud800b")


def test_ids_without_a_token_yield_no_text(byte_level):
    ids = byte_level.encode("hello")
    assert byte_level.decode([*ids, 5000]) == "hello"


def test_token_text_keeps_its_leading_space(byte_level, llama):
    assert llama.token_text(llama.encode("a hello")[-1]) == " hello"
    assert byte_level.token_text(byte_level.encode("a the")[-1]) == " the"
    assert byte_level.token_text(0) == "<s>"
    assert llama.token_text(3 + 0xE2) == "\ufffd"


# ---- files


def test_missing_tokenizer_error_says_token_ids_work(tmp_path):
    with pytest.raises(TokenizerError, match=r"no tokenizer.json.*prompt_token_ids work"):
        Tokenizer.open(tmp_path)
    assert Tokenizer.open_if_present(tmp_path) is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"model": 3}', b"\xff"])
def test_broken_tokenizer_file_is_named(tmp_path, content):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        Tokenizer.open_if_present(tmp_path)


@pytest.mark.parametrize("content", [b"", b"[1]", b"{", b"\xff", b"[" * 100_000])
def test_broken_tokenizer_config_is_named(tmp_path, content):
    write_byte_level(tmp_path)
    (tmp_path / "tokenizer_config.json").write_bytes(content)
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json"):
        Tokenizer.open(tmp_path)


def test_fingerprint_changes_only_with_the_files(tmp_path):
    first = Tokenizer.open(write_byte_level(tmp_path / "a")).fingerprint()
    assert Tokenizer.open(write_byte_level(tmp_path / "b")).fingerprint() == first
    (tmp_path / "b" / "chat_template.jinja").write_text("{{ messages }}")
    assert Tokenizer.open(tmp_path / "b").fingerprint() != first
    assert len(first) == 32


def test_tokenizer_leaves_environment_and_forks_quiet(tmp_path):
    """TOKENIZERS_PARALLELISM is not set, and nothing is printed at a fork."""
    folder = write_byte_level(tmp_path)
    program = (
        "import os, sys\n"
        "before = dict(os.environ)\n"
        "from pathlib import Path\n"
        "from spmd_worker.tokenizer.tokenizer import Tokenizer\n"
        f"tokenizer = Tokenizer.open(Path({str(folder)!r}))\n"
        "assert len([tokenizer.encode('hello world') for _ in range(64)]) == 64\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    tokenizer.encode('hello')\n"
        "    os._exit(0)\n"
        "os.waitpid(pid, 0)\n"
        "assert dict(os.environ) == before\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "TOKENIZERS_PARALLELISM"}
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


# ---- chat templates of a folder


def test_template_file_overrides_the_configuration(tmp_path):
    folder = write_byte_level(tmp_path, chat_template="config")
    assert Tokenizer.open(folder).apply_chat_template([{"role": "user", "content": "x"}]) == "config"
    (folder / "chat_template.json").write_text('{"chat_template": "old file"}')
    assert Tokenizer.open(folder).apply_chat_template([{"role": "user", "content": "x"}]) == "old file"
    (folder / "chat_template.jinja").write_text("file {{ bos_token }}")
    assert Tokenizer.open(folder).apply_chat_template([{"role": "user", "content": "x"}]) == "file <s>"


def test_default_template_is_chosen_among_named_ones(tmp_path):
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": CHATML}]
    folder = write_byte_level(tmp_path, chat_template=named)
    messages = [{"role": "user", "content": "hi"}]
    reference = PreTrainedTokenizerFast.from_pretrained(folder)
    ours = Tokenizer.open(folder)
    assert ours.apply_chat_template(messages) == reference.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )


@pytest.mark.parametrize("template", [3, [], [{"name": "tool_use", "template": 3}], {"default": "x"}])
def test_template_of_another_type_is_named(tmp_path, template):
    with pytest.raises(TokenizerError, match="chat_template must be"):
        Tokenizer.open(write_byte_level(tmp_path, chat_template=template))


def test_folder_without_a_template_is_named(byte_level):
    assert not byte_level.has_chat_template
    with pytest.raises(ValueError, match="no chat template"):
        byte_level.apply_chat_template([{"role": "user", "content": "x"}])


# ---- incremental decoding


def decode_in_groups(tokenizer, prompt, ids, groups, skip=True):
    decoder = IncrementalDecoder(tokenizer, prompt, skip)
    pieces, start = [], 0
    for size in groups:
        pieces.append(decoder.append(ids[start : start + size]))
        start += size
    pieces.append(decoder.append(ids[start:]))
    return [*pieces, decoder.flush()]


def expected_text(tokenizer, prompt, ids, skip):
    """Whole-sequence decode behind the prompt's text, for prompts that end in whole characters."""
    return tokenizer.decode([*prompt, *ids], skip)[len(tokenizer.decode(prompt, skip)) :]


def test_multi_token_character_appears_with_its_last_token(byte_level):
    ids = [byte_level._backend.token_to_id(character) for character in "âĤ¬"]  # E2 82 AC, the euro sign
    decoder = IncrementalDecoder(byte_level, byte_level.encode("a"))
    assert [decoder.append([token_id]) for token_id in ids] == ["", "", "€"]
    assert decoder.flush() == ""


def test_incomplete_character_is_replaced_at_the_end(byte_level):
    ids = [byte_level._backend.token_to_id(character) for character in "aâĤ"]
    decoder = IncrementalDecoder(byte_level, [])
    assert decoder.append(ids) == "a"
    assert decoder.flush() == "\ufffd"


def test_leading_space_is_kept_only_after_a_prompt(llama):
    ids = llama.encode("hello", add_special_tokens=False)
    assert "".join(decode_in_groups(llama, llama.encode("a"), ids, [])) == " hello"
    assert "".join(decode_in_groups(llama, [1], ids, [])) == "hello"


def test_fallback_bytes_are_held_until_their_run_ends(llama):
    smiley = [3 + value for value in "😀".encode()]
    letter = llama.encode("b", add_special_tokens=False)[-1:]
    decoder = IncrementalDecoder(llama, llama.encode("a"))
    assert decoder.append(smiley) == ""
    assert decoder.append(letter).startswith("😀")
    # One stray byte makes the library decode the whole run as invalid: a decoder that had given out the character
    # already could not agree with it.
    assert "".join(decode_in_groups(llama, llama.encode("a"), [*smiley, 3 + 0xFF], [])) == "\ufffd" * 5


def test_text_that_resembles_a_fallback_byte_is_text(tmp_path: Path):
    write_llama_style(tmp_path)
    file = tmp_path / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    content["model"]["vocab"]["<0xyz>"] = token_id = len(content["model"]["vocab"])
    file.write_text(json.dumps(content), encoding="utf-8")
    tokenizer = Tokenizer.open(tmp_path)
    b = content["model"]["vocab"]["b"]
    assert "".join(decode_in_groups(tokenizer, [1], [b, token_id, b], [])) == "b<0xyz>b"
    assert tokenizer.fallback_byte(token_id) is None


def test_character_cut_by_the_prompt_completes_in_output(byte_level, llama):
    euro = [byte_level._backend.token_to_id(character) for character in "âĤ¬"]
    assert "".join(decode_in_groups(byte_level, [*byte_level.encode("a"), *euro[:2]], euro[2:], [])) == "€"
    euro = [3 + value for value in "€".encode()]
    assert "".join(decode_in_groups(llama, [*llama.encode("a"), *euro[:2]], euro[2:], [])) == "€"
    many = [3 + value for value in ("😀" * 5).encode()]
    assert "".join(decode_in_groups(llama, many, llama.encode("b", False), [])) == " b"


def test_library_decode_stream_loses_text(byte_level, llama):
    """Why the decoder is ours. When this fails, `DecodeStream` may do what it does."""

    def piece_by_piece(tokenizer, prompt, ids):
        stream = DecodeStream(ids=prompt)
        return "".join(stream.step(tokenizer._backend, token_id) or "" for token_id in ids)

    # An unfinished character at the end never comes: there is no flush.
    ids = [byte_level._backend.token_to_id(character) for character in "aâĤ"]
    assert piece_by_piece(byte_level, [], ids) == "a"
    assert "".join(decode_in_groups(byte_level, [], ids, [])) == "a\ufffd"
    # Bytes that are no character, before text.
    word = llama.encode("hello", add_special_tokens=False)[-1]
    ids = [3 + 0x9F, 3 + 0x90, word]
    with pytest.raises(Exception, match="Invalid prefix encountered"):
        piece_by_piece(llama, [3 + ord("a")], ids)
    assert "".join(decode_in_groups(llama, [3 + ord("a")], ids, [])) == expected_text(llama, [3 + ord("a")], ids, True)
    # A prompt that ends in an unfinished character.
    prompt = [*byte_level.encode("a"), byte_level._backend.token_to_id("â")]
    ids = byte_level.encode("b")
    assert piece_by_piece(byte_level, prompt, ids).startswith("a")
    assert "".join(decode_in_groups(byte_level, prompt, ids, [])) == "\ufffdb"


def test_skipped_special_tokens_leave_no_trace(byte_level):
    ids = byte_level.encode("hello</s> world")
    assert "".join(decode_in_groups(byte_level, [], ids, [1] * 9)) == "hello world"
    assert "".join(decode_in_groups(byte_level, [], ids, [1] * 9, skip=False)) == "hello</s> world"


GROUPS = st.lists(st.integers(0, 5), max_size=12)


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(0, 330), max_size=60), groups=GROUPS, skip=st.booleans())
def test_random_byte_level_pieces_join_to_the_text(byte_level, ids, groups, skip):
    prompt = byte_level.encode("hello world")
    pieces = decode_in_groups(byte_level, prompt, ids, groups, skip)
    assert "".join(pieces) == expected_text(byte_level, prompt, ids, skip)


@settings(max_examples=150, deadline=None)
@given(raw=st.lists(st.sampled_from(["é".encode(), "你".encode(), "😀".encode(), b"\xe2", b"\xf0\x9f", b"\x80", b"a"])))
def test_random_byte_pieces_join_without_splitting_characters(byte_level, raw):
    data = b"".join(raw)
    table = dict(zip(range(256), _byte_characters()))
    ids = [byte_level._backend.token_to_id(table[value]) for value in data]
    pieces = decode_in_groups(byte_level, byte_level.encode("a"), ids, [1] * len(ids))
    assert "".join(pieces) == data.decode("utf-8", "replace")
    if "\ufffd" not in data.decode("utf-8", "replace"):
        assert all("\ufffd" not in piece for piece in pieces)


@settings(max_examples=150, deadline=None)
@given(
    ids=st.lists(st.one_of(st.integers(0, 290), st.sampled_from([3 + b for b in "😀€é".encode()])), max_size=60),
    prompt_text=st.sampled_from(["a", "hello a ", "he llo"]),
    groups=GROUPS,
    skip=st.booleans(),
)
def test_random_sentencepiece_pieces_join_to_the_text(llama, ids, prompt_text, groups, skip):
    prompt = llama.encode(prompt_text)
    pieces = decode_in_groups(llama, prompt, ids, groups, skip)
    assert "".join(pieces) == expected_text(llama, prompt, ids, skip)


def test_random_metaspace_pieces_join_to_the_text(tmp_path):
    tokenizer = Tokenizer.open(write_metaspace(tmp_path))

    @settings(max_examples=100, deadline=None)
    @given(ids=st.lists(st.integers(0, 7), max_size=40), prompt=st.lists(st.integers(0, 7), max_size=20))
    def check(ids, prompt):
        assert "".join(decode_in_groups(tokenizer, prompt, ids, [1] * 40)) == expected_text(
            tokenizer, prompt, ids, True
        )

    check()


@pytest.mark.parametrize("name", ["invalid", "text", "fallback"])
def test_decoding_work_per_token_is_constant(byte_level, llama, name, monkeypatch):
    lead = byte_level._backend.token_to_id("â")
    tokenizer, ids = {
        "invalid": (byte_level, [lead] * 2000),
        "text": (byte_level, byte_level.encode("hello world " * 300)[:2000]),
        "fallback": (llama, [3 + value for value in "😀".encode()] * 500),
    }[name]
    num_decoded = 0
    plain_decode = Tokenizer.decode

    def counted(self, token_ids, skip_special_tokens=True):
        nonlocal num_decoded
        num_decoded += len(token_ids)
        return plain_decode(self, token_ids, skip_special_tokens)

    expected = tokenizer.decode(ids)
    monkeypatch.setattr(Tokenizer, "decode", counted)
    assert "".join(decode_in_groups(tokenizer, [], ids, [1] * len(ids))) == expected
    assert num_decoded < 40 * len(ids)


def test_decoder_check_detects_a_window_without_context(llama, monkeypatch):
    """The negative control of the properties above: they see a decoder that keeps no context."""

    def forget(decoder, num_held):
        decoder._window, decoder._num_tokens_read, decoder._num_characters_given = [], 0, 0

    prompt, ids = llama.encode("a"), llama.encode("hello hello", add_special_tokens=False)
    assert "".join(decode_in_groups(llama, prompt, ids, [1])) == expected_text(llama, prompt, ids, True)
    monkeypatch.setattr(IncrementalDecoder, "_move_window", forget)
    assert "".join(decode_in_groups(llama, prompt, ids, [1])) != expected_text(llama, prompt, ids, True)


def test_decoding_calls_per_token_are_bounded(byte_level, monkeypatch):
    num_decoded = []
    right = IncrementalDecoder._decode

    def decode(decoder, ids):
        num_decoded.append(len(ids))
        return right(decoder, ids)

    monkeypatch.setattr(IncrementalDecoder, "_decode", decode)
    ids = byte_level.encode("hello world, this is a text " * 100)[:1000]
    decode_in_groups(byte_level, [], ids, [1] * 1000)
    assert len(num_decoded) <= 2 * len(ids) + 2
    assert max(num_decoded) < 16


def _byte_characters():
    """GPT-2's table: the printable character that stands for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(value) if value in printable else chr(next(others)) for value in range(256)]


@pytest.mark.parametrize("key", ["additional_special_tokens", "extra_special_tokens"])
@pytest.mark.parametrize("value", ["<|im_end|>", 5, True, 1.5])
def test_special_tokens_must_be_a_list(tmp_path, key, value):
    """Each letter of a string became a special token, which decoding omits."""
    folder = write_byte_level(tmp_path, **{key: value})
    with pytest.raises(TokenizerError, match=rf"tokenizer_config\.json: {key}=.* must .*list .*tokens"):
        Tokenizer.open(folder)


@pytest.mark.parametrize("key", ["9" * 5000, "-1", "x", "²"])
def test_token_with_a_non_numeric_id_comes_first(tmp_path, key):
    """The token is added although its id is invalid."""
    listed = {key: {"content": "<odd>", "special": True}, "320": {"content": "<more>", "special": True}}
    tokenizer = Tokenizer.open(write_byte_level(tmp_path, added_tokens_decoder=listed))
    assert tokenizer.vocab_size == 322


def test_template_name_that_is_not_text_is_ignored(tmp_path):
    templates = [{"name": ["default"], "template": "{{ no }}"}, {"name": "default", "template": "{{ 'yes' }}"}]
    tokenizer = Tokenizer.open(write_byte_level(tmp_path, chat_template=templates))
    assert tokenizer.apply_chat_template([], True) == "yes"
