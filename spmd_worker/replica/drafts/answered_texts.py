"""Outputs of rows that were answered, for the drafts of later rows: bounded by requests and by tokens.

An output waits until some row drafts, and is indexed then, the latest outputs first: a batch that is too full to draft
pays nothing. Indexed outputs are in two halves, and the older half is dropped when the newer is full.
"""

from array import array
from collections import deque
from collections.abc import Iterable
from typing import Final

from spmd_worker.replica.drafts.indexed_text import SEPARATOR, IndexedText

MAX_TOKENS: Final = 1 << 20
"""Tokens of all outputs that are kept, with 20 bytes each."""
MAX_INDEXED_AT_ONCE: Final = 1 << 10
"""Tokens that are indexed for one draft, but for an output that is longer: about a millisecond."""


class AnsweredTexts:
    """Keeps at least half of the last `max_requests` outputs, if they have at most half of `max_tokens`."""

    def __init__(self, max_requests: int, max_tokens: int = MAX_TOKENS) -> None:
        self._max_requests, self._max_tokens = max_requests, max_tokens
        self._waiting: deque[array[int]] = deque()
        self._num_waiting_tokens = 0
        # The older half, then the newer.
        self._halves = [self._new_half(), self._new_half()]

    @property
    def num_requests(self) -> int:
        return len(self._waiting) + sum(half.num_requests for half in self._halves)

    @property
    def num_tokens(self) -> int:
        return self._num_waiting_tokens + sum(half.num_tokens for half in self._halves)

    def add(self, output_token_ids: Iterable[int]) -> None:
        """Keep an output; the oldest are dropped for it."""
        output = array("q", output_token_ids)
        # A token that nothing follows is of no use.
        if len(output) < 2 or len(output) > self._max_tokens or not self._max_requests:
            return
        self._waiting.append(output)
        self._num_waiting_tokens += len(output)
        while self.num_requests > self._max_requests or self.num_tokens > self._max_tokens:
            self._drop_oldest()

    def texts(self) -> list[IndexedText]:
        """The indexed outputs, after some more were indexed."""
        if self._waiting:
            for output in self._taken():
                if self._halves[1].is_full(self._max_requests // 2):
                    self._halves = [self._halves[1], self._new_half()]
                self._halves[1].add(output)
        return [half.text for half in reversed(self._halves) if half.text is not None]

    def _taken(self) -> "list[array[int]]":
        """The latest of the waiting outputs, in their order."""
        taken: list[array[int]] = []
        num_tokens = 0
        while self._waiting and (not taken or num_tokens + len(self._waiting[-1]) <= MAX_INDEXED_AT_ONCE):
            taken.append(self._waiting.pop())
            num_tokens += len(taken[-1])
        self._num_waiting_tokens -= num_tokens
        return taken[::-1]

    def _drop_oldest(self) -> None:
        """Drop the older half, else the first output that waits; the newer half for the only one."""
        if self._halves[0].num_requests:
            self._halves[0] = self._new_half()
        elif len(self._waiting) > 1:
            self._num_waiting_tokens -= len(self._waiting.popleft())
        else:
            self._halves[1] = self._new_half()

    def _new_half(self) -> "_Half":
        return _Half(self._max_tokens // 2)


class _Half:
    """Outputs with a separator after each; no memory is used before the first."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self.text: IndexedText | None = None
        self.num_requests = 0

    @property
    def num_tokens(self) -> int:
        return 0 if self.text is None else len(self.text) - self.num_requests

    def is_full(self, max_requests: int) -> bool:
        return self.num_requests >= max_requests or self.num_tokens >= self._max_tokens

    def add(self, output: "array[int]") -> None:
        if self.text is None:
            self.text = IndexedText(self._max_tokens)
        self.text.extend(output)
        self.text.extend((SEPARATOR,))
        self.num_requests += 1
