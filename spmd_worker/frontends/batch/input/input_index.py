"""Index of an input: rows and digests of its pieces, so that a range of rows is read and checked without the rest.

rows.jsonl            pieces of at least 1 MiB that begin with a line
rows.jsonl.gz         one piece (.zst too): it is decompressed from its beginning
rows.parquet          a piece per row group, and one for the footer, which has no rows

Everything is made in one pass, without parsing a row, and is a function of the bytes of the files; only blank lines of
more than `max_line_bytes` depend on that limit: they are rows.
"""

import io
import json
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
from hashlib import blake2b
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, BinaryIO, Final

from spmd_worker.base.errors import ConfigError
from spmd_worker.base.files import JsonError, parse_json_object, read_regular_file
from spmd_worker.base.names import counted
from spmd_worker.base.remote_names import FilePath
from spmd_worker.frontends.batch.input.file_pieces import (
    HASH_BYTES,
    DigestedReads,
    RowCounter,
    Window,
    digest_of,
    read_block,
)
from spmd_worker.frontends.batch.input.input_files import (
    PARQUET_SUFFIX,
    ParquetRows,
    decompressed,
    is_compressed,
    open_bytes,
)
from spmd_worker.frontends.batch.input.row_reader import RowReader, rows_in

FORMAT_VERSION: Final = 1
_PIECE_BYTES: Final = 1 << 20
_PIECE_SHIFT: Final = 16
"""A piece has at least one part in 2^16 of the bytes before it: a file of any size has few pieces."""
_WAY_OUT: Final = "make the index again with spmd-worker-index, or leave it out"
_MOST_INDEX_BYTES: Final = 1 << 30
_MOST_HELD_BYTES: Final = 64 << 20
"""Pieces above this size are read twice, to check them and to use them."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Beginning of a piece: its first row, counted within its file, its first byte, and the digest of its bytes."""

    row: int
    offset: int
    digest: str


@dataclass(frozen=True, slots=True)
class IndexedFile:
    """A file and its pieces, in order; the first begins at byte 0."""

    path: str
    num_bytes: int
    num_rows: int
    marks: tuple[Mark, ...]

    def piece(self, number: int) -> tuple[int, int]:
        """First byte of a piece and of the next."""
        is_last = number + 1 == len(self.marks)
        return self.marks[number].offset, self.num_bytes if is_last else self.marks[number + 1].offset


@dataclass(frozen=True, slots=True)
class InputIndex:
    """Files of an input, in order. `digest` is of the pieces' digests, without the names of the files. Blank lines have
    at most `most_blank_bytes`, and are rows above `max_line_bytes`.
    """

    files: tuple[IndexedFile, ...]
    num_rows: int
    digest: str
    max_line_bytes: int
    most_blank_bytes: int

    @staticmethod
    def of(files: Sequence[IndexedFile], max_line_bytes: int, most_blank_bytes: int) -> "InputIndex":
        num_rows, num_bytes = sum(each.num_rows for each in files), sum(each.num_bytes for each in files)
        content = [[each.num_bytes, each.num_rows, [astuple(mark) for mark in each.marks]] for each in files]
        digest = blake2b(json.dumps(content).encode(), digest_size=HASH_BYTES).hexdigest()
        text = f"{num_bytes} bytes in {len(files)} file{'s' * (len(files) != 1)}, {digest}"
        return InputIndex(tuple(files), num_rows, text, max_line_bytes, most_blank_bytes)

    def to_bytes(self) -> bytes:
        files = [asdict(each) | {"marks": [astuple(mark) for mark in each.marks]} for each in self.files]
        head = {"format_version": FORMAT_VERSION, "num_rows": self.num_rows, "digest": self.digest}
        head |= {"max_line_bytes": self.max_line_bytes, "most_blank_bytes": self.most_blank_bytes}
        return json.dumps({**head, "files": files}).encode("ascii") + b"\n"

    @staticmethod
    def from_bytes(data: bytes) -> "InputIndex":
        """Raises ConfigError, whose message is a predicate, for anything but a complete index of this version."""
        try:
            value = parse_json_object(data)
            if value.get("format_version") != FORMAT_VERSION:
                raise ConfigError(f"is not an index of version {FORMAT_VERSION} of an input")
            if any(type(value[key]) is not int for key in ("max_line_bytes", "most_blank_bytes")):
                raise ConfigError("is damaged: its numbers of bytes are no numbers")
            files = [_file_of(each) for each in value["files"]]
            index = InputIndex.of(files, value["max_line_bytes"], value["most_blank_bytes"])
            is_whole = (index.digest, index.num_rows) == (value["digest"], value["num_rows"])
        except (JsonError, LookupError, TypeError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"is not an index of an input ({error})") from None
        if not is_whole:
            raise ConfigError("is damaged: its digest differs from its pieces'")
        return index


