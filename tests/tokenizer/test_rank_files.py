"""Files of ranks (tiktoken.model and others, tekken.json): ids are tiktoken's, faults are sentences."""

import json
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from json_files import edit
from rank_folders import FILES, KINDS, NUM_SPECIAL, SPECIAL, ids_of_ranks, special_ids, tekken, tokens, write_ranks

from spmd_worker.base.errors import TokenizerError
from spmd_worker.compat.script_tokenizer import PlainTokenizer, script_tokenizer
from spmd_worker.model_config.byte_level_bpe import CL100K
from spmd_worker.replica.grammar.compiler import GrammarCompiler
from spmd_worker.replica.sequence.structured_outputs import StructuredOutputsParams
from spmd_worker.tokenizer import byte_ranks
from spmd_worker.tokenizer.incremental_decoder import IncrementalDecoder
from spmd_worker.tokenizer.tokenizer import Tokenizer

TEXTS = [
    *(
        "hello world, it's  4567 你好世界 café\n\n x",
        " wholeword wholewords",
        "HelloWORLD's ÉtéA你 你好a",
        "",
        "  \r\n\t a  ",
    ),
    *(
        "<s>[INST]hello[/INST]",
        "<|im_user|>hi<|im_end|><|im_start|>",
        "e\u0301 ½Ⅳ 😀👩‍👧 हिन्दी ქართ 한국어 ǅʰª//-",
        "'S'Ll x='d",
    ),
]


def drawn_texts() -> list[str]:
    random, characters = Random(5), "heloWrd's 你好世A1 \n/<|éÉ\u0301😀"
    return ["".join(random.choice(characters) for _ in range(random.randrange(1, 40))) for _ in range(150)]


@pytest.mark.parametrize("kind", KINDS)
def test_ids_of_ranks_equal_tiktoken(kind: str, tmp_path: Path):
    tokenizer, ranked = Tokenizer.open(write_ranks(tmp_path, kind)), tokens()
    assert not tokenizer.is_isolated
    marked = [f"hello{text} 你好{text}" for text in special_ids(kind, len(ranked))]
    for text in [*TEXTS, *drawn_texts(), *marked]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == ids_of_ranks(kind, ranked, text), text
        assert tokenizer.min_num_tokens(text) <= len(ids)
        if kind in ("kimi", "tekken"):
            assert tokenizer.decode(ids, skip_special_tokens=False) == text
        decoder = IncrementalDecoder(tokenizer, [])
        assert decoder.finish(ids) == tokenizer.decode(ids)
    assert tokenizer.encode("hello") == [1] * (kind == "tekken") + ids_of_ranks(kind, ranked, "hello")
    # The control: with another expression, words differ.
    assert ids_of_ranks(kind, ranked, " 你 123") != ids_of_ranks(kind, ranked, " 你 123", CL100K)


@pytest.mark.parametrize("seed", range(3))
def test_ids_of_random_ranks_equal_tiktoken(seed: int, tmp_path: Path):
    """Tokens that repeat themselves, that rank below their parts, and that no merges make."""
    random, found = Random(seed), tokens()[:256]
    while len(found) < 300:
        token = "".join(random.choice("ab") for _ in range(random.randrange(2, 7))).encode()
        found += [] if token in found else [token]
    random.shuffle(found)
    tokenizer = Tokenizer.open(write_ranks(tmp_path, "kimi", found))
    words = [each * size for each in ("a", "ab", "aba", "abb") for size in range(1, 20)]
    words += ["".join(random.choice("ab") for _ in range(random.randrange(1, 30))) for _ in range(150)]
    for word in words:
        assert tokenizer.encode(word) == ids_of_ranks("kimi", found, word)


