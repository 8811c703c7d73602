"""Step channel with relays: answers and messages of many ranks, in two hops (`relay_tree.py`).

    rank 0  <-- answers of a group, packed --  relay  <-- answer --  leaf
    rank 0  -- message -->                     relay  -- message --> leaf

Every rank keeps its connection to rank 0 as well, idle while all goes well: over it a rank that dies is seen, abort
messages, records and the diagnosis travel, and rank 0 asks ranks whose answers are missing whether they are there. So a
failure is found and named as in a star.
"""

import contextlib
import select
import socket
import time
from typing import Final

from spmd_worker.base.errors import AbortedError, LostMessageError, RankFailedError
from spmd_worker.ranks.transport import abort_messages
from spmd_worker.ranks.transport.abort_messages import is_closed, wait_for_abort
from spmd_worker.ranks.transport.frames import FrameError, FrameKind, PeerGoneError, receive_frame, send_frame
from spmd_worker.ranks.transport.relay_tree import BundleError, RelayTree, pack_answers, unpack_answers
from spmd_worker.ranks.transport.step_channel import TcpFollower, TcpLeader

WAITS_FOR_RANKS: Final = True
"""Marker for the watchdog, which finds it in the module of a frame."""

_REPLY_S: Final = 1.0
"""Time for ranks without an answer to say that they are there: one that waits in the channel replies at once."""

_BEATS_S: Final = 3.0
"""A relay without a heartbeat for this long is silent itself."""


class TreeLeader(TcpLeader):
    """Rank 0's end."""

    def __init__(self, connections: list[socket.socket], timeout_s: float, tree: RelayTree) -> None:
        super().__init__(connections, timeout_s, children=tree.children(0))
        self._tree = tree

    def collect(self, step: int) -> list[bytes]:
        answers: list[bytes] = []
        for rank, payload in zip(self._tree.children(0), super().collect(step), strict=True):
            num_leaves = len(self._tree.children(rank))
            try:
                answers += unpack_answers(payload, 1 + num_leaves) if num_leaves else [payload]
            except BundleError as error:
                raise LostMessageError(f"rank 0 cannot read what rank {rank} sent: {error}") from None
        return answers

    def _silent(self, ranks: list[int]) -> list[int]:
        """Ranks of the missing groups that do not reply; the relays where all do."""
        asked = [each for rank in ranks for each in (rank, *self._tree.children(rank))]
        for rank in asked:
            with contextlib.suppress(PeerGoneError, TimeoutError):
                send_frame(self._connections[rank - 1], FrameKind.STEP_WANTED, 0)
        replied: dict[int, None] = {}
        deadline_s = time.monotonic() + _REPLY_S
        while len(replied) < len(asked):
            ready = self._poll.poll(max(deadline_s - time.monotonic(), 0.0))
            if not ready:
                break
            for descriptor, _ in ready:
                rank = self._rank_of(self._indices[descriptor])
                # Also an answer that comes now.
                self._frame_of(rank - 1, "no reply", deadline_s)
                replied[rank] = None
        return [rank for rank in asked if rank not in replied] or ranks


class TcpRelay(TcpFollower):
    """End of a group's first rank: `links` are its connections to the others of the group, in rank order."""

    def __init__(
        self, connection: socket.socket, rank: int, size: int, timeout_s: float, links: list[socket.socket]
    ) -> None:
        super().__init__(connection, rank, size, timeout_s)
        self._group = _GroupLeader(links, timeout_s, self)

    def start(self) -> None:
        """Start to listen to the group and to send heartbeats to it."""
        self._group.watch(self._connection)
        self._group.start()

    def answer(self, step: int, payload: bytes) -> None:
        """Wait for the group's answers and send all. Raises as rank 0's `collect` and a follower's `answer` do."""
        try:
            payloads = self._group.collect(step)
        except RankFailedError as error:
            raise self._explained(error) from None
        super().answer(step, pack_answers([payload, *payloads]))

    def receive(self) -> bytes:
        payload = super().receive()
        try:
            self._group.send(payload)
        except RankFailedError as error:
            raise self._explained(error) from None
        return payload

    def take_pending(self) -> None:
        """Handle a frame from rank 0 that is no message, while the group's answers are awaited."""
        payload = self._take(self._next_frame(time.monotonic() + self._timeout_s))
        if payload is not None:
            raise LostMessageError(f"rank {self.rank} received a message before it answered")

    def close(self) -> None:
        self._group.close()
        super().close()

    def _explained(self, error: RankFailedError) -> RankFailedError | AbortedError:
        """Rank 0's abort message, which knows why a rank left, rather than `error`, which knows that it did."""
        abort = wait_for_abort([self._connection], first_rank=0)
        if abort is not None:
            return AbortedError(*abort)
        # Its leaves leave where it does.
        return RankFailedError("rank 0 is gone") if is_closed(self._connection) else error


