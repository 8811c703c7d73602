"""The mirror follows plans, and refuses one that does not follow, before anything has changed."""

import copy
import dataclasses

import pytest
from mirror_state import mirror_state

from kv_cache.block_ops import BlockOps
from spmd_worker.replica.mirror.mirror import Mirror, MirroredSequence, MirrorError
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

NUM_BLOCKS, BLOCK_SIZE = 10, 4


def request(request_id: int, num_prompt_tokens: int = 5, n: int = 1) -> Request:
    return Request(request_id, tuple(range(100, 100 + num_prompt_tokens)), SamplingParams(n=n), 0)


def snapshot(
    request_id: int, *sequences: SequenceData, num_prompt_tokens: int = 5, n: int = 1
) -> SequenceGroupMetadata:
    return SequenceGroupMetadata(request(request_id, num_prompt_tokens, n), sequences)


def delta(request_id: int, *sequences: SequenceDataDelta) -> SequenceGroupMetadataDelta:
    return SequenceGroupMetadataDelta(request_id, sequences)


def plan(step: int, *groups, **fields) -> StepPlan:
    num_tokens = sum(data.num_scheduled_tokens for group in groups for data in group.sequences)
    return StepPlan(step, groups, **{"num_tokens": num_tokens, **fields})


def prompt_step() -> StepPlan:
    """Step 7: request 1 computes its prompt of 5 tokens and samples; of request 2 the first 3 of 6 are computed."""
    return plan(
        7,
        snapshot(1, SequenceData(0, (), (0, 1), 0, 5, 1), n=3),
        snapshot(2, SequenceData(0, (), (2,), 0, 3, 0), num_prompt_tokens=6),
    )


NEXT_OF_1 = SequenceDataDelta(0, (50,), 2, (), 5, 1, 1)
NEXT_OF_2 = SequenceDataDelta(0, (), 1, (3,), 3, 3, 1)
FORK_OF_1 = SequenceDataDelta(1, (60,), 0, (0, 4), 5, 1, 1)
COPY_FOR_FORK = BlockOps(copy=((1, 4),))


def changed(data, **fields):
    return dataclasses.replace(data, **fields)


@pytest.fixture
def mirror() -> Mirror:
    """After step 7."""
    mirror = Mirror(NUM_BLOCKS, BLOCK_SIZE)
    mirror.apply(prompt_step())
    return mirror


def frozen(mirror: Mirror):
    """Everything in the mirror, as values."""
    groups = [
        (request_id, group.request, [(index, values_of(each)) for index, each in group.sequences.items()])
        for request_id, group in mirror._groups.items()
    ]
    return copy.deepcopy((mirror._step, groups))


def values_of(sequence: MirroredSequence):
    # These two hold the sequence itself.
    names = [spec.name for spec in dataclasses.fields(sequence) if spec.name not in ("decode_row", "computed")]
    return [getattr(sequence, name) for name in names]


def test_snapshot_is_held_and_returned_in_plan_order():
    mirror = Mirror(NUM_BLOCKS, BLOCK_SIZE)
    first, second = mirror.apply(prompt_step())
    assert (first.sequence.request.request_id, first.num_scheduled_tokens, first.num_samples) == (1, 5, 1)
    assert (second.sequence.request.request_id, second.num_scheduled_tokens, second.num_samples) == (2, 3, 0)
    assert first.sequence.token_ids(0, 5) == [100, 101, 102, 103, 104]
    assert mirror_state(mirror) == {(1, 0): ((), (0, 1), 5), (2, 0): ((), (2,), 3)}
    assert len(mirror._groups) == 2


def test_delta_appends_tokens_and_blocks(mirror):
    first, second = mirror.apply(plan(8, delta(1, NEXT_OF_1), delta(2, NEXT_OF_2)))
    assert first.sequence.token_ids(3, 6) == [103, 104, 50]
    assert first.sequence.num_tokens == 6
    assert second.sequence.block_ids == [2, 3]
    assert mirror_state(mirror) == {(1, 0): ((50,), (0, 1), 6), (2, 0): ((), (2, 3), 6)}


@pytest.mark.parametrize(
    ("start", "stop", "tokens"), [(0, 0, []), (1, 3, [101, 102]), (4, 7, [104, 50, 51]), (5, 7, [50, 51]), (6, 6, [])]
)
def test_tokens_are_read_across_prompt_and_output(mirror, start, stop, tokens):
    mirror.apply(plan(8, delta(1, changed(NEXT_OF_1, appended_token_ids=(50, 51), num_scheduled_tokens=2))))
    assert mirror._groups[1].sequences[0].token_ids(start, stop) == tokens


