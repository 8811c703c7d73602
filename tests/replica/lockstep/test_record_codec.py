"""Records as bytes: every value of every type comes back, no count is trusted, and a new event needs no other file."""

import math
import os
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from property_examples import examples

from spmd_worker.replica.lockstep.wire.message import MessageError
from spmd_worker.replica.lockstep.wire.packing import ByteReader, ByteWriter
from spmd_worker.replica.lockstep.wire.record_codec import Codec, RecordCodec, _ListCodec, codec_of
from spmd_worker.replica.sequence.record_checks import NOT_SENT, Integer65
from spmd_worker.replica.sequence.sampling_params import SamplingParams

words = st.integers(-(2**63), 2**63 - 1)
small = st.integers(0, 3)
floats = st.floats(allow_nan=False) | st.sampled_from([0.0, -0.0, math.inf])
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=4)


class Pair(NamedTuple):
    left: int
    right: str | None


@dataclass(frozen=True)
class Leaf:
    number: int
    numbers: tuple[int, ...] = ()
    share: float = 0.0


@dataclass(frozen=True)
class Empty:
    pass


@dataclass(frozen=True, kw_only=True)
class Tree:
    is_there: bool = False
    leaves: tuple[Leaf | Empty, ...]
    seed: Integer65 | None = None
    pairs: tuple[Pair, ...] = ()
    rows: tuple[tuple[int, float], ...] = ()
    by_id: tuple[dict[int, Pair] | None, ...] = ()
    name: str = ""
    payload: bytes = b""


leaves = st.builds(Leaf, small | words, st.lists(words, max_size=3).map(tuple), floats | st.just(0.0))
pairs = st.builds(Pair, words, texts | st.none())
trees = st.builds(
    Tree,
    is_there=st.booleans(),
    leaves=st.lists(leaves | st.just(Empty()), max_size=5).map(tuple),
    seed=st.none() | st.integers(-(2**63), 2**64 - 1),
    pairs=st.lists(pairs, max_size=3).map(tuple),
    rows=st.lists(st.tuples(small, floats), max_size=4).map(tuple),
    by_id=st.lists(st.none() | st.dictionaries(words, pairs, max_size=2), max_size=3).map(tuple),
    name=texts,
    payload=st.binary(max_size=5),
)


def written(codec: Codec, values: list[Any], is_dense: bool = False) -> bytes:
    writer = ByteWriter()
    codec.write(writer, values, is_dense=is_dense)
    return bytes(writer.data)


def read(codec: Codec, data: bytes, num_values: int, is_dense: bool = False) -> list[Any]:
    reader = ByteReader(data, len(data))
    found = codec.read(reader, num_values, is_dense=is_dense)
    assert reader.num_left == 0
    return found


@given(st.lists(trees, max_size=4))
@examples(60)
def test_records_round_trip_bit_for_bit(values):
    codec = codec_of(Tree)
    data = written(codec, values)
    found = read(codec, data, len(values))
    assert repr(found) == repr(values)
    for length in range(len(data)):
        with pytest.raises(MessageError):
            read(codec, data[:length], len(values))


@given(st.lists(trees, min_size=2, max_size=2))
@examples(60)
def test_different_records_have_different_bytes(pair):
    one, two = pair
    assert (written(codec_of(Tree), [one]) == written(codec_of(Tree), [two])) == (repr(one) == repr(two))


@pytest.mark.parametrize(
    ("hint", "values"),
    [
        (int, [7] * 50),
        (int, list(range(50))),
        (bool, [True] * 50),
        (float, [0.5] * 50),
        (str, [""] * 50),
        (bytes, [b""] * 50),
        (int | None, [None] * 50),
        (Integer65, [0] * 50),
        (tuple[int, ...], [()] * 50),
        (tuple[int, float], [(1, 1.0)] * 50),
        (Pair, [Pair(1, None)] * 50),
        (Leaf, [Leaf(3)] * 50),
        (Leaf | Empty, [Empty()] * 50),
    ],
    ids=str,
)
def test_list_has_a_byte_for_each_entry(hint, values):
    """So that whoever announces many entries has to send them."""
    data = written(codec_of(hint), values, is_dense=True)
    assert len(data) >= len(values)
    assert read(codec_of(hint), data, len(values), is_dense=True) == values
    # Negative control: without that, most of these take a few bytes.
    assert hint in (Integer65, Leaf | Empty) or values == list(range(50)) or len(written(codec_of(hint), values)) < 20


