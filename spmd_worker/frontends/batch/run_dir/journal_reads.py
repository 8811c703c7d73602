"""Reads of a journal's files: records as arrays, lines by their records."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from spmd_worker.base.errors import JournalError
from spmd_worker.frontends.batch.run_dir.row_chunks import BLOCK_RECORDS

_READ_BYTES: Final = 1 << 20
RECORD_TYPE: Final = np.dtype(
    [
        *(("row", "<u8"), ("key", "<u8"), ("offset", "<u8"), ("length", "<u4"), ("checksum", "<u4")),
        *(("num_prompt_tokens", "<u4"), ("num_cached_tokens", "<u4"), ("num_output_tokens", "<u4")),
        *(("error_code", "S40"), ("media_digest", "<u8", 2), ("custom_id", "<u8", 2), ("is_rejected", "?")),
        ("record_checksum", "<u4"),
    ]
)
"""A packed record; its fields are those of `JournalRecord`."""


def records_of(descriptor: int, header: bytes, blocks: Sequence[int], number: int, chunk_rows: int) -> "NDArray[Any]":
    """Records of the chunk with this number, in order of the rows, from the blocks that have some."""
    found, block_bytes = [np.empty(0, RECORD_TYPE)], BLOCK_RECORDS * RECORD_TYPE.itemsize
    for block in blocks:
        data = read_at(descriptor, len(header) + block * block_bytes, block_bytes)
        records = np.frombuffer(data, RECORD_TYPE, len(data) // RECORD_TYPE.itemsize)
        found.append(records[records["row"] // chunk_rows == number])
    records = np.concatenate(found)
    return records[np.argsort(records["row"], kind="stable")]


def lines_of(descriptor: int, records: "NDArray[Any]", path: Path) -> Iterator[tuple[int, bytes]]:
    """(row, line) of the records. Raises JournalError for a line that is not there, or has changed."""
    columns = [records[name].tolist() for name in ("row", "offset", "length", "checksum")]
    for row, offset, length, checksum in zip(*columns):
        line = read_at(descriptor, offset, length) if offset < 1 << 62 else b""
        if len(line) != length or crc32(line) != checksum:
            raise JournalError(f"{path} does not hold the line of row {row}")
        yield row, line


def read_at(descriptor: int, offset: int, length: int) -> bytes:
    """Read `length` bytes, or fewer at the end of the file."""
    pieces, num_read = [], 0
    while num_read < length:
        piece = os.pread(descriptor, min(length - num_read, _READ_BYTES), offset + num_read)
        if not piece:
            break
        pieces.append(piece)
        num_read += len(piece)
    return b"".join(pieces)
