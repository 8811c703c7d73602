"""Prompts of decoders and segments of transcripts against transformers' Whisper."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
import torch
from tokenizer_folders import write_byte_level
from transformers import GenerationConfig, WhisperConfig, WhisperForConditionalGeneration
from transformers.models.whisper.tokenization_whisper import LANGUAGES as THEIR_LANGUAGES
from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

from spmd_worker.model_config.decoder_generation import DecoderGeneration, SpeechTokens
from spmd_worker.replica.sequence.decoder_prompt import (
    DecoderPrompt,
    RuledParams,
    Segment,
    decoder_prompt,
    detected_language,
    rules_after,
    segments,
    text_prompt,
)
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.replica.sequence.token_rules import TimestampRules, TokenRules
from spmd_worker.tokenizer.languages import CODES, LANGUAGES
from spmd_worker.tokenizer.tokenizer import Tokenizer

END, START, PREVIOUS, NO_TIMESTAMPS, FIRST = 400, 401, 407, 409, 410
SPEECH = SpeechTokens(
    NO_TIMESTAMPS, (("en", 402), ("de", 403), ("fr", 404)), (("translate", 405), ("transcribe", 406)), PREVIOUS, 50
)
WHISPER = DecoderGeneration(START, END, suppress_tokens=(1,), max_positions=40, speech=SPEECH)
ENGLISH = replace(WHISPER, speech=replace(SPEECH, languages=(), tasks=()))
STAMPS = TimestampRules(FIRST, END, 50)


@pytest.fixture(scope="module")
def whisper() -> WhisperForConditionalGeneration:
    config = WhisperConfig(
        vocab_size=460,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        pad_token_id=END,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        max_source_positions=20,
        max_target_positions=40,
        num_mel_bins=8,
        bos_token_id=END,
        eos_token_id=END,
        decoder_start_token_id=START,
    )
    return WhisperForConditionalGeneration(config).eval()


def their_prompt(
    model: WhisperForConditionalGeneration,
    language: str | None,
    task: str | None,
    timestamps: bool,
    *,
    is_english: bool,
) -> tuple[int, ...]:
    config = GenerationConfig(decoder_start_token_id=START, eos_token_id=END)
    config.no_timestamps_token_id, config.return_timestamps = NO_TIMESTAMPS, timestamps
    config.language, config.task, config.is_multilingual = language, task, not is_english
    if not is_english:
        config.lang_to_id = {f"<|{name}|>": token_id for name, token_id in SPEECH.languages}
        config.task_to_id = dict(SPEECH.tasks)
    ids = model._retrieve_init_tokens(torch.zeros(1, 8, 40), 1, config, model.config, 40, {})
    return tuple(ids[0].tolist())


@pytest.mark.parametrize("timestamps", [False, True])
@pytest.mark.parametrize("task", ["transcribe", "translate"])
@pytest.mark.parametrize("language", ["en", "German", "<|fr|>", "DE"])
def test_speech_prompt_is_transformers(
    whisper: WhisperForConditionalGeneration, language: str, task: str, timestamps: bool
):
    found = decoder_prompt(WHISPER, language=language, task=task, timestamps=timestamps)
    assert found.token_ids == their_prompt(whisper, language, task, timestamps, is_english=False)
    assert found.rules == TokenRules(suppress_tokens=(1,), timestamps=STAMPS if timestamps else None)
    assert found.rules == rules_after(WHISPER, found.token_ids)


@pytest.mark.parametrize("timestamps", [False, True])
def test_english_model_has_the_shorter_prompt(whisper: WhisperForConditionalGeneration, timestamps: bool):
    found = decoder_prompt(ENGLISH, language="english", timestamps=timestamps)
    assert found.token_ids == their_prompt(whisper, None, None, timestamps, is_english=True)
    for wrong in ({"language": "fr"}, {"task": "translate"}):
        with pytest.raises(ValueError, match="English alone"):
            decoder_prompt(ENGLISH, **wrong)


def test_detected_language_is_of_the_answer():
    found = decoder_prompt(WHISPER, task="translate")
    assert found.token_ids == (START,)
    assert found.rules == TokenRules((402, 403, 404), (405, NO_TIMESTAMPS), (1,))
    assert decoder_prompt(WHISPER, timestamps=True).rules == TokenRules(
        (402, 403, 404), (406,), (1,), timestamps=STAMPS
    )
    assert detected_language(WHISPER, [404, 406, NO_TIMESTAMPS, 7]) == "fr"
    assert detected_language(WHISPER, [7, END]) is None


def test_language_of_the_files_is_the_default():
    """Distil-Whisper's and fine-tuned models name one in generation_config.json."""
    assert WHISPER.speech is not None
    german = replace(WHISPER, speech=replace(WHISPER.speech, language="<|de|>"))
    assert decoder_prompt(german) == decoder_prompt(WHISPER, language="de")
    assert decoder_prompt(german, language="en") == decoder_prompt(WHISPER, language="en")


