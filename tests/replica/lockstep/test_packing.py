"""Integers and columns: every value comes back, in few bytes, and no count is trusted."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_worker.replica.lockstep.wire.message import MessageError
from spmd_worker.replica.lockstep.wire.packing import ByteReader, ByteWriter

words = st.integers(-(2**63), 2**63 - 1)
columns = st.one_of(
    st.lists(words, max_size=40),
    st.lists(st.integers(0, 300), max_size=40),
    st.lists(st.sampled_from([1, 1, 1, 1, 1, 1, 1, 1, 2**40, -5]), max_size=60),
    st.tuples(words, st.integers(1, 40), st.sampled_from([2**8, 2**16, 2**24, 2**32])).map(
        lambda given: [min(given[0] + (given[2] - 1) * (place % 2), 2**63 - 1) for place in range(given[1])]
    ),
)


def written(write, *values) -> bytes:
    writer = ByteWriter()
    write(writer, *values)
    return bytes(writer.data)


def reader(data: bytes) -> ByteReader:
    return ByteReader(data, len(data))


@given(columns)
@settings(max_examples=200)
def test_column_round_trips(values):
    data = written(ByteWriter.column, values)
    found = reader(data)
    assert found.column(len(values)) == values
    assert found.num_left == 0


@given(columns)
@settings(max_examples=100)
def test_counted_column_has_a_byte_for_each_value(values):
    data = written(ByteWriter.counted, tuple(values))
    assert reader(data).counted() == tuple(values)
    assert len(data) >= len(values)


@given(st.integers(-(2**64), 2**64 - 1))
def test_signed_integer_round_trips(value):
    assert reader(written(ByteWriter.signed, value)).signed() == value


@pytest.mark.parametrize(
    ("values", "num_bytes"),
    [
        ([], 0),
        ([7] * 1000, 2),
        ([200] * 1000, 3),
        ([1] * 999 + [512], 2 + 2 * 1000),
        ([7], 2),
        (list(range(256)), 2 + 256),
        (list(range(1_000_000, 1_000_256)), 1 + 3 + 256),
        ([0, 65_535], 2 + 2 * 2),
        ([0, 65_536], 2 + 2 * 3),
        ([0, 2**32 - 1], 2 + 2 * 4),
        ([0, 2**32], 1 + 2 * 8),
    ],
)
def test_columns_have_exact_sizes(values, num_bytes):
    assert len(written(ByteWriter.column, values)) == num_bytes


@pytest.mark.parametrize("value", [-1, 2**65])
def test_unsigned_integer_out_of_range_is_rejected(value):
    with pytest.raises(MessageError, match=rf"^{value} .*unsigned .*65 bits"):
        ByteWriter().unsigned(value)


@pytest.mark.parametrize("values", [[2**63, 0], [-(2**63) - 1], [2**63] * 9, [*range(40), 2**63]])
def test_column_value_beyond_64_bits_is_rejected(values):
    with pytest.raises(MessageError, match="64 bits"):
        ByteWriter().column(values)


@pytest.mark.parametrize(
    ("data", "read", "problem"),
    [
        (b"", ByteReader.byte, "truncated: 1 bytes wanted"),
        (b"\x80" * 12, ByteReader.unsigned, "more than 65 bits"),
        (b"\xff" * 9 + b"\x7f", ByteReader.unsigned, "more than 65 bits"),
        (b"\xff" * 9 + b"\x03", ByteReader.integer_64, "does not fit 64 bits"),
        (b"\x05abc", ByteReader.blob, "truncated: 5 bytes wanted"),
        (b"\x09abc", ByteReader.count, r"9 entries .*3 bytes left"),
        (b"\x02\x05\x00abcdefghij", ByteReader.counted, "invalid mode 5"),
        (b"\x02\x10\x02", ByteReader.counted, "invalid mode 16"),
        (b"\x01\x01" + b"\xff" * 9 + b"\x01\x00", ByteReader.counted, "least value"),
    ],
)
def test_invalid_bytes_are_rejected(data, read, problem):
    with pytest.raises(MessageError, match=problem):
        read(reader(data))