@pytest.mark.parametrize(
    ("hint", "values", "num_bytes"),
    [
        (Leaf, [Leaf(5)], 1 + 2),
        (Leaf, [Leaf(5)] * 1000, 1 + 2),
        (Leaf, [Leaf(5), Leaf(6, (7, 8))], 1 + (2 + 2) + (2 + 2) + (2 + 2)),
        (Leaf, [Leaf(5, share=0.5)] * 9, 1 + 2 + 9),
        (tuple[int, ...], [()], 2),
        (tuple[Leaf | Empty, ...], [()], 2),
        (tuple[Leaf | Empty, ...], [(Empty(),) * 9], 2 + (2 + 9)),
        (str, ["ab", "c"], 2 + 2 + 3),
        (Integer65, [2**64 - 1], 1 + 9),
        (Integer65, [-1, 127], 1 + 2),
        (int | None, [None, 4], (2 + 2) + 2),
    ],
    ids=str,
)
def test_records_have_exact_sizes(hint, values, num_bytes):
    assert len(written(codec_of(hint), values)) == num_bytes


@pytest.mark.parametrize(
    ("hint", "data", "num_values", "problem"),
    [
        (Leaf, b"\x04\x10\x02", 1, "Leaf has no field number 2"),
        (tuple[int, ...], b"\x10\x01", 1, "-1 entries announced"),
        (tuple[int, ...], b"\x10\xff\xff\xff\xff\x0f" + bytes(9), 1, "entries announced with 9 bytes left"),
        (tuple[int, ...], b"\x01\x01\x00\x03", 2, "entries announced"),  # lengths -1 and 2
        (bool, b"\x10\x04", 1, "flags from 2 to 2"),
        (int | None, b"\x10\x01", 1, "flags from -1 to -1"),
        (Leaf | Empty, b"\x10\x04", 1, "kinds from 2 to 2, there are 2"),
        (Integer65, b"\x00\x00", 1, "integers of 0 bytes each"),
        (Integer65, b"\x0a" + bytes(10), 1, "integers of 10 bytes each"),
        (Integer65, b"\x09" + b"\xff" * 8 + b"\x01", 1, "does not fit 65 bits"),
        (float, b"\x02" + bytes(8), 1, "mode 2 of a column of floats"),
        (str, b"\x10\x04\xc3\x28", 1, "not UTF-8"),
    ],
    ids=str,
)
def test_invalid_bytes_are_rejected(hint, data, num_values, problem):
    with pytest.raises(MessageError, match=problem):
        read(codec_of(hint), data, num_values)


def test_single_float_is_not_read_as_list():
    with pytest.raises(MessageError, match="mode 0"):
        read(codec_of(float), bytes(9), 2, is_dense=True)


@pytest.mark.parametrize("hint", [complex, list[int], set[int], Any, int | str, tuple[int | Empty, ...]], ids=str)
def test_type_without_encoding_is_rejected_by_name(hint):
    with pytest.raises((TypeError, AssertionError)):
        codec_of(hint)


def test_list_of_possibly_empty_records_is_rejected():
    with pytest.raises(AssertionError, match=r"Empty\(\) .*no bytes"):
        codec_of(tuple[Empty, ...])


def test_value_outside_union_is_rejected():
    with pytest.raises(MessageError, match=r"^Tree .*: .*Leaf, Empty$"):
        written(codec_of(Leaf | Empty), [Tree(leaves=())])


def test_local_field_is_not_encoded():
    @dataclass(frozen=True)
    class Local:
        a: int
        kept: Any = field(default=None, metadata=NOT_SENT)

    codec = codec_of(Local)
    assert codec.layout == "Local(a: int)"
    data = written(codec, [Local(3, kept=object())])
    assert codec.read(ByteReader(data, len(data)), 1) == [Local(3)]


def test_layout_distinguishes_fields_types_and_defaults():
    @dataclass(frozen=True)
    class One:
        a: int
        b: float = 0.5

    @dataclass(frozen=True)
    class Other:
        a: int
        b: float = field(default=0.25)

    layouts = [codec_of(One).layout, codec_of(Other).layout.replace("Other", "One")]
    assert layouts == ["One(a: int, b: float = 0.5)", "One(a: int, b: float = 0.25)"]
    assert RecordCodec(One, without=("b",)).layout == "One(a: int)"
    assert codec_of(tuple[One | Empty, ...]).layout == "tuple[One(a: int, b: float = 0.5) | Empty()]"