def _file_of(value: dict[str, Any]) -> IndexedFile:
    marks = tuple([Mark(*mark) for mark in value["marks"]])
    return IndexedFile(value["path"], value["num_bytes"], value["num_rows"], marks)


def read_index(path: Path, reader: RowReader) -> InputIndex:
    """The index in `job.input_index`, of the reader's files. Raises ConfigError."""
    key = f"job.input_index={path}"
    try:
        index = InputIndex.from_bytes(read_regular_file(path, _MOST_INDEX_BYTES))
    except OSError as error:
        raise ConfigError(f"{key} cannot be read ({error.strerror or error}): {_WAY_OUT}") from None
    except ConfigError as error:
        raise ConfigError(f"{key} {error}: {_WAY_OUT}") from None
    # Before anything is loaded.
    RangeReader(reader, index)
    return index


def index_input(reader: RowReader, is_over: Callable[[], bool] = lambda: False) -> InputIndex:
    """Index the reader's files; of a part of them once `is_over`. Raises OSError, and ConfigError for a Parquet file
    that has no rows of a job.
    """
    assert reader.paths is not None, "a stream can be read only once"
    counters = [RowCounter(reader.max_line_bytes) for _ in reader.paths]
    files = [_index_file(path, counter, is_over) for path, counter in zip(reader.paths, counters)]
    return InputIndex.of(files, reader.max_line_bytes, max([each.most_blank_bytes for each in counters], default=0))


def _index_file(path: FilePath, counter: RowCounter, is_over: Callable[[], bool]) -> IndexedFile:
    if path.suffix == PARQUET_SUFFIX:
        return _index_parquet(path, counter.max_line_bytes, is_over)
    with open_bytes(path) as file:
        if is_compressed(path):
            return _index_compressed(path, file, counter, is_over)
        return _index_lines(path, file, counter, is_over)


def _index_lines(path: FilePath, file: BinaryIO, counter: RowCounter, is_over: Callable[[], bool]) -> IndexedFile:
    marks: list[Mark] = []
    row = start = num_bytes = 0
    digest = blake2b(digest_size=HASH_BYTES)
    while (block := read_block(file)) and not is_over():
        # Blocks end anywhere, pieces with a line.
        end = num_bytes + block.rfind(b"\n") + 1
        head = block[: end - num_bytes]
        counter.add(head)
        digest.update(head)
        if head and end - start >= max(_PIECE_BYTES, start >> _PIECE_SHIFT):
            marks.append(Mark(row, start, digest.hexdigest()))
            row, start, digest = counter.num_rows, end, blake2b(digest_size=HASH_BYTES)
        counter.add(block[len(head) :])
        digest.update(block[len(head) :])
        num_bytes += len(block)
    if num_bytes > start or not marks:
        marks.append(Mark(row, start, digest.hexdigest()))
    return IndexedFile(str(path), num_bytes, counter.end(), tuple(marks))


def _index_compressed(path: FilePath, file: BinaryIO, counter: RowCounter, is_over: Callable[[], bool]) -> IndexedFile:
    read = DigestedReads(file)
    stream = decompressed(path, io.BufferedReader(read))
    while (block := read_block(stream)) and not is_over():
        counter.add(block)
    while read_block(read) and not is_over():
        continue
    return IndexedFile(str(path), read.num_bytes, counter.end(), (Mark(0, 0, read.digest.hexdigest()),))


def _index_parquet(path: FilePath, max_line_bytes: int, is_over: Callable[[], bool]) -> IndexedFile:
    rows = ParquetRows(path, max_line_bytes)
    num_rows, offsets = [size for size, _ in rows.groups], [offset for _, offset in rows.groups]
    with open_bytes(path) as file:
        num_bytes = file.seek(0, io.SEEK_END)
        footer = _footer_of(file, num_bytes)
        starts = [0, *offsets[1:], footer] if offsets else [0]
        if starts != sorted(starts):
            # Row groups in another order than in the footer: the file is one piece.
            starts = [0]
        first_rows = [0, *accumulate(num_rows)][: len(starts)]
        ends = [*starts[1:], num_bytes]
        digests = [digest_of(file, start, end, is_over) for start, end in zip(starts, ends)]
    return IndexedFile(str(path), num_bytes, rows.num_rows, tuple(map(Mark, first_rows, starts, digests)))


def _footer_of(file: BinaryIO, num_bytes: int) -> int:
    """Offset of a Parquet file's footer; its length comes before the last four bytes."""
    file.seek(num_bytes - 8)
    return num_bytes - 8 - int.from_bytes(file.read(4), "little")


