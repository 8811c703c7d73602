"""CPU affinity and threads of the ranks of a node, unless the user has set them.

Without this every rank would compute with as many threads as the node has cores, or, as torchrun sets it, with one. The
user's own setting wins: SPMD_WORKER_THREADS, OMP_NUM_THREADS, OpenMP's variables of binding, or a binding of each rank
by a wrapper (numactl, srun).
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from spmd_worker.base.errors import ConfigError
from spmd_worker.base.process import parent_of, variables_of

THREADS_VARIABLE: Final = "SPMD_WORKER_THREADS"
_OMP_VARIABLE: Final = "OMP_NUM_THREADS"
_BINDING_VARIABLES: Final = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
_RANK_VARIABLE: Final = "TORCHELASTIC_RUN_ID"
"""Variable that torchrun sets for each rank, and does not have itself."""
_WAITING_VARIABLES: Final = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")
_TOPOLOGY: Final = "/sys/devices/system/cpu"
_CGROUP: Final = "/sys/fs/cgroup"
_QUOTA_FILES: Final = (
    (f"{_CGROUP}/cpu.max",),
    (f"{_CGROUP}/cpu/cpu.cfs_quota_us", f"{_CGROUP}/cpu/cpu.cfs_period_us"),
)
"""Files with quota and period, of cgroup versions 2 and 1."""


@dataclass(frozen=True, slots=True)
class CoreShare:
    """One rank's threads and cores; None leaves them unchanged. `reason` is for the log."""

    num_threads: int | None
    cores: tuple[int, ...] | None
    reason: str


@dataclass(frozen=True, slots=True)
class Node:
    """Cores of this node that the process may run on, neighbours adjacent; the container's quota in cores (None: no
    limit); the launcher's cores and initial environment (None: unknown).
    """

    cores: tuple[int, ...]
    quota: float | None = None
    launcher_cores: tuple[int, ...] | None = None
    launcher_variables: Mapping[str, str] | None = None


def share_cores(node: Node, local_rank: int, num_local_ranks: int, variables: Mapping[str, str]) -> CoreShare:
    """Cores // ranks threads, at least 1, on a slice of the cores. Raises ConfigError for an invalid variable.

    torchrun sets OMP_NUM_THREADS=1 for several ranks if the user had set nothing. The launcher's own environment
    distinguishes the two; if it cannot be read, 1 is assumed to be torchrun's.
    """
    own = variables.get(THREADS_VARIABLE, "")
    if own:
        if not (own.isascii() and own.isdigit() and int(own) > 0):
            raise ConfigError(f"{THREADS_VARIABLE}={own} must be a whole number of threads a rank, 1 or more")
        return CoreShare(int(own), None, f"{THREADS_VARIABLE}={own}: {_threads(int(own))} a rank")
    if variables.get(_OMP_VARIABLE) and not _is_launchers(variables[_OMP_VARIABLE], node, num_local_ranks):
        return CoreShare(None, None, f"{_OMP_VARIABLE}={variables[_OMP_VARIABLE]} is the user's own")
    if num_local_ranks == 1 and (node.quota is None or node.quota >= len(node.cores)):
        return CoreShare(None, None, "one rank on this node: all cores are its own")
    if node.launcher_cores is not None and sorted(node.launcher_cores) != sorted(node.cores):
        # Each rank is already bound to its own cores.
        return CoreShare(len(node.cores), None, f"bound by the user: {_threads(len(node.cores))}")
    usable = len(node.cores) if node.quota is None else min(len(node.cores), int(node.quota))
    num_threads = max(usable // num_local_ranks, 1)
    num_own = len(node.cores) // num_local_ranks
    reason = f"{num_local_ranks} ranks share {usable} cores: {_threads(num_threads)} each"
    if num_own == 0 or num_local_ranks == 1 or any(variables.get(name) for name in _BINDING_VARIABLES):
        return CoreShare(num_threads, None, reason)
    cores = node.cores[local_rank * num_own : (local_rank + 1) * num_own]
    return CoreShare(num_threads, cores, f"{reason}, on cores of their own")


def _is_launchers(value: str, node: Node, num_local_ranks: int) -> bool:
    if value != "1" or num_local_ranks == 1:
        return False
    return node.launcher_variables is None or _OMP_VARIABLE not in node.launcher_variables


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


def take_share(share: CoreShare, set_num_threads: Callable[[int], None], *, binds: bool) -> None:
    """Apply a share before anything computes, because existing threads keep their cores. Without `binds` the cores stay
    unchanged, for ranks whose cores must be near a device.
    """
    if share.num_threads is not None:
        set_num_threads(share.num_threads)
    if share.cores is not None and binds:
        try:
            os.sched_setaffinity(0, share.cores)
        except (OSError, AttributeError):
            # Forbidden here, or not Linux: the kernel schedules the threads.
            return


def waiting_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Variables to set before torch is imported, unless the user has set OpenMP's wait policy: torch's threads sleep
    between operations, because by default they spin and take the cores from the kernels' threads.
    """
    return {} if any(variables.get(name) for name in _WAITING_VARIABLES) else {"OMP_WAIT_POLICY": "PASSIVE"}


def look_at_node() -> Node:
    """This node, as seen by this process."""
    launcher, variables = _find_launcher()
    cores = _cores_of(0) or tuple(range(os.cpu_count() or 1))
    return Node(tuple(sorted(cores, key=core_order)), _quota(), _cores_of(launcher), variables)


def core_order(core: int, topology: str = _TOPOLOGY) -> tuple[int, int, int]:
    """Sort key of a core: its processor, its physical core, its number; 0 if unknown. Neighbours sort together."""
    numbers = []
    for name in ("physical_package_id", "core_id"):
        try:
            numbers.append(int(Path(f"{topology}/cpu{core}/topology/{name}").read_text(encoding="ascii")))
        except (OSError, ValueError):
            numbers.append(0)
    return numbers[0], numbers[1], core


def _find_launcher() -> tuple[int, dict[str, str] | None]:
    """Process id and environment of the launcher: the first ancestor that is not a rank or a wrapper around one."""
    pid = os.getppid()
    while (variables := variables_of(pid)) is not None and _RANK_VARIABLE in variables:
        try:
            parent = parent_of(pid)
        except OSError:
            break
        if not parent:
            break
        pid = parent
    return pid, variables


def _cores_of(pid: int) -> tuple[int, ...] | None:
    try:
        return tuple(sorted(os.sched_getaffinity(pid)))
    except (OSError, AttributeError):
        return None


def _quota() -> float | None:
    for paths in _QUOTA_FILES:
        try:
            quota, period = " ".join(Path(path).read_text(encoding="ascii") for path in paths).split()
            found = parse_quota(quota, period)
        except (OSError, ValueError):
            continue
        if found is not None:
            return found
    return None


def parse_quota(quota: str, period: str) -> float | None:
    """Cores from a control group's quota and period in microseconds; None for no limit."""
    if quota == "max" or int(quota) <= 0:
        return None
    return int(quota) / int(period)
