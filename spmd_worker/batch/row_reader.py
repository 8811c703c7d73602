"""Reads a JSONL file line by line with bounded memory.

Knows lines and bytes. Knows nothing about JSON: a line may hold anything.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

DEFAULT_MAX_LINE_BYTES: Final = 16 * 1024 * 1024
_SKIP_BYTES: Final = 1024 * 1024
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
_JSON_SPACE: Final = b" \t\r"


@dataclass(frozen=True, slots=True)
class RowReader:
    """Iterates the rows of a JSONL file as (index, bytes without line end), in order; `-` is standard input.

    A row is a line that is not blank; `index` counts rows from 0, so blank lines have no index and no output row. The
    last line may lack its line end, lines may end in CRLF, and a byte order mark before the first line is dropped. Of a
    line longer than `max_line_bytes` the first `max_line_bytes + 1` bytes are given and the rest is skipped: the length
    tells the parser. A file can be iterated again, standard input cannot. Iterating raises OSError.
    """

    path: Path | str
    max_line_bytes: int = DEFAULT_MAX_LINE_BYTES

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        if str(self.path) == "-":
            yield from _rows(sys.stdin.buffer, self.max_line_bytes)
            return
        with open(self.path, "rb") as stream:
            yield from _rows(stream, self.max_line_bytes)


def _rows(stream: BinaryIO, max_line_bytes: int) -> Iterator[tuple[int, bytes]]:
    index = 0
    for line in _bounded_lines(stream, max_line_bytes):
        if len(line) > max_line_bytes or line.strip(_JSON_SPACE):
            yield index, line
            index += 1


def _bounded_lines(stream: BinaryIO, max_line_bytes: int) -> Iterator[bytes]:
    """Lines without their ends, each at most `max_line_bytes + 1` bytes."""
    is_first = True
    # Two bytes more than a line may have, for CRLF.
    while line := stream.readline(max_line_bytes + 2 + (len(_BYTE_ORDER_MARK) if is_first else 0)):
        if not line.endswith(b"\n"):
            _skip_rest_of_line(stream)
        line = line.removesuffix(b"\n").removesuffix(b"\r")
        if is_first:
            line = line.removeprefix(_BYTE_ORDER_MARK)
            is_first = False
        yield line[: max_line_bytes + 1]


def _skip_rest_of_line(stream: BinaryIO) -> None:
    while (piece := stream.readline(_SKIP_BYTES)) and not piece.endswith(b"\n"):
        pass
