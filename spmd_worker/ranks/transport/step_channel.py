"""How a step's message and answers cross the ranks of one replica: a star of TCP connections around rank 0.

Each follower sends its answer up, rank 0 its message down: one small send each, no spinning, the same code across
nodes, and a dead peer is seen at once. A heartbeat from rank 0 says how many messages it has sent, so a lost one is
noticed within a second and not at the timeout. Whoever fails says so to the others before it leaves (`abort`).

`ranks/transport/connect.py` makes one. The ends are what `replica/lockstep/channel.py` asks for.
"""

import logging
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from spmd_worker.base.errors import AbortedError, LostMessageError, RankFailedError
from spmd_worker.ranks.transport.channel import ControlChannel
from spmd_worker.ranks.transport.frames import Frame, FrameError, FrameKind, PeerGoneError, receive_frame, send_frame

logger = logging.getLogger(__name__)

WAITS_FOR_RANKS: Final = True
"""For the watchdog, which finds it in the module of a frame."""

_HEARTBEAT_S: Final = 0.5
_ABORT_WAIT_S: Final = 3.0
"""How long to wait for what a peer has to say, once something has failed here."""


class Abort(NamedTuple):
    """A rank's abort message. `is_divergence` says that the replicas disagree, rather than that a rank broke."""

    text: str
    is_divergence: bool

    def pack(self) -> bytes:
        """For the wire."""
        return bytes([self.is_divergence]) + self.text.encode("utf-8", "replace")

    @staticmethod
    def unpack(payload: bytes) -> "Abort":
        """From the wire."""
        return Abort(payload[1:].decode("utf-8", "replace"), bool(payload[:1] != b"\0"))


