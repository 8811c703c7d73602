"""Choice of a rank's device, and the check that each rank has its own GPU.

Changes neither the process's current device nor its thread counts.
"""

import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from spmd_worker.base.errors import ConfigError, DeviceError
from spmd_worker.base.process import boot_id

SHARE_VARIABLE: Final = "SPMD_WORKER_SHARE_GPUS"
"""1 lets ranks share a GPU, as tests do on a machine with one; set each rank's share of the memory by
`cache.gpu_memory_utilization` or `cache.num_blocks`. Within a replica NCCL still rejects a shared GPU.
"""

_SEPARATOR: Final = "\t"


def device_type(wanted: str) -> str:
    """`cpu` or `cuda` for a `device` option, as `choose_device` resolves it, without checking that it exists."""
    return wanted if wanted != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def choose_device(wanted: str, local_rank: int, *, is_callers_world: bool = False) -> torch.device:
    """The rank's device; `auto` is CUDA if available. A rank gets the GPU of its local rank, with two exceptions: the
    current device in a caller's world, unless it is 0, the default that nobody set; and the only GPU that
    CUDA_VISIBLE_DEVICES leaves, because Ray's actors and Slurm's tasks see only their own. `check_gpus_not_shared`
    detects ranks that share one. Raises ConfigError or DeviceError naming what is missing.
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
    """Unique id of this rank's GPU, independent of CUDA_VISIBLE_DEVICES: the host's boot id, the GPU's name and uuid.
    Empty on the CPU, and if SHARE_VARIABLE lets this rank share its GPU.
    """
    if device.type != "cuda" or variables.get(SHARE_VARIABLE) == "1":
        return ""
    properties: Any = torch.cuda.get_device_properties(device)  # torch's stub lacks the attribute
    return f"{boot_id() or socket.gethostname()}{_SEPARATOR}{properties.name} GPU-{properties.uuid}"


def check_gpus_not_shared(identities: Sequence[str]) -> None:
    """Raise ConfigError, the same on every rank, naming ranks that compute on one GPU. `identities` has each rank's
    `gpu_identity`, in rank order; empty ones may share.
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
        f"ranks {first} of one host compute on the same GPU, {name}{others}: give each rank its own in "
        f"CUDA_VISIBLE_DEVICES, or let every rank see all GPUs of its host (LOCAL_RANK then chooses); "
        f"{SHARE_VARIABLE}=1 on each of these ranks lets them share"
    )
