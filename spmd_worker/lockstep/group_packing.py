"""The groups of a plan as bytes, coded against the rows of the plan before.

A row goes on when the last listing has its sequence and foretells its computed tokens and kept blocks. A group goes on
when all its rows do and stood side by side before; it is then named by places in the last listing, in segments, and
only its chunk, its samples, and tokens and blocks that are not as foretold (the sampled ids; none) are written. Other
deltas are written as columns, snapshots one by one. A steady decode step is one segment, two constants, two zeros.

    unsigned        number of segments, then each: count * 4 + kind; for going rows how far from the expected place
    going rows      column of chunks, column of samples, ragged tokens, ragged blocks
    new deltas      request ids, numbers of sequences; sample indices, kept blocks, computed tokens, and as above
    snapshots       each whole
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, islice
from typing import Final

from spmd_worker.lockstep.listing import Listing, make_groups, make_rows
from spmd_worker.lockstep.message import MessageError
from spmd_worker.lockstep.packing import ByteReader, ByteWriter, Ragged
from spmd_worker.lockstep.record_packing import read_snapshot, write_snapshot
from spmd_worker.sequence.metadata import (
    GroupUpdate,
    SequenceDataDelta,
    SequenceGroupMetadata,
    SequenceGroupMetadataDelta,
)

_GOING_ROWS: Final = 0
_DELTAS: Final = 1
_SNAPSHOTS: Final = 2
_NUM_KIND_BITS: Final = 2


@dataclass(slots=True)
class _Segment:
    """Neighbours in the plan: `count` going rows, from `place` in the last listing on, or `count` other groups."""

    kind: int
    count: int
    place: int = -1


def write_groups(
    writer: ByteWriter, groups: Sequence[GroupUpdate], listing: Listing, last: Listing, sampled: Ragged
) -> None:
    """`listing` is of these groups, `last` of the plan before, `sampled` what each row of that sampled."""
    places = _group_places(_foretold_places(listing, last), listing, last, groups)
    segments = _segments(groups, places)
    _write_segments(writer, segments)
    going, others = _sorted_deltas(groups, places)
    if going:
        rows = [data for group in going for data in group.sequences]
        _write_rest(writer, rows, [sampled[place] for place in _going_places(segments)])
    if others:
        _write_deltas(writer, others)
    for group in groups:
        if isinstance(group, SequenceGroupMetadata):
            write_snapshot(writer, group)


def read_groups(reader: ByteReader, last: Listing, sampled: Ragged) -> tuple[GroupUpdate, ...]:
    """The inverse of `write_groups`, with the same `last` and `sampled`."""
    segments = _read_segments(reader, len(last.request_ids))
    places = _going_places(segments)
    rows = _read_going_rows(reader, places, last, sampled) if places else []
    deltas: Iterator[GroupUpdate] = iter(_read_deltas(reader, _count(segments, _DELTAS)))
    snapshots: Iterator[GroupUpdate] = iter([read_snapshot(reader) for _ in range(_count(segments, _SNAPSHOTS))])
    groups: list[GroupUpdate] = []
    first = 0
    for kind, members in groupby(segments, key=lambda segment: segment.kind):
        count = sum(segment.count for segment in members)
        if kind == _GOING_ROWS:
            groups += _regroup(rows[first : first + count], places[first : first + count], last)
            first += count
        else:
            groups += islice(deltas if kind == _DELTAS else snapshots, count)
    return tuple(groups)


def _foretold_places(listing: Listing, last: Listing) -> list[int]:
    """For each row where the last listing has it, or -1 if it is not there or is not as foretold."""
    computed, blocks = last.num_computed_tokens, last.num_blocks
    places = last.find(listing.request_ids, listing.sample_indices)
    return [
        place
        if place >= 0
        and isinstance(data, SequenceDataDelta)
        and data.num_computed_tokens == computed[place]
        and data.num_kept_blocks == blocks[place]
        else -1
        for place, data in zip(places, listing.rows)
    ]


def _group_places(places: list[int], listing: Listing, last: Listing, groups: Sequence[GroupUpdate]) -> list[int]:
    """For each group the place of its first row if all of it goes on from a group of the last listing, else -1.

    Then its rows lie side by side there, from the first row of that group on. No two groups have one place, so the
    reader, which joins neighbouring rows of one former group, never joins two groups.
    """
    if len(listing.rows) == len(groups) and listing.is_flat and last.is_flat:
        by_group = places
    else:
        ends = list(accumulate(len(group.sequences) for group in groups))
        by_group = [_first_place(places[end - len(group.sequences) : end], last) for group, end in zip(groups, ends)]
    going = [place for place in by_group if place >= 0]
    return by_group if len(dict.fromkeys(going)) == len(going) else [-1] * len(groups)


def _first_place(places: list[int], last: Listing) -> int:
    if not places or places[0] < 0:
        return -1
    first, end, numbers = places[0], places[0] + len(places), last.group_numbers
    is_whole = places == list(range(first, end)) and numbers[first] == numbers[end - 1]
    starts_group = first == 0 or numbers[first - 1] != numbers[first]
    return first if is_whole and starts_group else -1


def _segments(groups: Sequence[GroupUpdate], places: list[int]) -> list[_Segment]:
    """`places` is parallel to `groups`."""
    segments: list[_Segment] = []
    next_place = -2
    segment = _Segment(-1, 0)
    for group, place in zip(groups, places):
        if place < 0:
            kind = _SNAPSHOTS if isinstance(group, SequenceGroupMetadata) else _DELTAS
            if segment.kind != kind:
                segment = _Segment(kind, 0)
                segments.append(segment)
            segment.count += 1
            next_place = -2
            continue
        if place != next_place:
            segment = _Segment(_GOING_ROWS, 0, place)
            segments.append(segment)
        num_rows = len(group.sequences)
        segment.count += num_rows
        next_place = place + num_rows
    return segments


def _sorted_deltas(
    groups: Sequence[GroupUpdate], places: list[int]
) -> tuple[list[SequenceGroupMetadataDelta], list[SequenceGroupMetadataDelta]]:
    """Those that go on, and the others."""
    deltas = [(group, place) for group, place in zip(groups, places) if isinstance(group, SequenceGroupMetadataDelta)]
    return [group for group, place in deltas if place >= 0], [group for group, place in deltas if place < 0]


def _going_places(segments: list[_Segment]) -> list[int]:
    places: list[int] = []
    for segment in segments:
        if segment.kind == _GOING_ROWS:
            places += range(segment.place, segment.place + segment.count)
    return places


def _write_segments(writer: ByteWriter, segments: list[_Segment]) -> None:
    writer.unsigned(len(segments))
    expected_place = 0
    for segment in segments:
        writer.unsigned(segment.count << _NUM_KIND_BITS | segment.kind)
        if segment.kind == _GOING_ROWS:
            writer.signed(segment.place - expected_place)
            expected_place = segment.place + segment.count


def _read_segments(reader: ByteReader, num_last_rows: int) -> list[_Segment]:
    """Raises MessageError for places outside the last listing and for more groups than the bytes can hold."""
    segments: list[_Segment] = []
    expected_place = 0
    for _ in range(reader.count()):
        head = reader.unsigned()
        segment = _Segment(head & (1 << _NUM_KIND_BITS) - 1, head >> _NUM_KIND_BITS)
        if segment.kind == _GOING_ROWS:
            segment.place = expected_place + reader.signed()
            expected_place = segment.place + segment.count
            if segment.place < 0 or expected_place > num_last_rows:
                raise MessageError(f"rows {segment.place} to {expected_place} of a listing of {num_last_rows}")
        if segment.kind > _SNAPSHOTS or segment.count == 0:
            raise MessageError(f"no segment is {segment.count} of kind {segment.kind}")
        segments.append(segment)
    if _count(segments, _GOING_ROWS) > num_last_rows:
        raise MessageError(f"more rows go on than the {num_last_rows} of the last listing")
    if _count(segments, _DELTAS) + _count(segments, _SNAPSHOTS) > reader.num_left:
        raise MessageError(f"more groups announced than the {reader.num_left} bytes left can hold")
    return segments


def _count(segments: list[_Segment], kind: int) -> int:
    return sum(segment.count for segment in segments if segment.kind == kind)


def _write_rest(writer: ByteWriter, rows: Sequence[SequenceDataDelta], expected: Ragged) -> None:
    """What every delta row says anew."""
    writer.column([data.num_scheduled_tokens for data in rows])
    num_samples = [data.num_samples for data in rows]
    if min(num_samples) < 0:
        raise MessageError(f"a number of samples is {min(num_samples)}")
    writer.column(num_samples)
    writer.ragged([data.appended_token_ids for data in rows], expected)
    writer.ragged([data.appended_block_ids for data in rows], [()] * len(rows))


def _read_rest(reader: ByteReader, expected: Ragged) -> tuple[list[int], list[int], Ragged, Ragged]:
    """Chunks, samples, appended tokens, appended blocks."""
    num_rows = len(expected)
    num_scheduled_tokens = reader.column(num_rows)
    num_samples = reader.column(num_rows)
    if num_samples and min(num_samples) < 0:
        raise MessageError(f"a number of samples is {min(num_samples)}")
    return num_scheduled_tokens, num_samples, reader.ragged(expected), reader.ragged([()] * num_rows)


def _read_going_rows(reader: ByteReader, places: list[int], last: Listing, sampled: Ragged) -> list[SequenceDataDelta]:
    scheduled, samples, tokens, blocks = _read_rest(reader, [sampled[place] for place in places])
    sample_indices = [last.sample_indices[place] for place in places]
    kept = [last.num_blocks[place] for place in places]
    computed = [last.num_computed_tokens[place] for place in places]
    return make_rows((sample_indices, tokens, kept, blocks, computed, scheduled, samples), len(places))


def _write_deltas(writer: ByteWriter, groups: list[SequenceGroupMetadataDelta]) -> None:
    rows = [data for group in groups for data in group.sequences]
    writer.dense([group.request_id for group in groups])
    writer.column([len(group.sequences) for group in groups])
    if rows:
        writer.dense([data.sample_index for data in rows])
        writer.column([data.num_kept_blocks for data in rows])
        writer.column([data.num_computed_tokens for data in rows])
        _write_rest(writer, rows, [()] * len(rows))


def _read_deltas(reader: ByteReader, num_groups: int) -> list[SequenceGroupMetadataDelta]:
    if num_groups == 0:
        return []
    request_ids = reader.dense(num_groups)
    lengths = reader.column(num_groups)
    num_rows = sum(lengths)
    if min(lengths) < 0 or num_rows > reader.num_left:
        raise MessageError(f"{num_rows} rows announced with {reader.num_left} bytes left")
    if num_rows == 0:
        return make_groups(request_ids, [()] * num_groups)
    sample_indices = reader.dense(num_rows)
    kept, computed = reader.column(num_rows), reader.column(num_rows)
    scheduled, samples, tokens, blocks = _read_rest(reader, [()] * num_rows)
    rows = iter(make_rows((sample_indices, tokens, kept, blocks, computed, scheduled, samples), num_rows))
    return make_groups(request_ids, [tuple(islice(rows, length)) for length in lengths])


def _regroup(rows: list[SequenceDataDelta], places: list[int], last: Listing) -> list[SequenceGroupMetadataDelta]:
    """Going rows as groups: neighbours that were in one group still are."""
    if last.is_flat and len(dict.fromkeys(places)) == len(places):
        return make_groups([last.request_ids[place] for place in places], list(zip(rows)))
    numbers = [last.group_numbers[place] for place in places]
    starts = [0, *(index for index in range(1, len(rows)) if numbers[index] != numbers[index - 1])]
    ends = [*starts[1:], len(rows)]
    request_ids = [last.request_ids[places[start]] for start in starts]
    return make_groups(request_ids, [tuple(rows[start:end]) for start, end in zip(starts, ends)])
