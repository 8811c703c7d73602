"""First stage of a worker's start: this rank's device, its backend and its process groups."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist

from spmd_worker.base.errors import ConfigError
from spmd_worker.ranks.environment import RankEnvironment
from spmd_worker.ranks.groups import ParallelGroups, join_groups
from spmd_worker.resolved import ResolvedRun
from spmd_worker.worker.backends.backend import DeviceBackend
from spmd_worker.worker.backends.choice import new_backend
from spmd_worker.worker.device import choose_device
from spmd_worker.worker.memory.device import DeviceReading, read_cuda

_BFLOAT16_CAPABILITY: Final = (8, 0)


@dataclass(frozen=True, slots=True)
class OpenedDevice:
    """This rank's device. `readings` are of its memory on CUDA, before this rank allocated any and after the groups
    were joined.
    """

    resolved: ResolvedRun
    environment: RankEnvironment
    device: torch.device
    backend: DeviceBackend
    groups: ParallelGroups
    readings: tuple[DeviceReading, ...] = ()


def open_device(resolved: ResolvedRun, environment: RankEnvironment) -> OpenedDevice:
    """Choose the device and join the groups; every rank of the world calls this. Raises ConfigError for a device or
    dtype that this machine does not support.
    """
    device = choose_device(resolved.config.device, environment.local_rank, is_callers_world=dist.is_initialized())
    if device.type == "cuda":
        check_dtype(resolved.dtype, torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))
        if resolved.layout.world_size > 1 and not dist.is_initialized():
            # The world will be ours, and so is the process.
            torch.cuda.set_device(device)
    backend = new_backend(resolved, device)
    with current_device(device):
        readings = [read_cuda(device)] if device.type == "cuda" else []
        groups = join_groups(resolved.layout, environment, device, resolved.config.executor.timeout_s)
        try:
            groups = backend.wrap_groups(groups)
            readings += [read_cuda(device)] if device.type == "cuda" else []
        except BaseException:
            # A caller that continues finds the state before the call.
            groups.destroy()
            raise
    return OpenedDevice(resolved, environment, device, backend, groups, tuple(readings))


def check_dtype(dtype: str, gpu: str, capability: tuple[int, int]) -> None:
    """Raise ConfigError for a dtype that a GPU of this name and compute capability does not compute."""
    if dtype == "bfloat16" and capability < _BFLOAT16_CAPABILITY:
        needed, found = (".".join(map(str, each)) for each in (_BFLOAT16_CAPABILITY, capability))
        raise ConfigError(
            f"model.dtype=bfloat16 needs a GPU of compute capability {needed} or more, and {gpu} has {found}: set "
            f"model.dtype=float16, or float32 for weights that exceed its range"
        )


def current_device(device: torch.device) -> AbstractContextManager[object]:
    """Context in which `device` is the process's current one: torch's operators follow their tensors, but Triton
    launches, pinned memory and users' code follow the current device.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
