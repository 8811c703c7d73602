"""Finished rows on disk: committed rows survive any end of the job, and are not recomputed.

    rows.part    output lines, in the order in which rows ended
    journal      a header, then a record per row: its index, its line's offset, its counts, its custom_id's digest

A commit makes lines durable before the records that name them, so an existing record can be relied on. Anything after
the last complete record is truncated when the journal is reopened.
"""

import logging
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from hashlib import blake2b
from itertools import count, islice
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from spmd_worker.base.errors import JournalError
from spmd_worker.base.files import NamedErrors, open_job_file, sync_folder
from spmd_worker.frontends.batch.run_dir.journal_reads import RECORD_TYPE, lines_of, read_at, records_of
from spmd_worker.frontends.batch.run_dir.row_chunks import BLOCK_RECORDS, CHUNK_ROWS, MOST_ROWS, RowChunks
from spmd_worker.frontends.openai.row_writer import RowAnswer

logger = logging.getLogger(__name__)

LINES_NAME: Final = "rows.part"
JOURNAL_NAME: Final = "journal"
_HEADER: Final = b"SPMDJNL3"
_RECORD: Final = struct.Struct("<QQQIIIII40s16s16s?")
_CHECKSUM: Final = struct.Struct("<I")
RECORD_BYTES: Final = _RECORD.size + _CHECKSUM.size
assert RECORD_TYPE.itemsize == RECORD_BYTES
NO_CUSTOM_ID: Final = bytes(16)


class RowKey(NamedTuple):
    """Record of a row that is read: digests of its line (`row_key`) and of its custom_id (zeros without one), and
    whether the parser rejected the line.
    """

    line: int
    custom_id: bytes = NO_CUSTOM_ID
    is_rejected: bool = False


class JournalRecord(NamedTuple):
    """A row that is done. `key` is its input line's, `checksum` its output line's, at [offset, offset + length).
    `media_digest` is that of its images, "" without any; `custom_id` and `is_rejected` are as in RowKey.
    """

    row: int
    key: int
    offset: int
    length: int
    checksum: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    error_code: str | None
    media_digest: str = ""
    custom_id: bytes = NO_CUSTOM_ID
    is_rejected: bool = False

    @staticmethod
    def of(key: RowKey, answer: RowAnswer, offset: int) -> "JournalRecord":
        """Record of an answer whose line is at `offset`."""
        line, counts = answer.line, (answer.num_prompt_tokens, answer.num_cached_tokens, answer.num_output_tokens)
        return JournalRecord(
            *(answer.index, key.line, offset, len(line), crc32(line)),
            *counts,
            *(answer.error_code, answer.media_digest),
            custom_id=key.custom_id,
            is_rejected=key.is_rejected,
        )

    def pack(self) -> bytes:
        code = (self.error_code or "").encode("ascii")
        assert len(code) <= 40, self.error_code
        data = _RECORD.pack(*self[:8], code, bytes.fromhex(self.media_digest), self.custom_id, self.is_rejected)
        return data + _CHECKSUM.pack(crc32(data))

    @staticmethod
    def unpack(data: bytes) -> "JournalRecord | None":
        """Decode a record; None for an incomplete one."""
        if len(data) != RECORD_BYTES or _CHECKSUM.unpack(data[_RECORD.size :])[0] != crc32(data[: _RECORD.size]):
            return None
        *numbers, code, digest, custom_id, is_rejected = _RECORD.unpack(data[: _RECORD.size])
        error_code = code.rstrip(b"\0").decode("ascii", "replace") or None
        media_digest = digest.hex() if any(digest) else ""
        return JournalRecord._make([*numbers, error_code, media_digest, custom_id, is_rejected])


