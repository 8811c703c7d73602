"""Step channel of one replica: a star of TCP connections around rank 0, for a step's answers and message.

Each follower sends its answer, rank 0 its message: one small send each, without spinning, the same across nodes; a dead
peer is detected at once. Rank 0's heartbeats contain the number of sent messages, so a lost one is detected within a
second. A rank that fails sends an abort message before it leaves.

With many ranks answers and messages pass through relays (`relay_channel.py`); the star carries all else.
`ranks/transport/connect.py` makes the ends, which implement `replica/lockstep/channel.py`.
"""

import contextlib
import logging
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from spmd_worker.base.errors import AbortedError, LostMessageError, RankFailedError
from spmd_worker.ranks.transport import abort_messages
from spmd_worker.ranks.transport.abort_messages import Abort, read_abort, send_last, wait_for_abort
from spmd_worker.ranks.transport.channel import ControlChannel
from spmd_worker.ranks.transport.frames import Frame, FrameError, FrameKind, PeerGoneError, receive_frame, send_frame

logger = logging.getLogger(__name__)

WAITS_FOR_RANKS: Final = True
"""Marker for the watchdog, which finds it in the module of a frame."""

_HEARTBEAT_S: Final = 0.5


class TcpLeader:
    """Rank 0's end: one connection per follower, of which the `children` answer and get the messages. Also a relay's,
    whose rank and whose followers' ranks are given.
    """

    def __init__(
        self, connections: list[socket.socket], timeout_s: float, rank: int = 0, children: Sequence[int] | None = None
    ) -> None:
        """`children`: of the connections' ranks, which follow `rank`; None: all."""
        self.rank, self.size = rank, len(connections) + 1
        self._connections = connections
        self._timeout_s = timeout_s
        self._all = list(range(len(connections)))
        self._children = self._all if children is None else [child - rank - 1 for child in children]
        self._num_sent = 0
        self._is_torn = False
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        self._heart = threading.Thread(target=self._send_heartbeats, name="spmd-heartbeat", daemon=True)
        # `poll` would look at each of a thousand connections in every call.
        self._poll = select.epoll()
        self._indices = {connection.fileno(): index for index, connection in enumerate(connections)}

    def start(self) -> None:
        """Start to listen and to send heartbeats."""
        for connection in self._connections:
            connection.settimeout(self._timeout_s)
            self._poll.register(connection, select.EPOLLIN)
        self._heart.start()

    def collect(self, step: int) -> list[bytes]:
        """Raises RankFailedError naming the silent or dead ranks, AbortedError with a rank's abort message."""
        return self._gather(FrameKind.ANSWER, step, f"no answer to step {step}", self._children)

    def send(self, payload: bytes) -> None:
        """Raises RankFailedError when a follower is gone or does not read."""
        with self._lock:
            number, self._num_sent = self._num_sent, self._num_sent + 1
            try:
                self._send_to(self._children, FrameKind.MESSAGE, number, payload)
            except BaseException:
                # Some followers lack this message: only an abort message may follow.
                self._is_torn = True
                raise

    def exchange_records(self, record: bytes) -> list[bytes]:
        with self._lock:
            self._send_to(self._all, FrameKind.RECORD_WANTED, self._num_sent, b"")
        return [record, *self._gather(FrameKind.RECORD, 0, "no record of the step", self._all)]

    def send_diagnosis(self, text: str) -> None:
        with self._lock:
            self._send_to(self._all, FrameKind.DIAGNOSIS, self._num_sent, text.encode())

    def abort(self, text: str, is_divergence: bool) -> None:
        with self._lock:
            for connection in self._connections:
                send_last(connection, self._num_sent, Abort(text, is_divergence))

    def received_abort(self) -> Abort | None:
        """The first follower's abort message, which is passed on to the others."""
        abort = wait_for_abort(self._connections, first_rank=1)
        if abort is not None:
            self.abort(*abort)
        return abort

    def close(self) -> None:
        self._is_closed.set()
        # The heartbeat thread itself may collect this channel's engine as garbage.
        if self._heart.is_alive() and self._heart is not threading.current_thread():
            self._heart.join(abort_messages.ABORT_WAIT_S)
        for connection in self._connections:
            connection.close()
        self._poll.close()

    def _gather(self, wanted: FrameKind, number: int, missing: str, indices: list[int]) -> list[bytes]:
        """One frame of each of these followers, in rank order. Any dead rank is detected while waiting for others."""
        deadline_s = time.monotonic() + self._timeout_s
        payloads: dict[int, bytes] = {}
        while len(payloads) < len(indices):
            ready = self._poll.poll(max(deadline_s - time.monotonic(), 0.0))
            if not ready:
                silent = [self._rank_of(index) for index in indices if index not in payloads]
                if wanted is FrameKind.ANSWER:
                    silent = self._silent(silent)
                raise RankFailedError(f"{_listed(silent)} silent: {missing} in {self._timeout_s:g} s")
            for descriptor, _ in ready:
                index = self._indices.get(descriptor)
                if index is None:
                    self._read_other()
                    continue
                frame = self._frame_of(index, missing, deadline_s)
                if frame.kind is not wanted or frame.number != number or index in payloads:
                    raise LostMessageError(
                        f"rank {self._rank_of(index)} and rank {self.rank} are not at the same step: {frame.kind.name} "
                        f"{frame.number} where {wanted.name} {number} comes next"
                    )
                payloads[index] = frame.payload
        return [payloads[index] for index in indices]

    def _rank_of(self, index: int) -> int:
        return self.rank + 1 + index

    def _silent(self, ranks: list[int]) -> list[int]:
        """Those of `ranks`, whose answers are missing, that are silent themselves."""
        return ranks

    def _read_other(self) -> None:
        """Read a registered connection that is not a follower's."""
        raise AssertionError("no other connection is registered")

    def _frame_of(self, index: int, missing: str, deadline_s: float) -> Frame:
        connection, rank = self._connections[index], self._rank_of(index)
        connection.settimeout(max(deadline_s - time.monotonic(), 0.001))
        try:
            frame = receive_frame(connection)
        except TimeoutError:
            raise RankFailedError(f"rank {rank} is silent: {missing} in {self._timeout_s:g} s") from None
        except PeerGoneError as error:
            raise RankFailedError(f"rank {rank} is gone: {missing} ({error})") from None
        except FrameError as error:
            raise LostMessageError(f"rank {self.rank} cannot read what rank {rank} sent: {error}") from None
        if frame.kind is FrameKind.ABORT:
            raise AbortedError(*Abort.unpack(frame.payload))
        return frame

    def _send_to(self, indices: list[int], kind: FrameKind, number: int, payload: bytes) -> None:
        for index in indices:
            connection, rank = self._connections[index], self._rank_of(index)
            # A receive has changed the timeout.
            connection.settimeout(self._timeout_s)
            try:
                send_frame(connection, kind, number, payload)
            except (PeerGoneError, TimeoutError) as error:
                abort = read_abort(connection)
                if abort is not None:
                    raise AbortedError(*abort) from None
                raise RankFailedError(f"rank {rank} is gone: {error}") from None

    def _send_heartbeats(self) -> None:
        while not self._is_closed.wait(_HEARTBEAT_S):
            self._send_heartbeat()

    def _send_heartbeat(self) -> None:
        with self._lock:
            for connection in [self._connections[index] for index in self._children] if not self._is_torn else ():
                # A follower that does not read between steps has enough heartbeats; a partial frame would corrupt the
                # stream. A dead follower is detected by `collect`.
                if _is_writable(connection):
                    with contextlib.suppress(PeerGoneError, TimeoutError):
                        send_frame(connection, FrameKind.HEARTBEAT, self._num_sent)