class TcpLeader:
    """Rank 0's end: one connection a follower."""

    def __init__(self, connections: list[socket.socket], timeout_s: float) -> None:
        self.rank, self.size = 0, len(connections) + 1
        self._connections = connections
        self._timeout_s = timeout_s
        self._num_sent = 0
        self._is_torn = False
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        self._heart = threading.Thread(target=self._send_heartbeats, name="spmd-heartbeat", daemon=True)
        self._poll = select.poll()
        self._indices = {connection.fileno(): index for index, connection in enumerate(connections)}

    def start(self) -> None:
        """Begin to listen and the heartbeat."""
        for connection in self._connections:
            connection.settimeout(self._timeout_s)
            self._poll.register(connection, select.POLLIN)
        self._heart.start()

    def collect(self, step: int) -> list[bytes]:
        """Raises RankFailedError naming the silent or dead ranks, AbortedError with a rank's own abort message."""
        return self._gather(FrameKind.ANSWER, step, f"no answer to step {step}")

    def send(self, payload: bytes) -> None:
        """Raises RankFailedError when a follower is gone or does not read."""
        with self._lock:
            number, self._num_sent = self._num_sent, self._num_sent + 1
            try:
                self._send_all(FrameKind.MESSAGE, number, payload)
            except BaseException:
                # Some have this message and some never will: the next they hear must be why.
                self._is_torn = True
                raise

    def exchange_records(self, record: bytes) -> list[bytes]:
        with self._lock:
            self._send_all(FrameKind.RECORD_WANTED, self._num_sent, b"")
        return [record, *self._gather(FrameKind.RECORD, 0, "no record of the step")]

    def send_diagnosis(self, text: str) -> None:
        with self._lock:
            self._send_all(FrameKind.DIAGNOSIS, self._num_sent, text.encode())

    def abort(self, text: str, is_divergence: bool) -> None:
        with self._lock:
            for connection in self._connections:
                _send_last(connection, self._num_sent, Abort(text, is_divergence))

    def received_abort(self) -> Abort | None:
        """The first follower that says something; the others are told before this returns."""
        deadline_s = time.monotonic() + _ABORT_WAIT_S
        while time.monotonic() < deadline_s:
            for index, connection in enumerate(self._connections):
                abort = _look_for_abort(connection, index + 1)
                if abort is not None:
                    self.abort(*abort)
                    return abort
        return None

    def close(self) -> None:
        self._is_closed.set()
        # It may be the thread in which garbage is collected, this channel's engine too.
        if self._heart.is_alive() and self._heart is not threading.current_thread():
            self._heart.join(_ABORT_WAIT_S)
        for connection in self._connections:
            connection.close()

    def _gather(self, wanted: FrameKind, number: int, missing: str) -> list[bytes]:
        """One frame of each follower, in rank order. Whoever is gone is noticed while others are still waited for."""
        deadline_s = time.monotonic() + self._timeout_s
        payloads: dict[int, bytes] = {}
        while len(payloads) < len(self._connections):
            ready = self._poll.poll(max(deadline_s - time.monotonic(), 0.0) * 1000)
            if not ready:
                silent = [index + 1 for index in range(len(self._connections)) if index not in payloads]
                raise RankFailedError(f"{_listed(silent)} silent: {missing} in {self._timeout_s:g} s")
            for descriptor, _ in ready:
                index = self._indices[descriptor]
                frame = self._frame_of(index, missing, deadline_s)
                if frame.kind is not wanted or frame.number != number or index in payloads:
                    what = f"{frame.kind.name} {frame.number} where {wanted.name} {number} comes next"
                    raise LostMessageError(f"rank {index + 1} and rank 0 are not at the same step: {what}")
                payloads[index] = frame.payload
        return [payloads[index] for index in range(len(self._connections))]

    def _frame_of(self, index: int, missing: str, deadline_s: float) -> Frame:
        connection, rank = self._connections[index], index + 1
        connection.settimeout(max(deadline_s - time.monotonic(), 0.001))
        try:
            frame = receive_frame(connection)
        except TimeoutError:
            raise RankFailedError(f"rank {rank} is silent: {missing} in {self._timeout_s:g} s") from None
        except PeerGoneError as error:
            raise RankFailedError(f"rank {rank} is gone: {missing} ({error})") from None
        except FrameError as error:
            raise LostMessageError(f"rank 0 cannot read what rank {rank} sent: {error}") from None
        if frame.kind is FrameKind.ABORT:
            raise AbortedError(*Abort.unpack(frame.payload))
        return frame

    def _send_all(self, kind: FrameKind, number: int, payload: bytes) -> None:
        for index, connection in enumerate(self._connections):
            # A wait has left on it what was left of its own time.
            connection.settimeout(self._timeout_s)
            try:
                send_frame(connection, kind, number, payload)
            except (PeerGoneError, TimeoutError) as error:
                abort = _look_for_abort(connection, index + 1)
                if abort is not None:
                    raise AbortedError(*abort) from None
                raise RankFailedError(f"rank {index + 1} is gone: {error}") from None

    def _send_heartbeats(self) -> None:
        while not self._is_closed.wait(_HEARTBEAT_S):
            self._send_heartbeat()

    def _send_heartbeat(self) -> None:
        with self._lock:
            for connection in self._connections if not self._is_torn else ():
                if not _has_room(connection):
                    # Nobody reads, between two steps, what has been said often enough. Part of a frame would be read as
                    # the beginning of the next.
                    continue
                # A dead follower is found by the rank that waits for its answer.
                try:
                    send_frame(connection, FrameKind.HEARTBEAT, self._num_sent)
                except (PeerGoneError, TimeoutError):
                    continue