def read_journal(folder: Path) -> Iterator[tuple[int, bytes]]:
    """(row, line) of every committed row in order of the rows, also of a running job. Raises FileNotFoundError without
    a journal, JournalError for an invalid one, OSError.
    """
    with _open_to_read(folder / JOURNAL_NAME) as records, _open_to_read(folder / LINES_NAME) as lines:
        if records.read(len(_HEADER)) != _HEADER:
            raise JournalError(f"{folder / JOURNAL_NAME} is not a journal of this version")
        chunks = RowChunks()
        for number, record in enumerate(_records(records.fileno())):
            if record.row >= MOST_ROWS or chunks.has(record.row):
                raise JournalError(f"{folder / JOURNAL_NAME}: record {number} is not of a new row ({record.row})")
            chunks.append(record.row)
            chunks.commit(record.row, number)
        for each in chunks.from_row(0):
            found = records_of(records.fileno(), _HEADER, chunks.blocks_of(each), each, chunks.chunk_rows)
            yield from lines_of(lines.fileno(), found, folder / LINES_NAME)


def has_rows(folder: Path) -> bool:
    """True if a journal in the folder has a row, or anything else that a first start does not write."""
    sizes = {JOURNAL_NAME: len(_HEADER), LINES_NAME: 0}
    return any(path.stat().st_size > size for name, size in sizes.items() if (path := folder / name).exists())


def remove_journal(folder: Path) -> None:
    """Delete the existing files of a journal. Raises OSError."""
    # The records first: lines without records are ignored, records without lines would be damage.
    for name in (JOURNAL_NAME, LINES_NAME):
        (folder / name).unlink(missing_ok=True)


def row_key(line: bytes) -> int:
    """Key of an input line: a digest of 8 bytes."""
    return int.from_bytes(blake2b(line, digest_size=8).digest(), "little")