NEW_EVENT = """
from dataclasses import dataclass, replace
from spmd_worker.replica.sequence import events
from spmd_worker.replica.sequence.record_checks import check_fields

@dataclass(frozen=True, slots=True)
class LoadAdapter:
    number: int
    path: str
    ranks: tuple[int, ...] = ()
    scale: float | None = None

    def __post_init__(self) -> None:
        check_fields(self)

{registration}

# All that knows events is imported from here on.
from spmd_worker.replica.lockstep.difference import first_difference, record_of
from spmd_worker.replica.lockstep.digest import ChainedDigest
from spmd_worker.replica.lockstep.wire.codec import Decoder, Encoder
from spmd_worker.replica.lockstep.wire.message import StepMessage
from spmd_worker.replica.sequence.step import StepPlan

mine = StepMessage(4, (events.Close(), LoadAdapter(3, "/a/é", (8, 16), 0.5)), StepPlan(4), (), b"")
theirs = replace(mine, events=(events.Close(), LoadAdapter(3, "/a/é", (8, 17), 0.5)))
assert Decoder().decode(Encoder().encode(mine)) == mine
assert ChainedDigest().update(record_of(mine)) == ChainedDigest().update(record_of(replace(mine)))
assert ChainedDigest().update(record_of(mine)) != ChainedDigest().update(record_of(theirs))
print(first_difference(record_of(mine), record_of(theirs), 0, 1))
try:
    LoadAdapter("3", "/a")
except ValueError as error:
    print(error)
"""
REGISTRATION = "events.Event = events.Event | LoadAdapter"


def run_new_event(registration: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", NEW_EVENT.format(registration=registration)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )


def test_new_event_needs_only_its_class_and_registration():
    """In a process of its own, which extends `Event` by one line before anything reads it."""
    process = run_new_event(REGISTRATION)
    assert process.stdout.splitlines() == [
        "events[1].ranks[1]: 16 on rank 0, 17 on rank 1",
        "LoadAdapter.number='3' must be of type int",
    ], process.stderr


def test_event_outside_union_is_rejected():
    """Negative control."""
    process = run_new_event("")
    assert process.returncode != 0
    assert "MessageError: LoadAdapter has no encoding: supported are Admit, Abort" in process.stderr


@dataclass(frozen=True)
class Wide:
    """As many fields as sampling parameters."""

    a: int
    b: tuple[int, ...] = ()
    c: int = 0
    d: int = 0
    e: int = 0
    f: int = 0
    g: int = 0
    h: int = 0
    i: int = 0
    j: int = 0
    k: int = 0
    m: int = 0
    n: int = 0
    o: int = 0
    p: int = 0
    q: float = 0.0


@dataclass(frozen=True)
class Holder:
    wide: tuple[Wide, ...]
    pairs: tuple[Pair, ...] = ()


def holders() -> list[list[Holder]]:
    """Columns with shared records and lists, and with equal ones that are other objects."""
    first, second, pairs = Wide(1, (2, 3)), Wide(4, q=-0.0), (Pair(1, "x"), Pair(2, None))
    columns = [[Holder((first,) * count, pairs)] * repeats for count in (1, 2, 3) for repeats in (1, 2)]
    columns += [
        [Holder((second, first), pairs)],
        [Holder((first, second))],
        [Holder((Wide(1, (2, 3)),), (Pair(1, "x"),))],
    ]
    return columns * 2


def test_kept_bytes_equal_those_written_anew():
    kept = RecordCodec(Holder)
    for values in holders():
        for is_dense in (False, True):
            # `codec_of` keeps one codec of each type.
            codec_of.cache_clear()
            assert written(kept, values, is_dense=is_dense) == written(RecordCodec(Holder), values, is_dense=is_dense)


def test_comparison_detects_bytes_of_another_record(monkeypatch: pytest.MonkeyPatch):
    """Negative control: kept bytes are taken for any list of the same length."""
    write = _ListCodec._write
    seen: dict[tuple[int, int], bytes] = {}

    def careless(self: _ListCodec, writer: ByteWriter, values: list[Any], is_dense: bool) -> None:
        key = (id(self), len(values[0])) if values else (id(self), 0)
        if key not in seen:
            own = ByteWriter()
            write(self, own, values, is_dense)
            seen[key] = bytes(own.data)
        writer.data += seen[key]

    kept = RecordCodec(Holder)
    expected = [written(RecordCodec(Holder), values) for values in holders()]
    monkeypatch.setattr(_ListCodec, "_write", careless)
    assert [written(kept, values) for values in holders()] != expected


def test_equal_parameters_are_read_as_one_record():
    codec = codec_of(SamplingParams)

    def read_back(*given: SamplingParams) -> list[SamplingParams]:
        writer = ByteWriter()
        codec.write(writer, given)
        return codec.read(ByteReader(bytes(writer.data), len(writer.data)), len(given))

    one, other = SamplingParams(temperature=0.5), SamplingParams(temperature=0.5, frequency_penalty=-0.0, seed=1)
    first, second, third = read_back(one, one, other)
    assert first is second
    assert (first, third) == (one, other)
    assert read_back(other)[0] is third
    assert read_back(SamplingParams(temperature=0.5, frequency_penalty=0.0, seed=1))[0] is not third
    # Shared, so nobody may change it.
    with pytest.raises(AttributeError):
        first.temperature = 1.0
