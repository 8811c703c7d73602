"""Beam search compared with transformers' and with a plain search over transformers' logits."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from context_fixtures import fixture_of
from plain_beams import plain_beams
from reference_models import (
    checkpoint_folder,
    mixed_prompts,
    random_prompt,
    reference_logits,
    reference_model,
    write_text_checkpoint,
)
from transformers import GenerationConfig
from transformers.generation import logits_process

from spmd_worker import LLM, BeamSearchParams, SamplingParams, TimestampRules, TokenRules
from spmd_worker.compat.beam_search import BeamSearchOutput

NAME = "llama3"
PROMPTS = mixed_prompts(4, 30, seed=11)

llm = fixture_of(lambda: LLM(checkpoint_folder(NAME), num_blocks=300))


def found(output: BeamSearchOutput, prompt: list[int]) -> list[list[int]]:
    assert all(each.tokens[: len(prompt)] == prompt for each in output.sequences)
    return [each.tokens[len(prompt) :] for each in output.sequences]


@torch.no_grad()
def transformers_beams(
    prompt: list[int], width: int, num_tokens: int, **arguments: object
) -> tuple[list[list[int]], list[float]]:
    ids = torch.tensor([prompt])
    made = reference_model(NAME).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        length_penalty=0.0,
        output_scores=True,
        return_dict_in_generate=True,
        **arguments,
    )
    return made.sequences[:, len(prompt) :].tolist(), made.sequences_scores.tolist()


@pytest.mark.guarantee("beam_search")
@pytest.mark.parametrize("width", [2, 5])
def test_beams_that_do_not_end_are_transformers(llm: LLM, width: int):
    outputs = llm.beam_search(PROMPTS, BeamSearchParams(beam_width=width, max_tokens=6, ignore_eos=True))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected, scores = transformers_beams(prompt, width, 6)
        assert found(output, prompt) == expected
        assert [each.cum_logprob for each in output.sequences] == pytest.approx(scores, abs=1e-4)
        assert all(each.finish_reason == "length" for each in output.sequences)
        assert [len(each.logprobs) for each in output.sequences] == [6] * width


@pytest.mark.guarantee("beam_search")
@pytest.mark.control("beam_search")
def test_one_beam_is_greedy_several_find_likelier_text(llm: LLM):
    greedy = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True), use_tqdm=False)
    one, five = (
        llm.beam_search(PROMPTS, BeamSearchParams(beam_width=width, max_tokens=6, ignore_eos=True)) for width in (1, 5)
    )
    assert [found(output, prompt) for output, prompt in zip(one, PROMPTS, strict=True)] == [
        [output.outputs[0].token_ids] for output in greedy
    ]
    # Negative control of the comparison with transformers: the width matters.
    assert sum(output.sequences[0].cum_logprob for output in five) > sum(
        output.sequences[0].cum_logprob for output in one
    )


def transformers_rules(prompt: list[int]) -> dict[str, object]:
    config = GenerationConfig(eos_token_id=90, no_timestamps_token_id=129)
    config.max_initial_timestamp_index = 60
    processors = [
        logits_process.SuppressTokensAtBeginLogitsProcessor((140, 141), len(prompt)),
        logits_process.SuppressTokensLogitsProcessor((*range(0, 100, 2),)),
        logits_process.WhisperTimeStampLogitsProcessor(config, begin_index=len(prompt)),
    ]
    return {"no_repeat_ngram_size": 2, "logits_processor": processors}


def test_beams_with_rules_are_transformers(llm: LLM):
    rules = TokenRules(
        suppress_tokens=(*range(0, 100, 2),),
        begin_suppress_tokens=(140, 141),
        no_repeat_ngram_size=2,
        timestamps=TimestampRules(130, 90, 60),
    )
    params = BeamSearchParams(beam_width=3, max_tokens=7, ignore_eos=True, token_rules=rules)
    outputs = llm.beam_search(PROMPTS, params)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected, scores = transformers_beams(prompt, 3, 7, **transformers_rules(prompt))
        assert found(output, prompt) == expected
        assert [each.cum_logprob for each in output.sequences] == pytest.approx(scores, abs=1e-4)
    # Fewer tokens are allowed than beams want.
    narrow = replace(params, token_rules={"forced_tokens": [7], "suppress_tokens": [*range(3, 211)]}, max_tokens=2)
    (output,) = llm.beam_search(PROMPTS[:1], narrow)
    assert [each[0] for each in found(output, PROMPTS[0])] == [7, 7, 7]
    assert sorted(each[1] for each in found(output, PROMPTS[0])) == [0, 1, 2]


def _always(allowed: list[int], *_: object) -> list[int]:
    return allowed


def test_beams_of_allowed_tokens_are_transformers(llm: LLM):
    """Log-probabilities are the model's own; the narrow list has fewer tokens than beams want."""
    for allowed in ([3, *range(50, 90)], [9, 8]):
        params = BeamSearchParams(beam_width=2, max_tokens=4, ignore_eos=True, allowed_token_ids=allowed)
        outputs = llm.beam_search(PROMPTS, params)
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            expected, scores = transformers_beams(prompt, 2, 4, prefix_allowed_tokens_fn=partial(_always, allowed))
            assert found(output, prompt) == expected
            assert [each.cum_logprob for each in output.sequences] == pytest.approx(scores, abs=1e-4)
    (output,) = llm.beam_search(PROMPTS[:1], replace(params, allowed_token_ids=[7]))
    assert found(output, PROMPTS[0]) == [[7] * 4]


