"""Folders with the files of older tokenizers: converted by transformers where it is installed, else refused.

Models of SentencePiece are trained here, and compared with SentencePiece itself, which nobody here wrote.
"""

import contextlib
import io
import json
import logging
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
from absent_package import remove_package
from json_files import edit
from tokenizer_folders import CHATML, write_byte_level

from spmd_worker.base.errors import TokenizerError
from spmd_worker.compat.script_tokenizer import script_tokenizer
from spmd_worker.tokenizer.tokenizer import Tokenizer

TEXTS = ["hello world, this is a text", "naïve café 你好 😀\n\n  12345", "<|im_start|>user\nhello<|im_end|>", ""]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Qwen2's first files: vocab.json and merges.txt."""
    write_byte_level(tmp_path, chat_template=CHATML, tokenizer_class="Qwen2Tokenizer")
    model = json.loads((tmp_path / "tokenizer.json").read_text())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    (tmp_path / "tokenizer.json").unlink()
    return tmp_path


@pytest.mark.matrix
def test_converted_tokenizer_equals_transformers(folder: Path):
    """Ids, texts and chat templates are those of transformers."""
    from transformers import AutoTokenizer

    ours, theirs = Tokenizer.open(folder), AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert len(ours.encode(TEXTS[0])) < len(TEXTS[0]), "merges count"
    assert ours.has_chat_template
    assert ours.fingerprint() == Tokenizer.open(folder).fingerprint()
    assert not (folder / "tokenizer.json").exists(), "nothing is written"


@pytest.mark.matrix
def test_fingerprint_changes_with_the_merges(folder: Path):
    before = Tokenizer.open(folder)
    lines = (folder / "merges.txt").read_text().splitlines()
    (folder / "merges.txt").write_text("\n".join(lines[:5]) + "\n")
    after = Tokenizer.open(folder)
    assert after.fingerprint() != before.fingerprint()
    assert after.encode(TEXTS[0]) != before.encode(TEXTS[0])


@pytest.mark.guarantee("A model folder's code is not run")
@pytest.mark.control("A model folder's code is not run")
@pytest.mark.matrix
def test_folder_code_is_not_run(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
):
    from transformers import AutoTokenizer, dynamic_module_utils

    elsewhere = tmp_path_factory.mktemp("elsewhere")
    trace = elsewhere / "ran"
    code = f"from pathlib import Path\nPath({str(trace)!r}).touch()\n"
    code += "from transformers import Qwen2Tokenizer\nclass Own(Qwen2Tokenizer):\n    pass\n"
    (folder / "own.py").write_text(code)
    edit(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["own.Own", "own.Own"]})
    with contextlib.suppress(TokenizerError):
        Tokenizer.open(folder)
    assert not trace.exists()
    # Negative control: it would leave its trace.
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(elsewhere / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=True)
    assert trace.exists()


