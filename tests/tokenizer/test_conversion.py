"""Folders with the files of older tokenizers: converted by transformers where it is installed, else refused."""

import json
import logging
import sys
from pathlib import Path

import pytest
from tokenizer_folders import CHATML, write_byte_level

from spmd_worker.errors import TokenizerError
from spmd_worker.tokenizer.tokenizer import Tokenizer

TEXTS = ["hello world, this is a text", "naïve café 你好 😀\n\n  12345", "<|im_start|>user\nhello<|im_end|>", ""]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """As Qwen2 came at first: vocab.json and merges.txt."""
    write_byte_level(tmp_path, chat_template=CHATML, tokenizer_class="Qwen2Tokenizer")
    model = json.loads((tmp_path / "tokenizer.json").read_text())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    (tmp_path / "tokenizer.json").unlink()
    return tmp_path


@pytest.mark.matrix
def test_ids_texts_and_chat_are_transformers(folder: Path):
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
def test_other_merges_are_another_tokenizer(folder: Path):
    before = Tokenizer.open(folder)
    lines = (folder / "merges.txt").read_text().splitlines()
    (folder / "merges.txt").write_text("\n".join(lines[:5]) + "\n")
    after = Tokenizer.open(folder)
    assert after.fingerprint() != before.fingerprint()
    assert after.encode(TEXTS[0]) != before.encode(TEXTS[0])


def test_without_transformers_the_command_that_converts_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.open(folder)
    message = str(caught.value)
    assert message.startswith(f"{folder} has vocab.json and merges.txt and no tokenizer.json, and transformers, which")
    assert f"T.from_pretrained('{folder}').save_pretrained('{folder}')" in message
    with caplog.at_level(logging.WARNING):
        assert Tokenizer.open_if_present(folder) is None
    assert [record.getMessage() for record in caplog.records] == [message]


@pytest.mark.matrix
def test_files_that_cannot_be_converted_are_refused_with_the_reason(tmp_path: Path):
    (tmp_path / "tokenizer.model").write_bytes(b"\x00nothing")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    with pytest.raises(TokenizerError, match=r"has tokenizer\.model and no tokenizer\.json, and transformers cannot"):
        Tokenizer.open(tmp_path)
