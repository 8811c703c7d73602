"""The environment of worker processes: where their own world meets, and how many threads each computes with.

Everything listens on loopback, because the workers are on one node.
"""

import logging
import os
import socket
import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import Final

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch does not list it

from spmd_worker.ranks.cores import waiting_variables
from spmd_worker.ranks.network_interface import INTERFACE_VARIABLES, LOOPBACK, interface_of

logger = logging.getLogger(__name__)


_LAUNCHER_VARIABLES: Final = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE"),
    *("GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
)


def open_store(timeout_s: float) -> TCPStore:
    """The store in which one world of workers meets: this process's, on a free port of loopback."""
    # The socket is bound here, because the store by itself would listen on all interfaces.
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    return TCPStore(
        LOOPBACK,
        port,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def process_environment(num_workers: int) -> dict[str, str]:
    """What a worker process is started with: this one's variables without a launcher's, the same import path.

    OMP_NUM_THREADS is 1 unless the user has set it, which a warning says.
    """
    inherited = {name: value for name, value in os.environ.items() if not _is_set_by_a_launcher(name)}
    inherited["PYTHONPATH"] = os.pathsep.join([os.path.abspath(entry or os.curdir) for entry in sys.path])
    if "OMP_NUM_THREADS" not in inherited:
        inherited["OMP_NUM_THREADS"] = "1"
        logger.warning(
            "OMP_NUM_THREADS is not set: each of %d worker processes takes 1 thread, and this machine has %d cores; "
            "set it to the number of threads that a worker is to have",
            num_workers,
            os.cpu_count() or 1,
        )
    return inherited | waiting_variables(inherited)


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What torchrun would have told this rank, and the loopback interface for gloo and NCCL unless the user chose."""
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        # The store is the driver's, so rank 0 must not open one.
        "TORCHELASTIC_USE_AGENT_STORE": str(True),
    }
    return {**_loopback_interface(os.environ), **variables}


def _loopback_interface(variables: Mapping[str, str]) -> dict[str, str]:
    name = interface_of(LOOPBACK)
    return {} if name is None else {each: name for each in INTERFACE_VARIABLES if each not in variables}


def _is_set_by_a_launcher(name: str) -> bool:
    return name in _LAUNCHER_VARIABLES or name.startswith("TORCHELASTIC_")
