"""Rows read ahead of the replicas: the longest first, in chunks that shrink towards the end.

The window is bounded by rows and bytes, because the file may exceed memory: rows are ordered by length only within it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from spmd_worker.engine.data_parallel.round import share_of
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


class RowWindow:
    """Window over the rows of `source`; `reject` is called with invalid ones."""

    def __init__(self, source: RowSource, reject: Callable[[RowError], None]) -> None:
        self._source, self._reject = source, reject
        self._read: list[tuple[int, NumberedLine]] = []
        self._num_read_bytes = 0
        self._sorted: list[NumberedLine] = []

    @property
    def is_empty(self) -> bool:
        """Whether every row of the input has been handed out."""
        return self._source.has_ended and not self._read and not self._sorted

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
                self._read.append((expected_length(found.row), NumberedLine(found.row.index, found.line)))
                self._num_read_bytes += len(found.line)

    def take(self, num_replicas: int, most: int) -> list[NumberedLine]:
        """The next chunk, at most `most` rows; empty if no row is available, though more may come."""
        if not self._sorted:
            # Shortest first, because chunks are popped from the end; of equal ones the earlier row goes first.
            self._read.sort(key=lambda each: (each[0], -each[1].index))
            self._sorted = [line for _, line in self._read]
            self._read, self._num_read_bytes = [], 0
        size = min(most, len(self._sorted))
        if self._source.has_ended:
            size = share_of(len(self._sorted) + len(self._read), num_replicas, size)
        size = self._bounded(size)
        chunk = self._sorted[len(self._sorted) - size :]
        del self._sorted[len(self._sorted) - size :]
        return chunk[::-1]

    def _bounded(self, size: int) -> int:
        """The number of the next `size` rows that fit into _MAX_CHUNK_BYTES, one at least."""
        num_bytes = 0
        for number, each in enumerate(reversed(self._sorted[len(self._sorted) - size :])):
            num_bytes += len(each.line)
            if number and num_bytes > _MAX_CHUNK_BYTES:
                return number
        return size


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
