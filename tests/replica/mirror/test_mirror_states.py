"""The mirror of a model with recurrent states: each row has its own slot, and a plan that breaks that is refused."""

import dataclasses
from collections.abc import Callable

import pytest
from mirror_state import mirror_slots, mirror_state

from kv_cache.block_ops import BlockOps
from kv_cache.state_ops import StateOps
from spmd_worker.replica.mirror.mirror import Mirror, MirrorError
from spmd_worker.replica.sequence.metadata import (
    SequenceData,
    SequenceDataDelta,
    SequenceGroupMetadata,
    SequenceGroupMetadataDelta,
)
from spmd_worker.replica.sequence.request import Request
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.replica.sequence.sequence import SequenceKey
from spmd_worker.replica.sequence.step import StepPlan

NUM_BLOCKS, BLOCK_SIZE, NUM_SLOTS = 16, 4, 6
FIRST, SECOND = SequenceKey(1, 0), SequenceKey(2, 0)


def new_mirror(num_slots: int = NUM_SLOTS) -> Mirror:
    return Mirror(NUM_BLOCKS, BLOCK_SIZE, num_state_slots=num_slots, most_drafts=3)


def snapshot(request_id: int, slot: int, blocks: tuple[int, ...], num_samples: int = 1) -> SequenceGroupMetadata:
    """A prompt of 5 tokens, computed completely."""
    request = Request(request_id, (5, 6, 7, 8, 9), SamplingParams(n=2), 0)
    return SequenceGroupMetadata(request, (SequenceData(0, (), blocks, 0, 5, num_samples, slot),))


def prompts(step: int = 1) -> StepPlan:
    """Requests 1 and 2 have one prompt, and 7 another."""
    other = dataclasses.replace(snapshot(7, 2, (14, 15)), request=Request(7, (5, 6, 7, 8, 4), SamplingParams(), 0))
    return StepPlan(step, (snapshot(1, 0, (0, 1), 2), snapshot(2, 3, (2, 3)), other), num_tokens=15)


def decoding(step: int, *keys: SequenceKey, **fields: object) -> StepPlan:
    ids = (11,) * len(keys)
    return StepPlan(step, num_tokens=len(keys), continuing=keys, continuing_token_ids=ids, **fields)


def at_work(*plans: StepPlan) -> Mirror:
    mirror = new_mirror()
    for plan in (prompts(), *plans):
        mirror.apply(plan)
    return mirror


def delta(step: int, **fields: object) -> StepPlan:
    """Request 2's next token, in a delta."""
    data = SequenceDataDelta(**{**dict(zip(DELTA_FIELDS, (0, (11,), 2, (), 5, 1, 1))), **fields})
    return StepPlan(step, (SequenceGroupMetadataDelta(2, (data,)),), num_tokens=data.num_scheduled_tokens)


DELTA_FIELDS = [spec.name for spec in dataclasses.fields(SequenceDataDelta)]


def fork(step: int, slot: int) -> StepPlan:
    """Sample 1 of request 1."""
    data = SequenceDataDelta(1, (12,), 0, (0, 4), 5, 1, 1, slot)
    return StepPlan(step, (SequenceGroupMetadataDelta(1, (data,)),), num_tokens=1)


def test_rows_keep_their_slots():
    mirror = at_work()
    (first, second) = mirror.apply(decoding(2, FIRST, SECOND, state_ops=StateOps(copy=((0, 5),))))
    assert (first.sequence.state_slot, second.sequence.state_slot) == (0, 3)
    mirror.apply(dataclasses.replace(fork(3, 5), block_ops=BlockOps(copy=((1, 4),))))
    assert mirror_slots(mirror) == {FIRST: 0, (1, 1): 5, SECOND: 3, (7, 0): 2}


def test_moves_may_come_while_rows_only_decode():
    mirror = at_work(decoding(2, FIRST, SECOND))
    rows = mirror.apply(decoding(3, FIRST, SECOND, state_ops=StateOps(copy=((0, 4), (3, 1)))))
    # The same rows as before: the short way.
    assert rows is mirror.apply(decoding(4, FIRST, SECOND))


