"""What goes on costs a few bytes; everything else still comes back; a plan cannot claim more ids than were sampled."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from step_records import keys, words

from spmd_worker.lockstep.wire.continuing_packing import read_continuing, sampling_keys, write_continuing
from spmd_worker.lockstep.wire.message import MessageError
from spmd_worker.lockstep.wire.packing import ByteReader, ByteWriter
from spmd_worker.sequence.metadata import (
    SequenceData,
    SequenceDataDelta,
    SequenceGroupMetadata,
    SequenceGroupMetadataDelta,
)
from spmd_worker.sequence.request import Request
from spmd_worker.sequence.sampling_params import SamplingParams
from spmd_worker.sequence.sequence import SequenceKey
from spmd_worker.sequence.step import StepPlan

A, B, C, D = (SequenceKey(10, 0), SequenceKey(10, 1), SequenceKey(300, 0), SequenceKey(2**40, 0))
LAST = (A, B, C, D)
SAMPLED = (11, 12, 13, 14)


def written(last, sampled, continuing, token_ids, blocks=()) -> bytes:
    writer = ByteWriter()
    plan = StepPlan(5, continuing=continuing, continuing_token_ids=token_ids, continuing_blocks=blocks)
    write_continuing(writer, plan, last, sampled)
    return bytes(writer.data)


def read(data, last=LAST, sampled=SAMPLED):
    reader = ByteReader(data, len(data))
    found = read_continuing(reader, last, sampled)
    assert reader.num_left == 0
    return found


@pytest.mark.parametrize(
    ("continuing", "token_ids", "blocks", "data"),
    [
        # A selection (1) with the ids that were sampled (2), no place dropped, no block taken.
        (LAST, SAMPLED, (), b"\x03\x00\x00"),
        # Two places dropped, in a column of 1 byte each over 0.
        ((A, C), (11, 13), (), b"\x03\x02\x01\x00\x01\x03\x00"),
        ((), (), (), b"\x03\x04\x01\x00\x00\x01\x02\x03\x00"),
        # The last of the four takes block 7.
        (LAST, SAMPLED, ((3, 7),), b"\x03\x00\x01\x01\x00\x03\x10\x0e"),
        # A selection with other ids, which are written.
        ((A, C), (11, 12), (), b"\x01\x02\x01\x00\x01\x03\x02\x01\x00\x0b\x0c\x00"),
        # Another order, one that did not sample, one listed twice: keys and ids are written.
        ((B, A), (12, 11), (), b"\x00\x02\x01\x00\x0a\x0a\x01\x00\x01\x00\x02\x01\x00\x0c\x0b\x00"),
        ((SequenceKey(9, 0),), (5,), (), b"\x00\x01\x01\x00\x09\x10\x00\x01\x01\x00\x05\x00"),
        ((A, A), (11, 11), (), b"\x00\x02\x01\x00\x0a\x0a\x10\x00\x02\x01\x00\x0b\x0b\x00"),
        # Numbers of keys and ids that differ have no meaning, but come back.
        (LAST, (), (), b"\x01\x00\x00\x00"),
    ],
)
def test_exact_bytes_of_what_goes_on(continuing, token_ids, blocks, data):
    assert written(LAST, SAMPLED, continuing, token_ids, blocks) == data
    assert read(data) == (continuing, token_ids, blocks)


def test_nothing_before_and_nothing_now_costs_three_bytes():
    assert written((), (), (), ()) == b"\x03\x00\x00"
    # Ids without anybody they belong to (the step before was not read) are nobody's.
    assert written((), SAMPLED, (), ()) == b"\x03\x00\x00"
    assert read(b"\x03\x00\x00", (), SAMPLED) == ((), (), ())


@given(st.data())
@settings(max_examples=200)
def test_everything_comes_back(data):
    """Selections, dropped places, other ids, other orders and strangers, in any mixture."""
    last = data.draw(st.lists(keys, max_size=8).map(tuple))
    sampled = data.draw(st.lists(words, min_size=len(last), max_size=len(last)).map(tuple))
    kept = data.draw(st.lists(st.booleans(), min_size=len(last), max_size=len(last)))
    rows = [(key, token) for key, token, is_kept in zip(last, sampled, kept) if is_kept]
    if data.draw(st.booleans()):
        rows = data.draw(st.permutations(rows))
    if data.draw(st.booleans()):
        rows = [*rows, *data.draw(st.lists(st.tuples(keys, words), max_size=3))]
    continuing, token_ids = tuple(key for key, _ in rows), tuple(token for _, token in rows)
    if data.draw(st.booleans()):
        token_ids = data.draw(st.lists(words, max_size=8).map(tuple))
    blocks = data.draw(st.lists(st.tuples(words, words), max_size=3).map(tuple))
    coded = written(last, sampled, continuing, token_ids, blocks)
    assert read(coded, last, sampled) == (continuing, token_ids, blocks)
    for length in range(len(coded)):
        with pytest.raises(MessageError):
            read(coded[:length], last, sampled)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"\x02\x00\x00", "unknown flags 0x2"),
        (b"\x04\x00\x00", "unknown flags 0x4"),
        (b"\xff\x00\x00", "unknown flags 0xff"),
        (b"\x03\x01\x01\x00\x04\x00", r"dropped places \[4\] of 4"),
        (b"\x03\x01\x01\x01\x00\x00", r"dropped places \[-1\] of 4"),
        (b"\x03\x02\x01\x00\x01\x01\x00", r"dropped places \[1, 1\] of 4"),
        (b"\x03\x02\x01\x00\x02\x01\x00", r"dropped places \[2, 1\] of 4"),
        (b"\x03\xff\xff\xff\x7f", "entries announced"),
        (b"\x00\xff\xff\xff\x7f", "entries announced"),
        (b"\x03\x00\xff\xff\xff\x7f", "entries announced"),
        (b"\x01\x00\xff\xff\xff\x7f\x00", "entries announced"),
    ],
)
def test_bytes_without_meaning_are_refused(data, problem):
    with pytest.raises(MessageError, match=problem):
        read(data)


def test_places_of_nothing_are_refused():
    with pytest.raises(MessageError, match=r"dropped places \[0\] of 0"):
        read(b"\x03\x01\x01\x00\x00\x00", (), ())


REQUEST = Request(7, (1, 2), SamplingParams(n=3), 0)


def plan_of(num_snapshot_samples: int, num_delta_samples: int) -> StepPlan:
    groups = (
        SequenceGroupMetadataDelta(4, (SequenceDataDelta(2, (), 1, (), 8, 2, num_delta_samples),)),
        SequenceGroupMetadata(REQUEST, (SequenceData(0, (), (1,), 0, 2, num_snapshot_samples),)),
    )
    return StepPlan(3, groups, continuing=(A, C), continuing_token_ids=(1, 2))


@pytest.mark.parametrize(
    ("plan", "num_sampled", "expected"),
    [
        (StepPlan(3, continuing=LAST), 4, LAST),
        (plan_of(0, 0), 2, (A, C)),
        (plan_of(1, 0), 3, (A, C, (7, 0))),
        (plan_of(0, 1), 3, (A, C, (4, 2))),
        (plan_of(3, 1), 6, (A, C, (4, 2), (7, 0), (7, 1), (7, 2))),
        (StepPlan(3), 0, ()),
        # Another number of ids than the plan asks for.
        (StepPlan(3, continuing=LAST), 3, ()),
        (StepPlan(3, continuing=LAST), 0, ()),
        (StepPlan(3), 1, ()),
        (plan_of(3, 1), 5, ()),
        (plan_of(2**63 - 1, 1), 5, ()),
        (plan_of(0, 2**63 - 1), 2, ()),
    ],
)
def test_sampled_ids_belong_to_rows_in_plan_order_or_to_nobody(plan, num_sampled, expected):
    assert sampling_keys(plan, num_sampled) == expected
