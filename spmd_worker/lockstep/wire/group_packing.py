"""The groups of a plan as bytes: snapshots one by one, deltas as columns.

    counted         kinds in plan order, 0 a delta, 1 a snapshot
    deltas          request ids, numbers of sequences; sample indices, kept blocks, computed tokens, chunks, samples,
                    ragged tokens, ragged blocks
    snapshots       each whole

Sequences in decoding that continues are no groups: `continuing_packing.py` has them.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final

from spmd_worker.lockstep.wire.message import MessageError
from spmd_worker.lockstep.wire.packing import ByteReader, ByteWriter
from spmd_worker.lockstep.wire.record_packing import read_snapshot, write_snapshot
from spmd_worker.sequence.metadata import (
    GroupUpdate,
    SequenceDataDelta,
    SequenceGroupMetadata,
    SequenceGroupMetadataDelta,
)
from spmd_worker.sequence.request import RequestId

_DELTA: Final = 0
_SNAPSHOT: Final = 1


def write_groups(writer: ByteWriter, groups: Sequence[GroupUpdate]) -> None:
    """Raises MessageError for values without a place."""
    writer.counted(tuple([_SNAPSHOT if isinstance(group, SequenceGroupMetadata) else _DELTA for group in groups]))
    _write_deltas(writer, [group for group in groups if isinstance(group, SequenceGroupMetadataDelta)])
    for group in groups:
        if isinstance(group, SequenceGroupMetadata):
            write_snapshot(writer, group)


def read_groups(reader: ByteReader) -> tuple[GroupUpdate, ...]:
    """The inverse of `write_groups`."""
    kinds = reader.counted()
    if any(kind not in (_DELTA, _SNAPSHOT) for kind in kinds):
        raise MessageError(f"unknown kinds of groups: {kinds[:10]}")
    deltas: Iterator[GroupUpdate] = iter(_read_deltas(reader, kinds.count(_DELTA)))
    snapshots: Iterator[GroupUpdate] = iter([read_snapshot(reader) for _ in range(kinds.count(_SNAPSHOT))])
    return tuple([next(deltas if kind == _DELTA else snapshots) for kind in kinds])


def _write_deltas(writer: ByteWriter, groups: list[SequenceGroupMetadataDelta]) -> None:
    """Request ids and sample indices are dense, so that a reader can hold the numbers of groups and rows to the bytes.

    Nothing at all is written of no groups, and nothing after the numbers of sequences of no rows.
    """
    rows = [data for group in groups for data in group.sequences]
    writer.dense([group.request_id for group in groups])
    writer.column([len(group.sequences) for group in groups])
    writer.dense([data.sample_index for data in rows])
    writer.column([data.num_kept_blocks for data in rows])
    writer.column([data.num_computed_tokens for data in rows])
    writer.column([data.num_scheduled_tokens for data in rows])
    writer.column(_checked_samples([data.num_samples for data in rows]))
    writer.ragged([data.appended_token_ids for data in rows])
    writer.ragged([data.appended_block_ids for data in rows])


def _read_deltas(reader: ByteReader, num_groups: int) -> list[SequenceGroupMetadataDelta]:
    request_ids = reader.dense(num_groups)
    lengths = reader.column(num_groups)
    num_rows = sum(lengths)
    if min(lengths, default=0) < 0 or num_rows > reader.num_left:
        raise MessageError(f"{num_rows} rows announced with {reader.num_left} bytes left")
    sample_indices = reader.dense(num_rows)
    kept, computed, scheduled = [reader.column(num_rows) for _ in range(3)]
    samples = _checked_samples(reader.column(num_rows))
    tokens, blocks = reader.ragged(num_rows), reader.ragged(num_rows)
    columns = (sample_indices, tokens, kept, blocks, computed, scheduled, samples)
    rows = iter([SequenceDataDelta(*row) for row in zip(*columns, strict=True)])
    groups = [tuple(islice(rows, length)) for length in lengths]
    return [SequenceGroupMetadataDelta(RequestId(number), group) for number, group in zip(request_ids, groups)]


def _checked_samples(num_samples: list[int]) -> list[int]:
    if min(num_samples, default=0) < 0:
        raise MessageError(f"a number of samples is {min(num_samples)}")
    return num_samples