def test_preempted_sequence_comes_back_with_another_slot():
    """A mirror learns of a preemption when another sequence has the slot."""
    mirror = at_work()
    mirror.apply(StepPlan(2, (snapshot(3, 3, (4, 5)),), num_tokens=5))
    assert mirror_slots(mirror) == {FIRST: 0, SECOND: -1, (3, 0): 3, (7, 0): 2}
    mirror.apply(StepPlan(3, (snapshot(2, 1, (2, 3)),), num_tokens=5))
    assert mirror_slots(mirror) == {FIRST: 0, SECOND: 1, (3, 0): 3, (7, 0): 2}


def test_swapped_sequence_comes_back_with_another_slot():
    mirror = at_work(StepPlan(2, state_ops=StateOps(swap_out=((3, 0),), copy=((0, 3),))))
    assert mirror_slots(mirror)[SECOND] == -1
    request, data = Request(2, (5, 6, 7, 8, 9), SamplingParams(n=2), 0), SequenceData(0, (11,), (2, 3), 5, 1, 1, 4)
    group = SequenceGroupMetadata(request, (data,))
    mirror.apply(StepPlan(3, (group,), num_tokens=1, state_ops=StateOps(swap_in=((0, 4),))))
    assert mirror_slots(mirror)[SECOND] == 4


def resent(
    step: int, num_lagging_tokens: int, num_computed_tokens: int = 8, slot: int = 3, last_id: int = 13, **moves: object
) -> StepPlan:
    """Request 2, sent completely while it decodes: its next token is the tenth."""
    request = Request(2, (5, 6, 7, 8, 9), SamplingParams(n=2), 0)
    outputs, num_tokens = (11, 12, last_id, 14), 9 - num_computed_tokens
    counts = (num_computed_tokens, num_tokens, 1, slot, (), num_lagging_tokens)
    group = SequenceGroupMetadata(request, (SequenceData(0, outputs, (2, 3, 6), *counts),))
    return StepPlan(step, (group,), num_tokens=num_tokens, state_ops=StateOps(**moves))


def drafted(step: int = 2) -> StepPlan:
    """Request 2's next token, and three drafts behind it."""
    return delta(step, appended_block_ids=(6,), num_scheduled_tokens=4, draft_token_ids=(12, 13, 14))


def accepted(step: int, *token_ids: int, num_lagging_tokens: int) -> StepPlan:
    """Request 2 goes on after some of the drafts."""
    first = 6 + num_lagging_tokens
    return delta(step, appended_token_ids=token_ids, num_kept_blocks=3, num_computed_tokens=first)


@pytest.mark.parametrize("num_lagging_tokens", range(4))
def test_row_lags_by_accepted_drafts_once(num_lagging_tokens: int):
    ids = (*(12, 13, 14)[:num_lagging_tokens], 19)
    (row,) = at_work(drafted()).apply(accepted(3, *ids, num_lagging_tokens=num_lagging_tokens))
    assert (row.sequence.num_lagging_tokens, row.sequence.num_computed_tokens) == (
        num_lagging_tokens,
        6 + num_lagging_tokens,
    )
    mirror = at_work(drafted(), accepted(3, *ids, num_lagging_tokens=num_lagging_tokens))
    for step in (4, 5):
        # The first is not plain, the second is.
        (row,) = mirror.apply(decoding(step, SECOND))
        assert (row.sequence.num_lagging_tokens, row.sequence.draft_token_ids) == (0, ())


def test_drafts_may_follow_lagging_tokens():
    given = {"appended_token_ids": (12, 13, 20), "num_kept_blocks": 3, "num_computed_tokens": 8}
    mirror = at_work(drafted(), delta(3, **given, num_scheduled_tokens=3, draft_token_ids=(21, 22)))
    assert mirror.held(SECOND).num_lagging_tokens == 2
    # The slot has nine tokens, and the row goes on after the first draft.
    last = delta(4, appended_token_ids=(21, 30), num_kept_blocks=3, num_computed_tokens=10)
    (row,) = mirror.apply(last)
    assert (row.sequence.num_lagging_tokens, row.sequence.num_scheduled_tokens) == (1, 1)


