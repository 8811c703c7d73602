"""Which sequences of a request come back, in which order, and what they tell of log-probabilities."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizer_folders import write_byte_level

import spmd_worker.engine.outputs as engine_outputs
from spmd_worker.engine.outputs import request_output
from spmd_worker.replica.sequence.media_items import MediaItem
from spmd_worker.replica.sequence.outputs import CompletionOutput, Logprob, RequestOutput
from spmd_worker.replica.sequence.request import Request, RequestId
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.replica.sequence.sequence import FinishReason, Sequence, SequenceGroup, SequenceStatus
from spmd_worker.tokenizer.tokenizer import Tokenizer


def group_of(sums: list[float], **sampling: object) -> SequenceGroup:
    """One finished sequence for each of the cumulative log-probabilities; sample i has the output token 10 + i."""
    request = Request(RequestId(3), (1, 2), SamplingParams(**sampling), 0)
    sequences = [
        Sequence(
            request,
            sample_index,
            [10 + sample_index],
            status=SequenceStatus.FINISHED,
            finish_reason=FinishReason.LENGTH,
            cumulative_logprob=logprob,
            logprobs=[{10 + sample_index: Logprob(logprob, 1)}],
        )
        for sample_index, logprob in enumerate(sums)
    ]
    return SequenceGroup(request, sequences)


def output_of(sums: list[float], **sampling: object) -> RequestOutput:
    return request_output(group_of(sums, **sampling), None, None)


def chosen(sums: list[float], **sampling: object) -> list[int]:
    """The samples that come back, in order; their indices are counted anew."""
    outputs = output_of(sums, **sampling).outputs
    assert [each.index for each in outputs] == list(range(len(outputs)))
    return [each.token_ids[0] - 10 for each in outputs]


def test_best_samples_are_sorted_and_renumbered():
    assert output_of([-3.0, -1.0, -4.0, -2.0], n=2, best_of=4).outputs == [
        CompletionOutput(0, "", [11], cumulative_logprob=-1.0, finish_reason="length"),
        CompletionOutput(1, "", [13], cumulative_logprob=-2.0, finish_reason="length"),
    ]


def test_of_equal_samples_the_earlier_is_better():
    assert chosen([-2.0, -1.0, -2.0, -1.0, -2.0], n=3, best_of=5) == [1, 3, 0]
    assert chosen([-1.0] * 4, n=2, best_of=4) == [0, 1]


@pytest.mark.parametrize("worst", [math.nan, -math.inf])
def test_nan_sample_is_ranked_last(worst: float):
    """NaN compares as neither more nor less: sorted as it is, it would leave the others in any order."""
    assert chosen([-1.0, worst, -3.0, -2.0], n=4, best_of=5) == [0, 3, 2, 1]
    assert chosen([worst, -1.0, -3.0, -2.0], n=1, best_of=4) == [1]
    assert chosen([math.nan, -math.inf, math.nan, -5.0], n=3, best_of=4) == [3, 0, 1]


@pytest.mark.parametrize("sampling", [{"n": 3}, {"n": 3, "best_of": 3}, {"n": 3, "best_of": 3, "logprobs": 0}])
def test_unranked_samples_keep_their_order(sampling: dict[str, object]):
    assert chosen([-3.0, -1.0, -2.0], **sampling) == [0, 1, 2]


def test_ranked_rows_have_cumulative_logprob():
    silent, ranked, asked = (
        output_of([-3.0, -1.0], **sampling).outputs[0]
        for sampling in ({"n": 2}, {"best_of": 2}, {"best_of": 2, "logprobs": 0})
    )
    assert (silent.cumulative_logprob, silent.logprobs) == (None, None)
    assert (ranked.cumulative_logprob, ranked.logprobs) == (-1.0, None)
    assert (asked.cumulative_logprob, asked.logprobs) == (-1.0, [{11: Logprob(-1.0, 1)}])


def test_request_aborted_before_fork_returns_one_output():
    assert chosen([-1.0], n=2, best_of=4) == [0]


def test_ranked_group_ends_with_its_last_sample():
    group = group_of([-1.0, -2.0, -3.0], n=2, best_of=3)
    assert group.is_forked
    assert group.is_finished
    group.sequences.pop()
    assert not group.is_forked
    assert not group.is_finished


@pytest.mark.control("best_of returns the best, best first")
def test_control_reversed_ranking_is_detected(monkeypatch: pytest.MonkeyPatch, control):
    monkeypatch.setattr(engine_outputs, "_improbability", lambda sequence: sequence.cumulative_logprob)
    with control():
        test_best_samples_are_sorted_and_renumbered()


def test_image_tokens_have_no_prompt_logprob():
    """They kept the place of the text that follows, and the log-probability of another token."""
    media = (MediaItem(bytes(16), ((2, 2), (5, 1)), 4),)
    for num_virtual in (0, 1):
        ids = (0,) * num_virtual + (4, 5, 9, 9, 6, 9, 7)
        items = tuple([replace(each, runs=tuple([(at + num_virtual, n) for at, n in each.runs])) for each in media])
        request = Request(
            *(RequestId(3), ids, SamplingParams(prompt_logprobs=0), 0), num_virtual_tokens=num_virtual, media=items
        )
        group = SequenceGroup(request, [Sequence(request, 0, [1], finish_reason=FinishReason.LENGTH)])
        # The workers give image tokens the entry of token 0.
        known = [0 if each == 9 else each for each in ids]
        group.prompt_logprobs = [None, *({each: Logprob(-1.0 - each, 1)} for each in known[1:])]
        found = request_output(group, None, None).prompt_logprobs
        assert found is not None
        assert [each and next(iter(each)) for each in found] == [None, 5, None, None, 6, None, 7]


def test_prompt_logprobs_aborted_halfway_have_their_texts(tmp_path: Path):
    """They had those after the prompt's end: half of a character that was not computed yet."""
    tokenizer = Tokenizer.open(write_byte_level(tmp_path))
    request = Request(RequestId(3), tuple(tokenizer.encode("a text 🙂")), SamplingParams(prompt_logprobs=0), 0)
    entries = [None, *({each: Logprob(-1.0, 1)} for each in request.prompt_token_ids[1:])]
    found = []
    for num_computed in (len(entries), 3):
        group = SequenceGroup(request, [Sequence(request, 0, finish_reason=FinishReason.ABORT)])
        group.prompt_logprobs = entries[:num_computed]
        found.append(request_output(group, None, tokenizer).prompt_logprobs)
    complete, halfway = found
    assert complete is not None
    assert halfway == complete[:3]