class TcpFollower:
    """A follower's end: its connection to rank 0."""

    def __init__(self, connection: socket.socket, rank: int, size: int, timeout_s: float) -> None:
        self.rank, self.size = rank, size
        self._connection, self._timeout_s = connection, timeout_s
        self._num_received = 0
        self._record: Callable[[], bytes] | None = None

    def answer(self, step: int, payload: bytes) -> None:
        """Raises RankFailedError if rank 0 is gone."""
        self._send(FrameKind.ANSWER, step, payload)

    def receive(self) -> bytes:
        """Raises LostMessageError for a lost or repeated message, AbortedError with rank 0's abort message. Heartbeats
        reveal a lost message but do not extend the wait, because a hanging rank 0 may still send them.
        """
        deadline_s = time.monotonic() + self._timeout_s
        payload = None
        while payload is None:
            payload = self._take(self._next_frame(deadline_s))
        return payload

    def _take(self, frame: Frame) -> bytes | None:
        """Handle a frame; returns the payload of a message."""
        if frame.kind is FrameKind.HEARTBEAT:
            self._check_number(frame.number)
        elif frame.kind is FrameKind.MESSAGE:
            self._check_number(frame.number)
            self._num_received += 1
            return frame.payload
        elif frame.kind is FrameKind.RECORD_WANTED:
            assert self._record is not None, "rank 0 asks for a record before any step"
            self._send(FrameKind.RECORD, 0, self._record())
        elif frame.kind is FrameKind.STEP_WANTED:
            self._send(FrameKind.STEP, 0, b"")
        elif frame.kind is FrameKind.DIAGNOSIS:
            raise AbortedError(frame.payload.decode("utf-8", "replace"), is_divergence=True)
        elif frame.kind is FrameKind.ABORT:
            raise AbortedError(*Abort.unpack(frame.payload))
        else:
            raise LostMessageError(f"rank {self.rank} received {frame.kind.name} where a message comes next")
        return None

    def offer_record(self, record: Callable[[], bytes]) -> None:
        self._record = record

    def abort(self, text: str, is_divergence: bool) -> None:
        send_last(self._connection, self._num_received, Abort(text, is_divergence))

    def received_abort(self) -> Abort | None:
        """The abort message of rank 0, or one that it passed on."""
        return wait_for_abort([self._connection], first_rank=0)

    def close(self) -> None:
        self._connection.close()

    def _next_frame(self, deadline_s: float) -> Frame:
        self._connection.settimeout(max(deadline_s - time.monotonic(), 0.001))
        try:
            return receive_frame(self._connection)
        except TimeoutError:
            raise RankFailedError(f"rank 0 is silent: no message in {self._timeout_s:g} s") from None
        except PeerGoneError as error:
            raise RankFailedError(f"rank 0 is gone ({error})") from None
        except FrameError as error:
            raise LostMessageError(f"rank {self.rank} cannot read what rank 0 sent: {error}") from None

    def _check_number(self, number: int) -> None:
        if number > self._num_received:
            raise LostMessageError(f"message {self._num_received} from rank 0 never reached rank {self.rank}")
        if number < self._num_received:
            raise LostMessageError(f"message {number} from rank 0 reached rank {self.rank} twice")

    def _send(self, kind: FrameKind, number: int, payload: bytes) -> None:
        self._connection.settimeout(self._timeout_s)
        try:
            send_frame(self._connection, kind, number, payload)
        except (PeerGoneError, TimeoutError) as error:
            abort = read_abort(self._connection)
            if abort is not None:
                raise AbortedError(*abort) from None
            raise RankFailedError(f"rank 0 is gone ({error})") from None