EVEN = tuple(range(0, 211, 2))
"""End of sequence in the tests below, or these models would never come to it."""


def log_probs(prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """transformers', of the token behind the tokens of an answer."""
    return torch.log_softmax(reference_logits(reference_model(NAME), [*prompt, *tokens])[-1], -1)


@pytest.mark.parametrize("penalty", [0.0, 1.0, 8.0])
def test_finished_beams_compete_with_unfinished_ones(llm: LLM, penalty: float, monkeypatch: pytest.MonkeyPatch):
    engine = llm.llm_engine
    ends_even = replace(engine.resolved.model_config, eos_token_ids=EVEN)
    monkeypatch.setattr(engine, "resolved", replace(engine.resolved, model_config=ends_even))
    outputs = llm.beam_search(PROMPTS, BeamSearchParams(beam_width=4, max_tokens=5, length_penalty=penalty))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert found(output, prompt) == plain_beams(partial(log_probs, prompt), len(prompt), 4, 5, penalty, EVEN)
        for each in output.sequences:
            has_ended = each.tokens[-1] in EVEN
            assert each.finish_reason == ("stop" if has_ended else "length")
            assert each.stop_reason == (each.tokens[-1] if has_ended else None)
            assert not set(each.tokens[len(prompt) : -1]) & set(EVEN)
    # The longer a beam may be for its score, the fewer end.
    num_ended = sum(each.finish_reason == "stop" for output in outputs for each in output.sequences)
    assert (num_ended > 0) == (penalty < 8.0)


def test_beams_may_fill_max_model_len(llm: LLM):
    prompt = random_prompt(509, 1)
    (output,) = llm.beam_search([prompt], BeamSearchParams(beam_width=2, max_tokens=9, ignore_eos=True))
    assert [len(each.tokens) for each in output.sequences] == [512, 512]
    with pytest.raises(ValueError, match=r"has 512 tokens .*max_model_len is 512"):
        llm.beam_search([random_prompt(512, 1)], BeamSearchParams(beam_width=2, max_tokens=9))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"beam_width": 0}, r"beam_width=0 must .*1 or more"),
        ({"beam_width": 33}, r"beam_width=33 must .*most 32"),
        ({"max_tokens": 1.5}, r"max_tokens=1\.5 must .*1 or more"),
        (
            {"structured_outputs": {"regex": "a"}},
            r"structured_outputs=\{'regex': 'a'\} .*rejected",
        ),
        ({"watermarking": True}, r"watermarking=True .*rejected"),
        ({"skip_special_tokens": 1}, r"skip_special_tokens=1 must .*true"),
        ({"allowed_token_ids": []}, r"allowed_token_ids is empty"),
        ({"temperature": 0.7}, r"temperature=0\.7 must be 0: "),
    ],
)
def test_parameters_that_cannot_be_are_named(given: dict[str, object], words: str):
    with pytest.raises(ValueError, match=words):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 3, **given})


def test_fields_are_positional_in_the_order_of_vllm():
    given = (2, 3, True, 0.0, 0.5, True, None, False, None, (4, 5))
    names = ("beam_width", "max_tokens", "ignore_eos", "temperature", "length_penalty", "include_stop_str_in_output")
    names += ("structured_outputs", "skip_special_tokens", "watermarking", "allowed_token_ids")
    assert BeamSearchParams(*given) == BeamSearchParams(**dict(zip(names, given, strict=True)))
    assert BeamSearchParams(2, 3, structured_outputs={}, watermarking=False) == BeamSearchParams(2, 3)


def test_special_tokens_are_in_beam_text_when_requested(tmp_path: Path):
    with LLM(write_text_checkpoint(tmp_path), num_blocks=300) as llm:
        special = llm.get_tokenizer().eos_token
        prompt = f"hello{special} world"
        for skip in (True, False):
            (output,) = llm.beam_search([prompt], BeamSearchParams(2, 2, True, skip_special_tokens=skip))
            assert all((special in each.text) == (not skip) for each in output.sequences)
            assert all(each.text.startswith("hello world" if skip else prompt) for each in output.sequences)


def test_beam_search_rejects_invalid_prompts_and_parameters(llm: LLM):
    params = BeamSearchParams(beam_width=2, max_tokens=3)
    with pytest.raises(ValueError, match=r"no tokenizer.json"):
        llm.beam_search("hello", params)
    with pytest.raises(TypeError, match=r"^params .*SamplingParams: .*BeamSearchParams"):
        llm.beam_search(PROMPTS, SamplingParams())
    with pytest.raises(TypeError, match="lora_request='x' is a str: give LoRARequest"):
        llm.beam_search(PROMPTS, params, lora_request="x")
    assert llm.beam_search([], params) == []
