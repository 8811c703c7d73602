"""A control channel whose ranks are threads of one process: `broadcast`, `gather` and `minimum` without torch.

Offers what `ControlChannel` offers. Knows nothing of groups.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

WAIT_S = 240.0


@dataclass
class _Table:
    """What the ranks of one replica put down for each other."""

    payloads: list[object]
    barrier: threading.Barrier
    before_broadcast: Callable[[bytes], None] = field(default=lambda payload: None)


class ThreadControl:
    """One rank's end. `before_broadcast`, where set, sees what rank 0 sends before the others do."""

    def __init__(self, rank: int, table: _Table) -> None:
        self.rank, self.size = rank, len(table.payloads)
        self.table = table

    def gather(self, payload: bytes) -> list[bytes]:
        return self._exchange(payload)

    def broadcast(self, payload: bytes | None) -> bytes:
        assert (payload is not None) == (self.rank == 0)
        if payload is not None:
            self.table.before_broadcast(payload)
        return self._exchange(payload)[0]

    def minimum(self, numbers: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(map(min, zip(*self._exchange(numbers))))

    def _exchange(self, value):
        self.table.payloads[self.rank] = value
        self.table.barrier.wait(WAIT_S)
        values = list(self.table.payloads)
        self.table.barrier.wait(WAIT_S)
        return values


def thread_controls(size: int) -> list[ThreadControl]:
    """The ends of all ranks; each is to be used by a thread of its own."""
    table = _Table([None] * size, threading.Barrier(size))
    return [ThreadControl(rank, table) for rank in range(size)]
