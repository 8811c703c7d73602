"""One round of work shared by replicas: its queue, heartbeats, failures and end.

    taken      number of items taken, from the front
    counted    number answered so far, for progress bars
    heartbeat/R  heartbeat of replica R: a growing number
    finished   number of replicas without work left; the last one sets `over`
    interrupted  set when a signal handler raised: items not taken yet are dropped
    failed     the first replica that failed sets `failure` to its text

Replicas never wait for one another before the end of a round.
"""

import time
from collections.abc import Callable, Iterator
from typing import Final

from spmd_worker.base.errors import RankFailedError
from spmd_worker.engine.data_parallel.store import Store

WAITS_FOR_RANKS: Final = True
"""Read by the watchdog, in the module of a frame."""

_MAX_HEARTBEAT_S: Final = 0.5
_HEARTBEATS_PER_TIMEOUT: Final = 8
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.02


class ReplicaRound:
    """One rank's handle of a round. `prefix` is the round's own: the same on every rank, in no other round.

    The leader of each replica takes, sends heartbeats and finishes; any rank may report a failure, and all may wait.
    """

    def __init__(
        self, store: Store, prefix: str, replica: int, num_replicas: int, timeout_s: float, is_leader: bool = True
    ) -> None:
        self.store, self.prefix, self.replica, self.num_replicas = store, prefix, replica, num_replicas
        self._is_leader, self._timeout_s = is_leader, timeout_s
        self._heartbeat_s = min(_MAX_HEARTBEAT_S, timeout_s / _HEARTBEATS_PER_TIMEOUT)
        self._last_heartbeat_s = self._last_look_s = float("-inf")
        self._seen: dict[int, tuple[int, float]] = {}
        self._has_finished = self._has_interrupted = False

    def take(self, total: int, most: int) -> range:
        """The next indices of `total` for this replica, at most `most`; empty when all are taken.

        The shares shrink towards the end, so that the replicas end together.
        """
        wanted = share_of(total - self.store.add(self._key("taken"), 0), self.num_replicas, most)
        if wanted == 0:
            return range(0)
        stop = self.store.add(self._key("taken"), wanted)
        return range(min(stop - wanted, total), min(stop, total))

    def count(self, number: int) -> None:
        """Add `number` to the count of answered work; its unit is the caller's."""
        self.store.add(self._key("counted"), number)

    @property
    def num_counted(self) -> int:
        """Sum over all replicas."""
        return self.store.add(self._key("counted"), 0)

    def send_heartbeat(self) -> bool:
        """Send this replica's heartbeat, if due; call between steps. Returns whether it was due.

        Raises RankFailedError when another replica has failed.
        """
        now_s = time.monotonic()
        if now_s - self._last_heartbeat_s < self._heartbeat_s:
            return False
        self._last_heartbeat_s = now_s
        if self._is_leader:
            self.store.add(self._key(f"heartbeat/{self.replica}"), 1)
        self.check_failure()
        return True

    def check_failure(self) -> None:
        if self.store.check([self._key("failure")]):
            raise RankFailedError(self.store.get(self._key("failure")).decode("utf-8", "replace"))

    def check_others(self) -> None:
        """Raise RankFailedError when another replica has been silent for the timeout; call while waiting."""
        now_s = time.monotonic()
        if now_s - self._last_look_s < self._heartbeat_s:
            return
        self._last_look_s = now_s
        for replica in range(self.num_replicas):
            count = self.store.add(self._key(f"heartbeat/{replica}"), 0)
            last_count, since_s = self._seen.get(replica, (-1, now_s))
            if count != last_count:
                self._seen[replica] = (count, now_s)
            elif replica != self.replica and now_s - since_s > self._timeout_s:
                raise RankFailedError(f"replica {replica} is silent: no sign of life in {self._timeout_s:g} s")

    def fail(self, text: str) -> None:
        """Report the reason why this rank leaves; the first report wins."""
        if self.store.add(self._key("failed"), 1) == 1:
            self.store.set(self._key("failure"), text.encode("utf-8", "replace"))

    def interrupt(self) -> None:
        """End the round's call on all replicas, with their unanswered prompts."""
        if not self._has_interrupted:
            self._has_interrupted = True
            self.store.set(self._key("interrupted"), b"")

    @property
    def is_interrupted(self) -> bool:
        return self._has_interrupted or self.store.check([self._key("interrupted")])

    def finish(self) -> None:
        """This replica has no work left; called once, by its leader."""
        assert self._is_leader, "the leader speaks for its replica"
        assert not self._has_finished, self.prefix
        self._has_finished = True
        if self.store.add(self._key("finished"), 1) == self.num_replicas:
            self.store.set(self._key("over"), b"")

    @property
    def is_over(self) -> bool:
        """Whether every replica has finished."""
        return self.store.check([self._key("over")])

    def wait(self, is_done: Callable[[], bool], *, may_be_silent: bool = False) -> Iterator[None]:
        """Yield repeatedly until `is_done`. Raises RankFailedError for a failed, or a forbidden silent, replica."""
        pause_s = _FIRST_PAUSE_S
        while not is_done():
            self.check_failure()
            self.send_heartbeat()
            if not may_be_silent:
                self.check_others()
            yield
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def forget(self) -> None:
        """Remove the round's keys: called on one rank, when no other reads them any more."""
        heartbeats = [f"heartbeat/{replica}" for replica in range(self.num_replicas)]
        for name in ("taken", "counted", "finished", "over", "interrupted", "failed", "failure", *heartbeats):
            self.store.delete_key(self._key(name))

    def _key(self, name: str) -> str:
        return f"{self.prefix}/{name}"


def share_of(num_left: int, num_replicas: int, most: int) -> int:
    """Share of `num_left` for a replica with capacity for `most`: half of its equal part, at least one.

    Guided self-scheduling (Polychronopoulos and Kuck, 1987), with half parts because rows differ in length.
    """
    return max(0, min(num_left, most, max(1, num_left // (2 * num_replicas))))
