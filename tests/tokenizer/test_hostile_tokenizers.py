"""Hostile tokenizer files: each is words at the start or for a text, none a traceback, and none takes the process."""

import json
import os
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers
from hostile_tokenizers import COMPONENTS, MODELS, write_drawn, write_named
from jobs_of_rows import answers_of_job
from ranks import REPOSITORY
from tokenizer_folders import write_byte_level, write_llama_style
from tokenizers import Regex, pre_tokenizers
from tokenizers import Tokenizer as Backend

from spmd_worker.base.errors import TokenizerError
from spmd_worker.compat.script_tokenizer import PlainTokenizer, script_tokenizer
from spmd_worker.replica.grammar.compiler import GrammarCompiler
from spmd_worker.replica.grammar.llguidance_input import GrammarError
from spmd_worker.replica.sequence.structured_outputs import StructuredOutputsParams
from spmd_worker.tokenizer import file_check
from spmd_worker.tokenizer.encoder import Encoder
from spmd_worker.tokenizer.file_check import check_file
from spmd_worker.tokenizer.incremental_decoder import IncrementalDecoder
from spmd_worker.tokenizer.patterns import is_linear
from spmd_worker.tokenizer.tokenizer import Tokenizer

TEXTS = [
    *("hello world abc", "a" * 40 + "!", "", "naïve 你好 😀<s> a</s>", " " * 2000 + "a", "x" * 3000, "aaab" * 500),
]
MOST_CPU_S = 40.0

REFUSED = {
    "growing normalizer": "normalizer makes up to 1073741824 characters",
    "growing expression": "normalizer makes up to",
    "spaces everywhere": "pre_tokenizer makes up to 4096 characters",
    "empty pattern": r"Replace must .*pattern",
    "many steps": r"normalizer .*1000 steps, .* 32\b",
    "nested steps": r"nested .*64 levels",
    "charsmap without an array": "precompiled_charsmap='////fw=='",
    "charsmap that points outside": "precompiled_charsmap",
    "broken expression": "unmatched parenthesis",
    "text a thousand times": "post_processor.single",
    "text left out": "post_processor.single",
    "special token that is missing": r"post_processor: .*token 'none' must .*special_tokens",
    "stripping decoder": "stop=3 of Strip must be 0",
    "growing decoder": "decoder: Replace",
    "catastrophic decoder": "linear-time",
    "negative id": r"added_tokens\[0\].id=-1",
    "largest id": "an integer from 0 to",
    "one id of all": r"id 0 belongs .*2 tokens",
    "long token": "at most 8192",
    "prefix that is longer": "begins with '##'",
    "no model": r"model=None must .*object",
}


def use(folder: Path) -> list[str]:
    """Error of a folder, or of its texts."""
    try:
        tokenizer = Tokenizer.open(folder)
    except TokenizerError as error:
        return [str(error)]
    said = []
    for text in TEXTS:
        try:
            ids = tokenizer.encode(text)
            assert ids == tokenizer.encode(text), "random"
            assert tokenizer.min_num_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False))
            IncrementalDecoder(tokenizer, ids[:3]).finish(ids[3:2000])
        except TokenizerError as error:
            said.append(str(error))
    for token_id in range(min(tokenizer.vocab_size, 300)):
        tokenizer.decode([token_id] * 3)
        tokenizer.token_text(token_id)
    tokenizer.to_json()
    return said


def check(folder: Path, capfd: pytest.CaptureFixture[str]) -> list[str]:
    said = use(folder)
    for words in said:
        assert "\n" not in words, words
        assert 10 < len(words) < 700, words
    shown = "".join(capfd.readouterr())
    assert "panicked" not in shown, shown
    assert "Traceback" not in shown, shown
    return said


@pytest.mark.finding(number="B3")
@pytest.mark.parametrize("name", sorted(REFUSED))
def test_hostile_tokenizer_file_is_rejected_with_a_sentence(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str
):
    with pytest.raises(TokenizerError, match=REFUSED[name]) as error:
        Tokenizer.open_if_present(write_named(tmp_path, name))
    assert str(error.value).startswith(str(tmp_path / "tokenizer.json"))
    assert str(error.value).endswith(file_check.WAY_OUT)
    assert check(tmp_path, capfd) == [str(error.value)]


@pytest.mark.finding(number="B3")
def test_template_file_name_must_be_utf8(tmp_path: Path):
    write_byte_level(tmp_path)
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / os.fsdecode(b"tool\xff.jinja")).write_text("x")
    with pytest.raises(TokenizerError, match=r"tool\\udcff\.jinja': .*name .*UTF-8"):
        Tokenizer.open(tmp_path)


