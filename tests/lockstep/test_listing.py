"""Records made from columns are the records that their constructors make."""

from spmd_worker.lockstep.listing import listing_of, make_groups, make_rows
from spmd_worker.sequence.metadata import SequenceData, SequenceDataDelta, SequenceGroupMetadata
from spmd_worker.sequence.request import Request
from spmd_worker.sequence.sampling_params import SamplingParams
from spmd_worker.sequence.step import StepPlan

ROWS = [SequenceDataDelta(0, (4, 5), 3, (6,), 7, 8, 9), SequenceDataDelta(1, (), 1, (), 2, 3, 0)]


def test_rows_and_groups_made_from_columns_equal_those_made_one_by_one():
    columns = [[0, 1], [(4, 5), ()], [3, 1], [(6,), ()], [7, 2], [8, 3], [9, 0]]
    rows = make_rows(columns, 2)
    assert rows == ROWS
    assert [hash(row) for row in rows] == [hash(row) for row in ROWS]
    (group,) = make_groups([17], [tuple(rows)])
    assert (group.request_id, group.sequences) == (17, tuple(ROWS))


def test_a_listing_says_what_the_step_leaves_behind():
    whole = SequenceGroupMetadata(Request(5, (1, 2), SamplingParams(), 0), (SequenceData(0, (), (1, 2, 3), 0, 2, 2),))
    listing = listing_of(StepPlan(1, (whole, *make_groups([17], [tuple(ROWS)]))))
    assert listing.request_ids == [5, 17, 17]
    assert listing.group_numbers == [0, 1, 1]
    assert listing.num_computed_tokens == [2, 15, 5]
    assert listing.num_blocks == [3, 4, 1]
    assert not listing.is_flat
    assert listing.sampled_by_row((1, 2, 3)) == [(1, 2), (3,), ()]
    assert list(listing.find([17, 5, 17], [1, 0, 2])) == [2, 0, -1]
