"""Makes sure that every replica has a part of a round.

Replicas take work as they have room, so one that is slow for a moment may find that all is taken: right for whoever
waits for the answers, and a test of what every replica does, or of one that fails, would find nothing to look at.
"""

import time

from spmd_worker.engine.data_parallel.round import ReplicaRound
from spmd_worker.frontends.batch.row_exchange import RowClaimer
from spmd_worker.frontends.batch.row_window import NumberedLine

_PAUSE_S = 0.002


def give_every_replica_a_part(num_replicas: int) -> None:
    """Call on every rank, once: in each round of prompts or rows from now on no replica takes a second share before
    each has taken its first. There is one for each where there are as many rows as replicas.

    Waits for as long as that needs; where another replica fails meanwhile, it raises as the round does.
    """
    take, draw = ReplicaRound.take, RowClaimer.claim

    # Rounds of two worlds may have one name, so what has begun is known by the object.
    def take_in_turn(self: ReplicaRound, total: int, most: int) -> range:
        key = f"{self.prefix}/first shares"
        if getattr(self, "has_begun", False):
            while self.store.add(key, 0) < num_replicas:
                self.send_heartbeat()
                time.sleep(_PAUSE_S)
            return take(self, total, most)
        share = take(self, total, most)
        self.has_begun = True
        self.store.add(key, 1)
        return share

    def draw_in_turn(self: RowClaimer) -> list[NumberedLine]:
        key = f"{self._prefix}/first chunks"
        has_begun = getattr(self, "has_begun", False)
        # A chunk belongs to who drew its number, whenever it is there.
        if has_begun and self._number is None and self._store.add(key, 0) < num_replicas:
            return []
        rows = draw(self)
        if not has_begun:
            self.has_begun = True
            self._store.add(key, 1)
        return rows

    ReplicaRound.take, RowClaimer.claim = take_in_turn, draw_in_turn
