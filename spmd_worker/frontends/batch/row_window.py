"""Rows read ahead of the replicas: the longest first, in chunks that shrink towards the end.

The window is bounded by rows and bytes, because the file may exceed memory: rows are ordered by length only within it.
Rows that begin alike stay together, because each replica has a cache of its own: they come next to each other
(`PrefixWindow`), and are divided where they are more than a chunk.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from spmd_worker.engine.data_parallel.round import share_of
from spmd_worker.frontends.batch.prefix_key import share_beginning
from spmd_worker.frontends.batch.row_source import RowSource
from spmd_worker.frontends.openai.row import ChatPrompt, EncoderPrompt, Prompt, ReadPrompt, Row, RowError, TextPrompt

_MAX_ROWS: Final = 4096
_MAX_BYTES: Final = 64 << 20
_ROWS_PER_CALL: Final = 256
"""Most rows read per call; rank 0 has a replica to step in between."""
_MAX_CHUNK_BYTES: Final = 8 << 20
_CHARACTERS_PER_TOKEN: Final = 4
_TOKENS_PER_IMAGE: Final = 1024
"""Its tokens are known when it is prepared."""


@dataclass(frozen=True, slots=True)
class NumberedLine:
    """An input line with the number of its row."""

    index: int
    line: bytes


@dataclass(frozen=True, slots=True)
class _ReadRow:
    """A line with its expected length and the key of its prompt."""

    length: int
    line: NumberedLine
    key: bytes


class RowWindow:
    """Window over the rows of `source`; `reject` is called with invalid ones."""

    def __init__(self, source: RowSource, reject: Callable[[RowError], None]) -> None:
        self._source, self._reject = source, reject
        self._read: list[_ReadRow] = []
        self._num_read_bytes = 0
        # Popped from the end: the next piece, and in each the next row, is the last.
        self._pieces: list[list[NumberedLine]] = []
        self._num_sorted = 0

    @property
    def is_empty(self) -> bool:
        """Whether every row of the input has been handed out."""
        return self._source.has_ended and not self._read and not self._pieces

    def read_on(self, is_over: Callable[[], bool] = lambda: False) -> None:
        """Read some rows, if more may be held, until the turn `is_over`."""
        for _ in range(_ROWS_PER_CALL):
            if is_over():
                return
            is_full = len(self._read) >= _MAX_ROWS or self._num_read_bytes >= _MAX_BYTES
            if self._source.has_ended or is_full or (found := self._source.next_row()) is None:
                return
            if isinstance(found.row, RowError):
                self._reject(found.row)
            else:
                line = NumberedLine(found.row.index, found.line)
                self._read.append(_ReadRow(expected_length(found.row), line, found.key))
                self._num_read_bytes += len(found.line)

    def take(self, num_replicas: int, most: int, most_alike: int = 0) -> list[NumberedLine]:
        """The next chunk, at most `most` rows, or `most_alike` that begin alike; empty if no row is available, though
        more may come.
        """
        if not self._pieces:
            self._pieces = _pieces(self._read, max(most, most_alike))
            self._num_sorted = len(self._read)
            self._read, self._num_read_bytes = [], 0
        size, size_alike = most, max(most, most_alike)
        if self._source.has_ended:
            num_left = self._num_sorted + len(self._read)
            size, size_alike = (share_of(num_left, num_replicas, each) for each in (size, size_alike))
        chunk: list[NumberedLine] = []
        num_bytes = 0
        while self._pieces and (not chunk or len(chunk) + len(self._pieces[-1]) <= size):
            piece = self._pieces[-1]
            while piece and len(chunk) < size_alike:
                if self._source.is_lost(piece[-1].index):
                    piece.pop()
                    self._num_sorted -= 1
                    continue
                num_bytes += len(piece[-1].line)
                if chunk and num_bytes > _MAX_CHUNK_BYTES:
                    break
                chunk.append(piece.pop())
            if piece:
                break
            self._pieces.pop()
        self._num_sorted -= len(chunk)
        return chunk


def _pieces(rows: list[_ReadRow], most: int) -> list[list[NumberedLine]]:
    """Rows in pieces of at most `most` that begin alike. The run with the longest row is last, of equal ones the first
    read; so are the pieces of a run, and the rows of a piece.
    """
    runs = _runs(rows, 1)
    for quarters in (2, 3):
        # A system prompt of all rows makes one run of them: what they share beyond it tells more.
        runs = [part for run in runs for part in (_runs(run, quarters) if len(run) > most else (run,))]
    cut = [sorted([sorted(piece, key=_by_length) for piece in _cut(run, most)], key=_longest) for run in runs]
    cut.sort(key=lambda pieces: _longest(pieces[-1]))
    return [[each.line for each in piece] for pieces in cut for piece in pieces]


def _cut(run: list[_ReadRow], most: int) -> list[list[_ReadRow]]:
    """A run in equal pieces, as few as possible."""
    size = -(-len(run) // -(-len(run) // most))
    return [run[start : start + size] for start in range(0, len(run), size)]


def _runs(rows: list[_ReadRow], quarters: int) -> list[list[_ReadRow]]:
    """Rows, whose neighbours are those with a common beginning (`PrefixWindow`), cut where they share less."""
    runs: list[list[_ReadRow]] = []
    for each in rows:
        if runs and share_beginning(runs[-1][-1].key, each.key, quarters):
            runs[-1].append(each)
        else:
            runs.append([each])
    return runs


def _by_length(row: _ReadRow) -> tuple[int, int]:
    return row.length, -row.line.index


def _longest(piece: list[_ReadRow]) -> tuple[int, int]:
    return _by_length(piece[-1])


def expected_length(row: Row) -> int:
    """Estimated tokens of the row: its prompt's, and its samples' limit if there is one."""
    if row.pooling is not None:
        return sum(_prompt_length(prompt) for prompt in row.pooling.prompts)
    sampling = row.sampling
    return _prompt_length(row.prompt) + sampling.num_sequences * (sampling.max_tokens or 0)


def _prompt_length(prompt: Prompt) -> int:
    if isinstance(prompt, EncoderPrompt):
        return _prompt_length(prompt.encoder)
    if not isinstance(prompt, ReadPrompt):
        # The number of rows is not known before they are read.
        return 0
    of_images = _TOKENS_PER_IMAGE * len(prompt.images)
    if isinstance(prompt, TextPrompt):
        return of_images + len(prompt.text) // _CHARACTERS_PER_TOKEN
    if isinstance(prompt, ChatPrompt):
        num_characters = sum(len(str(message.get("content"))) for message in prompt.messages)
        return of_images + num_characters // _CHARACTERS_PER_TOKEN
    return of_images + len(prompt.token_ids)
