"""Source languages of translators' tokenizers: transformers' ids, by the class, whatever tokenizer.json has."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer

from spmd_worker.tokenizer.tokenizer import Tokenizer

SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
TEXTS = ("abc ab", "c", "")
CLASSES = {
    "NllbTokenizer": ("eng_Latn", "fra_Latn"),
    "MBart50Tokenizer": ("en_XX", "fr_XX"),
    "MBartTokenizer": ("en_XX", "fr_XX"),
}


def write(folder: Path, tokenizer_class: str, end: str, settings: dict[str, Any]) -> Path:
    """A folder as an older release wrote it: the file's own template has the language at the other end."""
    languages = CLASSES[tokenizer_class]
    pieces = [*SPECIAL, "▁", "a", "b", "c", "▁a", "ab", "▁ab"]
    if tokenizer_class == "NllbTokenizer":
        merges = [("▁", "a"), ("a", "b"), ("▁", "ab")]
        vocabulary = {each: index for index, each in enumerate(pieces)}
        library = Library(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True))
    else:
        scores = [(each, -float(index)) for index, each in enumerate([*pieces, *languages])]
        library = Library(models.Unigram(scores, unk_id=3))
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace()
    library.add_special_tokens([*SPECIAL, *languages])
    single = f"$A </s> {languages[0]}" if end == "last" else f"{languages[0]} $A </s>"
    special = [(each, library.token_to_id(each)) for each in ("</s>", languages[0])]
    library.post_processor = processors.TemplateProcessing(single=single, pair=f"{single} $B", special_tokens=special)
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": tokenizer_class} | settings))
    (folder / "config.json").write_text('{"model_type": "mbart"}')
    return folder


@pytest.mark.parametrize(
    ("tokenizer_class", "settings"),
    [
        ("NllbTokenizer", {}),
        ("NllbTokenizer", {"src_lang": "fra_Latn"}),
        ("NllbTokenizer", {"legacy_behaviour": True}),
        ("MBart50Tokenizer", {"src_lang": None}),
        ("MBart50Tokenizer", {"tokenizer_class": "MBart50TokenizerFast", "src_lang": "fr_XX"}),
        ("MBartTokenizer", {}),
    ],
)
def test_source_texts_have_the_ids_of_transformers(tmp_path: Path, tokenizer_class: str, settings: dict[str, Any]):
    """NLLB's own tokenizer.json ends texts with the language; the class, since 2023, begins them with it."""
    is_last = tokenizer_class != "MBartTokenizer" and not settings.get("legacy_behaviour")
    folder = write(tmp_path, tokenizer_class, "last" if is_last else "first", settings)
    ours, theirs = Tokenizer.open(folder), AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.encode(text) != Library.from_file(str(folder / "tokenizer.json")).encode(text).ids, "control"
    for language in CLASSES[tokenizer_class]:
        theirs.src_lang = language
        before, after = ours.around_source(language)
        for text in TEXTS:
            assert [*before, *ours.encode(text, add_special_tokens=False), *after] == theirs.encode(text)


def test_unknown_source_languages_are_named(tmp_path: Path):
    tokenizer = Tokenizer.open(write(tmp_path, "MBartTokenizer", "last", {}))
    with pytest.raises(ValueError, match="source_language='klingon' is not a language token"):
        tokenizer.around_source("klingon")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(ValueError, match="source_language='fr_XX': this model's tokenizer is of no class"):
        Tokenizer.open(tmp_path).around_source("fr_XX")
