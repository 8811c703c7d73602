"""Accepts a server's connections: at most a given number, with idle ones closed when another needs the descriptor.

asyncio's own loop over `accept` retries without descriptors thousands of times a second, and logs a line for each; a
limit that rejects requests would let idle clients shut out active ones.
"""

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Callable
from typing import Final

logger = logging.getLogger(__name__)

BACKLOG: Final = 1024
_AT_A_TIME: Final = 32
"""Most connections accepted per callback: this many descriptors above `most` are in use for a moment."""
_PAUSE_S: Final = 0.5
_LOG_INTERVAL_S: Final = 60.0
_SHORTAGES: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Connections:
    """Connections of one socket. Beyond `most` a new one replaces the longest idle; if none is idle, it waits."""

    def __init__(self, bound: socket.socket, most: int, make: Callable[["Connections"], asyncio.Protocol]) -> None:
        self._bound, self._most, self._make = bound, most, make
        self._loop = asyncio.get_running_loop()
        self._open: dict[asyncio.Transport, None] = {}
        self._idle: dict[asyncio.Transport, None] = {}
        """Idle connections, in the order in which they became idle."""
        self._joining: set[asyncio.BaseProtocol] = set()
        """Connections that were accepted and are not open yet: each is in one of the two, never in both."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_listening = False
        self._has_stopped = False
        self._logged_s = float("-inf")

    def start(self) -> None:
        """Accept from now on. Raises OSError."""
        self._bound.setblocking(False)
        self._bound.listen(BACKLOG)
        self._listen()

    def stop(self) -> None:
        """Stop accepting; open connections remain."""
        self._has_stopped = True
        self._pause()

    def opened(self, connection: asyncio.Transport) -> None:
        """Add a connection, idle until its first request."""
        self._joining.discard(connection.get_protocol())
        self._open[connection] = self._idle[connection] = None
        self._listen()

    def idle(self, connection: asyncio.Transport) -> None:
        self.busy(connection)
        if connection in self._open:
            self._idle[connection] = None
            self._listen()

    def busy(self, connection: asyncio.Transport) -> None:
        """Mark as busy: not to be closed for another."""
        self._idle.pop(connection, None)

    def closed(self, connection: asyncio.Transport) -> None:
        self._open.pop(connection, None)
        self._idle.pop(connection, None)
        self._listen()

    def _accept(self) -> None:
        for _ in range(_AT_A_TIME):
            is_full = len(self._open) + len(self._joining) >= self._most
            if is_full and not self._idle:
                # A connection that closes or becomes idle resumes accepting.
                self._pause()
                return
            try:
                accepted, _ = self._bound.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionError:
                # The client has already left.
                continue
            except OSError as error:
                self._wait(error)
                return
            if is_full:
                # Only now: nobody may have been waiting.
                self._close_idle()
            accepted.setblocking(False)
            connection = self._make(self)
            self._joining.add(connection)
            task = self._loop.create_task(self._join(accepted, connection))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _join(self, accepted: socket.socket, connection: asyncio.Protocol) -> None:
        # An exception of a client that left before it was connected is nobody's.
        with contextlib.suppress(OSError):
            await self._loop.connect_accepted_socket(lambda: connection, accepted)
        self._joining.discard(connection)

    def _close_idle(self) -> None:
        """End the connection that has been idle for longest, if there is one."""
        oldest = next(iter(self._idle), None)
        if oldest is not None:
            self._open.pop(oldest)
            self._idle.pop(oldest)
            oldest.abort()

    def _wait(self, error: OSError) -> None:
        """Retry a little later: there are no descriptors, or the network has a fault."""
        is_short = error.errno in _SHORTAGES
        now_s = self._loop.time()
        if now_s - self._logged_s >= _LOG_INTERVAL_S:
            self._logged_s = now_s
            logger.warning(
                "no connection can be accepted (%s): %d are open%s",
                error.strerror,
                len(self._open),
                "; raise the limit of open files (ulimit -n)" if is_short else "",
            )
        for _ in range(_AT_A_TIME if is_short else 0):
            self._close_idle()
        self._pause()
        self._loop.call_later(_PAUSE_S, self._listen)

    def _listen(self) -> None:
        if not (self._is_listening or self._has_stopped):
            self._is_listening = True
            self._loop.add_reader(self._bound.fileno(), self._accept)

    def _pause(self) -> None:
        if self._is_listening:
            self._is_listening = False
            self._loop.remove_reader(self._bound.fileno())