class TcpFollower:
    """A follower's end: its connection to rank 0."""

    def __init__(self, connection: socket.socket, rank: int, size: int, timeout_s: float) -> None:
        self.rank, self.size = rank, size
        self._connection, self._timeout_s = connection, timeout_s
        self._num_received = 0
        self._record: Callable[[], bytes] | None = None

    def answer(self, step: int, payload: bytes) -> None:
        """Raises RankFailedError when rank 0 is gone."""
        self._send(FrameKind.ANSWER, step, payload)

    def receive(self) -> bytes:
        """Raises LostMessageError for a message lost or repeated, AbortedError with rank 0's abort message.

        Heartbeats show at once that something is missing; they do not lengthen the wait, because a rank 0 that hangs
        may have a heart that beats.
        """
        deadline_s = time.monotonic() + self._timeout_s
        while True:
            frame = self._next_frame(deadline_s)
            if frame.kind is FrameKind.HEARTBEAT:
                self._check_number(frame.number)
            elif frame.kind is FrameKind.MESSAGE:
                self._check_number(frame.number)
                self._num_received += 1
                return frame.payload
            elif frame.kind is FrameKind.RECORD_WANTED:
                assert self._record is not None, "rank 0 asks for a record before any step"
                self._send(FrameKind.RECORD, 0, self._record())
            elif frame.kind is FrameKind.DIAGNOSIS:
                raise AbortedError(frame.payload.decode("utf-8", "replace"), is_divergence=True)
            elif frame.kind is FrameKind.ABORT:
                raise AbortedError(*Abort.unpack(frame.payload))
            else:
                raise LostMessageError(f"rank {self.rank} received {frame.kind.name} where a message comes next")

    def offer_record(self, record: Callable[[], bytes]) -> None:
        self._record = record

    def abort(self, text: str, is_divergence: bool) -> None:
        _send_last(self._connection, self._num_received, Abort(text, is_divergence))

    def received_abort(self) -> Abort | None:
        """What rank 0 said, or passed on, before it left."""
        deadline_s = time.monotonic() + _ABORT_WAIT_S
        while time.monotonic() < deadline_s:
            abort = _look_for_abort(self._connection, 0)
            if abort is not None:
                return abort
        return None

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
            abort = _look_for_abort(self._connection, 0)
            if abort is not None:
                raise AbortedError(*abort) from None
            raise RankFailedError(f"rank 0 is gone ({error})") from None


class GlooStepChannel:
    """Either end, over the control group: where ranks cannot connect to rank 0. Slower, and without heartbeats."""

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
        """Peers may be in any collective: there is no way to reach them but to leave, which gloo tells them."""
        logger.debug("leaving: %s", text)

    def received_abort(self) -> Abort | None:
        """None: see `abort`."""
        return None

    def close(self) -> None:
        """The control group belongs to somebody else."""

    def _broadcast(self, kind: FrameKind, payload: bytes) -> None:
        self._control.broadcast(bytes([kind]) + payload)


def _has_room(connection: socket.socket) -> bool:
    """Whether a heartbeat would go at once, and whole: Linux says so while a third of the buffer is free."""
    if connection.fileno() < 0:
        # Closed: the channel ends.
        return False
    asked = select.poll()
    asked.register(connection, select.POLLOUT)
    return any(event & select.POLLOUT for _, event in asked.poll(0))


def _listed(ranks: list[int]) -> str:
    return f"rank {ranks[0]} is" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} are"


def _send_last(connection: socket.socket, number: int, abort: Abort) -> None:
    """Best effort: a rank that is gone needs no explanation, and nobody must wait here for one who does not read."""
    try:
        connection.settimeout(0.2)
        send_frame(connection, FrameKind.ABORT, number, abort.pack())
    except OSError:
        return


def _look_for_abort(connection: socket.socket, rank: int) -> Abort | None:
    """Read on until a peer's abort message; None when there are none now."""
    while True:
        try:
            connection.settimeout(0.05)
            frame = receive_frame(connection)
        except TimeoutError:
            return None
        except (OSError, FrameError):
            time.sleep(0.02)
            return None
        if frame.kind in (FrameKind.ABORT, FrameKind.DIAGNOSIS):
            logger.debug("rank %d said why it leaves", rank)
            is_diagnosis = frame.kind is FrameKind.DIAGNOSIS
            return (
                Abort(frame.payload.decode("utf-8", "replace"), True) if is_diagnosis else Abort.unpack(frame.payload)
            )
