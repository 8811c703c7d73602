"""Which device a rank computes on.

Does not change the process's current device or thread counts.
"""

import os

import torch

from spmd_worker.errors import ConfigError, DeviceError


def device_type(wanted: str) -> str:
    """What `choose_device` takes, as `cpu` or `cuda`, without looking whether it is there."""
    return wanted if wanted != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def choose_device(wanted: str, local_rank: int, *, is_callers_world: bool = False) -> torch.device:
    """`auto` takes CUDA where there is some. A rank has the GPU of its local rank, with two exceptions: the current
    device in a world of the caller's, where that is another than 0, at which it is before anybody sets it; and the one
    GPU that CUDA_VISIBLE_DEVICES leaves, because Ray's actors and Slurm's tasks see their own alone. Ranks of one
    group that share it after all are refused by NCCL, replicas of one rank each are not. Raises ConfigError or
    DeviceError naming what is missing.
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