@pytest.mark.parametrize(
    "plan",
    [
        *(resent(3, 0, 6), resent(3, 1, 7), resent(3, 2)),
        resent(3, 2, slot=4, swap_out=((3, 0),), swap_in=((0, 4),)),
        # Computed again, from what other sequences have left.
        *(resent(3, 0, 5, slot=4, copy=((0, 4),)), resent(3, 0, 5, copy=((0, 3),)), resent(3, 0, 0)),
    ],
)
def test_row_sent_completely_says_how_far_it_lags(plan: StepPlan):
    (row,) = at_work(drafted()).apply(plan)
    assert row.sequence.num_lagging_tokens == plan.groups[0].sequences[0].num_lagging_tokens


def test_row_lags_while_others_continue():
    """It is listed behind them, and in the next step continues with them."""
    mirror = at_work(dataclasses.replace(drafted(), continuing=(FIRST,), continuing_token_ids=(11,), num_tokens=5))
    lagging = accepted(3, 12, 13, 19, num_lagging_tokens=2)
    rows = mirror.apply(dataclasses.replace(lagging, continuing=(FIRST,), continuing_token_ids=(11,), num_tokens=2))
    assert [row.sequence.num_lagging_tokens for row in rows] == [0, 2]
    assert [row.sequence.num_lagging_tokens for row in mirror.apply(decoding(4, FIRST, SECOND))] == [0, 0]


def test_models_without_states_have_no_lag():
    mirror = new_mirror(0)
    mirror.apply(StepPlan(1, (snapshot(2, -1, (2, 3)),), num_tokens=5))
    mirror.apply(drafted())
    (row,) = mirror.apply(accepted(3, 12, 13, 19, num_lagging_tokens=2))
    assert row.sequence.num_lagging_tokens == 0
    other = dataclasses.replace(resent(4, 1).groups[0].sequences[0], state_slot=-1)
    group = dataclasses.replace(resent(4, 1).groups[0], sequences=(other,))
    with pytest.raises(MirrorError, match=r"num_lagging_tokens is 1, .* 0 in a model without recurrent states"):
        mirror.apply(StepPlan(4, (group,), num_tokens=1))


OUT = StepPlan(2, state_ops=StateOps(swap_out=((3, 0),)))
TAKEN = StepPlan(2, (snapshot(3, 3, (4, 5)),), num_tokens=5)
OVERWRITTEN = StepPlan(2, state_ops=StateOps(copy=((0, 3),)))

