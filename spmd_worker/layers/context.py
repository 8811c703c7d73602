"""What a layer is built with: its group of ranks, its device's kernels, where its parameters live."""

from dataclasses import dataclass

import torch
from torch import nn

from spmd_worker.attention.backend import AttentionBackend
from spmd_worker.distributed.communicator import GroupHandle
from spmd_worker.distributed.expert_layout import ExpertLayout
from spmd_worker.kernels.api import Kernels


@dataclass(frozen=True, slots=True)
class LayerContext:
    """Passed as an argument to every layer's constructor. `layer` is the number, in the whole model, of the layer that
    is being built. `expert_layout` None: ranks share the columns of each expert.
    """

    tensor_group: GroupHandle
    kernels: Kernels
    attention: AttentionBackend
    dtype: torch.dtype
    device: torch.device
    expert_layout: ExpertLayout | None = None
    layer: int = 0

    def parameter(self, *shape: int) -> nn.Parameter:
        """An uninitialised parameter; the loader must fill every element."""
        return nn.Parameter(torch.empty(shape, dtype=self.dtype, device=self.device), requires_grad=False)
