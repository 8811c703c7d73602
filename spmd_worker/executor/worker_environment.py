"""Environment of worker processes: the store of their world, their ranks, their number of threads.

Everything listens on loopback, because the workers are on one node.
"""

import logging
import os
import socket
import sys
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
    """The store of one world of workers, in this process, on a free port of loopback."""
    # Bound here, because the store itself would listen on all interfaces.
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
    """Variables of a worker process: this process's, without a launcher's, and the same import path. OMP_NUM_THREADS is
    1, with a warning, unless the user has set it.
    """
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in _LAUNCHER_VARIABLES and not name.startswith("TORCHELASTIC_")
    }
    inherited["PYTHONPATH"] = os.pathsep.join([os.path.abspath(entry or os.curdir) for entry in sys.path])
    if "OMP_NUM_THREADS" not in inherited:
        inherited["OMP_NUM_THREADS"] = "1"
        logger.warning(
            "OMP_NUM_THREADS is not set: each of %d worker processes uses 1 thread, and this machine has %d cores; "
            "set it to the number of threads per worker",
            num_workers,
            os.cpu_count() or 1,
        )
    return inherited | waiting_variables(inherited)


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """The variables that torchrun sets for a rank, and the loopback interface for gloo and NCCL unless the user has set
    one.
    """
    interface = interface_of(LOOPBACK)
    names = [] if interface is None else [name for name in INTERFACE_VARIABLES if name not in os.environ]
    return {
        **dict.fromkeys(names, interface or ""),
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        # The driver has the store, so rank 0 must not open one.
        "TORCHELASTIC_USE_AGENT_STORE": str(True),
    }
