"""Abort messages on a step channel: what a rank that fails says before it leaves, and how the others read it."""

import contextlib
import logging
import select
import socket
import time
from typing import Final, NamedTuple

from spmd_worker.ranks.transport.frames import FrameError, FrameKind, receive_frame, send_frame

logger = logging.getLogger(__name__)

WAITS_FOR_RANKS: Final = True
"""Marker for the watchdog, which finds it in the module of a frame."""

ABORT_WAIT_S: Final = 3.0
"""Time to wait for a peer's abort message after a failure here."""


class Abort(NamedTuple):
    """A rank's abort message. `is_divergence`: the replicas disagree, rather than a rank having failed."""

    text: str
    is_divergence: bool

    def pack(self) -> bytes:
        return bytes([self.is_divergence]) + self.text.encode("utf-8", "replace")

    @staticmethod
    def unpack(payload: bytes) -> "Abort":
        return Abort(payload[1:].decode("utf-8", "replace"), bool(payload[:1] != b"\0"))


def send_last(connection: socket.socket, number: int, abort: Abort) -> None:
    """Send an abort message, best effort: the peer may be gone or not read."""
    with contextlib.suppress(OSError):
        connection.settimeout(0.2)
        send_frame(connection, FrameKind.ABORT, number, abort.pack())


def wait_for_abort(connections: list[socket.socket], first_rank: int) -> Abort | None:
    """An abort message of one of these ranks, which are consecutive; None if none comes within a few seconds, or all
    are gone. Costs as much as there is to read: rank 0 may have a thousand connections.
    """
    deadline_s = time.monotonic() + ABORT_WAIT_S
    poll = select.poll()
    waiting = {connection.fileno(): connection for connection in connections if connection.fileno() >= 0}
    for descriptor in waiting:
        poll.register(descriptor, select.POLLIN)
    is_over = False
    # At least once, also after a pause of this process: what was said lies there.
    while waiting and not is_over:
        for descriptor, _ in poll.poll(max(deadline_s - time.monotonic(), 0.0) * 1000):
            connection = waiting[descriptor]
            try:
                abort = _next_abort(connection)
            except (OSError, FrameError):
                # Nothing more can come.
                poll.unregister(descriptor)
                del waiting[descriptor]
                continue
            if abort is not None:
                logger.debug("rank %d sent an abort message", first_rank + connections.index(connection))
                return abort
        is_over = time.monotonic() >= deadline_s
    return None


def read_abort(connection: socket.socket) -> Abort | None:
    """A peer's abort message, if it lies there."""
    try:
        return _next_abort(connection)
    except (OSError, FrameError):
        return None


def _next_abort(connection: socket.socket) -> Abort | None:
    """Read frames up to a peer's abort message; None if there is none yet. Raises OSError where the peer is gone,
    FrameError for invalid bytes.
    """
    while True:
        connection.settimeout(0.05)
        try:
            frame = receive_frame(connection)
        except TimeoutError:
            return None
        if frame.kind is FrameKind.DIAGNOSIS:
            return Abort(frame.payload.decode("utf-8", "replace"), is_divergence=True)
        if frame.kind is FrameKind.ABORT:
            return Abort.unpack(frame.payload)
        if frame.kind is FrameKind.STEP_WANTED:
            # Rank 0 must not take this rank, which has given up on another, for a silent one.
            send_frame(connection, FrameKind.STEP, 0)


def is_closed(connection: socket.socket) -> bool:
    """Whether the other end has closed the connection, which has nothing else to read."""
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except (TimeoutError, BlockingIOError):
        return False
    except OSError:
        return True