def test_reading_tokens_outside_sequence_is_an_assertion_error(mirror):
    with pytest.raises(AssertionError):
        mirror._groups[1].sequences[0].token_ids(4, 6)


def test_delta_may_introduce_a_fork(mirror):
    _, fork = mirror.apply(plan(8, delta(1, NEXT_OF_1, FORK_OF_1), block_ops=COPY_FOR_FORK))
    assert fork.sequence.request is mirror._groups[1].request
    assert mirror_state(mirror)[(1, 1)] == ((60,), (0, 4), 6)
    assert len(mirror._groups) == 2


def test_copy_on_write_replaces_last_block_of_table(mirror):
    moves = BlockOps(copy=((1, 9),))
    mirror.apply(plan(8, delta(1, changed(NEXT_OF_1, num_kept_blocks=1, appended_block_ids=(9,))), block_ops=moves))
    assert mirror_state(mirror)[(1, 0)][1] == (0, 9)


def test_table_may_be_cut_without_appending(mirror):
    mirror.apply(plan(8, delta(2, NEXT_OF_2)))
    cut = SequenceDataDelta(0, (7,), 2, (), 6, 1, 1)
    mirror.apply(plan(9, delta(2, cut)))
    assert mirror_state(mirror)[(2, 0)] == ((7,), (2, 3), 7)


def test_swapped_sequence_returns_with_tokens_and_new_table(mirror):
    """Nothing is said of it while it is away; then a delta that keeps no block."""
    mirror.apply(plan(8, delta(1, NEXT_OF_1)))
    mirror.apply(plan(9, block_ops=BlockOps(swap_out=((0, 3), (1, 4)))))
    assert mirror_state(mirror)[(1, 0)] == ((50,), (0, 1), 6)
    back = SequenceDataDelta(0, (51,), 0, (8, 7), 6, 1, 1)
    (row,) = mirror.apply(plan(10, delta(1, back), block_ops=BlockOps(swap_in=((3, 8), (4, 7)))))
    assert row.sequence.token_ids(0, 7) == [100, 101, 102, 103, 104, 50, 51]
    assert mirror_state(mirror)[(1, 0)] == ((50, 51), (8, 7), 7)
    mirror.apply(plan(11, delta(1, SequenceDataDelta(0, (52,), 2, (), 7, 1, 1))))
    assert mirror_state(mirror)[(1, 0)] == ((50, 51, 52), (8, 7), 8)


def test_new_table_may_have_another_length(mirror):
    moves = BlockOps(swap_out=((0, 0), (1, 1)), swap_in=((0, 9), (1, 8)))
    mirror.apply(
        plan(8, delta(1, changed(NEXT_OF_1, num_kept_blocks=0, appended_block_ids=(9, 8, 7))), block_ops=moves)
    )
    assert mirror_state(mirror)[(1, 0)] == ((50,), (9, 8, 7), 6)
    moves = BlockOps(swap_out=((9, 0), (8, 1)), swap_in=((0, 5), (1, 6)))
    mirror.apply(plan(9, delta(1, SequenceDataDelta(0, (51,), 0, (5, 6), 6, 1, 1)), block_ops=moves))
    assert mirror_state(mirror)[(1, 0)] == ((50, 51), (5, 6), 7)


def test_block_moves_are_accepted_for_any_host_blocks(mirror):
    """How many blocks there are beyond the device, the mirror does not know."""
    before = mirror_state(mirror)
    far = 10**9
    moves = BlockOps(((far, 0),), ((9, far),), ((1, 2),), store=((9, far),), load=((far, 9),), transfer=4)
    mirror.apply(plan(8, block_ops=moves))
    assert mirror_state(mirror) == before