class GlooStepChannel:
    """Either end over the control group, if ranks cannot connect to rank 0. Slower, and without heartbeats."""

    def __init__(self, control: ControlChannel) -> None:
        self.rank, self.size = control.rank, control.size
        self._control = control
        self._record: Callable[[], bytes] = bytes

    def collect(self, step: int) -> list[bytes]:
        return self._control.gather(b"")[1:]

    def answer(self, step: int, payload: bytes) -> None:
        self._control.gather(payload)

    def send(self, payload: bytes) -> None:
        self._broadcast(FrameKind.MESSAGE, payload)

    def receive(self) -> bytes:
        received = self._control.broadcast(None)
        kind, payload = FrameKind(received[0]), received[1:]
        if kind is FrameKind.RECORD_WANTED:
            self._control.gather(self._record())
            return self.receive()
        if kind is FrameKind.DIAGNOSIS:
            raise AbortedError(payload.decode(), is_divergence=True)
        return payload

    def offer_record(self, record: Callable[[], bytes]) -> None:
        self._record = record

    def exchange_records(self, record: bytes) -> list[bytes]:
        self._broadcast(FrameKind.RECORD_WANTED, b"")
        return self._control.gather(record)

    def send_diagnosis(self, text: str) -> None:
        self._broadcast(FrameKind.DIAGNOSIS, text.encode())

    def abort(self, text: str, is_divergence: bool) -> None:
        """Peers may be in any collective: they only notice that this rank leaves."""
        logger.debug("leaving: %s", text)

    def received_abort(self) -> Abort | None:
        return None

    def close(self) -> None:
        """Does nothing: the caller owns the control group."""

    def _broadcast(self, kind: FrameKind, payload: bytes) -> None:
        self._control.broadcast(bytes([kind]) + payload)


def _is_writable(connection: socket.socket) -> bool:
    """Whether a complete heartbeat fits the send buffer: Linux reports this while a third of it is free."""
    if connection.fileno() < 0:
        # Closed: the channel ends.
        return False
    poll = select.poll()
    poll.register(connection, select.POLLOUT)
    return any(event & select.POLLOUT for _, event in poll.poll(0))


def _listed(ranks: list[int]) -> str:
    return f"rank {ranks[0]} is" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} are"