def test_tokens_behind_ranks_have_their_names(tmp_path: Path):
    num_ranks = len(tokens())
    kimi = Tokenizer.open(write_ranks(tmp_path / "kimi", "kimi"))
    assert kimi.vocab_size == num_ranks + 256
    assert (kimi.bos_token_id, kimi.eos_token_id) == (num_ranks, num_ranks + 1)
    assert kimi.token_id(f"<|reserved_token_{num_ranks + 254}|>") == num_ranks + 254
    assert kimi.decode([num_ranks + 2, num_ranks + 4]) == "<|tool_call_begin|>", "only special ones are skipped"
    mistral = Tokenizer.open(write_ranks(tmp_path / "tekken", "tekken"))
    assert mistral.special_tokens == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
    }
    assert mistral.vocab_size == NUM_SPECIAL + num_ranks, "without the token beyond the model's rows"
    assert mistral.token_id("[TOOL_CALLS]") == SPECIAL.index("[TOOL_CALLS]")


def test_older_tekken_file_has_known_special_tokens(tmp_path: Path):
    content = tekken([b64encode(token).decode() for token in tokens()])
    del content["special_tokens"]
    (tmp_path / "tekken.json").write_text(json.dumps(content))
    tokenizer = Tokenizer.open(tmp_path)
    assert tokenizer.encode("<pad>[IMG_END]hello") == [1, 11, 13, *ids_of_ranks("tekken", tokens(), "hello")]


def test_hunyuan_ranks_are_counted_by_line(tmp_path: Path):
    """Its file may have a token twice, and its numbers are not read."""
    folder = write_ranks(tmp_path, "hunyuan")
    path = folder / FILES["hunyuan"]
    expected = Tokenizer.open(folder).encode(TEXTS[0])
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:300], lines[7], *(f"{line}0" for line in lines[300:])]) + "\n\n")
    assert Tokenizer.open(folder).encode(TEXTS[0]) == expected


