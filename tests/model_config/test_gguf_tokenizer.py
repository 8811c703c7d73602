"""Tokenizers out of GGUF: ids and texts are those of the tokenizer.json that a file was converted from."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from family_checkpoints import family_folder
from gguf_files import tokenizer_metadata, write_gguf
from reference_models import checkpoint_folder
from tokenizer_folders import CHATML, write_byte_level, write_llama_style
from transformers import AutoTokenizer
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX as QWEN2
from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX as QWEN35

from spmd_worker.base.errors import ModelConfigError
from spmd_worker.model_config.gguf import tokenizer_json
from spmd_worker.model_config.hub import locate_model
from spmd_worker.tokenizer.patterns import is_linear
from spmd_worker.tokenizer.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("own_hub_cache")

TEXTS = (
    *("hello world, the cache", "  two  spaces\n\n\ttab ", "", " ", "naïve café 你好 😀 12345", "<s>hello</s> w"),
    *("hello<|im_start|> hello", "it's I'LL 3.14", "\U0001f468‍\U0001f469‍\U0001f467 é é"),
)
KEYS = "tokenizer.ggml."


def converted(metadata: dict[str, Any], folder: Path, model: str = "llama2") -> Path:
    """The model folder of a GGUF with this tokenizer."""
    folder.mkdir(exist_ok=True)
    source = family_folder(model) if model == "gemma" else checkpoint_folder(model)
    return locate_model(str(write_gguf(source, folder / "m.gguf", metadata=metadata)), None).folder


def with_split(folder: Path, regex: str) -> None:
    """Split words of the folder's tokenizer by a regular expression."""
    content = json.loads((folder / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    step = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, step]}
    (folder / "tokenizer.json").write_text(json.dumps(content))


@pytest.mark.guarantee("A GGUF has its model's tokenizer")
@pytest.mark.parametrize("kind", ["bytes", "words", "sentencepiece"])
def test_ids_and_texts_are_the_tokenizers_own(kind: str, tmp_path: Path):
    write = write_llama_style if kind == "sentencepiece" else write_byte_level
    own = write(tmp_path / "own")
    if kind == "words":
        with_split(own, QWEN2)
    metadata = tokenizer_metadata(own, "deepseek-r1-qwen" if kind == "words" else "gpt-2")
    ours = Tokenizer.open(converted(metadata, tmp_path / "files"))
    theirs = tokenizers.Tokenizer.from_file(str(own / "tokenizer.json"))
    assert ours.vocabulary() == theirs.get_vocab(with_added_tokens=True)
    for each in TEXTS:
        ids = theirs.encode(each).ids
        assert ours.encode(each) == ids
        assert ours.decode(ids) == theirs.decode(ids)
        assert ours.encode(each, add_special_tokens=False) == theirs.encode(each, add_special_tokens=False).ids


@pytest.mark.control("A GGUF has its model's tokenizer")
def test_comparison_detects_another_split(tmp_path: Path):
    own = write_byte_level(tmp_path / "own")
    found = {
        pre: Tokenizer.open(converted(tokenizer_metadata(own, pre), tmp_path / pre)).encode("xx 12345")
        for pre in ("gpt-2", "starcoder")
    }
    assert found["gpt-2"] == tokenizers.Tokenizer.from_file(str(own / "tokenizer.json")).encode("xx 12345").ids
    assert len(found["gpt-2"]) < len(found["starcoder"])


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
def test_ids_are_transformers_of_the_same_file(kind: str, tmp_path: Path):
    own = (write_llama_style if kind == "sentencepiece" else write_byte_level)(tmp_path / "own")
    metadata = tokenizer_metadata(own, "qwen2") | {f"{KEYS}add_bos_token": False}
    ours = Tokenizer.open(converted(metadata, tmp_path / "files", "qwen2"))
    theirs = AutoTokenizer.from_pretrained(tmp_path / "files", gguf_file="m.gguf")
    for each in TEXTS:
        # transformers' class of Llama puts a space in front of the first part of a text alone, and llama.cpp of each.
        if kind == "bytes" or not (each.startswith(" ") or "<s>" in each):
            assert ours.encode(each, add_special_tokens=False) == theirs.encode(each, add_special_tokens=False)


def test_splits_are_published_ones_and_linear():
    splits = tokenizer_json._SPLITS
    assert (splits["qwen2"], splits["qwen35"]) == (QWEN2, QWEN35)
    assert all(is_linear(each) for each in splits.values() if each not in ("", "digits"))


@pytest.mark.parametrize(
    ("given", "first", "last"),
    [
        ({}, [], []),
        ({"pre": "llama-bpe"}, [0], []),
        ({"pre": "llama-bpe", "add_bos_token": False}, [], []),
        ({"add_bos_token": True, "add_eos_token": True}, [0], [1]),
    ],
)
def test_first_and_last_tokens_are_the_metadatas(given: dict, first: list, last: list, tmp_path: Path):
    metadata = tokenizer_metadata(write_byte_level(tmp_path / "own"))
    metadata |= {f"{KEYS}{key}": value for key, value in given.items()}
    ours = Tokenizer.open(converted(metadata, tmp_path / "files"))
    plain = ours.encode("hello", add_special_tokens=False)
    assert ours.encode("hello") == [*first, *plain, *last]


