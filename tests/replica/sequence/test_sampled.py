"""The order of a step's ids is one function's, and ids are shared out as they were put together."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_worker.replica.sequence.metadata import (
    SequenceData,
    SequenceDataDelta,
    SequenceGroupMetadata,
    SequenceGroupMetadataDelta,
)
from spmd_worker.replica.sequence.request import Request
from spmd_worker.replica.sequence.sampled import (
    SampledIds,
    left_out,
    num_sampling,
    sample_indices,
    sampling_keys,
    without,
)
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.replica.sequence.sequence import SequenceKey
from spmd_worker.replica.sequence.step import StepPlan, StepResult

A, C = SequenceKey(10, 0), SequenceKey(300, 0)
REQUEST = Request(7, (1, 2), SamplingParams(n=3), 0)
rows = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple) | st.just((5,)), max_size=6)


def plan_of(num_snapshot_samples: int, num_delta_samples: int) -> StepPlan:
    groups = (
        SequenceGroupMetadataDelta(4, (SequenceDataDelta(2, (), 1, (), 8, 2, num_delta_samples),)),
        SequenceGroupMetadata(REQUEST, (SequenceData(0, (), (1,), 0, 2, num_snapshot_samples),)),
    )
    return StepPlan(3, groups, continuing=(A, C), continuing_token_ids=(1, 2))


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (StepPlan(3, continuing=(A, C)), (A, C)),
        (plan_of(0, 0), (A, C)),
        (plan_of(1, 0), (A, C, (7, 0))),
        (plan_of(0, 1), (A, C, (4, 2))),
        (plan_of(3, 1), (A, C, (4, 2), (7, 0), (7, 1), (7, 2))),
        (StepPlan(3), ()),
    ],
)
def test_sampling_order_follows_the_plan(plan, expected):
    """Sequences that continue come first, then rows and their forks in the plan's order."""
    assert sampling_keys(plan) == expected
    assert num_sampling(plan) == len(expected)


def test_claimed_samples_are_counted_without_being_made():
    assert num_sampling(plan_of(2**63 - 1, 1)) == 2 + 2**63 - 1 + 1
    assert sample_indices(2, 3) == range(2, 5)


@given(rows)
def test_ids_are_split_as_they_were_joined(given_rows):
    ids = SampledIds.from_rows(given_rows)
    assert ids.rows() == given_rows
    assert ids.num_sequences == len(given_rows)
    assert (ids.num_ids == ()) == all(len(row) == 1 for row in given_rows)
    assert StepResult(1, ids.token_ids, num_token_ids=ids.num_ids).token_ids == ids.token_ids


@given(rows, rows, st.integers(0, 6))
def test_parts_of_sampled_ids_join_to_the_original(given_rows, others, num_first):
    ids = SampledIds.from_rows(given_rows)
    assert ids.first(num_first).joined(ids.after(num_first)) == ids
    assert ids.first(num_first).rows() == given_rows[:num_first]
    assert ids.joined(SampledIds.from_rows(others)) == SampledIds.from_rows(given_rows + others)
    kept = [row for index, row in enumerate(given_rows) if index != num_first]
    assert ids.without([num_first]) == SampledIds.from_rows(kept)


def test_empty_ids_differ_from_one_empty_row():
    assert SampledIds.from_rows([]) == SampledIds()
    assert SampledIds.from_rows([()]) == SampledIds((), (0,))
    assert SampledIds.from_rows([(), (3,)]).without([0]) == SampledIds((3,))


@pytest.mark.parametrize("num_ids", [(1, 1), (4,), (-1, 4)])
def test_inconsistent_id_counts_are_rejected(num_ids):
    with pytest.raises(ValueError, match=r"StepResult\.num_token_ids shares out"):
        StepResult(1, (5, 6, 7), num_token_ids=num_ids)


keys = st.lists(st.integers(0, 400), unique=True, max_size=150).map(
    lambda numbers: tuple([SequenceKey(number, 0) for number in numbers])
)


@given(keys, st.data())
def test_left_out_keys_are_found_in_order(last_keys, data):
    dropped = sorted(data.draw(st.sets(st.sampled_from(range(len(last_keys)))))) if last_keys else []
    kept = tuple([key for index, key in enumerate(last_keys) if index not in dropped])
    # Equal keys need not be the same objects.
    copies = tuple([SequenceKey(*key) for key in kept])
    assert without(last_keys, dropped) == kept
    assert left_out(kept, last_keys) == left_out(copies, last_keys) == dropped


@given(keys, keys)
def test_other_keys_are_not_left_out_of_some(some, last_keys):
    dropped = left_out(some, last_keys)
    if dropped is None:
        rest = iter(last_keys)
        assert not all(key in rest for key in some)
    else:
        assert without(last_keys, dropped) == some