@pytest.mark.parametrize(
    ("config", "model_type"),
    [
        ({"tokenizer_class": None, "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}}, None),
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, "kimi_linear"),
    ],
)
def test_class_is_found_in_other_keys(config: dict[str, Any], model_type: str | None, tmp_path: Path):
    folder = write_ranks(tmp_path, "kimi", **config)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    assert Tokenizer.open(folder).encode(" 你好") == ids_of_ranks("kimi", tokens(), " 你好")


@pytest.mark.parametrize("named", ["OtherTokenizer", None, 7])
def test_unknown_class_of_ranks_is_an_error(named: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    folder = write_ranks(tmp_path, "kimi", tokenizer_class=named)
    (folder / "config.json").write_text('{"model_type": "other"}')
    assert Tokenizer.open_if_present(folder) is None
    (record,) = caplog.records
    words = ("tiktoken.model: how a text is split", "TikTokenTokenizer", "give a tokenizer.json, or prompt_token_ids")
    assert all(each in record.getMessage() for each in words)
    assert ("'OtherTokenizer'" if named == "OtherTokenizer" else "model_type='other'") in record.getMessage()


def line_of(change: Callable[[list[str]], list[str]]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        path = write_ranks(folder, "kimi") / FILES["kimi"]
        path.write_text("\n".join(change(path.read_text().splitlines())))

    return write


def tekken_with(**changed: Any) -> Callable[[Path], None]:
    """tekken.json with other keys, of `config` where that has them."""

    def write(folder: Path) -> None:
        path = write_ranks(folder, "tekken") / FILES["tekken"]
        content = json.loads(path.read_text())
        for key, value in changed.items():
            (content["config"] if key in content["config"] else content)[key] = value
        path.write_text(json.dumps(content))

    return write


def tekken_of(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "tekken.json").write_text(text)


def kimi_added(number: int, text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        write_ranks(folder, "kimi", added_tokens_decoder={str(number): {"content": text, "special": True}})

    return write


BAD = {
    "binary": (line_of(lambda lines: ["\0\x01" * 90]), r"line 1, .*base64"),
    "no rank": (line_of(lambda lines: [*lines, "aGVsbG8="]), r"line \d+, b'aGVsbG8=', must be a token in base64"),
    "rank below 0": (line_of(lambda lines: [*lines, "aGVsbG8gYQ== -1"]), "must be a token in base64 and its rank"),
    "large rank": (line_of(lambda lines: [*lines, f"aGVsbG8gYQ== {'9' * 4000}"]), "must be a token in base64"),
    "far rank": (line_of(lambda lines: [*lines, "aGVsbG8gYQ== 9999999"]), "an integer from 0 to"),
    "token twice": (line_of(lambda lines: [*lines, f"{lines[9].split()[0]} 9000"]), "has a token of a line before"),
    "rank twice": (line_of(lambda lines: [*lines, "aGVsbG8gYQ== 9"]), "a rank belongs to two tokens"),
    "no byte": (line_of(lambda lines: lines[:10] + lines[11:]), "no token for the byte 0x0a"),
    "empty": (line_of(lambda lines: []), "no token for the byte 0x00"),
    "long token": (line_of(lambda lines: [*lines, f"{b64encode(b'a' * 1025).decode()} 9000"]), "a token of 1025 bytes"),
    "id of a rank": (kimi_added(5, "[BOS]"), r"added token '\[BOS\]' has the id 5.*not that of the token of rank 5"),
    "two ids": (kimi_added(9000, f"<|reserved_token_{len(tokens())}|>"), r"the id 9000, which must be .*which is also"),
    "long added token": (kimi_added(9000, "x" * 9000), "9000 characters"),
    "surrogate": (kimi_added(9000, "\ud800"), "lone surrogate"),
    "surrogate in the pattern": (tekken_with(pattern="\ud800"), "lone surrogate"),
    "not an object": (tekken_of("[1]"), "must be a JSON object"),
    "no vocabulary": (tekken_of("{}"), "object config and a list vocab"),
    "deep": (tekken_of("[" * 99 + "]" * 99), "levels"),
    "no pattern": (tekken_with(pattern=None), "config.pattern=None must be a regular expression"),
    "broken pattern": (tekken_with(pattern="(a"), "tekken.json: the tokenizers library cannot read it"),
    "many special": (tekken_with(default_num_special_tokens=1 << 30), "from 0 to 65536"),
    "few special": (tekken_with(default_num_special_tokens=3), "must be at least the number of special_tokens, 8"),
    "large vocabulary": (tekken_with(default_vocab_size=9000), "by at most the number of tokens in vocab"),
    "text as size": (tekken_with(default_vocab_size="9"), "config.default_vocab_size='9' must be an integer"),
    "special without rank": (tekken_with(special_tokens=[{"token_str": "a"}]), "special_tokens must be a list"),
    "special twice": (tekken_with(special_tokens=[{"rank": n, "token_str": "a"} for n in (0, 1)]), "which is also 0"),
    "other entry": (tekken_with(vocab=[{"rank": 1, "token_bytes": "AA=="}] * 400), r"vocab\[0\]=.* its index"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_hostile_file_of_ranks_is_a_sentence(name: str, tmp_path: Path):
    write, words = BAD[name]
    write(tmp_path)
    with pytest.raises(TokenizerError, match=words) as error:
        Tokenizer.open(tmp_path)
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 900


def test_cost_of_ranks_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A token that is a run of one letter has a pair for each of its bytes, each of its length."""
    folder = write_ranks(tmp_path, "kimi", [*tokens(), *(b"z" * size for size in range(2, 150))])
    assert Tokenizer.open(folder).encode("z" * 149) == [len(tokens()) + 147]
    for limit, most in (("_MAX_MERGES", 10_000), ("_MAX_MERGED_BYTES", 1_000_000)):
        with monkeypatch.context() as patch:
            patch.setattr(byte_ranks, limit, most)
            with pytest.raises(TokenizerError, match="pairs or"):
                Tokenizer.open(folder)
    monkeypatch.setattr(byte_ranks, "_MAX_BYTES", 1000)
    with pytest.raises(TokenizerError, match="bytes of tokens in all"):
        Tokenizer.open(folder)


@pytest.mark.parametrize("kind", ["kimi", "tekken"])
def test_grammar_masks_follow_ranks(kind: str, tmp_path: Path):
    tokenizer = Tokenizer.open(write_ranks(tmp_path, kind))
    assert tokenizer.eos_token_id is not None
    compiler = GrammarCompiler(lambda: tokenizer, tokenizer.vocab_size, (tokenizer.eos_token_id,))
    for text in ("hello 你好", "hello world's"):
        state = compiler.start(StructuredOutputsParams(choice=("hello 你好", "hello world's")))
        ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        for number, token_id in enumerate(ids, 1):
            bits = np.zeros(-(-tokenizer.vocab_size // 32), dtype=np.int32)
            state.fill(bits)
            allowed = [each for each in range(tokenizer.vocab_size) if bits[each // 32] >> each % 32 & 1]
            assert token_id in allowed
            assert len(allowed) < 20
            state.advance(ids[:number])
        assert not state.problem


def test_scripts_get_the_ids_of_ranks(tmp_path: Path):
    """transformers would split texts as other models do, or run the folder's code."""
    folder = write_ranks(tmp_path, "kimi")
    theirs = script_tokenizer(Tokenizer.open(folder), folder)
    assert isinstance(theirs, PlainTokenizer)
    assert theirs.encode(" 你好") == ids_of_ranks("kimi", tokens(), " 你好")


def test_folder_prefers_its_tokenizer_json(tmp_path: Path):
    """A folder that was mended by hand, as the guides said, keeps its ids."""
    folder = write_ranks(tmp_path, "kimi")
    before = Tokenizer.open(folder)
    (folder / "tokenizer.json").write_text(before.to_json())
    (folder / "tiktoken.model").write_bytes(b"broken")
    assert Tokenizer.open(folder).encode(TEXTS[0]) == before.encode(TEXTS[0])
    edit(folder / "tokenizer_config.json", tokenizer_class="OtherTokenizer")
    assert Tokenizer.open(folder).encode(TEXTS[0]) == before.encode(TEXTS[0])


@pytest.mark.stress
@pytest.mark.parametrize("seed", range(3))
def test_drawn_faults_of_ranks_are_sentences(seed: int, tmp_path: Path):
    """Whatever is in the files, they are read or rejected."""
    random, said = Random(seed), list[str]()
    for number in range(200):
        kind = random.choice(KINDS)
        folder = write_ranks(tmp_path / str(number), kind)
        path = folder / random.choice([FILES[kind], *(["tokenizer_config.json"] if kind != "tekken" else [])])
        if path.suffix == ".json" and random.random() < 0.7:
            path.write_text(json.dumps(with_fault(json.loads(path.read_text()), random)))
        else:
            content = bytearray(path.read_bytes())
            at = random.randrange(len(content))
            content[at : at + random.randrange(9)] = random.randbytes(random.randrange(9))
            path.write_bytes(content)
        try:
            tokenizer = Tokenizer.open(folder)
            tokenizer.decode(tokenizer.encode(TEXTS[0]))
        except TokenizerError as error:
            said.append(str(error))
    assert len(said) > 50
    assert max(map(len, said)) < 1200


def with_fault(value: Any, random: Random) -> Any:
    """The object, list or value with another value in one place."""
    if isinstance(value, dict | list) and value and random.random() < 0.85:
        at = random.choice(list(value) if isinstance(value, dict) else range(len(value)))
        value[at] = with_fault(value[at], random)
        return value
    return random.choice([None, True, -1, 1.5, 1e308, 10**30, "", "\ud800", "\0", [], {}, [[]], {"a": 1}, "AA==", 300])
