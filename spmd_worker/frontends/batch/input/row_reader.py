"""Reads the rows of a job's input one by one, with bounded memory; a line may contain anything."""

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from spmd_worker.base.config.schema import RowLimits
from spmd_worker.base.remote_names import FilePath
from spmd_worker.frontends.batch.input.input_files import (
    PARQUET_SUFFIX,
    STANDARD_INPUT,
    ParquetRows,
    find_inputs,
    is_stream,
    open_input,
    open_stream,
)

_SKIP_BYTES: Final = 1024 * 1024
BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
JSON_SPACE: Final = b" \t\r"


@dataclass(frozen=True, slots=True)
class RowReader:
    """Iterates the rows of files as (index, bytes without line end), in order; of `stream` if `paths` is None.

    A row is a line that is not blank; `index` counts rows from 0, over all files. The last line of a file may lack its
    line end, lines may end in CRLF, and a byte order mark before a file's first line is dropped. A line longer than
    `max_line_bytes` is cut to `max_line_bytes + 1` bytes: the parser recognises it by the length. Files can be iterated
    again, a stream cannot. Iterating raises OSError.
    """

    paths: Sequence[FilePath] | None
    max_line_bytes: int = RowLimits().num_line_bytes
    stream: str = STANDARD_INPUT

    @staticmethod
    def of(
        name: str,
        max_line_bytes: int = RowLimits().num_line_bytes,
        is_own: Callable[[Path], bool] = lambda path: False,
    ) -> "RowReader":
        """Reader for a value of `job.input`, without the job's own files. Raises ConfigError for a missing file."""
        if is_stream(name):
            return RowReader(None, max_line_bytes, name)
        return RowReader(find_inputs(name, is_own), max_line_bytes)

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        return enumerate(self._lines())

    def _lines(self) -> Iterator[bytes]:
        if self.paths is None:
            with open_stream(self.stream) as stream:
                yield from rows_in(stream, self.max_line_bytes)
        else:
            for path in self.paths:
                yield from self.lines_of(path)

    def lines_of(self, path: FilePath) -> Iterator[bytes]:
        """Rows of one file."""
        if path.suffix == PARQUET_SUFFIX:
            yield from ParquetRows(path, self.max_line_bytes)
            return
        with open_input(path) as stream:
            yield from rows_in(stream, self.max_line_bytes)


def rows_in(stream: BinaryIO, max_line_bytes: int, *, is_start: bool = True) -> Iterator[bytes]:
    """Rows of decompressed bytes, which begin with a line, the file's first if `is_start`."""
    for line in _bounded_lines(stream, max_line_bytes, is_start):
        if len(line) > max_line_bytes or line.strip(JSON_SPACE):
            yield line
        else:
            _skip_blank_lines(stream, max_line_bytes)


def _skip_blank_lines(stream: BinaryIO, max_line_bytes: int) -> None:
    """Skip the blank lines of the stream's buffer, and of the next: a compressed file may have very many."""
    if not isinstance(stream, io.BufferedReader):
        return
    while ahead := stream.peek():
        num_blank = ahead.rfind(b"\n", 0, len(ahead) - len(ahead.lstrip(JSON_SPACE + b"\n"))) + 1
        # A line that is too long is a row, blank or not.
        is_too_long = num_blank > max_line_bytes and max(map(len, ahead[:num_blank].split(b"\n"))) > max_line_bytes
        if not num_blank or is_too_long:
            return
        stream.read(num_blank)


def _bounded_lines(stream: BinaryIO, max_line_bytes: int, is_first: bool) -> Iterator[bytes]:
    """Lines without their ends, each at most `max_line_bytes + 1` bytes."""
    # CRLF takes two bytes more than a line may have.
    while line := stream.readline(max_line_bytes + 2 + (len(BYTE_ORDER_MARK) if is_first else 0)):
        piece = line
        while piece and not piece.endswith(b"\n"):
            piece = stream.readline(_SKIP_BYTES)
        line = line.removesuffix(b"\n").removesuffix(b"\r")
        if is_first:
            line = line.removeprefix(BYTE_ORDER_MARK)
            is_first = False
        yield line[: max_line_bytes + 1]
