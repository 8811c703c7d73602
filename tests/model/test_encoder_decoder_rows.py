"""Rows of decoders with encoders: defaults of their classes, entries, and what files may not have."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cross_rows import CASES, cross_folder, cross_logits, cross_stages
from family_mutants import entries
from image_rows import ImageRun
from model_types import MODEL_TYPES
from reference_models import relative_error
from rows_of_encoders import cross_row
from transformers import AutoConfig

from spmd_worker.base.errors import CheckpointError, ModelConfigError
from spmd_worker.model_config.families.encoder_decoder_rows import ENCODER_DECODER_ROWS
from spmd_worker.model_config.families.family import Family
from spmd_worker.model_config.families.listing import describe_families
from spmd_worker.model_config.families.table import FAMILIES
from spmd_worker.model_config.model_config import ModelConfig, model_config_of, read_model_files
from spmd_worker.ranks.topology import Stage

TOLERANCE = 1e-4
PATH = Path("config.json")
EVERY = sorted(ENCODER_DECODER_ROWS)
STAGE = Stage(0, 3, is_first=True, is_last=True)


def read(architecture: str, **keys: Any) -> ModelConfig:
    return model_config_of({**keys, "architectures": [architecture]}, PATH)


@pytest.mark.parametrize("architecture", EVERY)
def test_defaults_of_encoder_decoders_equal_transformers(architecture: str):
    theirs = AutoConfig.for_model(MODEL_TYPES[architecture])
    ours = read(architecture)
    part, is_t5 = ours.encoder_part, hasattr(theirs, "d_kv")
    assert part is not None
    for config, half in ((ours, "decoder"), (part.stack, "encoder")):
        names = [f"{half}_{key}" for key in ("layers", "attention_heads", "ffn_dim")]
        if is_t5:
            names = ["num_decoder_layers" if half == "decoder" else "num_layers", "num_heads", "d_ff"]
        sizes = [getattr(theirs, key) for key in names]
        assert (config.num_layers, config.num_heads, config.layers[0].intermediate_size) == tuple(sizes)
        assert (config.vocab_size, config.hidden_size) == (theirs.vocab_size, theirs.d_model)
        scales = not is_t5 and theirs.scale_embedding
        assert config.embedding_multiplier == (theirs.d_model**0.5 if scales else 1.0)
    most = getattr(theirs, "max_target_positions", getattr(theirs, "max_position_embeddings", 512))
    assert ours.max_position_embeddings == most
    assert part.max_rows == (0 if is_t5 else getattr(theirs, "max_source_positions", most))
    assert ours.eos_token_ids == ((theirs.eos_token_id,) if theirs.eos_token_id < theirs.vocab_size else ())
    start = getattr(theirs, "decoder_start_token_id", None)
    assert part.start_token_id == (start if start is not None else getattr(theirs, "bos_token_id", None) or 0)
    assert (part.kind == "audio") == hasattr(theirs, "num_mel_bins")
    # What transformers writes of them reads as the same.
    assert read(architecture, **theirs.to_dict()) == ours


UNSEEN = (
    *("models", "defaults", "required", "newer", "file_keys", "encoder_part", "variants", "norms.eps", "norms.eps_key"),
    *("names.embedding_copies", "names.ignored", "names.optional_prefix", "names.parts", "names.head_bias"),
    *("head.has_bias", "head.ties_by_files", "names.aliases", "names.classifier", "names.head_dense"),
)
"""Entries of models that classify, too, which have tests of their own (test_decoder_classifiers.py)."""
UNSEEN_IN = {
    "t5": ("attention.qkv_bias", "attention.output_bias", "feed_forward.bias", "feed_forward.activation_words"),
    "whisper": ("embedding.root_key", "names.head"),
}


@pytest.mark.gate("t5", "whisper")
@pytest.mark.matrix
@pytest.mark.control("Models compute what transformers computes")
@pytest.mark.parametrize("name", ["bart", "m2m100", "t5", "umt5", "whisper"])
def test_comparison_detects_changed_decoder_rows(name: str, monkeypatch: pytest.MonkeyPatch):
    """With one entry as the plain row has it."""
    architecture = read_model_files(cross_folder(name)).model_config.architecture
    given, row = cross_row(21, 19), replace(FAMILIES[architecture], variants=())
    expected, unnoticed = cross_logits(name, given), []

    def error() -> float:
        (logits,) = ImageRun(cross_stages(name, STAGE), (given,)).finish()
        return relative_error(logits[given.num_virtual :], expected)

    assert error() < TOLERANCE
    for entry, changed in entries(row, Family(), *UNSEEN, *UNSEEN_IN.get(name, ())):
        with monkeypatch.context() as patch:
            patch.setitem(FAMILIES, architecture, changed)
            try:
                is_noticed = error() > 10 * TOLERANCE
            except (CheckpointError, ModelConfigError, AssertionError, KeyError, RuntimeError, IndexError):
                continue
        unnoticed += [] if is_noticed else [entry]
    assert unnoticed == []


@pytest.mark.parametrize(
    ("architecture", "keys", "sentence"),
    [
        (
            "BartForConditionalGeneration",
            {"decoder_start_token_id": 99_999_999},
            "decoder_start_token_id=99999999 must",
        ),
        ("BartForConditionalGeneration", {"decoder_start_token_id": "a"}, "decoder_start_token_id=.* must be a whole"),
        ("BartForConditionalGeneration", {"encoder_layers": 0}, "encoder_layers=0 must be a whole number"),
        ("BartForConditionalGeneration", {"scale_embedding": 2}, "scale_embedding=2 must be true or false"),
        ("MarianMTModel", {"share_encoder_decoder_embeddings": False}, "share_encoder_decoder_embeddings=.* only True"),
        ("M2M100ForConditionalGeneration", {"pad_token_id": 0}, "pad_token_id=0 is not supported, only 1"),
        ("WhisperForConditionalGeneration", {"num_mel_bins": 0}, "num_mel_bins=0 must be a whole number"),
        ("T5ForConditionalGeneration", {"feed_forward_proj": "gated-swish"}, "feed_forward_proj='gated-swish' is not"),
        (
            "T5ForConditionalGeneration",
            {"relative_attention_num_buckets": 3},
            "relative_attention_num_buckets=3 must be",
        ),
        ("T5ForConditionalGeneration", {"relative_attention_max_distance": 16}, "num_buckets=32 must be even"),
        ("PegasusForSequenceClassification", {}, "is unknown"),
        ("LEDForConditionalGeneration", {}, "of a form that does not run"),
    ],
)
def test_other_encoder_decoders_are_rejected(architecture: str, keys: dict[str, Any], sentence: str):
    with pytest.raises(ModelConfigError, match=sentence) as raised:
        read(architecture, **keys)
    assert re.match(r"config\.json: ", str(raised.value))


@pytest.mark.parametrize("architecture", ["T5ForConditionalGeneration", "UMT5ForConditionalGeneration"])
def test_flags_of_t5_are_those_of_all_releases(architecture: str):
    """Files of T5 1.1 have an untied head, which newer transformers write as `scale_decoder_outputs`."""
    found = {
        (scales, tied): read(architecture, **{key: value for key, value in keys.items() if value is not None})
        for scales, tied in ((None, None), (None, False), (False, True), (True, True), (None, True))
        for keys in ({"scale_decoder_outputs": scales, "tie_word_embeddings": tied},)
    }
    assert {key: config.logit_divisor > 1 for key, config in found.items()} == {
        (None, None): True,
        (None, False): False,
        (False, True): False,
        (True, True): True,
        (None, True): True,
    }


@pytest.mark.parametrize(
    ("given", "architecture"),
    [
        ("BartModel", "BartForConditionalGeneration"),
        ("MarianModel", "MarianMTModel"),
        ("T5WithLMHeadModel", "T5ForConditionalGeneration"),
    ],
)
def test_older_names_are_of_models_that_generate(given: str, architecture: str, tmp_path: Path):
    """Files of bart-base and t5-large have these, and AutoModelForSeq2SeqLM goes by model_type."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [given]}))
    files = read_model_files(tmp_path)
    assert files.generates
    assert files.model_config.pooling is None
    assert files.model_config == read(architecture)


def test_start_token_of_generation_config_comes_first(tmp_path: Path):
    folder = cross_folder("bart")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    (tmp_path / "generation_config.json").write_text('{"decoder_start_token_id": 7}')
    part = read_model_files(tmp_path).model_config.encoder_part
    assert part is not None
    assert part.start_token_id == 7


def test_listing_says_what_encoder_decoders_read():
    lines = describe_families().splitlines()
    (whisper,) = (line for line in lines if line.startswith("| WhisperForConditionalGeneration |"))
    (bart,) = (line for line in lines if line.startswith("| BartForConditionalGeneration |"))
    assert "| audio to text |" in whisper
    assert "| text to text |" in bart
    assert {name for name, _ in CASES.values()} <= {
        each.removesuffix("ForConditionalGeneration").removesuffix("MTModel") for each in EVERY
    }