@pytest.mark.finding(number="B3")
def test_unknown_tokenizer_is_encoded_in_a_process(tmp_path: Path):
    """A text that never ends is an error; the next one is encoded as by the library."""
    folder = write_named(tmp_path, "catastrophic expression")
    tokenizer = Tokenizer.open(folder)
    assert tokenizer.is_isolated
    library = Backend.from_file(str(folder / "tokenizer.json"))
    for text in ("hello world abc", "a<s>b</s>", "naïve 你好"):
        assert tokenizer.encode(text) == library.encode(text).ids
        assert tokenizer.encode_inside(text, text)[0] == 2 * library.encode(text).ids
        assert tokenizer.encode_with_offsets(text) == (library.encode(text).ids, library.encode(text).offsets)
        assert tokenizer.decode(tokenizer.encode(text)) == library.decode(library.encode(text).ids)
    with pytest.raises(TokenizerError, match=r"text cannot .*encoded: "):
        tokenizer.encode("a" * 40 + "!")
    assert tokenizer.encode("hello") == library.encode("hello").ids
    assert tokenizer.min_num_tokens("a" * 1_000_000) == 0
    assert isinstance(script_tokenizer(tokenizer, folder), PlainTokenizer)


@pytest.mark.finding(number="B3")
def test_library_panic_is_a_tokenizer_error():
    """Panics are no `Exception`s."""
    model = {"type": "BPE", "vocab": {"a": 0}, "merges": []}
    values = {"model": model, "added_tokens": [], **COMPONENTS["special token that is missing"]}
    backend = Backend.from_str(json.dumps({"version": "1.0", **values}))
    with pytest.raises(BaseException, match="no entry found") as panic:
        backend.encode("aaaaa")
    assert not isinstance(panic.value, Exception), "the control"
    with pytest.raises(TokenizerError, match="encoded: no entry"):
        Encoder(backend).encode("aaaaa", True)


@pytest.mark.parametrize("name", ["truncation", "padding"])
def test_stored_truncation_and_padding_change_nothing(tmp_path: Path, name: str):
    plain = Tokenizer.open(write_byte_level(tmp_path / "plain"))
    tokenizer = Tokenizer.open(write_named(tmp_path / "other", name))
    assert not tokenizer.is_isolated
    for text in TEXTS:
        assert tokenizer.encode(text) == plain.encode(text)
        assert tokenizer.encode_inside(text) == plain.encode_inside(text)


@pytest.mark.finding(number="B3")
@pytest.mark.stress
@pytest.mark.parametrize("part", range(4))
def test_hundred_hostile_tokenizers_raise_only_tokenizer_errors(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], part: int
):
    """All that have a name, and drawn ones: 100 each part."""
    writers: list[tuple[Any, Any]] = [(write_named, name) for name in [*COMPONENTS, *MODELS][part::4]]
    writers += [(write_drawn, seed) for seed in range(1000 * part, 1000 * part + 100 - len(writers))]
    said, peak = 0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number, (write, fault) in enumerate(writers):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
        said += bool(check(write(tmp_path / str(number), fault), capfd))
        assert resource.getrusage(resource.RUSAGE_SELF).ru_utime - before < MOST_CPU_S, fault
    with capfd.disabled():
        print(f"\nHOSTILE TOKENIZERS part {part}: {len(writers)} folders, {said} with words")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < max(4 << 20, peak + 1), "or an earlier test's peak"


# ---- forms that models have are of known form


FAMILIES = [
    *("AlbertTokenizer", "BertTokenizer", "CLIPTokenizer", "CohereTokenizer", "DebertaV2Tokenizer"),
    *("GPT2Tokenizer", "GPTNeoXTokenizer", "GemmaTokenizer", "LlamaTokenizer", "MBartTokenizer", "MPNetTokenizer"),
    *("Qwen2Tokenizer", "RobertaTokenizer", "T5Tokenizer", "WhisperTokenizer", "XLMRobertaTokenizer", "XLNetTokenizer"),
]


@pytest.mark.parametrize("name", FAMILIES)
def test_tokenizer_of_a_family_is_known(name: str):
    """The tokenizer as transformers builds it."""
    backend = getattr(transformers, name)().backend_tokenizer
    assert check_file(name, backend.to_str().encode()).is_known


CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA_3 = (
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
UPPER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
GPT_4O = (
    rf"{UPPER}*{LOWER}+{CONTRACTIONS}?|{UPPER}+{LOWER}*{CONTRACTIONS}?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KNOWN = [
    *(LLAMA_3, LLAMA_3.replace("{1,3}", ""), GPT_4O, GPT_4O.replace(f"{CONTRACTIONS}?", "").replace("{1,3}", "")),
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
    *(r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", " ?[^(\\s|[.,!?…。，、।۔،])]+", r"\s+", " {2,}", r"[\n\r\t]"),
]
UNKNOWN = [
    *("(a+)+$", "a+$", r"\s+$", "a*", "a?" * 30 + "a" * 30, "a{0,99}" * 3 + "b", r"\s*[\r\n]+", "a*a*b", "(a|a)*b"),
    *("a+?b", ".*x", r"(a)\1", "[a-z]+[0-9]", r"\s*[\r\n]+|x+", "", "a|", "(?=a+b)a", "(" * 50, "[", "a{1000}{1000}"),
]


@pytest.mark.parametrize("pattern", KNOWN)
def test_expressions_of_models_are_linear(pattern: str):
    assert is_linear(pattern)
    pre_tokenizers.Split(Regex(pattern), "isolated")


@pytest.mark.parametrize("pattern", UNKNOWN)
def test_expression_of_nonlinear_time_is_unknown(pattern: str):
    assert not is_linear(pattern)


# ---- nothing is random


@pytest.mark.finding(number="A6")
@pytest.mark.parametrize("dropout", [0.1, 0.9, 1.0])
def test_dropout_is_off_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture, dropout: float):
    plain = Tokenizer.open(write_byte_level(tmp_path / "plain"))
    folder = write_byte_level(tmp_path / "random")
    values = json.loads((folder / "tokenizer.json").read_text())
    values["model"]["dropout"] = dropout
    (folder / "tokenizer.json").write_text(json.dumps(values))
    tokenizer = Tokenizer.open(folder)
    assert caplog.text.count(f"model.dropout={dropout} is for training") == 1
    text = "hello world, this is a text about the cache"
    expected = plain.encode(text)
    assert [tokenizer.encode(text) for _ in range(6)] == [expected] * 6
    assert [tokenizer.encode_inside(text, text) for _ in range(3)] == [plain.encode_inside(text, text)] * 3
    theirs = script_tokenizer(tokenizer, folder)
    assert not isinstance(theirs, PlainTokenizer)
    assert [theirs.encode(text) for _ in range(6)] == [expected] * 6
    assert json.loads(tokenizer.to_json())["model"]["dropout"] is None
    assert tokenizer.fingerprint() == Tokenizer.open(folder).fingerprint() != plain.fingerprint()
    # The control: the library honours it.
    library = Backend.from_str(json.dumps(values))
    assert any(library.encode(text).ids != expected for _ in range(20))


@pytest.mark.finding(number="A6")
def test_dropout_is_off_in_the_encoder_process(tmp_path: Path):
    folder = write_named(tmp_path, "catastrophic expression")
    expected = Tokenizer.open(folder).encode("hello world, this is a text")
    values = json.loads((folder / "tokenizer.json").read_text())
    values["model"]["dropout"] = 0.5
    (folder / "tokenizer.json").write_text(json.dumps(values))
    tokenizer = Tokenizer.open(folder)
    assert [tokenizer.encode("hello world, this is a text") for _ in range(6)] == [expected] * 6


# ---- rows


def answers_of(folder: Path, change: dict[str, Any], prompts: list[str]) -> list[dict[str, Any]]:
    """Answers of a job with a changed tokenizer.json."""
    shutil.copytree(REPOSITORY / "scripts" / "demo" / "model", folder / "model")
    path = folder / "model" / "tokenizer.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | change | {"model": values["model"] | change.get("model", {})}))
    rows = [{"prompt": prompt, "max_tokens": 2, "temperature": 0, "prompt_logprobs": 0} for prompt in prompts]
    return answers_of_job(folder, folder / "model", rows)


@pytest.mark.finding(number="A6")
def test_equal_rows_have_equal_outputs_with_dropout(tmp_path: Path):
    prompts = ["add 123 456 = add 123 456 ="] * 6
    plain, *others = answers_of(tmp_path / "plain", {}, prompts)
    random = answers_of(tmp_path / "random", {"model": {"dropout": 0.5}}, prompts)
    for answer in (*others, *random):
        assert {**answer, "index": 0} == {**plain, "index": 0}


@pytest.mark.finding(number="B3")
def test_unencodable_row_is_an_error_row(tmp_path: Path):
    prompts = ["add 1 2 =", "a" * 40 + "!", "add 1 2 ="]
    first, second, third = answers_of(tmp_path, COMPONENTS["catastrophic expression"], prompts)
    assert (first["error"], third["error"]) == (None, None)
    assert second["error"]["code"] == "tokenizer_error"
    assert second["error"]["message"].startswith("the text cannot be encoded: ")
    assert first["outputs"] == third["outputs"]


@pytest.mark.finding(number="B3")
def test_grammar_over_hostile_vocabulary_is_rejected(tmp_path: Path):
    """The forms' library reads the tokenizer too, and panics over a token that is very long."""
    tokenizer = Tokenizer.open(write_llama_style(tmp_path, added_tokens_decoder={"300": {"content": "x" * 5000}}))
    compiler = GrammarCompiler(lambda: tokenizer, tokenizer.vocab_size, (2,))
    for _ in range(2):
        with pytest.raises(GrammarError, match=r"llguidance .*not .*tokenizer: "):
            compiler.check(StructuredOutputsParams(choice=("a", "b")))
