"""Rows of a job that are done, in chunks: a byte a row while a chunk is being answered, and next to nothing afterwards.

A chunk whose rows are all committed is known by its number, and by the blocks of the journal's records that have rows
of it: what else is known about a row is read from there.
"""

from array import array
from bisect import insort
from typing import Final

CHUNK_ROWS: Final = 16_384
BLOCK_RECORDS: Final = 1024
_APPENDED, _COMMITTED = b"\1", b"\2"
MOST_ROWS: Final = 1 << 48
"""More than any input has."""


class _Chunk:
    """`states` has a byte a row, None once all are committed. `blocks` are numbers of blocks of records, in order."""

    __slots__ = ("blocks", "num_left", "states")

    def __init__(self, num_rows: int) -> None:
        self.states: bytearray | None = bytearray(num_rows)
        self.num_left = num_rows
        self.blocks = array("Q")


class RowChunks:
    """Rows are appended, then committed, in any order. Not thread-safe."""

    def __init__(self, chunk_rows: int = CHUNK_ROWS) -> None:
        self.chunk_rows = chunk_rows
        self._chunks: dict[int, _Chunk] = {}

    @property
    def num_held_rows(self) -> int:
        """Rows of the chunks that take a byte a row."""
        return sum(each.states is not None for each in self._chunks.values()) * self.chunk_rows

    def has(self, row: int) -> bool:
        """Whether the row is done, committed or not."""
        number, slot = divmod(row, self.chunk_rows)
        chunk = self._chunks.get(number)
        return chunk is not None and (chunk.states is None or chunk.states[slot] > 0)

    def append(self, row: int) -> None:
        number, slot = divmod(row, self.chunk_rows)
        chunk = self._chunks.get(number)
        if chunk is None:
            chunk = self._chunks[number] = _Chunk(self.chunk_rows)
        assert chunk.states is not None, f"row {row} is done twice"
        chunk.states[slot] = _APPENDED[0]

    def commit(self, row: int, record: int) -> None:
        """Commit an appended row, whose record has this number. Idempotent."""
        number, slot = divmod(row, self.chunk_rows)
        chunk, block = self._chunks[number], record // BLOCK_RECORDS
        if chunk.states is None or chunk.states[slot] == _COMMITTED[0]:
            return
        if not chunk.blocks or chunk.blocks[-1] < block:
            chunk.blocks.append(block)
        elif block not in chunk.blocks:
            insort(chunk.blocks, block)
        chunk.states[slot] = _COMMITTED[0]
        chunk.num_left -= 1
        if not chunk.num_left:
            chunk.states = None

    def committed_until(self, row: int) -> int:
        """The first row from `row` on that is not committed."""
        number, slot = divmod(row, self.chunk_rows)
        while (chunk := self._chunks.get(number)) is not None:
            if chunk.states is not None:
                rest = chunk.states[slot:]
                num_committed = len(rest) - len(rest.lstrip(_COMMITTED))
                if num_committed < len(rest):
                    return number * self.chunk_rows + slot + num_committed
            number, slot = number + 1, 0
        return number * self.chunk_rows + slot

    def from_row(self, row: int) -> list[int]:
        """Numbers of the chunks, in order, that have committed rows from `row` on."""
        first = row // self.chunk_rows
        return sorted([number for number, chunk in self._chunks.items() if number >= first and chunk.blocks])

    def blocks_of(self, number: int) -> "array[int]":
        """Blocks of the records that have rows of a chunk."""
        return self._chunks[number].blocks
