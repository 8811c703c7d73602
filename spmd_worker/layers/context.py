"""What a layer is built with: its group of ranks, its device's kernels, where its parameters live."""

from dataclasses import dataclass

import torch
from torch import nn

from spmd_worker.attention.backend import AttentionBackend
from spmd_worker.distributed.communicator import GroupHandle
from spmd_worker.kernels.api import Kernels


@dataclass(frozen=True, slots=True)
class LayerContext:
    """Passed as an argument to every layer's constructor."""

    tensor_group: GroupHandle
    kernels: Kernels
    attention: AttentionBackend
    dtype: torch.dtype
    device: torch.device

    def parameter(self, *shape: int) -> nn.Parameter:
        """An uninitialised parameter; the loader must fill every element."""
        return nn.Parameter(torch.empty(shape, dtype=self.dtype, device=self.device), requires_grad=False)
