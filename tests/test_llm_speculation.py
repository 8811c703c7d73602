"""`LLM` with n-gram and suffix drafts: the ids and log-probabilities of a run without, and its counts."""

from typing import Any

import pytest
from reference_models import checkpoint_folder, mixed_prompts

from spmd_worker import LLM, RequestOutput, SamplingParams

PROMPTS = [[*prompt, *prompt] for prompt in mixed_prompts(4, 20, seed=3)]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.7, top_p=0.9, max_tokens=30, seed=5, repetition_penalty=0.9, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=33, min_tokens=20, logit_bias={7: 100.0, 8: 100.0}),
    SamplingParams(n=3, temperature=1.0, max_tokens=25, seed=1, top_k=2),
]
OFF: list[list[tuple[Any, ...]]] = []


def answers(outputs: list[RequestOutput]) -> list[list[tuple[Any, ...]]]:
    return [
        [(each.token_ids, each.cumulative_logprob, each.finish_reason, each.logprobs) for each in output.outputs]
        for output in outputs
    ]


def answers_without() -> list[list[tuple[Any, ...]]]:
    if not OFF:
        with LLM(checkpoint_folder("llama3"), num_blocks=300) as llm:
            OFF.extend(answers(llm.generate(PROMPTS, PARAMS, use_tqdm=False)))
            assert not [each for each in llm.get_metrics() if "spec_decode" in each.name]
    return OFF


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_llm_answers_are_equal_with_drafts(method: str):
    speculation = {"method": method, "num_speculative_tokens": 6, "prompt_lookup_min": 1, "max_step_tokens": 40}
    with LLM(checkpoint_folder("llama3"), num_blocks=300, speculative_config=speculation) as llm:
        for _ in range(2):
            assert answers(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == answers_without()
        found = {each.name.removeprefix("vllm:spec_decode_num_"): each for each in llm.get_metrics()}
        drafted, accepted = found["draft_tokens"].value, found["accepted_tokens"].value
        by_position = found["accepted_tokens_per_pos"].values
    assert drafted > accepted > 20
    assert (len(by_position), sum(by_position)) == (6, accepted)
    assert by_position == sorted(by_position, reverse=True)
    assert drafted > found["drafts"].value > 0
