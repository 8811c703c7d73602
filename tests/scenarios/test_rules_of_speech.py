"""Answers of a tiny Whisper against transformers': its prompts, detected languages, timestamps and masks; and beams."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from context_fixtures import fixture_of
from plain_beams import plain_beams
from speech_models import (
    FIRST_STAMP,
    IDS,
    RATE,
    sound,
    speech_folder,
    speech_reference,
    speech_rules,
    their_beams,
    their_transcripts,
)
from transformers import WhisperFeatureExtractor

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

llm = fixture_of(lambda: LLM(str(speech_folder()), dtype="float32", num_blocks=200, device="cpu"))


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


def their_answers(features: torch.Tensor, settings: dict[str, Any]) -> list[list[int]]:
    return their_transcripts(speech_reference(), features, settings, NUM_TOKENS)


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


def log_probs(features: torch.Tensor, prompt: list[int], processors: Any, tokens: list[int]) -> torch.Tensor:
    """transformers', of the token behind the tokens of an answer, with its rules."""
    ids = torch.tensor([[*prompt, *tokens]])
    logits = speech_reference()(input_features=features, decoder_input_ids=ids).logits[:, -1]
    found: torch.Tensor = processors(ids, logits.log_softmax(-1))[0]
    return found


@pytest.mark.gate("translated, timestamps")
@pytest.mark.parametrize("name", ["English", "translated, timestamps"])
def test_beams_of_speech_equal_transformers(llm: LLM, features: torch.Tensor, name: str):
    """`generate` does not count a prompt in a beam's length: where beams end, a plain search is compared."""
    made, reference = our_prompt(llm, SETTINGS[name]), speech_reference()
    ids, processors = [*made.token_ids], speech_rules(reference, SETTINGS[name], len(made.token_ids))
    assert made.rules is not None
    has_ended = False
    for width in (2, 3):
        # Neither may end a beam.
        rules = replace(made.rules, suppress_tokens=(*made.rules.suppress_tokens, END))
        without_end = [*processors, lambda _, scores: scores.index_fill(1, torch.tensor([END]), -torch.inf)]
        params = BeamSearchParams(beam_width=width, max_tokens=6, ignore_eos=True, token_rules=rules)
        for given, output in zip(features, llm.beam_search(prompts(made), params), strict=True):
            wanted, scores = their_beams(reference, given[None], ids, without_end, width, 6)
            assert [each.tokens for each in output.sequences] == wanted
            assert [each.cum_logprob for each in output.sequences] == pytest.approx(scores, abs=1e-4)
        params = BeamSearchParams(beam_width=width, max_tokens=NUM_TOKENS, length_penalty=1.0)
        beams = llm.beam_search(prompts(made)[:2], params)
        for given, output in zip(features[:2], beams, strict=True):
            given_log_probs = partial(log_probs, given[None], ids, processors)
            found = plain_beams(given_log_probs, len(ids), width, NUM_TOKENS, 1.0, [END])
            assert [each.tokens for each in output.sequences] == [[*ids, *each] for each in found]
        has_ended |= any(each.finish_reason == "stop" for output in beams for each in output.sequences)
    assert has_ended


@pytest.mark.gate("recompute")
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_sampled_speech_is_the_same_in_any_order(llm: LLM, mode: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SPMD_WORKER_CHECK", "1")
    made = our_prompt(llm, SETTINGS["translated, timestamps"])
    params = [
        SamplingParams(temperature=1, seed=index // 2, max_tokens=24, n=1 + index % 2, logprobs=0, ignore_eos=True)
        for index in range(len(SOUNDS))
    ]

    def answers(opened: LLM, indices: list[int]) -> list[Any]:
        given = [prompts(made)[index] for index in indices]
        outputs = opened.generate(given, [params[index] for index in indices], use_tqdm=False)
        return [[[one.token_ids, str(one.logprobs)] for one in each.outputs] for each in outputs]

    order, every = [2, 0, 3, 1], [*range(len(SOUNDS))]
    alone = [answers(llm, [index])[0] for index in every]
    assert len({str(each) for each in alone}) == len(alone)
    assert answers(llm, every) == alone
    assert answers(llm, order) == [alone[index] for index in order]
    options = {"preemption_mode": mode, "swap_space": 0.01 * (mode == "swap"), "max_num_batched_tokens": 150}
    small = {"device": "cpu", "block_size": 8, "num_blocks": 2 * 13 + 12, **options}
    with LLM(str(speech_folder()), dtype="float32", **small) as opened:
        assert answers(opened, order) == [alone[index] for index in order]
        counters = opened.llm_engine.counters
        assert counters.num_preemptions > 0
        assert bool(counters.num_swapped_in) == (mode == "swap")
