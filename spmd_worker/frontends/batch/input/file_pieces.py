"""Parts of a file: their rows, their digests, and streams of them."""

import io
from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import islice
from typing import Any, BinaryIO, Final

from spmd_worker.frontends.batch.input.row_reader import BYTE_ORDER_MARK, JSON_SPACE

HASH_BYTES: Final = 16
BLOCK_BYTES: Final = 1 << 18


def digest_of(file: BinaryIO, start: int, end: int, is_over: Callable[[], bool] = lambda: False) -> str:
    """Digest of the bytes from `start` to `end`."""
    digest = blake2b(digest_size=HASH_BYTES)
    file.seek(start)
    while start < end and not is_over() and (block := file.read(min(BLOCK_BYTES, end - start))):
        digest.update(block)
        start += len(block)
    return digest.hexdigest()


def read_block(stream: BinaryIO | io.RawIOBase) -> bytes:
    """The next BLOCK_BYTES, or fewer at the end."""
    block = stream.read(BLOCK_BYTES)
    while block and len(block) < BLOCK_BYTES and (more := stream.read(BLOCK_BYTES - len(block))):
        block += more
    return block


class DigestedReads(io.RawIOBase):
    """Reads of a file that are digested on the way."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest, self.num_bytes = blake2b(digest_size=HASH_BYTES), 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        self.digest.update(data)
        self.num_bytes += len(data)
        return len(data)


class RowCounter:
    """Number of rows in a file's decompressed bytes, which come in any pieces; the same as `rows_in` yields."""

    def __init__(self, max_line_bytes: int) -> None:
        self.num_rows = 0
        """Rows whose lines have ended."""
        self.most_blank_bytes = 0
        self.max_line_bytes = max_line_bytes
        self._is_start = True
        # Of the line that has not ended: its length, whether it is blank, and as much of it as a mark has.
        self._length, self._is_blank, self._last = 0, True, b""
        self._start = b""

    def add(self, data: bytes) -> None:
        if self._is_start:
            self._start += data
            if len(self._start) < len(BYTE_ORDER_MARK) and BYTE_ORDER_MARK.startswith(self._start):
                return
            data, self._start, self._is_start = self._start.removeprefix(BYTE_ORDER_MARK), b"", False
        *lines, rest = data.split(b"\n")
        if lines:
            self._extend(lines[0])
            self._end_line()
            blanks = [len(each.removesuffix(b"\r")) for each in islice(lines, 1, None) if not each.strip(JSON_SPACE)]
            self.num_rows += len(lines) - 1 - len(blanks)
            self._add_blanks(blanks)
        self._extend(rest)

    def end(self) -> int:
        """Number of all rows: the last line may lack its end."""
        self._extend(self._start)
        self._end_line()
        return self.num_rows

    def _extend(self, part: bytes) -> None:
        if part:
            self._length += len(part)
            self._is_blank = self._is_blank and not part.strip(JSON_SPACE)
            self._last = part[-1:]

    def _end_line(self) -> None:
        if self._is_blank:
            self._add_blanks([self._length - (self._last == b"\r")])
        else:
            self.num_rows += 1
        self._length, self._is_blank, self._last = 0, True, b""

    def _add_blanks(self, lengths: Sequence[int]) -> None:
        self.num_rows += sum(length > self.max_line_bytes for length in lengths)
        self.most_blank_bytes = max([self.most_blank_bytes, *lengths])


class Window(io.RawIOBase):
    """The next `num_bytes` of a stream."""

    def __init__(self, stream: BinaryIO, num_bytes: int) -> None:
        self._stream, self._num_left = stream, num_bytes

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        data = self._stream.read(min(len(buffer), self._num_left))
        buffer[: len(data)] = data
        self._num_left -= len(data)
        return len(data)
