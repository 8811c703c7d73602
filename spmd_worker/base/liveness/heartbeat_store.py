"""The heartbeat store, where ranks publish their heartbeats: keys on the launcher's store, which outlives all ranks."""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from spmd_worker.base.liveness.heartbeat import RankHeartbeat

OVER: Final = "over"
"""Flag of a rank's own name that is not used any more: an agreed name has replaced it, or the attempt has failed and
there may be another in the same process.
"""


class KeyValueStore(Protocol):
    """Methods of `torch.distributed.Store` in use. They raise RuntimeError when it is gone."""

    def multi_get(self, keys: list[str], /) -> list[bytes]: ...

    def set(self, key: str, value: str, /) -> None: ...

    def add(self, key: str, amount: int, /) -> int: ...

    def check(self, keys: list[str], /) -> bool: ...


@dataclass(frozen=True, slots=True)
class HeartbeatStore:
    """A store, and the prefix of this run's keys. `is_host`: the store is in this process."""

    store: KeyValueStore
    prefix: str
    is_host: bool = False

    def publish(self, heartbeat: RankHeartbeat) -> None:
        """Replace this rank's last heartbeat."""
        self.store.set(f"{self.prefix}/heartbeat/{heartbeat.rank}", heartbeat.pack().decode())

    def find(self, ranks: Sequence[int], known: Container[int] = ()) -> dict[int, RankHeartbeat]:
        """The last heartbeats of those of `ranks` that have published one. The `known` ranks have: if all are known,
        one request suffices.
        """
        keys = {rank: f"{self.prefix}/heartbeat/{rank}" for rank in ranks}
        there = [rank for rank, key in keys.items() if rank in known or self.store.check([key])]
        payloads = self.store.multi_get([keys[rank] for rank in there]) if there else []
        return {rank: RankHeartbeat.unpack(payload) for rank, payload in zip(there, payloads, strict=True)}

    def count(self, what: str, amount: int = 1) -> int:
        """Increment a counter of all ranks, which starts at 0. Returns its new value; an `amount` of 0 reads it."""
        return self.store.add(f"{self.prefix}/{what}", amount)

    def raise_flag(self, name: str) -> None:
        """Set a flag for all ranks. Flags are never cleared."""
        self.store.set(f"{self.prefix}/{name}", "1")

    def has_flag(self, name: str) -> bool:
        """Whether a rank set it."""
        return self.store.check([f"{self.prefix}/{name}"])
