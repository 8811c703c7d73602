"""Rendezvous in the launcher's store: the ranks of a world agree on a name that no world had before.

The store outlives processes and worlds, so it holds keys of ranks that died, or gave up, while they were joining.
Counters that each rank keeps for itself differ from then on. Here each arrival has a name of its own: rank 0 offers the
world's to every arrival it finds, and publishes "go" when the latest arrival of every rank has accepted it.

    rank 0                                  rank R
                                            at/R = arrival
    offer/arrival = world, for each
                                            taken/world/arrival, once offer/arrival exists
    go/world, once all have accepted it     returns world, once go/world exists

A restarted rank 0 makes a new offer to all ranks that still wait; a restarted rank is offered the same world.
"""

import time
import uuid
from collections.abc import Iterator
from datetime import timedelta
from typing import Final

from torch.distributed.distributed_c10d import Store

from spmd_worker.base.errors import RankFailedError

WAITS_FOR_RANKS: Final = True
"""Marker for the watchdog, which finds it in the module of a frame."""

_MIN_POLL_S: Final = 0.001
_MAX_POLL_S: Final = 0.02


def meet(store: Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """The world's name, the same on the `world_size` ranks that make this call. Raises RankFailedError if they are not
    all here within `timeout`; on rank 0 it names the missing ranks.
    """
    return _lead(store, world_size, timeout) if rank == 0 else _follow(store, rank, timeout)


def _lead(store: Store, world_size: int, timeout: timedelta) -> str:
    world = _new_name()
    offered: set[str] = set()
    missing = list(range(1, world_size))
    for _ in _polls(timeout):
        arrivals = {rank: _read(store, f"at/{rank}") for rank in missing}
        for arrival in arrivals.values():
            if arrival and arrival not in offered:
                store.set(f"offer/{arrival}", world)
                offered.add(arrival)
        missing = [rank for rank, arrival in arrivals.items() if not _has_accepted(store, world, arrival)]
        # Read all again: a rank that had accepted may have died since, and arrived again.
        if not missing:
            missing = [
                rank for rank in range(1, world_size) if not _has_accepted(store, world, _read(store, f"at/{rank}"))
            ]
            if not missing:
                store.set(f"go/{world}", "1")
                return world
    raise RankFailedError(
        f"rank {', '.join(map(str, missing))} has not joined in {timeout.total_seconds():g} s: every rank makes its "
        f"engine, in the same order, or none"
    )


def _follow(store: Store, rank: int, timeout: timedelta) -> str:
    arrival, world = _new_name(), ""
    store.set(f"at/{rank}", arrival)
    try:
        for _ in _polls(timeout):
            # First: a world that has begun needs this rank, whatever rank 0 offers next.
            if world and store.check([f"go/{world}"]):
                return world
            offer = _read(store, f"offer/{arrival}")
            if offer != world:
                world = offer
                store.set(f"taken/{world}/{arrival}", "1")
    except BaseException:
        _give_up(store, rank)
        raise
    _give_up(store, rank)
    raise RankFailedError(
        f"rank 0 has not joined with all the others in {timeout.total_seconds():g} s: every rank makes its engine, in "
        f"the same order, or none"
    )


def _give_up(store: Store, rank: int) -> None:
    """Withdraw the arrival: without it the world does not begin."""
    try:
        store.set(f"at/{rank}", "")
    except RuntimeError:
        # The store is gone, and with it all ranks that wait there.
        return


def _has_accepted(store: Store, world: str, arrival: str) -> bool:
    return bool(arrival) and store.check([f"taken/{world}/{arrival}"])


def _read(store: Store, key: str) -> str:
    """Value of a key; empty if it does not exist."""
    return store.get(key).decode() if store.check([key]) else ""


def _new_name() -> str:
    return uuid.uuid4().hex


def _polls(timeout: timedelta) -> Iterator[None]:
    """Yield at least once, then less and less often, until the time is over."""
    deadline_s = time.monotonic() + timeout.total_seconds()
    wait_s = _MIN_POLL_S
    while True:
        yield
        if time.monotonic() > deadline_s:
            return
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, _MAX_POLL_S)