REJECTED: dict[str, tuple[list[StepPlan], Callable[[], StepPlan], str]] = {
    "no slot": ([], lambda: StepPlan(2, (snapshot(3, -1, (4, 5)),), num_tokens=5), "state_slot is -1, .* 0 to 5"),
    "a slot beyond": ([], lambda: StepPlan(2, (snapshot(3, 6, (4, 5)),), num_tokens=5), "state_slot is 6, .* 0 to 5"),
    "two rows, one slot": (
        [],
        lambda: StepPlan(2, (snapshot(3, 1, (4, 5)), snapshot(4, 1, (6, 7))), num_tokens=10),
        "request 4, sample 0: field state_slot is 1, .* given once",
    ),
    "the slot of a row that continues": (
        [],
        lambda: dataclasses.replace(decoding(2, FIRST), groups=(snapshot(3, 0, (4, 5)),), num_tokens=6),
        "request 1, sample 0: field state_slot is 0, .* no other row",
    ),
    "the slot of a row with a delta": (
        [],
        lambda: dataclasses.replace(delta(2), groups=(*delta(2).groups, snapshot(3, 3, (4, 5))), num_tokens=6),
        "request 2, sample 0: field state_slot is 3, .* no other row",
    ),
    "a lost slot, continuing": ([TAKEN], lambda: decoding(3, SECOND), "request 2, .* another sequence's by now"),
    "a lost slot, in a delta": ([TAKEN], lambda: delta(3), "request 2, .* another sequence's by now"),
    "an overwritten slot": ([OVERWRITTEN], lambda: decoding(3, SECOND), "request 2, .* another sequence's by now"),
    "a second slot": ([], lambda: delta(2, state_slot=1), "state_slot is 1, .* -1 for a sequence that has its slot"),
    "a fork without a copy": (
        [],
        lambda: fork(2, 5),
        "step 2, request 1, sample 1: field state_slot is 5, which nobody has filled, .* after its 5 tokens",
    ),
    "a copy for a fork, a step late": (
        [decoding(2, FIRST)],
        lambda: dataclasses.replace(fork(3, 5), state_ops=StateOps(copy=((0, 5),))),
        "step 3, request 1, sample 1: field num_computed_tokens is 5, .* behind the 6 tokens that slot 5 has",
    ),
    "a swap-in left out": (
        [OUT],
        lambda: resent(3, 0, 5, slot=4),
        "step 3, request 2, sample 0: field state_slot is 4, which nobody has filled, .* after its 5 tokens",
    ),
    "a swap-in left out, to a slot with another state": (
        [OUT],
        lambda: resent(3, 0, 5, slot=2),
        "step 3, request 2, sample 0: field state_slot is 2, with the state after 5 tokens of request 7, sample 0",
    ),
    "a swap-out left out": (
        [],
        lambda: resent(2, 0, 5, slot=4, swap_in=((0, 4),)),
        "step 2: field state_ops is a swap-in of slot 0, which nobody has filled",
    ),
    "a state swapped in twice": (
        [OUT, resent(3, 0, 5, slot=4, swap_in=((0, 4),))],
        lambda: resent(4, 0, 5, slot=5, swap_in=((0, 5),)),
        "step 4: field state_ops is a swap-in of slot 0, which nobody has filled",
    ),
    "another's state swapped in": (
        [dataclasses.replace(OUT, state_ops=StateOps(swap_out=((3, 0), (2, 1))))],
        lambda: resent(3, 0, 5, slot=4, swap_in=((1, 4),)),
        "step 3, request 2, sample 0: field state_slot is 4, with the state after 5 tokens of request 7, sample 0",
    ),
    "a snapshot that nobody restores": (
        [StepPlan(2, state_ops=StateOps(copy=((0, 1),)))],
        lambda: resent(3, 0, 5, slot=4),
        "step 3, request 2, sample 0: field state_slot is 4, which nobody has filled, .* after its 5 tokens",
    ),
    "a copy of nothing": (
        [],
        lambda: StepPlan(2, state_ops=StateOps(copy=((4, 5),))),
        "step 2: field state_ops is a copy of slot 4, which nobody has filled",
    ),
    "a copy of nothing, while rows decode": (
        [decoding(2, FIRST, SECOND)],
        lambda: decoding(3, FIRST, SECOND, state_ops=StateOps(copy=((4, 5),))),
        "step 3: field state_ops is a copy of slot 4, which nobody has filled",
    ),
    "a state of an ended sequence": (
        [StepPlan(2, finished_request_ids=(7,))],
        lambda: StepPlan(3, state_ops=StateOps(copy=((2, 5),))),
        "step 3: field state_ops is a copy of slot 2, which nobody has filled",
    ),
    "two slots swapped": (
        [OUT, StepPlan(3, state_ops=StateOps(copy=((2, 1),), swap_in=((0, 4),)))],
        lambda: resent(4, 0, 5, slot=1),
        "step 4, request 2, sample 0: field state_slot is 1, with the state after 5 tokens of request 7, sample 0",
    ),
    "a fork without a slot": ([], lambda: fork(2, -1), "state_slot is -1, .* 0 to 5"),
    "a token applied twice, in a delta": (
        [],
        lambda: delta(2, appended_token_ids=(), num_computed_tokens=4),
        "num_computed_tokens is 4, .* a state has that already",
    ),
    "a token applied twice, behind drafts": (
        [drafted()],
        lambda: delta(3, appended_token_ids=(), num_kept_blocks=3, num_computed_tokens=5),
        "num_computed_tokens is 5, .* a state has that already",
    ),
    "a draft that was none": (
        [drafted()],
        lambda: accepted(3, 12, 99, 20, num_lagging_tokens=2),
        "num_computed_tokens is 8, the mirror expects 7",
    ),
    "more drafts than a slot has room for": (
        [],
        lambda: delta(2, appended_block_ids=(6,), num_scheduled_tokens=5, draft_token_ids=(12, 13, 14, 15)),
        "request 2, sample 0: field draft_token_ids is 4 drafts, .* at most 3",
    ),
    "a lag, and no drafts": ([], lambda: resent(2, 2), "is 8, with a lag of 2, .* up to 0 drafts behind the 5 tokens"),
    "too long a lag": ([drafted()], lambda: resent(3, 3), "is 8, with a lag of 3, .* up to 3 drafts behind the 6"),
    "too short a lag": ([drafted()], lambda: resent(3, 1), "is 8, with a lag of 1"),
    "a lag forgotten": ([drafted()], lambda: resent(3, 0), "is 8, with a lag of 0"),
    "a lag forgotten at a swap": (
        [drafted()],
        lambda: resent(3, 0, slot=4, swap_out=((3, 0),), swap_in=((0, 4),)),
        "is 8, with a lag of 0",
    ),
    "a lag by a draft that was none": ([drafted()], lambda: resent(3, 2, last_id=9), "a lag of 2, .* up to 1 drafts"),
    "a lag of a copy": (
        [drafted()],
        lambda: resent(3, 2, slot=4, copy=((3, 4),)),
        "is 8, with a lag of 2, .* up to 0 drafts behind the 6 tokens that slot 4 has",
    ),
    "a lag of zeros": ([drafted()], lambda: resent(3, 1, 0), "num_lagging_tokens is 1"),
    "a lag of a new sequence": (
        [drafted(), StepPlan(3, finished_request_ids=(2,))],
        lambda: resent(4, 2),
        "state_slot is 3, which nobody has filled, .* the state after its 6 tokens",
    ),
    "a token applied twice, continuing": (
        [],
        lambda: StepPlan(2, num_tokens=1, continuing=(SECOND,), continuing_num_ids=(0,)),
        "continuing_num_ids is 0",
    ),
    "a copy from beyond": ([], lambda: StepPlan(2, state_ops=StateOps(copy=((6, 1),))), "state_ops is 6, .* 0 to 5"),
    "a copy to beyond": ([], lambda: StepPlan(2, state_ops=StateOps(copy=((1, -1),))), "state_ops is -1"),
    "a swap-out from beyond": ([], lambda: StepPlan(2, state_ops=StateOps(swap_out=((9, 1),))), "state_ops is 9"),
    "a swap-in to beyond": ([], lambda: StepPlan(2, state_ops=StateOps(swap_in=((1, 9),))), "state_ops is 9"),
    "a slot that receives twice": (
        [],
        lambda: StepPlan(2, state_ops=StateOps(copy=((0, 1),), swap_in=((0, 1),))),
        r"device slots \[1, 1\] receiving",
    ),
    "a host slot that receives twice": (
        [],
        lambda: StepPlan(2, state_ops=StateOps(swap_out=((0, 1), (2, 1)))),
        r"host slots \[1, 1\] receiving",
    ),
    "a copy to a row that continues": (
        [],
        lambda: decoding(2, FIRST, SECOND, state_ops=StateOps(copy=((0, 3),))),
        "request 2, sample 0: field state_ops is slot 3 receiving",
    ),
    "a copy to a row that only decodes": (
        [decoding(2, FIRST, SECOND)],
        lambda: decoding(3, FIRST, SECOND, state_ops=StateOps(copy=((0, 3),))),
        "request 2, sample 0: field state_ops is slot 3 receiving",
    ),
}


@pytest.mark.parametrize("name", REJECTED)
def test_wrong_slot_is_rejected_and_changes_nothing(name: str):
    before, plan, match = REJECTED[name]
    mirror = at_work(*before)
    state, slots = mirror_state(mirror), mirror_slots(mirror)
    with pytest.raises(MirrorError, match=match):
        mirror.apply(plan())
    assert (mirror_state(mirror), mirror_slots(mirror)) == (state, slots)


def test_model_without_states_has_no_slots():
    with pytest.raises(MirrorError, match=r"state_slot is 0, .* -1 in a model without recurrent states"):
        new_mirror(0).apply(prompts())
    with pytest.raises(MirrorError, match="none in a model without recurrent states"):
        new_mirror(0).apply(StepPlan(1, block_ops=BlockOps(), state_ops=StateOps(copy=((0, 1),))))
