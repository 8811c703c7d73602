"""What passes between the thread that steps the engine and the thread that serves: requests down, outputs up.

    server's thread   reserve -> submit -> newest ... -> close
    engine's thread   wait -> take -> give

Bounded both ways. Down: every request that is not answered to its end holds a place, as many as it has sequences, and
there are so many places. Up: a request has one slot, which the newest output, all of it so far, replaces; a reader that
is slow finds more in it the next time, and costs the engine nothing meanwhile.
"""

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from spmd_worker.compat.metrics import Metric
from spmd_worker.frontends.openai.pooled_row import EncodedPooledRow, PooledOutput
from spmd_worker.frontends.openai.row import EncodedRow
from spmd_worker.replica.sequence.outputs import RequestOutput

FAILED: Final = "server_failed"
"""`RequestOutput.error_code` where the engine, and not the request, is the reason; also of a server that ends."""


class NoPlaceError(Exception):
    """Too many requests are not answered yet."""


class EndingError(Exception):
    """The server takes no more requests; the message says why."""


@dataclass(eq=False, slots=True)
class OpenRequest:
    """A request that was accepted. `is_streamed`: its reader wants outputs before the last."""

    row: EncodedRow | EncodedPooledRow
    is_streamed: bool
    loop: asyncio.AbstractEventLoop
    news: asyncio.Event = field(default_factory=asyncio.Event)
    output: RequestOutput | PooledOutput | None = None
    """The newest, until its reader takes it; under the exchange's lock."""


class RequestExchange:
    """`most_sequences` is how many places there are. Any thread may call `end` and `fail`."""

    def __init__(self, most_sequences: int) -> None:
        self.most_sequences = most_sequences
        self.num_sequences = 0
        """Places that are held."""
        self.metrics: list[Metric] = []
        """Of the engine, after its last step."""
        self.ending = ""
        """Why there are no more requests; empty while there are."""
        self.has_failed = False
        self._changed = threading.Condition()
        self._open: dict[OpenRequest, None] = {}
        self._arrived: list[OpenRequest] = []
        self._given_up: list[OpenRequest] = []
        self._must_look = False

    # The server's side.

    def reserve(self, num_sequences: int = 1) -> None:
        """Hold so many places. Raises NoPlaceError or EndingError."""
        with self._changed:
            if self.ending:
                raise EndingError(self.ending)
            if self.num_sequences + num_sequences > self.most_sequences:
                raise NoPlaceError
            self.num_sequences += num_sequences

    def free(self, num_sequences: int) -> None:
        """Give places back."""
        with self._changed:
            self.num_sequences -= num_sequences
            self._changed.notify_all()

    def submit(self, request: OpenRequest) -> None:
        """Hand a request, whose places are held, to the engine. Raises EndingError."""
        with self._changed:
            if self.ending:
                raise EndingError(self.ending)
            self._open[request] = None
            self._arrived.append(request)
            self._changed.notify_all()

    async def newest(self, request: OpenRequest) -> RequestOutput | PooledOutput:
        """Wait for an output that was not read yet: all of the request so far."""
        await request.news.wait()
        with self._changed:
            request.news.clear()
            output, request.output = request.output, None
        assert output is not None, "news without an output"
        return output

    def close(self, request: OpenRequest) -> None:
        """Its response has ended, whole or not: the engine ends what is left of the request. Its places stay held."""
        with self._changed:
            del self._open[request]
            self._given_up.append(request)
            self._changed.notify_all()

    # The engine's side.

    def wait(self, limit_s: float) -> None:
        """Until there is something to take, or the server ends, for so long at most."""
        with self._changed:
            self._changed.wait_for(self._has_news, limit_s)

    def look(self) -> None:
        """Have the engine's thread look after its engine, though there is nothing to take."""
        with self._changed:
            self._must_look = True
            self._changed.notify_all()

    def take(self) -> tuple[list[OpenRequest], list[OpenRequest], bool]:
        """Since the last call: requests that have arrived, those whose responses have ended (each request comes in
        both), and whether `look` was called.
        """
        with self._changed:
            must_look, self._must_look = self._must_look, False
            arrived, self._arrived = self._arrived, []
            given_up, self._given_up = self._given_up, []
            return arrived, given_up, must_look

    def give(self, outputs: Sequence[tuple[OpenRequest, RequestOutput | PooledOutput]]) -> None:
        """Put outputs into their requests' slots, and wake the readers whose slot was empty. After `fail` nothing."""
        with self._changed:
            if not self.has_failed:
                self._put(outputs)

    # Any thread.

    def end(self, reason: str) -> None:
        """Take no more requests; those that are there go on. The first reason counts."""
        with self._changed:
            self.ending = self.ending or reason
            self._changed.notify_all()

    def fail(self, reason: str) -> None:
        """Answer everything that is open with an error, now: the engine will answer nothing more. Idempotent."""
        self.end(reason)
        with self._changed:
            if self.has_failed:
                return
            # What was answered to its end, and only waits for its reader, stays answered.
            unanswered = [each for each in self._open if each.output is None or not each.output.finished]
            self._put([(request, _failed(request, reason)) for request in unanswered])
            self.has_failed = True

    def wait_until_closed(self, limit_s: float) -> bool:
        """Until every response has ended, for so long at most. Returns whether they have."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._open, limit_s)

    def _has_news(self) -> bool:
        return bool(self._arrived or self._given_up or self.ending or self._must_look)

    def _put(self, outputs: Sequence[tuple[OpenRequest, RequestOutput | PooledOutput]]) -> None:
        woken = [request for request, _ in outputs if request in self._open and request.output is None]
        for request, output in outputs:
            request.output = output
        for loop in dict.fromkeys(request.loop for request in woken):
            # One that was closed has no readers any more.
            if not loop.is_closed():
                loop.call_soon_threadsafe(_wake, [request for request in woken if request.loop is loop])


def _wake(requests: list[OpenRequest]) -> None:
    for request in requests:
        request.news.set()


def _failed(request: OpenRequest, reason: str) -> RequestOutput:
    row = request.row
    prompt, token_ids = (None, []) if isinstance(row, EncodedPooledRow) else (row.prompt, list(row.prompt_token_ids))
    return RequestOutput("", prompt, token_ids, finished=True, error=reason, error_code=FAILED)