def test_sample_count_follows_running_sequences():
    """`best_of`: three run, one is returned."""
    ranked = Request(3, (5,) * 4, SamplingParams(n=1, best_of=3), 0)
    mirror = Mirror(NUM_BLOCKS, BLOCK_SIZE)
    (row,) = mirror.apply(plan(1, SequenceGroupMetadata(ranked, (SequenceData(0, (), (0,), 0, 4, 3),))))
    assert row.num_samples == 3
    mirror.apply(plan(2, delta(3, SequenceDataDelta(2, (60,), 0, (0, 4), 4, 1, 1))))
    assert mirror_state(mirror)[(3, 2)] == ((60,), (0, 4), 5)
    with pytest.raises(MirrorError, match=r"sample 3: .*sample_index is 3, .* 0 to 2$"):
        mirror.apply(plan(3, delta(3, SequenceDataDelta(3, (61,), 0, (0, 5), 4, 1, 1))))
    four = SequenceGroupMetadata(dataclasses.replace(ranked, request_id=4), (SequenceData(0, (), (1,), 0, 4, 4),))
    with pytest.raises(MirrorError, match=r"num_samples is 4, .* 0 to 3$"):
        mirror.apply(plan(3, four))


def test_snapshot_replaces_only_the_sequences_it_lists(mirror):
    mirror.apply(plan(8, delta(1, NEXT_OF_1, FORK_OF_1), block_ops=COPY_FOR_FORK))
    whole = snapshot(1, SequenceData(1, (60, 61), (5, 6), 0, 7, 1), n=3)
    mirror.apply(plan(9, whole))
    assert mirror_state(mirror)[(1, 0)] == ((50,), (0, 1), 6)
    assert mirror_state(mirror)[(1, 1)] == ((60, 61), (5, 6), 7)
    assert mirror._groups[1].sequences[0].request is whole.request


def test_finished_sequences_are_forgotten_before_plan_applies(mirror):
    mirror.apply(plan(8, delta(1, NEXT_OF_1, FORK_OF_1), block_ops=COPY_FOR_FORK))
    next_of_fork = SequenceDataDelta(1, (61,), 2, (), 6, 1, 1)
    mirror.apply(plan(9, delta(1, next_of_fork), finished_sequences=(SequenceKey(1, 0),), finished_request_ids=(2,)))
    assert list(mirror_state(mirror)) == [(1, 1)]
    assert len(mirror._groups) == 1
    mirror.apply(plan(10, finished_sequences=(SequenceKey(1, 1),), finished_request_ids=(1,)))
    assert mirror_state(mirror) == {}
    assert len(mirror._groups) == 0


def test_finishing_unknown_sequences_is_no_error(mirror):
    before = mirror_state(mirror)
    mirror.apply(plan(8, finished_sequences=(SequenceKey(99, 0), SequenceKey(1, 5)), finished_request_ids=(98,)))
    assert mirror_state(mirror) == before


def test_step_without_groups_changes_only_the_step(mirror):
    before = mirror_state(mirror)
    assert mirror.apply(plan(8)) == ()
    assert mirror_state(mirror) == before
    mirror.apply(plan(9, delta(1, NEXT_OF_1)))


def test_sequence_may_miss_steps(mirror):
    mirror.apply(plan(8, delta(2, NEXT_OF_2)))
    mirror.apply(plan(9, delta(1, NEXT_OF_1)))
    assert mirror_state(mirror)[(1, 0)] == ((50,), (0, 1), 6)


@pytest.mark.parametrize("step", [-3, 0, 1, 10**12])
def test_steps_may_start_anywhere(step):
    Mirror(NUM_BLOCKS, BLOCK_SIZE).apply(plan(step))


