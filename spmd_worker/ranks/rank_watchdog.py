"""Watchdog of a launched rank: the connection to its heartbeat store, and the groups it may abort.

The heartbeat store is that of torchrun's agent, in a separate connection; without an agent one in rank 0's process.
"""

import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch.distributed as dist
from torch.distributed import distributed_c10d

from spmd_worker.base.liveness.heartbeat_store import OVER, HeartbeatStore
from spmd_worker.base.liveness.watchdog import Watchdog
from spmd_worker.base.liveness.watched import Watched
from spmd_worker.ranks.environment import RankEnvironment

logger = logging.getLogger(__name__)

_CONNECT_S: Final = 60.0
"""Time limit for connecting: ranks start when their imports are done, which may be far apart."""

_ANSWER_S: Final = 5.0
_LOOK_S: Final = 2.0


def watch_program(environment: RankEnvironment, timeout_s: float, run_dir: Path | None, *, spins: bool) -> Watchdog:
    """The watchdog of one of our programs, which owns its process and its world. Not started yet."""
    watched = Watched(
        environment.rank,
        tuple(range(environment.world_size)),
        timeout_s,
        run_dir,
        exits=True,
        abort_groups=_abort_groups,
        has_launcher=_has_agent(),
        spins=spins,
    )
    return Watchdog(watched, _connector(watched, may_host=True))


def watch_guest(environment: RankEnvironment, num_ranks: int, timeout_s: float, *, spins: bool) -> Watchdog:
    """The watchdog of an engine of `num_ranks` ranks in a caller's process. Not started yet."""
    first = environment.rank // num_ranks * num_ranks
    ranks = tuple(range(first, first + num_ranks))
    watched = Watched(environment.rank, ranks, timeout_s, spins=spins)
    return Watchdog(watched, _connector(watched, may_host=False))


def _connector(watched: Watched, *, may_host: bool) -> Callable[[], HeartbeatStore] | None:
    """Function that opens the store; None if there is no other rank, or no store other than the user's."""
    if len(watched.ranks) == 1 or "MASTER_ADDR" not in os.environ or not (_has_agent() or may_host):
        return None
    return _Connector(watched.rank, watched.ranks, is_host=watched.rank == 0 and not _has_agent())


class _Connector:
    """Opens the heartbeat store, and reopens it under the same name after a connection loss."""

    def __init__(self, rank: int, ranks: Sequence[int], *, is_host: bool) -> None:
        self._rank, self._ranks, self._is_host = rank, ranks, is_host
        # A copy: the user's program may change them, and the store's address stays the same.
        self._variables = dict(os.environ)
        self._prefix: str | None = None

    def __call__(self) -> HeartbeatStore:
        if self._prefix is not None and not self._is_host:
            # Raises OSError if nothing listens: torch would retry for long, and print that each time.
            address = (self._variables["MASTER_ADDR"], int(self._variables["MASTER_PORT"]))
            socket.create_connection(address, _LOOK_S).close()
        opened = open_heartbeat_store(
            self._rank, self._ranks, is_host=self._is_host, variables=self._variables, prefix=self._prefix
        )
        self._prefix = opened.prefix
        return opened


def _has_agent() -> bool:
    """Whether torchrun's agent is this process's parent, and keeps a store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def open_heartbeat_store(
    rank: int,
    ranks: Sequence[int],
    *,
    is_host: bool,
    variables: Mapping[str, str] = os.environ,
    prefix: str | None = None,
) -> HeartbeatStore:
    """Connect to the store. It outlives all runs and restarts, so each run has its own keys, and so has each of several
    engines in a world. `prefix` is that of a lost store; without it every rank counts its runs, skipping those of
    earlier attempts: a first name, until the ranks have agreed on theirs. Raises RuntimeError if there is no store.
    """
    store = dist.TCPStore(  # type: ignore[attr-defined]  # torch's stubs do not export it
        variables["MASTER_ADDR"],
        int(variables["MASTER_PORT"]),
        is_master=is_host,
        timeout=timedelta(seconds=_CONNECT_S),
        wait_for_workers=False,
        # Torch's own rendezvous opens the same store in this process.
        multi_tenant=True,
    )
    store.set_timeout(timedelta(seconds=_ANSWER_S))
    if prefix is not None:
        return HeartbeatStore(store, prefix, is_host)
    restart = variables.get("TORCHELASTIC_RESTART_COUNT", "0")
    of_ranks = f"spmd_worker/watch/restart {restart}/ranks {ranks[0]} to {ranks[-1]}"
    while True:
        run = store.add(f"{of_ranks}/runs of rank {rank}", 1)
        opened = HeartbeatStore(store, f"{of_ranks}/run {run}", is_host)
        if not opened.has_flag(OVER):
            return opened


def _abort_groups() -> None:
    """Abort collectives that the main thread may wait for, which torch supports for NCCL's groups."""
    if not dist.is_initialized() or "nccl" not in dist.get_backend_config():
        return
    try:
        distributed_c10d._abort_process_group()
    except (RuntimeError, ValueError) as error:
        logger.debug("the groups could not be aborted: %s", error)
