"""Bytes of a part of a pool: finished rows as a header, their number, a journal's record of each, and their lines."""

import struct
from collections.abc import Iterable
from itertools import accumulate
from typing import Final, NamedTuple
from zlib import crc32

from spmd_worker.base.errors import PoolError
from spmd_worker.frontends.batch.run_dir.journal import RECORD_BYTES, JournalRecord, RowKey
from spmd_worker.frontends.openai.row_writer import RowAnswer

_HEADER: Final = b"SPMDPRT1"
_COUNT: Final = struct.Struct("<Q")


class FinishedRow(NamedTuple):
    """An answer, and the record of the row that it answers."""

    key: RowKey
    answer: RowAnswer


def encode_part(rows: Iterable[FinishedRow]) -> bytes:
    """Rows in order of their indices."""
    ordered = sorted(rows, key=lambda each: each.answer.index)
    offsets = accumulate((len(each.answer.line) for each in ordered), initial=0)
    records = [JournalRecord.of(*each, offset).pack() for each, offset in zip(ordered, offsets)]
    lines = [each.answer.line for each in ordered]
    return b"".join([_HEADER, _COUNT.pack(len(ordered)), *records, *lines])


def decode_part(name: str, data: bytes) -> list[tuple[JournalRecord, bytes]]:
    """(record, line) of every row. Raises PoolError for damage."""
    begin = len(_HEADER) + _COUNT.size
    if not data.startswith(_HEADER) or len(data) < begin:
        raise PoolError(f"{name} is not a part of a pool of this version: {_WAY_OUT}")
    (num_rows,) = _COUNT.unpack(data[len(_HEADER) : begin])
    lines = data[begin + num_rows * RECORD_BYTES :]
    found = []
    for start in range(begin, begin + num_rows * RECORD_BYTES, RECORD_BYTES):
        record = JournalRecord.unpack(data[start : start + RECORD_BYTES])
        line = b"" if record is None else lines[record.offset : record.offset + record.length]
        if record is None or len(line) != record.length or crc32(line) != record.checksum:
            raise PoolError(f"{name} is damaged: {_WAY_OUT}")
        found.append((record, line))
    return found


_WAY_OUT: Final = "restore the pool's folder from before, or give job.pool another"