def test_gemma_merges_by_ids_and_keeps_spaces(tmp_path: Path):
    metadata = tokenizer_metadata(write_llama_style(tmp_path / "own"))
    tokens = metadata[f"{KEYS}tokens"]
    tokens[tokens.index("▁▁")], tokens[tokens.index("▁a")] = "▁a", "  "
    # As of a vocabulary whose last merge is the first.
    metadata |= {f"{KEYS}scores": [float(each) for each in range(len(tokens))], f"{KEYS}add_space_prefix": False}
    ours = Tokenizer.open(converted(metadata, tmp_path / "files", "gemma"))
    found = ours.encode("b  a hello", add_special_tokens=False)
    assert [ours.token(each) for each in found] == ["b", "▁▁", "a", "▁hello"]


@pytest.mark.parametrize("kind", [3, 4], ids=["control", "user-defined"])
def test_chat_templates_and_ends_are_the_files(kind: int, tmp_path: Path):
    metadata = tokenizer_metadata(write_byte_level(tmp_path / "own"))
    metadata[f"{KEYS}token_type"][3] = kind
    metadata |= {"tokenizer.chat_template": CHATML, "tokenizer.chat_template.tool_use": "tools"}
    metadata |= {f"{KEYS}eot_token_id": 5, "general.sampling.temp": 0.6, "general.sampling.top_k": 20}
    folder = converted(metadata, tmp_path / "files")
    tokenizer = Tokenizer.open(folder)
    assert tokenizer.chat_templates.sources == {"default": CHATML, "tool_use": "tools"}
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<s>"}
    # <|im_end|> is 3.
    generation = json.loads((folder / "generation_config.json").read_text())
    assert (generation["eos_token_id"], generation["temperature"], generation["top_k"]) == ([1, 5, 3], 0.6, 20)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model='bert' is not supported, only gpt2 and llama: put the model's own"),
        ({"pre": "viking"}, "tokenizer.ggml.pre='viking' is not known, only .*llama-bpe.*: put the model's own"),
        ({"merges": ["ab"]}, "tokenizer.ggml.merges must have a space in each text"),
        ({"merges": [1]}, "tokenizer.ggml.merges must be a list of texts"),
        ({"tokens": [1, 2]}, r"tokenizer.ggml.tokens=\[1, 2\] must be a list of texts"),
        ({"token_type": [1]}, "tokenizer.ggml.token_type must list a type for each of the 320 tokens"),
        ({"bos_token_id": 320}, "tokenizer.ggml.bos_token_id=320 must be a whole number from 0 to 319"),
        ({"eos_token_id": "x"}, "tokenizer.ggml.eos_token_id='x' must be a whole number"),
        ({"add_bos_token": 3}, "tokenizer.ggml.add_bos_token=3 must be true or false"),
        ({"model": "llama"}, "tokenizer.ggml.scores must list a number for each token"),
    ],
)
def test_unusable_metadata_is_named(given: dict, words: str, tmp_path: Path):
    metadata = tokenizer_metadata(write_byte_level(tmp_path / "own"))
    if given == {"model": "llama"}:
        del metadata[f"{KEYS}merges"]
    metadata |= {f"{KEYS}{key}": value for key, value in given.items()}
    with pytest.raises(ModelConfigError, match=rf"m.gguf: {words}"):
        converted(metadata, tmp_path / "files")


def test_tokenizer_beside_a_file_takes_its_place(tmp_path: Path):
    own = write_byte_level(tmp_path / "files", chat_template="x")
    (own / "notes.txt").write_text("")
    metadata = tokenizer_metadata(own) | {f"{KEYS}pre": "unheard-of"}
    path = write_gguf(checkpoint_folder("llama2"), own / "m.gguf", metadata=metadata)
    folder = locate_model(str(own), None).folder
    assert (folder / "tokenizer.json").read_bytes() == (own / "tokenizer.json").read_bytes()
    assert not (folder / "notes.txt").exists()
    with pytest.raises(ModelConfigError, match="unheard-of"):
        locate_model(str(path), None)


def test_tokenizer_alone_keeps_the_metadatas_template(tmp_path: Path):
    """Regression: beside a tokenizer.json alone there was no template, and no first token."""
    own = write_byte_level(tmp_path / "files")
    metadata = tokenizer_metadata(own) | {"tokenizer.chat_template": CHATML}
    (own / "tokenizer_config.json").unlink()
    write_gguf(checkpoint_folder("llama2"), own / "m.gguf", metadata=metadata)
    tokenizer = Tokenizer.open(locate_model(str(own), None).folder)
    assert tokenizer.chat_templates.sources == {"default": CHATML}
    assert tokenizer.special_tokens["bos_token"] == "<s>"
