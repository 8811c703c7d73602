"""Answers of a tiny Whisper against transformers': its prompts, detected languages, timestamps and masks; and beams."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from speech_models import FIRST_STAMP, IDS, RATE, sound, speech_folder
from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

from spmd_worker import LLM, BeamSearchParams, SamplingParams
from spmd_worker.replica.sequence.decoder_prompt import DecoderPrompt, decoder_prompt, detected_language, segments

NUM_TOKENS, END = 14, IDS["<|endoftext|>"]
SOUNDS = [sound(1.2 + index / 10, index) for index in range(4)]
SETTINGS: dict[str, dict[str, Any]] = {
    "detected language": {},
    "detected language, timestamps": {"timestamps": True},
    "English": {"language": "en"},
    "translated, timestamps": {"language": "french", "task": "translate", "timestamps": True},
}


@pytest.fixture(scope="module")
def llm():
    with LLM(str(speech_folder()), dtype="float32", num_blocks=200, device="cpu") as made:
        yield made


@pytest.fixture(scope="module")
def features() -> torch.Tensor:
    extractor = WhisperFeatureExtractor.from_pretrained(speech_folder())
    return extractor(SOUNDS, sampling_rate=RATE, return_tensors="pt").input_features


def our_prompt(llm: LLM, settings: dict[str, Any]) -> DecoderPrompt:
    generation = llm.llm_engine.resolved.decoder
    assert generation is not None
    return decoder_prompt(generation, **settings)


def prompts(made: DecoderPrompt) -> list[dict[str, Any]]:
    audio = [{"prompt": "", "multi_modal_data": {"audio": (each, RATE)}} for each in SOUNDS]
    return [{"encoder_prompt": each, "decoder_prompt": list(made.token_ids)} for each in audio]


def our_answers(llm: LLM, settings: dict[str, Any], **sampling: Any) -> list[list[int]]:
    """Prompt and answer of each sound."""
    made = our_prompt(llm, settings)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, token_rules=made.rules, **sampling)
    outputs = llm.generate(prompts(made), params, use_tqdm=False)
    return [[*made.token_ids, *each.outputs[0].token_ids] for each in outputs]


@torch.no_grad()
def their_answers(features: torch.Tensor, settings: dict[str, Any]) -> list[list[int]]:
    """Greedy, of the first window alone: `generate` computes what follows the last timestamp once more."""
    model = WhisperForConditionalGeneration.from_pretrained(speech_folder()).eval()
    config = copy.deepcopy(model.generation_config)
    config.return_timestamps = settings.get("timestamps", False)
    # transformers takes no task by default.
    config.language, config.task = settings.get("language"), settings.get("task", "transcribe")
    config.no_speech_threshold = None
    ids = model._retrieve_init_tokens(features, len(features), config, model.config, features.shape[-1], {})
    most = NUM_TOKENS - (ids.shape[1] - 1 if "language" not in settings else 0)
    processors = model._retrieve_logit_processors(config, None, ids.shape[1], 1, "cpu")
    for _ in range(most):
        scores = model(input_features=features, decoder_input_ids=ids).logits[:, -1]
        for each in processors:
            scores = each(ids, scores)
        ids = torch.cat((ids, scores.argmax(-1, keepdim=True)), dim=1)
    rows = ids.tolist()
    return [row[: row.index(END) + 1] if END in row else row for row in rows]


@pytest.mark.gate("English", "translated, timestamps", "detected language, timestamps")
@pytest.mark.parametrize("name", SETTINGS)
def test_greedy_answers_of_speech_equal_transformers(llm: LLM, features: torch.Tensor, name: str):
    found = our_answers(llm, SETTINGS[name])
    assert found == their_answers(features, SETTINGS[name])
    has_stamps = [any(each >= FIRST_STAMP for each in row) for row in found]
    assert all(has_stamps) == ("timestamps" in name)
    generation = llm.llm_engine.resolved.decoder
    assert generation is not None
    assert all(detected_language(generation, row) in ("en", "de", "fr") for row in found)
    assert all(segments(generation, row[1:], 0.0, 2.0) for row in found)


def test_answers_of_speech_depend_on_the_rules(llm: LLM, features: torch.Tensor):
    """Negative control."""
    settings = SETTINGS["translated, timestamps"]
    made = our_prompt(llm, settings)
    assert made.rules is not None
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
    for rules in (replace(made.rules, timestamps=None), replace(made.rules, suppress_tokens=())):
        outputs = llm.generate(prompts(made), replace(params, token_rules=rules), use_tqdm=False)
        found = [[*made.token_ids, *each.outputs[0].token_ids] for each in outputs]
        assert found != their_answers(features, settings)


def test_detected_language_is_the_same_when_drawn(llm: LLM):
    greedy = our_answers(llm, {})
    drawn = llm.generate(
        prompts(our_prompt(llm, {})),
        SamplingParams(temperature=3.0, seed=1, max_tokens=6, token_rules=our_prompt(llm, {}).rules),
        use_tqdm=False,
    )
    assert [each.outputs[0].token_ids[:3] for each in drawn] == [row[1:4] for row in greedy]


def test_one_beam_of_speech_is_greedy(llm: LLM):
    """The beam has the prompt's rules, without being given any."""
    made = our_prompt(llm, {"language": "de", "timestamps": True})
    beams = llm.beam_search(prompts(made), BeamSearchParams(beam_width=1, max_tokens=9, ignore_eos=True))
    greedy = llm.generate(prompts(made), SamplingParams(temperature=0, max_tokens=9, ignore_eos=True), use_tqdm=False)
    for beam, output in zip(beams, greedy, strict=True):
        assert beam.sequences[0].tokens == [*made.token_ids, *output.outputs[0].token_ids]