def test_text_before_is_cut_to_half_of_the_positions(tokenizer: Tokenizer):
    short = decoder_prompt(WHISPER, tokenizer, language="en", prompt_text="  a b ")
    assert short.token_ids == (PREVIOUS, *tokenizer.encode(" a b"), START, 402, 406, NO_TIMESTAMPS)
    text = "one two three " * 20
    long = decoder_prompt(WHISPER, tokenizer, language="en", prompt_text=text).token_ids
    kept = tokenizer.encode(f" {text.strip()}")[-19:]
    assert long == (PREVIOUS, *kept, START, 402, 406, NO_TIMESTAMPS)
    with pytest.raises(ValueError, match=r"needs a tokenizer\.json"):
        decoder_prompt(WHISPER, language="en", prompt_text="a")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"task": "sing"}, "task='sing' must be transcribe or translate"),
        ({"language": "xx"}, "language='xx' must be a code or an English name: en, de, fr"),
        ({"language": "welsh"}, "language='welsh' is not a language of this model"),
    ],
)
def test_bad_arguments_are_named(arguments: dict, message: str):
    with pytest.raises(ValueError, match=message):
        decoder_prompt(WHISPER, **arguments)
    with pytest.raises(ValueError, match="no_timestamps_token_id"):
        decoder_prompt(replace(WHISPER, speech=None))


def test_languages_are_transformers():
    assert LANGUAGES == THEIR_LANGUAGES
    assert CODES == TO_LANGUAGE_CODE


def test_text_prompt_has_the_forced_first_token():
    assert text_prompt(DecoderGeneration(2, 2)) == DecoderPrompt((2,))
    bart = DecoderGeneration(2, 2, 0, 2, no_repeat_ngram_size=3, min_length=56)
    # transformers counts both tokens of the prompt.
    rules = TokenRules(forced_eos_token_id=2, min_new_tokens=54, no_repeat_ngram_size=3)
    assert text_prompt(bart) == DecoderPrompt((2, 0), rules)


def test_target_language_is_the_forced_first_token(tmp_path: Path):
    folder = write_byte_level(tmp_path)
    file = str(folder / "tokenizer.json")
    theirs = tokenizers.Tokenizer.from_file(file)
    theirs.add_special_tokens(["fra_Latn", "__de__"])
    theirs.save(file)
    tokenizer, generation = Tokenizer.open(folder), DecoderGeneration(2, 2, 9)
    for language, token in (("fra_Latn", "fra_Latn"), ("de", "__de__"), ("__de__", "__de__")):
        assert text_prompt(generation, tokenizer, language).token_ids == (2, theirs.token_to_id(token))
    with pytest.raises(ValueError, match="target_language='a' is not a language token"):
        text_prompt(generation, tokenizer, "a")
    with pytest.raises(ValueError, match=r"target_language needs a tokenizer\.json"):
        text_prompt(generation, None, "de")


def random_answer(rng: random.Random) -> list[int]:
    """Pairs of timestamps around text, of which the last may be missing."""
    answer, stamp = [FIRST + rng.randrange(3)], rng.randrange(3)
    for _ in range(rng.randrange(1, 4)):
        stamp += rng.randrange(1, 6)
        answer += [rng.randrange(2, 300) for _ in range(rng.randrange(1, 4))]
        answer += [FIRST + stamp + 3] * 2
    return answer[: len(answer) - rng.randrange(2)]


def test_segments_are_transformers(whisper: WhisperForConditionalGeneration):
    rng = random.Random(4)
    for _ in range(200):
        answer = random_answer(rng)
        theirs, _ = whisper._retrieve_segment(
            seek_sequence=torch.tensor(answer),
            seek_outputs=[{}],
            time_offset=torch.tensor([30.0], dtype=torch.float64),
            timestamp_begin=FIRST,
            seek_num_frames=torch.tensor([3000]),
            time_precision=0.02,
            time_precision_features=0.01,
            input_stride=2,
            prev_idx=0,
            idx=0,
            return_token_timestamps=False,
            decoder_input_ids=torch.zeros(1, 3),
        )
        ours = segments(WHISPER, [402, 406, *answer, END], 30.0, 60.0)
        texts = [[each for each in part["tokens"].tolist() if each < FIRST] for part in theirs]
        assert [list(each.token_ids) for each in ours] == texts
        assert [each.end_s for each in ours] == pytest.approx([float(part["end"]) for part in theirs])
        starts = [float(part["start"]) for part in theirs]
        # Of an answer without a pair transformers begins at the window.
        assert [each.start_s for each in ours][len(theirs) == 1 :] == pytest.approx(starts[len(theirs) == 1 :])


def test_segments_lie_within_the_window():
    # Text without timestamps, and behind the last pair; a timestamp behind the audio.
    assert segments(WHISPER, [7, 8, END], 5.0, 9.5) == [Segment(5.0, 9.5, (7, 8))]
    answer = [FIRST, 7, FIRST + 50, FIRST + 50, 8, 9]
    assert segments(WHISPER, answer, 0.0, 4.0) == [Segment(0.0, 1.0, (7,)), Segment(1.0, 4.0, (8, 9))]
    assert segments(WHISPER, [FIRST, 7, FIRST + 500], 2.0, 4.0) == [Segment(2.0, 4.0, (7,))]
    assert segments(WHISPER, [FIRST, FIRST + 3, END], 0.0, 4.0) == []


def test_rows_share_parameters_with_equal_rules():
    ruled, frozen = RuledParams(), SamplingParams(temperature=0.0).frozen()
    rules = TokenRules(suppress_tokens=(3,))
    first = ruled.of(frozen, rules)
    assert first.token_rules == rules
    assert ruled.of(frozen, TokenRules(suppress_tokens=(3,))) is first
    assert ruled.of(frozen, TokenRules(suppress_tokens=(4,))).token_rules == TokenRules(suppress_tokens=(4,))
    own = SamplingParams(token_rules={"suppress_tokens": [9]})
    assert ruled.of(own, rules) is own
    for given in (rules, None):
        assert ruled.of(SamplingParams(temperature=0.0, token_rules={}), given) == frozen
    assert ruled.of(frozen, None) is frozen
