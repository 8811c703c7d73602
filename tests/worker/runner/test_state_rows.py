"""Replays of drafts, as steps lay them out: by both builders alike, and none where no row needs one."""

from typing import Any

import pytest
import torch
from torch import Tensor

from spmd_worker.ops.attention.draft_replay import DraftReplay
from spmd_worker.replica.mirror.records import MirroredSequence, ScheduledSequence
from spmd_worker.replica.sequence.request import Request, RequestId
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.worker.runner.batch import Batch, build_batch
from spmd_worker.worker.runner.batch_state import BatchState

CPU = torch.device("cpu")
MOST_DRAFTS = 4
OPTIONS: dict[str, Any] = {"has_states": True, "most_drafts": MOST_DRAFTS}


def row(number: int, first: int, drafts: tuple[int, ...] = (), lag: int = 0) -> MirroredSequence:
    """A row of three blocks a group that has computed `first` tokens, and knows one more."""
    request = Request(RequestId(number), tuple(range(first)), SamplingParams(temperature=0.0), number)
    blocks = list(range(6 * number, 6 * number + 6))
    return MirroredSequence(
        *(request, 0, [5], blocks, first, 1), state_slot=3 * number + 3, draft_token_ids=drafts, num_lagging_tokens=lag
    )


def step() -> tuple[ScheduledSequence, ...]:
    """A row that lags and has drafts, a chunk of a prompt, one with drafts alone, one that lags alone."""
    prompt = row(1, 9)
    prompt.num_computed_tokens = 2
    return (
        ScheduledSequence(row(0, 12, (8, 9), lag=2), 3, 1),
        ScheduledSequence(prompt, 3, 0),
        ScheduledSequence(row(2, 7, (4,)), 2, 1),
        ScheduledSequence(row(3, 6, lag=4), 1, 1),
    )


def batches(scheduled: tuple[ScheduledSequence, ...], **options: Any) -> list[Batch]:
    """By both builders."""
    given = {**OPTIONS, **options}
    return [build_batch(scheduled, 16, CPU, **given), BatchState(16, CPU, **given).build(scheduled)]


def replay_tensors(replay: DraftReplay) -> list[Tensor]:
    segments = replay.segments
    assert segments.kept is not None
    return [
        *(segments.slots, segments.starts, segments.firsts, segments.kept),
        *(replay.own_rows, replay.lagging_rows, replay.replayed_rows, replay.draft_rows, replay.saved_rows),
    ]


@pytest.mark.parametrize("grouped", [{}, {"num_groups": 2, "group_of": (0, 1)}], ids=["", "groups"])
def test_replay_has_lagging_tokens_first(grouped: dict[str, Any]) -> None:
    for batch in batches(step(), **grouped):
        attention = batch.attention.of_layer(1) if grouped else batch.attention
        assert attention.replay is not None
        tensors = replay_tensors(attention.replay)
        assert [each.tolist() for each in tensors] == [
            [3, 6, 9, 12],
            [0, 5, 8, 10, 15],
            [10, 2, 7, 2],
            [3, 3, 1, 5],
            [2, 3, 4, 5, 6, 7, 8, 9, 14],
            [0, 1, 10, 11, 12, 13],
            [12, 13, 48, 49, 50, 51],
            [1, 2, 7],
            [12, 13, 36],
        ]
        assert [each.dtype for each in tensors] == [torch.int32] * 4 + [torch.int64] * 5
        # The step's own tokens are laid out as ever.
        assert attention.segments is not None
        assert attention.segments.firsts.tolist() == [12, 2, 7, 6]
        assert attention.query_starts == (0, 3, 6, 8, 9)


def test_steps_without_drafts_replay_nothing() -> None:
    plain = (ScheduledSequence(row(0, 12), 1, 1), ScheduledSequence(row(1, 5), 1, 1))
    assert [batch.attention.replay for batch in batches(plain)] == [None, None]
    # No layer of the stage saves any inputs.
    assert [batch.attention.replay for batch in batches(step(), most_drafts=0)] == [None, None]


def test_rows_that_lag_do_not_continue() -> None:
    """Steps of one token a row: with what is kept, as laid out anew; a lag in the first, in the second, in none."""
    for lags in ((2, 0, 0), (0, 2, 0), (0, 0, 0)):
        sequences, state, layouts = [row(0, 12), row(1, 5)], BatchState(16, CPU, **OPTIONS), []
        for lag in lags:
            sequences[0].num_lagging_tokens = lag
            scheduled = tuple(ScheduledSequence(each, 1, 1) for each in sequences)
            kept, anew = state.build(scheduled), build_batch(scheduled, 16, CPU, **OPTIONS)
            replays = [each.attention.replay for each in (kept, anew)]
            assert [each is None for each in replays] == [lag == 0] * 2
            if replays[0] is not None and replays[1] is not None:
                assert all(map(torch.equal, *map(replay_tensors, (replays[0], replays[1]))))
            assert torch.equal(kept.positions, anew.positions)
            layouts.append(state._layout.query_starts)
            for each in sequences:
                each.num_computed_tokens += 1
                each.output_token_ids.append(6)
        continued = [layouts[0] is layouts[1], layouts[1] is layouts[2]]
        assert continued == [lags[1] == 0, True]


@pytest.mark.parametrize(("lag", "drafts"), [(5, ()), (0, (1, 2, 3, 4, 5))])
def test_more_drafts_than_slots_hold_are_a_fault(lag: int, drafts: tuple[int, ...]) -> None:
    scheduled = (ScheduledSequence(row(0, 12, drafts, lag), 1 + len(drafts), 1),)
    with pytest.raises(AssertionError, match="5"):
        build_batch(scheduled, 16, CPU, **OPTIONS)