def test_missing_transformers_error_names_the_conversion_command(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.open(folder)
    message = str(caught.value)
    assert message.startswith(f"{folder} has vocab.json and merges.txt but no tokenizer.json, and transformers")
    assert f"T.from_pretrained('{folder}').save_pretrained('{folder}')" in message
    with caplog.at_level(logging.WARNING):
        assert Tokenizer.open_if_present(folder) is None
    assert [record.getMessage() for record in caplog.records] == [message]


@pytest.mark.matrix
def test_unconvertible_files_are_rejected_with_the_reason(tmp_path: Path):
    (tmp_path / "tokenizer.model").write_bytes(b"\x00nothing")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json, .*transformers cannot"):
        Tokenizer.open(tmp_path)


CORPUS = [
    "hello world, this is a text about the cache and the scheduler.",
    "naïve café 你好 世界 😀 12345 x",
    "the quick brown fox  jumps over\tthe lazy dog",
    "Ⅳ ﬁne ½ ＡＢＣ",
] * 20
AS_LLAMA = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "split_digits": True}
AS_LLAMA |= {"byte_fallback": True, "vocab_size": 400}
AS_GEMMA = {**AS_LLAMA, "add_dummy_prefix": False, "pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3}
AS_T5 = {"vocab_size": 130, "pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
TOKENS = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}


def train(kind: str, **settings: Any) -> bytes:
    """A model of SentencePiece, of this kind."""
    from sentencepiece import SentencePieceTrainer

    model = io.BytesIO()
    settings = {"character_coverage": 1.0, "hard_vocab_limit": False, "minloglevel": 3, **settings}
    SentencePieceTrainer.train(sentence_iterator=iter(CORPUS), model_writer=model, model_type=kind, **settings)
    return model.getvalue()


def write_model(folder: Path, model: bytes, tokenizer_class: str, **tokens: str) -> Path:
    (folder / "tokenizer.model").write_bytes(model)
    (folder / "tokenizer_config.json").write_text(json.dumps({**TOKENS, **tokens, "tokenizer_class": tokenizer_class}))
    return folder


def many_texts() -> list[str]:
    """None begins with a space, none has a token that stands for none."""
    random, characters = Random(3), "abcdehlortuw  \n,.é你好😀1½Ａﬁ\t"
    drawn = ["".join(random.choice(characters) for _ in range(random.randrange(1, 20))) for _ in range(200)]
    texts = [*TEXTS[:2], *CORPUS[:4], "two  spaces", "trailing ", "x\r\ny", "e\u0301", "…", *drawn]
    return [text for text in texts if text.strip() and not text[0].isspace()]


@pytest.mark.parametrize(
    ("kind", "settings", "tokenizer_class"), [("bpe", AS_LLAMA, "LlamaTokenizer"), ("unigram", AS_T5, "T5Tokenizer")]
)
def test_sentencepiece_sampling_is_off(kind: str, settings: dict[str, Any], tokenizer_class: str, tmp_path: Path):
    """`sp_model_kwargs` are for training."""
    folder = write_model(tmp_path, train(kind, **settings), tokenizer_class)
    expected = Tokenizer.open(folder).encode(TEXTS[0])
    edit(folder / "tokenizer_config.json", sp_model_kwargs={"enable_sampling": True, "nbest_size": -1, "alpha": 0.1})
    tokenizer = Tokenizer.open(folder)
    assert [tokenizer.encode(TEXTS[0]) for _ in range(6)] == [expected] * 6
    theirs = script_tokenizer(tokenizer, folder)
    assert [theirs.encode(TEXTS[0]) for _ in range(6)] == [expected] * 6


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("kind", "settings", "tokenizer_class"),
    [("bpe", AS_LLAMA, "LlamaTokenizer"), ("bpe", AS_GEMMA, "GemmaTokenizer"), ("unigram", AS_T5, "T5Tokenizer")],
)
def test_sentencepiece_ids_equal_the_model_and_transformers(
    kind: str, settings: dict[str, Any], tokenizer_class: str, tmp_path: Path
):
    from sentencepiece import SentencePieceProcessor
    from transformers import AutoTokenizer

    model = train(kind, **settings)
    ours = Tokenizer.open(write_model(tmp_path, model, tokenizer_class, pad_token="<pad>"))
    theirs = AutoTokenizer.from_pretrained(str(tmp_path), local_files_only=True)
    processor = SentencePieceProcessor(model_proto=model)
    texts = many_texts()
    assert len(texts) > 150
    for text in texts:
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        assert theirs.encode(text, add_special_tokens=False) == processor.encode(text)
        own = [token for token in ids if token not in (processor.bos_id(), processor.eos_id())]
        assert own == processor.encode(text), text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert len(ours.encode(CORPUS[0])) < 0.8 * len(CORPUS[0]), "pieces count"


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("kind", "settings", "tokenizer_class", "words"),
    [
        ("unigram", AS_LLAMA, "LlamaTokenizer", "another kind (Unigram)"),
        ("bpe", AS_LLAMA, "GemmaTokenizer", "encodes 'hello world'"),
        (
            "bpe",
            {**AS_LLAMA, "remove_extra_whitespaces": True},
            "LlamaTokenizer",
            "encodes 'two  spaces, three   here'",
        ),
        ("bpe", {**AS_LLAMA, "normalization_rule_name": "nmt_nfkc"}, "LlamaTokenizer", "itself gives ["),
        ("bpe", AS_LLAMA, "PreTrainedTokenizerFast", "encodes 'hello world'"),
    ],
)
def test_conversion_that_differs_from_the_model_is_rejected(
    kind: str, settings: dict[str, Any], tokenizer_class: str, words: str, tmp_path: Path
):
    """The converter follows the class, and silently gave other ids: two of five texts of a unigram model."""
    write_model(tmp_path, train(kind, **settings), tokenizer_class)
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json") as caught:
        Tokenizer.open(tmp_path)
    assert words in str(caught.value)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("tokenizer_class", "file"),
    [
        ("T5Tokenizer", "spiece.model"),
        ("PegasusTokenizer", "spiece.model"),
        ("MBart50Tokenizer", "sentencepiece.bpe.model"),
        ("DebertaV2Tokenizer", "spm.model"),
    ],
)
def test_sentencepiece_of_encoders_gives_ids_of_transformers(tokenizer_class: str, file: str, tmp_path: Path):
    """Their folders were taken for folders without a tokenizer."""
    from transformers import AutoTokenizer

    is_mbart = tokenizer_class.startswith("MBart")
    write_model(tmp_path, train("unigram", **({"vocab_size": 130} if is_mbart else AS_T5)), tokenizer_class)
    (tmp_path / "tokenizer.model").rename(tmp_path / file)
    ours = Tokenizer.open_if_present(tmp_path)
    theirs = AutoTokenizer.from_pretrained(str(tmp_path), local_files_only=True)
    assert ours is not None
    for text in many_texts():
        assert ours.encode(text) == theirs.encode(text)


@pytest.mark.parametrize("files", [("source.spm", "target.spm"), ("sentencepiece.bpe.model",)])
def test_tokenizers_of_pairs_are_named_with_the_way_out(
    files: tuple[str, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """Marian's and M2M100's folders: save_pretrained would write no tokenizer.json."""
    for name in ("vocab.json", *files):
        (tmp_path / name).write_text("{}")
    assert Tokenizer.open_if_present(tmp_path) is None
    (record,) = caplog.records
    assert f"has vocab.json and {' and '.join(files)} but no tokenizer.json" in record.getMessage()
    assert "prompt_token_ids" in record.getMessage()
    assert "save_pretrained" not in record.getMessage()


@pytest.mark.parametrize("module", ["sentencepiece", "google.protobuf"])
@pytest.mark.matrix
def test_missing_sentencepiece_package_is_named(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_model(tmp_path, train("bpe", **AS_LLAMA), "LlamaTokenizer")
    for name in [name for name in sys.modules if name.startswith(("sentencepiece", "google.protobuf"))]:
        monkeypatch.delitem(sys.modules, name)
    remove_package(monkeypatch, module)
    package = module.removeprefix("google.")
    with pytest.raises(TokenizerError, match=rf"and {package}, .*not installed"):
        Tokenizer.open(tmp_path)
