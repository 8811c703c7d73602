"""Exchange between the engine's thread and the server's thread: requests down, outputs up.

    server's thread   reserve -> submit -> newest ... -> close
    engine's thread   wait -> take -> give

Bounded both ways. Down: a request that is not completed holds capacity for each of its sequences, up to
`max_sequences` in total, and for its prepared images and audio, up to `max_media_bytes`. Up: a request has one slot, in
which the newest cumulative output replaces the last; a slow reader finds more in it the next time, without cost to the
engine.
"""

import asyncio
import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from spmd_worker.compat.metrics import Metric, Vector
from spmd_worker.frontends.openai.row import EncodedRow
from spmd_worker.frontends.openai.row_outputs import EncodedSplitRow, RowOutputs
from spmd_worker.frontends.serve.request_histograms import RequestHistograms
from spmd_worker.replica.sequence.outputs import RequestOutput

FAILED: Final = "server_failed"
"""`RequestOutput.error_code` of an error in the engine, not in the request; also of a server that ends."""


class NoCapacityError(Exception):
    """Too many requests are not answered yet, or too many images and audio, as the message says."""


class EndingError(Exception):
    """The server accepts no more requests; the message is the reason."""


@dataclass(eq=False, slots=True)
class OpenRequest:
    """A request that was accepted. `is_streamed`: its reader wants outputs before the last. `arrived_s` is a time of
    the monotonic clock.
    """

    row: EncodedRow | EncodedSplitRow
    is_streamed: bool
    loop: asyncio.AbstractEventLoop
    has_output: asyncio.Event = field(default_factory=asyncio.Event)
    output: RequestOutput | RowOutputs | None = None
    """The newest output, until it is read; under the exchange's lock."""
    arrived_s: float = field(default_factory=time.monotonic)


class RequestExchange:
    """`max_sequences` is the capacity, and `max_media_bytes` that of images and audio, which one request may exceed.
    Any thread may call `end` and `fail`.
    """

    def __init__(self, max_sequences: int, max_media_bytes: float = math.inf) -> None:
        self.max_sequences, self.max_media_bytes = max_sequences, max_media_bytes
        self.num_sequences = self.num_media_bytes = 0
        self.metrics: list[Metric | Vector] = []
        """The engine's, after its last step."""
        self.histograms: RequestHistograms | None = None
        """The engine loop's, once it runs."""
        self.ending = ""
        """Reason why no more requests are accepted; empty while they are."""
        self.has_failed = False
        self._changed = threading.Condition()
        self._open: dict[OpenRequest, None] = {}
        self._arrived: list[OpenRequest] = []
        self._given_up: list[OpenRequest] = []
        self._must_look = False

    # The server's side.

    def check_accepts(self) -> None:
        """Raise EndingError if no more requests are accepted."""
        if self.ending:
            raise EndingError(self.ending)

    def reserve(self, num_sequences: int = 1, num_media_bytes: int = 0) -> None:
        """Reserve capacity. Raises NoCapacityError or EndingError."""
        with self._changed:
            self.check_accepts()
            if self.num_sequences + num_sequences > self.max_sequences:
                raise NoCapacityError
            if (
                num_media_bytes
                and self.num_media_bytes
                and self.num_media_bytes + num_media_bytes > self.max_media_bytes
            ):
                held = f"requests with {self.num_media_bytes} bytes of images and audio are not answered yet"
                raise NoCapacityError(f"{held}: retry later (job.media_window_gib)")
            self.num_sequences += num_sequences
            self.num_media_bytes += num_media_bytes

    def free(self, num_sequences: int, num_media_bytes: int = 0) -> None:
        with self._changed:
            self.num_sequences -= num_sequences
            self.num_media_bytes -= num_media_bytes
            self._changed.notify_all()

    def submit(self, request: OpenRequest) -> None:
        """Hand a request, whose capacity is reserved, to the engine. Raises EndingError."""
        with self._changed:
            self.check_accepts()
            self._open[request] = None
            self._arrived.append(request)
            self._changed.notify_all()

    async def newest(self, request: OpenRequest) -> RequestOutput | RowOutputs:
        """Wait for an unread output: all of the request so far."""
        await request.has_output.wait()
        with self._changed:
            request.has_output.clear()
            output, request.output = request.output, None
        assert output is not None, "set with the output"
        return output

    def close(self, request: OpenRequest) -> None:
        """Close a request whose response has ended, complete or not: the engine aborts the rest. Keeps its capacity."""
        with self._changed:
            del self._open[request]
            self._given_up.append(request)
            self._changed.notify_all()

    # The engine's side.

    def wait(self, limit_s: float) -> None:
        """Wait until there is something to take, or the server ends, at most `limit_s`."""
        with self._changed:
            self._changed.wait_for(lambda: self._arrived or self._given_up or self.ending or self._must_look, limit_s)

    def look(self) -> None:
        """Wake the engine's thread to check its engine, though there is nothing to take."""
        with self._changed:
            self._must_look = True
            self._changed.notify_all()

    def take(self) -> tuple[list[OpenRequest], list[OpenRequest], bool]:
        """Requests that arrived and requests that were closed since the last call, and whether `look` was called."""
        with self._changed:
            must_look, self._must_look = self._must_look, False
            arrived, self._arrived = self._arrived, []
            given_up, self._given_up = self._given_up, []
            return arrived, given_up, must_look

    def give(self, outputs: Sequence[tuple[OpenRequest, RequestOutput | RowOutputs]]) -> None:
        """Put outputs into their requests' slots, and wake the readers whose slot was empty. No effect after `fail`."""
        with self._changed:
            if not self.has_failed:
                self._put(outputs)

    # Any thread.

    def end(self, reason: str) -> None:
        """Accept no more requests; open ones continue. The first reason is kept."""
        with self._changed:
            self.ending = self.ending or reason
            self._changed.notify_all()

    def fail(self, reason: str) -> None:
        """Answer all open requests with an error, now: the engine will answer nothing more. Idempotent."""
        self.end(reason)
        with self._changed:
            if self.has_failed:
                return
            # A completed output that only waits for its reader is kept.
            unanswered = [each for each in self._open if each.output is None or not each.output.finished]
            self._put([(request, _failed(request, reason)) for request in unanswered])
            self.has_failed = True

    def wait_until_closed(self, limit_s: float) -> bool:
        """Wait until every response has ended, at most `limit_s`. Returns whether they have."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._open, limit_s)

    def _put(self, outputs: Sequence[tuple[OpenRequest, RequestOutput | RowOutputs]]) -> None:
        woken = [request for request, _ in outputs if request in self._open and request.output is None]
        for request, output in outputs:
            request.output = output
        for loop in dict.fromkeys(request.loop for request in woken):
            # A closed loop has no readers any more.
            if not loop.is_closed():
                loop.call_soon_threadsafe(_wake, [request for request in woken if request.loop is loop])


def _wake(requests: list[OpenRequest]) -> None:
    for request in requests:
        request.has_output.set()


def _failed(request: OpenRequest, reason: str) -> RequestOutput:
    row = request.row
    prompt, token_ids = (row.content.text, list(row.content.token_ids)) if isinstance(row, EncodedRow) else (None, [])
    return RequestOutput("", prompt, token_ids, finished=True, error=reason, error_code=FAILED)
