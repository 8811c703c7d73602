"""Which device a rank computes on.

Does not change the process's current device or thread counts.
"""

import torch

from spmd_worker.errors import ConfigError, DeviceError


def device_type(wanted: str) -> str:
    """What `choose_device` takes, as `cpu` or `cuda`, without looking whether it is there."""
    return wanted if wanted != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def choose_device(wanted: str, local_rank: int) -> torch.device:
    """`auto` takes CUDA where there is some. Raises ConfigError or DeviceError naming what is missing."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cpu" or (wanted == "auto" and num_gpus == 0):
        return torch.device("cpu")
    if num_gpus == 0:
        raise ConfigError("device=cuda but torch finds no CUDA device here: use device=cpu")
    if local_rank >= num_gpus:
        raise DeviceError(
            f"local rank {local_rank} needs a GPU of its own but this node has {num_gpus}: "
            f"start {num_gpus} ranks here (torchrun --nproc-per-node {num_gpus}) or use device=cpu"
        )
    return torch.device("cuda", local_rank)