REFUSALS = {
    "a repeated step": (plan(7, delta(1, NEXT_OF_1)), "step 7: field step is 7, the mirror expects 8"),
    "a skipped step": (plan(9, delta(1, NEXT_OF_1)), "step 9: field step is 9, the mirror expects 8"),
    "a wrong number of tokens": (
        plan(8, delta(1, NEXT_OF_1), num_tokens=4),
        "step 8: field num_tokens is 4, the mirror expects 1",
    ),
    "an unknown group": (
        plan(8, delta(5, NEXT_OF_1)),
        "step 8, request 5: field request_id is a delta, the mirror expects a snapshot: the mirror does not hold the",
    ),
    "a group listed twice": (
        plan(8, delta(1, NEXT_OF_1), delta(1, NEXT_OF_1)),
        "step 8, request 1: field groups is listed twice, the mirror expects listed once",
    ),
    "a group listed as snapshot and delta": (
        plan(8, delta(1, NEXT_OF_1), snapshot(1, SequenceData(0, (), (0, 1), 0, 5, 1))),
        "step 8, request 1: field groups is listed twice, the mirror expects listed once",
    ),
    "a group without sequences": (
        plan(8, delta(1)),
        "step 8, request 1: field sequences is empty, the mirror expects at least one",
    ),
    "a sequence listed twice": (
        plan(8, delta(1, NEXT_OF_1, NEXT_OF_1)),
        r"step 8, request 1: field sequences is samples \[0, 0\], the mirror expects each sample once",
    ),
    "a group finished and listed": (
        plan(8, delta(1, NEXT_OF_1), finished_request_ids=(1,)),
        "step 8, request 1: field groups is listed and in finished_request_ids, the mirror expects one or the other",
    ),
    "a sequence finished and listed": (
        plan(8, delta(1, NEXT_OF_1), finished_sequences=(SequenceKey(1, 0),)),
        "step 8, request 1, sample 0: field sequences is listed and in finished_sequences, the mirror expects one or",
    ),
    "a jump in computed tokens": (
        plan(8, delta(1, changed(NEXT_OF_1, num_computed_tokens=4))),
        "step 8, request 1, sample 0: field num_computed_tokens is 4, the mirror expects 5",
    ),
    "negative computed tokens": (
        plan(8, snapshot(5, SequenceData(0, (), (5, 6), -1, 3, 0))),
        "request 5, sample 0: field num_computed_tokens is -1, the mirror expects 0 or more",
    ),
    "more kept blocks than known": (
        plan(8, delta(1, changed(NEXT_OF_1, num_kept_blocks=3))),
        "field num_kept_blocks is 3, the mirror expects from 0 to 2, the known blocks",
    ),
    "negative kept blocks": (
        plan(8, delta(1, changed(NEXT_OF_1, num_kept_blocks=-1, appended_block_ids=(4, 5)))),
        "field num_kept_blocks is -1, the mirror expects from 0 to 2, the known blocks",
    ),
    "an appended block outside": (
        plan(8, delta(1, changed(NEXT_OF_1, appended_block_ids=(4, 10)))),
        "field appended_block_ids is 10, the mirror expects from 0 to 9",
    ),
    "a negative block": (
        plan(8, snapshot(5, SequenceData(0, (), (-1, 4), 0, 5, 1))),
        "request 5, sample 0: field block_ids is -1, the mirror expects from 0 to 9",
    ),
    "a block of a fork outside": (
        plan(8, delta(1, changed(FORK_OF_1, appended_block_ids=(0, 77)))),
        "sample 1: field appended_block_ids is 77, the mirror expects from 0 to 9",
    ),
    "a table too short": (
        plan(8, delta(1, changed(NEXT_OF_1, num_kept_blocks=1))),
        "field block_ids is 1 blocks, the mirror expects enough blocks of 4 for 6 tokens",
    ),
    "a snapshot's table too short": (
        plan(8, snapshot(5, SequenceData(0, (), (4,), 0, 5, 1))),
        "field block_ids is 1 blocks, the mirror expects enough blocks of 4 for 5 tokens",
    ),
    "more scheduled than there are": (
        plan(8, delta(1, changed(NEXT_OF_1, num_scheduled_tokens=2))),
        "field num_scheduled_tokens is 2, the mirror expects at most 1, what is left of 6 tokens",
    ),
    "nothing scheduled": (
        plan(8, delta(1, changed(NEXT_OF_1, num_scheduled_tokens=0, num_samples=0))),
        "field num_scheduled_tokens is 0, the mirror expects 1 or more",
    ),
    "samples inside a prompt": (
        plan(8, delta(2, changed(NEXT_OF_2, num_scheduled_tokens=2))),
        "field num_samples is 1, the mirror expects 0 at token 5 of 6",
    ),
    "more samples than the request has": (
        plan(8, delta(1, changed(NEXT_OF_1, num_samples=4))),
        "step 8, request 1, sample 0: field num_samples is 4, the mirror expects from 0 to 3",
    ),
    "more samples than the request has left": (
        plan(8, delta(1, NEXT_OF_1, changed(FORK_OF_1, num_samples=3))),
        "step 8, request 1, sample 1: field num_samples is 3, the mirror expects from 0 to 2",
    ),
    "a snapshot's samples beyond the request's": (
        plan(8, snapshot(5, SequenceData(0, (), (4, 5), 0, 5, 2))),
        "step 8, request 5, sample 0: field num_samples is 2, the mirror expects from 0 to 1",
    ),
    "a new table too short": (
        plan(8, delta(1, changed(NEXT_OF_1, num_kept_blocks=0, appended_block_ids=(7,)))),
        "field block_ids is 1 blocks, the mirror expects enough blocks of 4 for 6 tokens",
    ),
    "a new table outside": (
        plan(8, delta(1, changed(NEXT_OF_1, num_kept_blocks=0, appended_block_ids=(7, -1)))),
        "field appended_block_ids is -1, the mirror expects from 0 to 9",
    ),
    "a fork that keeps blocks": (
        plan(8, delta(1, changed(FORK_OF_1, num_kept_blocks=1))),
        "sample 1: field num_kept_blocks is 1, the mirror expects 0 for a new sequence",
    ),
    "a sample that was not asked for": (
        plan(8, delta(1, changed(FORK_OF_1, sample_index=3))),
        "sample 3: field sample_index is 3, the mirror expects from 0 to 2",
    ),
    "a copy outside the device": (
        plan(8, block_ops=BlockOps(copy=((1, 10),))),
        "step 8: field block_ops.copy is 10, the mirror expects from 0 to 9",
    ),
    "a swap in outside the device": (
        plan(8, block_ops=BlockOps(swap_in=((500, 10),))),
        "field block_ops.swap_in is 10",
    ),
    "a swap out outside the device": (
        plan(8, block_ops=BlockOps(swap_out=((-1, 500),))),
        "field block_ops.swap_out is -1",
    ),
    "a store outside the device": (
        plan(8, block_ops=BlockOps(store=((9, 500), (10, 501)), transfer=1)),
        "step 8: field block_ops.store is 10, the mirror expects from 0 to 9",
    ),
    "a store of a negative block": (
        plan(8, block_ops=BlockOps(store=((-1, 500),), transfer=1)),
        "step 8: field block_ops.store is -1, the mirror expects from 0 to 9",
    ),
    "a load outside the device": (
        plan(8, block_ops=BlockOps(load=((500, 0), (501, 12)), transfer=1)),
        "step 8: field block_ops.load is 12, the mirror expects from 0 to 9",
    ),
    "a load to a negative block": (
        plan(8, block_ops=BlockOps(load=((500, -3),), transfer=1)),
        "step 8: field block_ops.load is -3, the mirror expects from 0 to 9",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_inconsistent_plan_is_rejected_and_changes_nothing(mirror, name):
    refused, problem = REFUSALS[name]
    before = frozen(mirror)
    with pytest.raises(MirrorError, match=problem):
        mirror.apply(refused)
    assert frozen(mirror) == before
    mirror.apply(plan(8, delta(1, NEXT_OF_1), delta(2, NEXT_OF_2)))
    assert frozen(mirror) != before


@pytest.mark.parametrize("name", [name for name in REFUSALS if "step" not in name])
def test_fault_at_end_of_plan_changes_nothing(mirror, name):
    """The faulty part comes last, after a finish, a snapshot and a delta that are in order."""
    refused, _ = REFUSALS[name]
    mirror.apply(
        plan(8, snapshot(8, SequenceData(0, (), (8,), 0, 4, 0)), snapshot(9, SequenceData(0, (), (9,), 0, 4, 0)))
    )
    before = frozen(mirror)
    good = (
        snapshot(6, SequenceData(0, (), (4, 5), 0, 5, 1)),
        delta(8, SequenceDataDelta(0, (), 1, (6,), 4, 1, 1)),
    )
    num_tokens = 6 + refused.num_tokens
    whole = dataclasses.replace(
        refused,
        step=9,
        groups=(*good, *refused.groups),
        finished_request_ids=(9, *refused.finished_request_ids),
        num_tokens=num_tokens,
    )
    with pytest.raises(MirrorError):
        mirror.apply(whole)
    assert frozen(mirror) == before


def test_first_plan_is_checked_too():
    mirror = Mirror(NUM_BLOCKS, BLOCK_SIZE)
    with pytest.raises(MirrorError, match=r"^step 7, .*request_id .*not hold"):
        mirror.apply(plan(7, delta(1, NEXT_OF_1)))
    mirror.apply(prompt_step())


def test_finished_request_is_unknown_afterwards(mirror):
    mirror.apply(plan(8, finished_request_ids=(1,)))
    with pytest.raises(MirrorError, match=r"^step 9, .*request_id .*not hold"):
        mirror.apply(plan(9, delta(1, NEXT_OF_1)))
