"""`best_of` through `LLM`: more samples run than come back, and the likeliest are those that do."""

from dataclasses import replace

import pytest
from context_fixtures import fixture_of
from reference_models import checkpoint_folder, mixed_prompts

from spmd_worker import LLM, CompletionOutput, RequestOutput, SamplingParams

PROMPTS = mixed_prompts(6, 40, seed=5)
SAMPLED = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
NAME = "llama3"

llm = fixture_of(lambda: LLM(checkpoint_folder(NAME), num_blocks=300))


def rows(sampling: SamplingParams) -> list[SamplingParams]:
    """The same for every prompt, each with a random stream of its own."""
    return [replace(sampling, seed=100 + index) for index in range(len(PROMPTS))]


def run(llm: LLM, sampling: SamplingParams) -> list[list[CompletionOutput]]:
    outputs: list[RequestOutput] = llm.generate(PROMPTS, rows(sampling), use_tqdm=False)
    assert [output.error for output in outputs] == [None] * len(PROMPTS)
    return [output.outputs for output in outputs]


def best_by_hand(llm: LLM, sampling: SamplingParams, count: int) -> list[list[CompletionOutput]]:
    """All samples of a row that returns them all with their log-probabilities, the likeliest first, cut."""
    best = []
    for completions in run(llm, sampling):
        order = sorted(completions, key=lambda each: (-each.cumulative_logprob, each.index))[:count]
        best.append([replace(each, index=index) for index, each in enumerate(order)])
    return best


def tokens(outputs: list[list[CompletionOutput]]) -> list[list[list[int]]]:
    return [[completion.token_ids for completion in completions] for completions in outputs]


@pytest.mark.guarantee("best_of returns the best, best first", is_control_inside=True)
def test_best_of_equals_manual_ranking(llm: LLM):
    expected = best_by_hand(llm, replace(SAMPLED, n=4, logprobs=0), count=2)
    assert run(llm, replace(SAMPLED, n=2, best_of=4, logprobs=0)) == expected
    silent = [[replace(each, logprobs=None) for each in completions] for completions in expected]
    assert run(llm, replace(SAMPLED, n=2, best_of=4)) == silent
    # Negative control: the best are not simply the first.
    assert tokens(expected) != tokens(run(llm, replace(SAMPLED, n=2)))


def test_best_of_ranks_by_cumulative_logprob(llm: LLM):
    ending = replace(SAMPLED, stop_token_ids=tuple(range(0, 200, 10)))
    expected = best_by_hand(llm, replace(ending, n=5, logprobs=0), count=3)
    assert len({len(each.token_ids) for completions in expected for each in completions}) > 1
    assert tokens(run(llm, replace(ending, n=3, best_of=5))) == tokens(expected)


def test_best_of_is_equal_under_preemption(llm: LLM):
    sampling = replace(SAMPLED, n=2, best_of=4)
    expected = run(llm, sampling)
    with LLM(checkpoint_folder(NAME), num_blocks=8, max_model_len=60, block_size=8) as small:
        assert tokens(run(small, sampling)) == tokens(expected)
        assert small.llm_engine.counters.num_preemptions > 0


def test_best_of_greedy_equals_single_answer(llm: LLM):
    greedy = replace(SAMPLED, temperature=0.0)
    assert tokens(run(llm, replace(greedy, n=2, best_of=3))) == [[one, one] for (one,) in tokens(run(llm, greedy))]


@pytest.mark.finding(number="D2")
def test_best_of_exceeds_max_num_seqs():
    params = [replace(SAMPLED, best_of=4), replace(SAMPLED, best_of=3)]
    answers = []
    for max_num_seqs in (3, 64):
        with LLM(checkpoint_folder(NAME), num_blocks=300, max_num_seqs=max_num_seqs) as llm:
            outputs = llm.generate(PROMPTS[:2], params, use_tqdm=False)
            answers.append(tokens([output.outputs for output in outputs]))
    assert answers[0] == answers[1]
    assert [len(each) for each in answers[0]] == [1, 1]
