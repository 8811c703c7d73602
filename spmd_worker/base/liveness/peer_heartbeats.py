"""The last heartbeats of the other ranks, as this rank knows them: their age, and whether their processes are gone."""

from collections.abc import Sequence
from typing import Final

from spmd_worker.base.liveness.failure_diagnosis import SILENT_AFTER_S, RankStatus
from spmd_worker.base.liveness.heartbeat import RankHeartbeat
from spmd_worker.base.liveness.heartbeat_store import HeartbeatStore
from spmd_worker.base.liveness.stall_clock import WatchClock
from spmd_worker.base.process import start_time_of


class PeerHeartbeats:
    """Read by the exchange's thread; any thread may ask for a status. `node` is this node's name."""

    def __init__(self, clock: WatchClock, node: str) -> None:
        self._clock = clock
        self.node: Final = node
        self._last: dict[int, RankHeartbeat] = {}
        self._heard_s: dict[int, float] = {}
        self._gone: dict[int, bool] = {}
        self.published: set[int] = set()
        """Ranks that have a heartbeat under the current name."""

    def read(self, store: HeartbeatStore, ranks: Sequence[int]) -> None:
        """Read the last heartbeats of `ranks`. Raises what the store raises."""
        # Other ranks were read during an alarm: after it, their last heartbeats would look like silence.
        self._last = {rank: last for rank, last in self._last.items() if rank in ranks}
        # Processes first, heartbeats after: a rank that ended well has published so before its process ended.
        gone = [rank for rank, last in self._last.items() if self._is_near(last) and self._has_no_process(last)]
        found = store.find(ranks, self.published)
        self.published = set(found)
        for rank in gone:
            self._gone[rank] = not self._last[rank].has_ended
        for rank, heartbeat in found.items():
            last = self._last.get(rank)
            if last is None or (heartbeat.pid, heartbeat.count) != (last.pid, last.count):
                self._last[rank], self._heard_s[rank] = heartbeat, self._clock.now_s
            self._gone[rank] = rank in gone and not heartbeat.has_ended

    def status(self, rank: int, *, is_store_lost: bool) -> RankStatus:
        """Status of another rank."""
        heard_ago_s = max(self._clock.now_s - self._heard_s.get(rank, self._clock.now_s), 0.0)
        last = self._last.get(rank)
        if is_store_lost and last is not None and self._is_near(last):
            # No heartbeats arrive any more, but a process on this node can be looked up, and does not count as silent.
            is_gone = self._has_no_process(last) and not last.has_ended
            return RankStatus(rank, last, min(heard_ago_s, SILENT_AFTER_S), is_gone)
        return RankStatus(rank, last, heard_ago_s, self._gone.get(rank, False))

    def restart_silence(self) -> None:
        """Count silence from now on: heartbeats missed while the store was lost mean nothing."""
        self._heard_s = dict.fromkeys(self._heard_s, self._clock.now_s)

    def forget_attempt(self) -> None:
        """Forget ranks that have ended or failed: their next heartbeats are of another attempt."""
        self.published.clear()
        for rank, last in list(self._last.items()):
            if last.has_ended or last.failure is not None or self._gone.get(rank, False):
                del self._last[rank]
                self._gone.pop(rank, None)

    def _is_near(self, heartbeat: RankHeartbeat) -> bool:
        """Whether a rank's process is on this node."""
        return bool(self.node) and heartbeat.node == self.node

    def _has_no_process(self, heartbeat: RankHeartbeat) -> bool:
        """Whether the process of a rank on this node is known to have ended."""
        try:
            return start_time_of(heartbeat.pid) != heartbeat.start_time
        except OSError:
            return False