class RangeReader:
    """Reads ranges of the rows of `reader`: only the pieces that have rows of the range, whose digests are checked
    before a row of them is yielded. Raises ConfigError for an index of other files.
    """

    def __init__(self, reader: RowReader, index: InputIndex) -> None:
        limits = index.max_line_bytes, reader.max_line_bytes
        if limits[0] != limits[1] and index.most_blank_bytes > min(limits):
            raise ConfigError(
                f"job.input has blank lines of {index.most_blank_bytes} bytes, which are rows or not by "
                f"limits.max_line_bytes, {limits[0]} in its index and {limits[1]} in the job: remove those lines, or "
                f"leave out the index"
            )
        paths = reader.paths or ()
        if len(paths) != len(index.files):
            raise ConfigError(
                f"job.input has {counted(len(paths), 'file')}, and its index {len(index.files)}: give the input that "
                f"the index was made of, or make the index again with spmd-worker-index"
            )
        self._reader, self._files = reader, list(zip(paths, index.files))
        self._first_rows = [0, *accumulate(each.num_rows for each in index.files)]

    def rows(self, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
        """(index over all files, line) of the rows from `start` up to `stop`, without it. Raises ConfigError for a
        piece that has changed since the index was made, OSError.
        """
        stop = min(stop, self._first_rows[-1])
        while start < stop:
            # The last file that begins at the row: those before it have no rows.
            number = bisect_right(self._first_rows, start) - 1
            first, end = self._first_rows[number], min(stop, self._first_rows[number + 1])
            lines = self._lines_of(*self._files[number], start - first, end - first)
            yield from enumerate(lines, start)
            start = end

    def _lines_of(self, path: FilePath, file: IndexedFile, start: int, stop: int) -> Iterator[bytes]:
        """Rows of one file."""
        rows = [mark.row for mark in file.marks]
        # Of pieces that begin at the same row only the last has it.
        pieces = range(bisect_right(rows, start) - 1, bisect_right(rows, stop - 1))
        with open_bytes(path) as stream:
            _check_size(path, file, stream)
            if path.suffix == PARQUET_SUFFIX:
                lines = self._parquet_lines(path, file, stream, pieces)
            elif is_compressed(path):
                lines = self._compressed_lines(path, file, stream)
            else:
                lines = self._plain_lines(path, file, stream, pieces)
            skipped = file.marks[pieces[0]].row
            num_lines = 0
            for line in islice(lines, start - skipped, stop - skipped):
                num_lines += 1
                yield line
        if num_lines != stop - start:
            raise _changed(path)

    def _plain_lines(
        self, path: FilePath, file: IndexedFile, stream: BinaryIO, pieces: Sequence[int]
    ) -> Iterator[bytes]:
        for number in pieces:
            piece = _checked_piece(path, file, stream, number)
            yield from rows_in(piece, self._reader.max_line_bytes, is_start=file.marks[number].offset == 0)

    def _compressed_lines(self, path: FilePath, file: IndexedFile, stream: BinaryIO) -> Iterator[bytes]:
        piece = _checked_piece(path, file, stream, 0)
        yield from rows_in(decompressed(path, piece), self._reader.max_line_bytes)

    def _parquet_lines(
        self, path: FilePath, file: IndexedFile, stream: BinaryIO, pieces: Sequence[int]
    ) -> Iterator[bytes]:
        has_groups = len(file.marks) > 1
        _check_digest(path, file, stream, len(file.marks) - 1)
        parquet = ParquetRows(path, self._reader.max_line_bytes)
        if not has_groups:
            yield from parquet
            return
        for number in pieces:
            _check_digest(path, file, stream, number)
            yield from parquet.lines([number])


def _changed(path: FilePath) -> ConfigError:
    return ConfigError(
        f"job.input={path} changed since its rows were counted: start the job again with the unchanged input, or make "
        f"its index (job.input_index) again with spmd-worker-index"
    )


def _check_size(path: FilePath, file: IndexedFile, stream: BinaryIO) -> None:
    if stream.seek(0, io.SEEK_END) != file.num_bytes:
        raise _changed(path)


def _check_digest(path: FilePath, file: IndexedFile, stream: BinaryIO, number: int) -> None:
    if digest_of(stream, *file.piece(number)) != file.marks[number].digest:
        raise _changed(path)


def _checked_piece(path: FilePath, file: IndexedFile, stream: BinaryIO, number: int) -> BinaryIO:
    """The bytes of a piece, once its digest has been checked."""
    start, end = file.piece(number)
    if end - start > _MOST_HELD_BYTES:
        _check_digest(path, file, stream, number)
        stream.seek(start)
        return io.BufferedReader(Window(stream, end - start))
    stream.seek(start)
    data = stream.read(end - start)
    if blake2b(data, digest_size=HASH_BYTES).hexdigest() != file.marks[number].digest:
        raise _changed(path)
    # Blank lines are skipped by a buffer.
    return io.BufferedReader(io.BytesIO(data))  # type: ignore[arg-type]  # all that it calls is there
