"""What goes on costs a few bytes; everything else still comes back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from property_examples import examples
from step_records import keys, words

from spmd_worker.replica.lockstep.wire.continuing_packing import read_continuing, write_continuing
from spmd_worker.replica.lockstep.wire.message import MessageError
from spmd_worker.replica.lockstep.wire.packing import ByteReader, ByteWriter
from spmd_worker.replica.sequence.sampled import SampledIds
from spmd_worker.replica.sequence.sequence import SequenceKey
from spmd_worker.replica.sequence.step import StepPlan

A, B, C, D = (SequenceKey(10, 0), SequenceKey(10, 1), SequenceKey(300, 0), SequenceKey(2**40, 0))
LAST = (A, B, C, D)
SAMPLED = (11, 12, 13, 14)


def written(last, sampled, continuing, token_ids, blocks=(), num_ids=(), num_sampled_ids=()) -> bytes:
    writer = ByteWriter()
    plan = StepPlan(
        5,
        continuing=continuing,
        continuing_token_ids=token_ids,
        continuing_num_ids=num_ids,
        continuing_blocks=blocks,
    )
    write_continuing(writer, plan, last, SampledIds(sampled, num_sampled_ids))
    return bytes(writer.data)


def read_all(data, last=LAST, sampled=SAMPLED, num_sampled_ids=()):
    reader = ByteReader(data, len(data))
    found = read_continuing(reader, last, SampledIds(sampled, num_sampled_ids))
    assert reader.num_left == 0
    return found


def read(data, last=LAST, sampled=SAMPLED):
    """Of sequences that were given one id each."""
    keys, token_ids, num_ids, blocks = read_all(data, last, sampled)
    assert num_ids == ()
    return keys, token_ids, blocks


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
        ((A, C), (11, 12), (), b"\x01\x02\x01\x00\x01\x03\x02\x01\x00\x0b\x0c\x00\x00"),
        # Another order, one that did not sample, one listed twice: keys and ids are written.
        ((B, A), (12, 11), (), b"\x00\x02\x01\x00\x0a\x0a\x01\x00\x01\x00\x02\x01\x00\x0c\x0b\x00\x00"),
        ((SequenceKey(9, 0),), (5,), (), b"\x00\x01\x01\x00\x09\x10\x00\x01\x01\x00\x05\x00\x00"),
        ((A, A), (11, 11), (), b"\x00\x02\x01\x00\x0a\x0a\x10\x00\x02\x01\x00\x0b\x0b\x00\x00"),
        # Numbers of keys and ids that differ have no meaning, but come back.
        (LAST, (), (), b"\x01\x00\x00\x00\x00"),
    ],
)
def test_continuing_sequences_have_exact_bytes(continuing, token_ids, blocks, data):
    assert written(LAST, SAMPLED, continuing, token_ids, blocks) == data
    assert read(data) == (continuing, token_ids, blocks)


def test_step_after_nothing_costs_three_bytes_when_empty():
    assert written((), (), (), ()) == b"\x03\x00\x00"
    # Ids without anybody they belong to (the step before was not read) are nobody's.
    assert written((), SAMPLED, (), ()) == b"\x03\x00\x00"
    assert read(b"\x03\x00\x00", (), SAMPLED) == ((), (), ())


@given(st.data())
@examples(200)
def test_any_continuation_round_trips(data):
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
    num_ids = data.draw(st.just(()) | st.lists(words, max_size=8).map(tuple))
    coded = written(last, sampled, continuing, token_ids, blocks, num_ids)
    assert read_all(coded, last, sampled) == (continuing, token_ids, num_ids, blocks)
    for length in range(len(coded)):
        with pytest.raises(MessageError):
            read_all(coded[:length], last, sampled)


@pytest.mark.parametrize(
    ("continuing", "token_ids", "num_ids", "data"),
    [
        # A was given none, B three, C and D one each: nothing is written but that all go on as they were given.
        (LAST, (21, 22, 23, 13, 14), (0, 3, 1, 1), b"\x03\x00\x00"),
        ((A, C, D), (13, 14), (0, 1, 1), b"\x03\x01\x01\x00\x01\x00"),
        # Those left were given one each, so their numbers are left out, on both sides.
        ((C, D), (13, 14), (), b"\x03\x02\x01\x00\x00\x01\x00"),
        # B goes on with two of its three: ids and numbers are written.
        ((B,), (21, 22), (2,), b"\x01\x03\x01\x00\x00\x02\x03\x02\x01\x00\x15\x16\x01\x01\x00\x02\x00"),
    ],
)
def test_sequences_given_no_or_several_ids_continue(continuing, token_ids, num_ids, data):
    sampled, num_sampled_ids = (21, 22, 23, 13, 14), (0, 3, 1, 1)
    assert written(LAST, sampled, continuing, token_ids, (), num_ids, num_sampled_ids) == data
    assert read_all(data, LAST, sampled, num_sampled_ids) == (continuing, token_ids, num_ids, ())


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"\x02\x00\x00", "unknown flags 0x2"),
        (b"\x04\x00\x00", "unknown flags 0x4"),
        (b"\xff\x00\x00", "unknown flags 0xff"),
        (b"\x03\x01\x01\x00\x04\x00", r"dropped indices \[4\] of 4"),
        (b"\x03\x01\x01\x01\x00\x00", r"dropped indices \[-1\] of 4"),
        (b"\x03\x02\x01\x00\x01\x01\x00", r"dropped indices \[1, 1\] of 4"),
        (b"\x03\x02\x01\x00\x02\x01\x00", r"dropped indices \[2, 1\] of 4"),
        (b"\x03\xff\xff\xff\x7f", "entries announced"),
        (b"\x00\xff\xff\xff\x7f", "entries announced"),
        (b"\x03\x00\xff\xff\xff\x7f", "entries announced"),
        (b"\x01\x00\xff\xff\xff\x7f\x00", "entries announced"),
    ],
)
def test_invalid_bytes_are_rejected(data, problem):
    with pytest.raises(MessageError, match=problem):
        read(data)


def test_dropped_indices_of_nothing_are_rejected():
    with pytest.raises(MessageError, match=r"dropped indices \[0\] of 0"):
        read(b"\x03\x01\x01\x00\x00\x00", (), ())