class _GroupLeader(TcpLeader):
    """A relay's end towards its group."""

    def __init__(self, links: list[socket.socket], timeout_s: float, relay: TcpRelay) -> None:
        super().__init__(links, timeout_s, relay.rank)
        self._relay = relay

    def watch(self, connection: socket.socket) -> None:
        """Also listen to rank 0, which may abort or ask meanwhile."""
        self._poll.register(connection, select.EPOLLIN)

    def _read_other(self) -> None:
        self._relay.take_pending()


class TcpLeaf(TcpFollower):
    """End of a rank that hears from rank 0 through `relay`, over `link`."""

    def __init__(
        self, connection: socket.socket, rank: int, size: int, timeout_s: float, relay: int, link: socket.socket
    ) -> None:
        super().__init__(connection, rank, size, timeout_s)
        self._relay, self._link = relay, link
        self._poll = select.poll()
        self._last_beat_s = 0.0
        self._rank_0_gone: RankFailedError | None = None
        for each in (connection, link):
            self._poll.register(each, select.POLLIN)

    def answer(self, step: int, payload: bytes) -> None:
        self._link.settimeout(self._timeout_s)
        try:
            send_frame(self._link, FrameKind.ANSWER, step, payload)
        except (PeerGoneError, TimeoutError) as error:
            raise self._left(f"rank {self._relay} is gone ({error})") from None

    def receive(self) -> bytes:
        self._last_beat_s = time.monotonic()
        deadline_s = self._deadline(self._last_beat_s + self._timeout_s)
        while True:
            ready = dict(self._poll.poll(max(deadline_s - time.monotonic(), 0.0) * 1000))
            if self._link.fileno() in ready:
                # First: rank 0 may have left after its last message.
                if (payload := self._read_link(deadline_s)) is not None:
                    return payload
            elif ready:
                self._read_rank_0(deadline_s)
                deadline_s = self._deadline(deadline_s)
            else:
                raise self._silence()

    def close(self) -> None:
        self._link.close()
        super().close()

    def _read_link(self, deadline_s: float) -> bytes | None:
        self._link.settimeout(max(deadline_s - time.monotonic(), 0.001))
        try:
            frame = receive_frame(self._link)
        except TimeoutError:
            raise self._silence() from None
        except PeerGoneError as error:
            raise self._left(f"rank {self._relay} is gone ({error})") from None
        except FrameError as error:
            raise LostMessageError(f"rank {self.rank} cannot read what rank {self._relay} sent: {error}") from None
        if frame.kind is FrameKind.HEARTBEAT:
            self._last_beat_s = time.monotonic()
        return self._take(frame)

    def _read_rank_0(self, deadline_s: float) -> None:
        try:
            payload = self._take(self._next_frame(deadline_s))
        except RankFailedError as error:
            self._rank_0_gone = error
            self._poll.unregister(self._connection)
            return
        if payload is not None:
            raise LostMessageError(f"a message reached rank {self.rank} without rank {self._relay}")

    def _deadline(self, deadline_s: float) -> float:
        """A short one where rank 0 is gone: the relay, whose heart may go on, may still have its last message."""
        if self._rank_0_gone is None:
            return deadline_s
        return min(deadline_s, time.monotonic() + abort_messages.ABORT_WAIT_S)

    def _silence(self) -> RankFailedError:
        if self._rank_0_gone is not None:
            return self._rank_0_gone
        is_relay = time.monotonic() - self._last_beat_s > _BEATS_S
        missing = f"no message in {self._timeout_s:g} s"
        if is_relay:
            return RankFailedError(f"rank {self._relay} is silent: {missing} from rank 0 through it")
        return RankFailedError(f"rank 0 is silent: {missing} through rank {self._relay}")

    def _left(self, text: str) -> RankFailedError | AbortedError:
        """Rank 0's abort message if it comes: it knows more. A relay also leaves where rank 0 is gone."""
        if self._rank_0_gone is not None:
            return self._rank_0_gone
        abort = wait_for_abort([self._connection], first_rank=0)
        if abort is not None:
            return AbortedError(*abort)
        return RankFailedError("rank 0 is gone" if is_closed(self._connection) else text)
