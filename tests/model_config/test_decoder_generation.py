"""How answers of encoder-decoder models are generated, from files of real releases' form."""

from dataclasses import replace
from pathlib import Path

import pytest

from spmd_worker.base.config.schema import SamplingConfig
from spmd_worker.base.errors import ModelConfigError
from spmd_worker.model_config.decoder_generation import DecoderGeneration, SpeechTokens, read_decoder_generation
from spmd_worker.replica.sequence.defaults import default_sampling

BART_CNN = {
    "decoder_start_token_id": 2,
    "forced_bos_token_id": 0,
    "forced_eos_token_id": 2,
    "eos_token_id": 2,
    "early_stopping": True,
    "length_penalty": 2.0,
    "num_beams": 4,
    "max_length": 142,
    "min_length": 56,
    "no_repeat_ngram_size": 3,
}
WHISPER = {
    "decoder_start_token_id": 50258,
    "eos_token_id": 50257,
    "max_length": 448,
    "num_beams": 1,
    "is_multilingual": True,
    "max_initial_timestamp_index": 50,
    "no_timestamps_token_id": 50363,
    "prev_sot_token_id": 50361,
    "lang_to_id": {"<|zh|>": 50260, "<|en|>": 50259},
    "task_to_id": {"transcribe": 50359, "translate": 50358},
    "suppress_tokens": [1, 2, 50358, 50999, 60000],
    "begin_suppress_tokens": [220, 50257],
}


def read(generation: dict, config: dict | None = None, is_speech: bool = False) -> DecoderGeneration:
    return read_decoder_generation(
        *(generation, config or {}, Path("model")),
        start_token_id=generation.get("decoder_start_token_id", 0),
        is_speech=is_speech,
        vocab_size=51865,
        eos_token_ids=(generation.get("eos_token_id", 1),),
        max_positions=448,
    )


def test_text_model_reads_forced_tokens_and_lengths():
    found = read(BART_CNN)
    expected = DecoderGeneration(
        start_token_id=2,
        end_token_id=2,
        forced_bos_token_id=0,
        forced_eos_token_id=2,
        no_repeat_ngram_size=3,
        min_length=56,
        max_length=142,
        max_positions=448,
        without_effect=("num_beams=4", "length_penalty=2.0", "early_stopping=True"),
    )
    assert found == expected
    assert "num_beams=4" in found.warning
    assert "LLM.beam_search" in found.warning
    assert replace(found, without_effect=()).warning == ""
    # transformers counts the decoder's prompt of two tokens.
    assert found.max_tokens == 140
    assert default_sampling(SamplingConfig(), BART_CNN, None, found.max_tokens).max_tokens == 140
    assert default_sampling(SamplingConfig(max_tokens=7), BART_CNN, None, found.max_tokens).max_tokens == 7


def test_speech_model_reads_languages_tasks_and_timestamps():
    found = read(WHISPER, is_speech=True)
    assert found.speech == SpeechTokens(
        50363, (("en", 50259), ("zh", 50260)), (("translate", 50358), ("transcribe", 50359)), 50361, 50
    )
    assert found.speech.first_timestamp == 50364
    german = read({**WHISPER, "language": "german"}, is_speech=True)
    assert german.speech == replace(found.speech, language="german")
    # An id outside the vocabulary cannot be sampled.
    assert (found.suppress_tokens, found.begin_suppress_tokens) == ((1, 2, 50358, 50999), (220, 50257))
    assert (found.max_length, found.warning) == (None, "")


def test_english_speech_model_has_no_languages():
    found = read({**WHISPER, "is_multilingual": False}, is_speech=True)
    assert found.speech is not None
    assert (found.speech.languages, found.speech.tasks) == ((), ())


def test_config_counts_without_generation_config():
    """Older releases have these keys in config.json; where both files have them transformers reads the newer."""
    assert read({}, {"forced_bos_token_id": 7, "num_beams": 4}).forced_bos_token_id == 7
    assert read({"eos_token_id": 2}, {"forced_bos_token_id": 7}).forced_bos_token_id is None


def test_keys_of_config_without_effect_are_named():
    """Pegasus and Blenderbot have no generation_config.json, and their beams were not named."""
    assert read({}, {"num_beams": 8}).warning.startswith("config.json: num_beams=8 are without effect here")
    assert read({"eos_token_id": 2}, {"num_beams": 8}).warning == ""


def test_bad_words_of_one_token_are_suppressed():
    """Marian's is its padding. transformers leaves out the ends of answers too."""
    found = read({"bad_words_ids": [[58], [3], [70000], [1], [4, 5]], "suppress_tokens": [3, 9], "eos_token_id": 1})
    assert found.suppress_tokens == (3, 9, 58)
    assert found.without_effect == ("bad_words_ids=[[4, 5]]",)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("forced_bos_token_id", 51865),
        ("forced_eos_token_id", "x"),
        ("suppress_tokens", 5),
        ("suppress_tokens", [-1]),
        ("bad_words_ids", [5]),
        ("bad_words_ids", [["a"]]),
        ("no_repeat_ngram_size", -1),
        ("max_length", 0),
        ("min_length", 1.5),
        ("lang_to_id", [1]),
        ("lang_to_id", {"<|en|>": 70000}),
        ("no_timestamps_token_id", True),
        ("language", 5),
    ],
)
def test_bad_values_are_named(key: str, value: object):
    is_speech = key in ("lang_to_id", "no_timestamps_token_id", "language")
    with pytest.raises(ModelConfigError, match=rf"generation_config\.json: {key}"):
        read({**(WHISPER if is_speech else BART_CNN), key: value}, is_speech=is_speech)