class RowJournal:
    """Opens a run directory's journal, or begins it. One writer at a time (the caller's lock); `commit` is thread-safe.

    A commit happens `commit_rows` rows or `commit_s` seconds after the last, whichever is sooner, if `append` or `tick`
    is called. After an OSError nothing more is written: the file's state after a failed fsync is unknown until it is
    read again. Memory is of the rows that are not committed, and a byte for each row of the chunks with such rows.
    """

    def __init__(
        self,
        folder: Path,
        commit_rows: int,
        commit_s: float,
        sync: Callable[[int], None] = os.fsync,
        *,
        chunk_rows: int = CHUNK_ROWS,
    ) -> None:
        """Raises JournalError for an invalid journal, OSError."""
        self.folder = folder
        self._commit_rows, self._commit_s, self._sync = commit_rows, commit_s, sync
        self._lock = threading.Lock()
        self._chunks = RowChunks(chunk_rows)
        self._pending: list[tuple[RowKey, RowAnswer]] = []
        # Rows whose records are on disk, from this number on, and that may not be marked as committed yet.
        self._written: tuple[int, list[tuple[RowKey, RowAnswer]]] = (0, [])
        self._failure: Exception | None = None
        self._keys: tuple[int, dict[int, int]] = (-1, {})
        self.num_rows = 0
        self._lines = _open_to_append(folder / LINES_NAME)
        self._records = _open_to_append(folder / JOURNAL_NAME)
        self._recover()
        # Both names must be durable before a record is written.
        sync_folder(folder)
        self.num_recovered = self.num_rows
        self._last_commit_s = time.monotonic()

    def has(self, index: int) -> bool:
        return self._chunks.has(index)

    @property
    def num_held_rows(self) -> int:
        """Rows that take memory."""
        return self._chunks.num_held_rows

    def key_of(self, index: int) -> int:
        """Key of the input line of a row that was done when the journal was opened. Fast in order of the rows."""
        number = index // self._chunks.chunk_rows
        if self._keys[0] != number:
            found = self._chunk(number)
            self._keys = number, dict(zip(found["row"].tolist(), found["key"].tolist()))
        return self._keys[1][index]

    def append(self, key: RowKey, answer: RowAnswer) -> None:
        """Record that a row is done. Raises OSError when a commit fails."""
        assert not self.has(answer.index), f"row {answer.index} is done twice"
        with self._lock:
            # Ctrl-C may come between the two: a pending row must have its entry, or the commit of all rows would fail.
            self._add(answer.index)
            self._pending.append((key, answer))
        self.tick()

    def tick(self) -> None:
        """Commit if a commit is due. Raises OSError."""
        is_due = time.monotonic() - self._last_commit_s >= self._commit_s
        if self._pending and (is_due or len(self._pending) >= self._commit_rows):
            self.commit()

    def commit(self) -> None:
        """Make all appended rows durable. Raises OSError, as does every later call: nothing more is written then."""
        with self._lock:
            self._last_commit_s = time.monotonic()
            if self._failure is not None:
                raise self._failure
            self._mark_written()
            if not self._pending:
                return
            ends = os.lseek(self._lines, 0, os.SEEK_END), os.lseek(self._records, 0, os.SEEK_END)
            try:
                with NamedErrors(self.folder):
                    self._write_pending(ends[0])
                # In one line: Ctrl-C comes behind calls.
                self._written, self._pending = ((ends[1] - len(_HEADER)) // RECORD_BYTES, self._pending), []
                self._mark_written()
            except Exception as error:  # raised by every commit from now on
                self._failure = error
                raise
            except BaseException:  # Ctrl-C: the files are intact, and the next commit starts again
                if self._pending:
                    try:
                        self._truncate(*ends)
                    except OSError as error:  # like any failure of a commit
                        self._failure = error
                raise

    def _write_pending(self, offset: int) -> None:
        records = bytearray()
        for key, answer in self._pending:
            records += JournalRecord.of(key, answer, offset).pack()
            offset += len(answer.line)
        _write_all(self._lines, b"".join([answer.line for _, answer in self._pending]))
        self._sync(self._lines)
        _write_all(self._records, bytes(records))
        self._sync(self._records)

    def _mark_written(self) -> None:
        """Idempotent, and called again after Ctrl-C."""
        first, rows = self._written
        for number, (_, answer) in enumerate(rows, first):
            self._chunks.commit(answer.index, number)
        self._written = (0, [])

    def _truncate(self, lines_end: int, records_end: int) -> None:
        """Truncate durably: the records first, which must not name missing lines."""
        for descriptor, end in ((self._records, records_end), (self._lines, lines_end)):
            if os.fstat(descriptor).st_size > end:
                os.ftruncate(descriptor, end)
                # New bytes must not end up before old ones.
                self._sync(descriptor)

    def records(self) -> Iterator[JournalRecord]:
        """Rows that were done when the journal was opened, in the order in which they ended."""
        return islice(_records(self._records), self.num_recovered)

    def committed(self) -> Iterator[JournalRecord]:
        """All committed rows, in the order in which they ended."""
        return _records(self._records)

    def in_order(self, first_row: int = 0) -> "Iterator[NDArray[Any]]":
        """Records (RECORD_TYPE) of the committed rows from `first_row` on, in order of the rows, chunk after chunk."""
        with self._lock:
            self._mark_written()
            numbers = self._chunks.from_row(first_row)
        for number in numbers:
            found = self._chunk(number)
            yield found[found["row"] >= first_row]

    def media_digests(self) -> Iterator[tuple[int, str]]:
        """(row, digest of its images) of the committed rows with images, in order of the rows."""
        for found in self.in_order():
            for each in found[found["media_digest"].any(axis=1)]:
                yield int(each["row"]), each["media_digest"].tobytes().hex()

    def committed_until(self, row: int) -> int:
        """The first row from `row` on that is not committed. Thread-safe."""
        with self._lock:
            self._mark_written()
            return self._chunks.committed_until(row)

    def lines(self, first_row: int = 0) -> Iterator[bytes]:
        """The committed lines in order of the rows from `first_row` on, up to the first missing row. Thread-safe.
        Raises JournalError for a line that has changed.
        """
        stop, row = self.committed_until(first_row), first_row
        while row < stop:
            end = min(stop, (row // self._chunks.chunk_rows + 1) * self._chunks.chunk_rows)
            found = self._chunk(row // self._chunks.chunk_rows)
            found = found[(found["row"] >= row) & (found["row"] < end)]
            if not np.array_equal(found["row"], np.arange(row, end, dtype=np.uint64)):
                raise JournalError(f"{self.folder / JOURNAL_NAME} does not have the rows {row} to {end - 1} once each")
            for _, line in lines_of(self._lines, found, self.folder / LINES_NAME):
                yield line
            row = end

    def _chunk(self, number: int) -> "NDArray[Any]":
        with self._lock:
            blocks = tuple(self._chunks.blocks_of(number))
        return records_of(self._records, _HEADER, blocks, number, self._chunks.chunk_rows)

    def close(self) -> None:
        """Commit and close the files. Idempotent. Raises OSError when rows could not be committed, now or before."""
        if self._lines < 0:
            return
        try:
            if self._failure is None or self._pending:
                try:
                    self.commit()
                except KeyboardInterrupt:
                    # No later commit would start again.
                    self.commit()
                    raise
        finally:
            # Another thread may be committing for the same reason.
            with self._lock:
                lines, records, self._lines, self._records = self._lines, self._records, -1, -1
            os.close(lines)
            os.close(records)

    def _recover(self) -> None:
        """Read the existing records, and truncate a torn tail. Raises JournalError."""
        path, size = self.folder / JOURNAL_NAME, os.fstat(self._records).st_size
        head = read_at(self._records, 0, len(_HEADER))
        # A power failure may leave the header's size on disk without its bytes.
        is_unwritten = size <= len(_HEADER) and not any(head)
        if size < len(_HEADER) or is_unwritten:
            if not _HEADER.startswith(head) and not is_unwritten:
                raise JournalError(f"{path} is not a journal: it begins with {head!r}")
            self._truncate(0, 0)
            _write_all(self._records, _HEADER)
            self._sync(self._records)
            return
        end, lines_end = len(_HEADER), 0
        if head != _HEADER:
            raise JournalError(f"{path} is not a journal of this version")
        num_line_bytes = os.fstat(self._lines).st_size
        while (record := JournalRecord.unpack(read_at(self._records, end, RECORD_BYTES))) is not None:
            is_complete = record.offset == lines_end and record.offset + record.length <= num_line_bytes
            if not is_complete or crc32(read_at(self._lines, record.offset, record.length)) != record.checksum:
                raise JournalError(
                    f"{path}: record {self.num_rows} (row {record.row}) names bytes {record.offset} to "
                    f"{record.offset + record.length} of {LINES_NAME}, which are not that row's line"
                )
            if self.has(record.row):
                raise JournalError(f"{path}: row {record.row} is recorded twice")
            if record.row >= MOST_ROWS:
                raise JournalError(f"{path}: row {record.row} is beyond any input's rows")
            self._add(record.row)
            self._chunks.commit(record.row, self.num_rows - 1)
            end += RECORD_BYTES
            lines_end += record.length
        # A killed job leaves only a torn record at the end; valid records behind it are a disk fault.
        behind = range(end + RECORD_BYTES, size, RECORD_BYTES)
        num_lost = sum(JournalRecord.unpack(read_at(self._records, at, RECORD_BYTES)) is not None for at in behind)
        if num_lost:
            logger.warning(
                "%s is damaged at byte %d: %d finished rows behind it are not used, but recomputed", path, end, num_lost
            )
        self._truncate(lines_end, end)

    def _add(self, index: int) -> None:
        self._chunks.append(index)
        self.num_rows += 1


def _records(descriptor: int) -> Iterator[JournalRecord]:
    """All complete records, in the order of the file."""
    for start in count(len(_HEADER), BLOCK_RECORDS * RECORD_BYTES):
        block = read_at(descriptor, start, BLOCK_RECORDS * RECORD_BYTES)
        for at in range(0, len(block), RECORD_BYTES):
            if (record := JournalRecord.unpack(block[at : at + RECORD_BYTES])) is None:
                return
            yield record
        if len(block) < BLOCK_RECORDS * RECORD_BYTES:
            return


def _open_to_read(path: Path) -> BinaryIO:
    return open(open_job_file(path, os.O_RDONLY), "rb")


def _open_to_append(path: Path) -> int:
    return open_job_file(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)


def _write_all(descriptor: int, data: bytes) -> None:
    """Write all data: a write may be partial, on a disk that fills up. Raises OSError."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
