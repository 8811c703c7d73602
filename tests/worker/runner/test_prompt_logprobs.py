"""Prompt log-probabilities chunk by chunk: the same entries however the prompt is cut, one for each position."""

import sys
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from spmd_worker.ops.sampling.read_back import Awaited, ReadBack
from spmd_worker.ops.sampling.sampler import Sampler
from spmd_worker.ranks.communicator import single_group
from spmd_worker.replica.mirror.mirror import MirroredSequence, ScheduledSequence
from spmd_worker.replica.sequence.media_items import MediaItem
from spmd_worker.replica.sequence.outputs import TokenLogprobs
from spmd_worker.replica.sequence.request import Request, RequestId
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.worker.runner import prompt_logprobs as module
from spmd_worker.worker.runner.prompt_logprobs import prompt_logprobs

VOCAB_SIZE = 30
PROMPT = tuple(torch.randint(0, VOCAB_SIZE, (20,), generator=torch.Generator().manual_seed(0)).tolist())
# Quarters: products and sums of these are exact, so a row's logits have the same bits in any company.
HIDDEN = torch.randint(-6, 7, (26, 5), generator=torch.Generator().manual_seed(1)) / 4
HEAD = torch.randint(-6, 7, (VOCAB_SIZE, 5), generator=torch.Generator().manual_seed(2)) / 4


def whole_logits(hidden: Tensor) -> Tensor:
    return hidden @ HEAD.t()


def report(hidden: Tensor, token_ids: list[int], num_top: int) -> list[Awaited[list[TokenLogprobs]]]:
    sampler = Sampler(single_group(), 0, VOCAB_SIZE, (), "raw_logprobs")
    read_back = ReadBack()
    pieces = sampler.launch_report(whole_logits(hidden), token_ids, num_top, read_back)
    read_back.read()
    return pieces


def chunk(
    first: int,
    end: int,
    wanted: int | None = 2,
    sample: int = 0,
    prompt: tuple[int, ...] = PROMPT,
    media: tuple[MediaItem, ...] = (),
) -> ScheduledSequence:
    request = Request(RequestId(3), prompt, SamplingParams(prompt_logprobs=wanted, n=2), 0, media=media)
    sequence = MirroredSequence(request, sample, [1] * 6, [], first, end - first)
    return ScheduledSequence(sequence, end - first, 0)


def entries_of(cuts: list[int]) -> list[TokenLogprobs | None]:
    """The prompt (and six output tokens) computed in the chunks between `cuts`."""
    found: list[TokenLogprobs | None] = []
    for first, end in pairwise(cuts):
        for launched in prompt_logprobs([chunk(first, end)], (0, end - first), HIDDEN[first:end], report):
            request_id, start, entries = launched.collect()
            assert request_id == 3
            assert start == len(found)
            found += entries
    return found


def test_image_tokens_need_no_logit(monkeypatch: pytest.MonkeyPatch):
    """In some models the id of image tokens lies outside the vocabulary."""
    media = (MediaItem(bytes(16), ((3, 4), (9, 1)), 4),)
    places = [3, 4, 5, 6, 9]
    prompt = tuple([VOCAB_SIZE + 9 if place in places else each for place, each in enumerate(PROMPT)])
    known = entries_of([0, 20])
    monkeypatch.setattr(sys.modules[__name__], "chunk", partial(chunk, prompt=prompt, media=media))
    for cuts in ([0, 20], [0, 4, 5, 9, 10, 20]):
        found = entries_of(cuts)
        assert [next(iter(found[place] or ())) for place in places] == [0] * 5
        assert [each for place, each in enumerate(found) if place not in places] == [
            each for place, each in enumerate(known) if place not in places
        ]


def test_prompt_logprobs_equal_log_softmax_of_previous_position():
    entries = entries_of([0, 20])
    assert entries[0] is None
    assert len(entries) == 20
    expected = torch.log_softmax(whole_logits(HIDDEN).double(), -1)
    for position in range(1, 20):
        entry, row = entries[position], expected[position - 1]
        assert next(iter(entry)) == PROMPT[position]
        for token, value in entry.items():
            assert value.logprob == pytest.approx(float(row[token]), abs=1e-5)
            assert value.rank == int((row > row[token]).sum()) + 1


@pytest.mark.parametrize("cuts", [[0, 1, 20], [0, 7, 14, 20], [0, 19, 20], [0, 19, 26], [0, 26], [0, *range(1, 21)]])
def test_prompt_logprobs_do_not_depend_on_chunks(cuts: list[int]):
    assert entries_of(cuts) == entries_of([0, 20])


def test_long_chunks_are_worked_through_in_pieces(monkeypatch: pytest.MonkeyPatch):
    expected = entries_of([0, 20])
    monkeypatch.setattr(module, "_ROWS_AT_ONCE", 3)
    assert entries_of([0, 20]) == expected


def test_only_requested_prompt_logprobs_are_reported():
    step = [chunk(0, 5, wanted=None), chunk(20, 21), chunk(0, 5, sample=1), chunk(0, 5)]
    reported = prompt_logprobs(step, (0, 5, 6, 11, 16), HIDDEN[:16], report)
    collected = [each.collect() for each in reported]
    assert [(request_id, start, len(entries)) for request_id, start, entries in collected] == [(3, 0, 6)]
