"""Which device a rank computes on, and that no other rank computes on it.

Does not change the process's current device or thread counts.
"""

import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from spmd_worker.base.errors import ConfigError, DeviceError
from spmd_worker.base.process import boot_id

SHARE_VARIABLE: Final = "SPMD_WORKER_SHARE_GPUS"
"""1 on ranks that may share a GPU, as tests do where there is one. Each then takes its share of the memory by
`cache.gpu_memory_utilization` or `cache.num_blocks`. NCCL refuses it among the ranks of one replica all the same.
"""

_SEPARATOR: Final = "\t"


def device_type(wanted: str) -> str:
    """What `choose_device` takes, as `cpu` or `cuda`, without looking whether it is there."""
    return wanted if wanted != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def choose_device(wanted: str, local_rank: int, *, is_callers_world: bool = False) -> torch.device:
    """`auto` takes CUDA where there is some. A rank has the GPU of its local rank, with two exceptions: the current
    device in a world of the caller's, where that is another than 0, at which it is before anybody sets it; and the one
    GPU that CUDA_VISIBLE_DEVICES leaves, because Ray's actors and Slurm's tasks see their own alone. Ranks that share
    it after all are found by `check_own_gpus`. Raises ConfigError or DeviceError naming what is missing.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cpu" or (wanted == "auto" and num_gpus == 0):
        return torch.device("cpu")
    if num_gpus == 0:
        raise ConfigError("device=cuda but torch finds no CUDA device here: use device=cpu")
    if is_callers_world and (current := torch.cuda.current_device()):
        return torch.device("cuda", current)
    if num_gpus == 1 and os.environ.get("CUDA_VISIBLE_DEVICES"):
        return torch.device("cuda", 0)
    if local_rank >= num_gpus:
        raise DeviceError(
            f"local rank {local_rank} needs a GPU of its own but this node has {num_gpus}: start {num_gpus} ranks here "
            f"(torchrun --nproc-per-node {num_gpus}), give each rank its own in CUDA_VISIBLE_DEVICES, or use device=cpu"
        )
    return torch.device("cuda", local_rank)


def gpu_identity(device: torch.device, variables: Mapping[str, str] = os.environ) -> str:
    """What tells this rank's GPU from all others: the host's boot, the GPU's name and its uuid, which does not follow
    from CUDA_VISIBLE_DEVICES. Empty on the CPU, and where SHARE_VARIABLE lets this rank share its GPU.
    """
    if device.type != "cuda" or variables.get(SHARE_VARIABLE) == "1":
        return ""
    properties: Any = torch.cuda.get_device_properties(device)  # torch's stub lacks the attribute
    return f"{boot_id() or socket.gethostname()}{_SEPARATOR}{properties.name} GPU-{properties.uuid}"


def check_own_gpus(identities: Sequence[str]) -> None:
    """`identities` are `gpu_identity` of each rank, in rank order; whoever has an empty one may share. Raises
    ConfigError, the same on every rank, naming ranks of one host that compute on one GPU.
    """
    ranks: dict[str, list[int]] = {}
    for rank, identity in enumerate(identities):
        ranks.setdefault(identity, []).append(rank)
    shared = [
        (", ".join(map(str, sharing)), identity.partition(_SEPARATOR)[2])
        for identity, sharing in ranks.items()
        if identity and len(sharing) > 1
    ]
    if not shared:
        return
    first, name = shared[0]
    others = "".join(f", and ranks {sharing} on {gpu}" for sharing, gpu in shared[1:])
    raise ConfigError(
        f"ranks {first} of one host compute on one GPU, {name}{others}: give each rank its own in "
        f"CUDA_VISIBLE_DEVICES, or let every rank see all GPUs of its host (it takes that of its LOCAL_RANK); "
        f"{SHARE_VARIABLE}=1 on each of these ranks lets them share"
    )
