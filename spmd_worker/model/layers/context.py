"""What a layer is built with: its group of ranks, its device's kernels, where its parameters live."""

from dataclasses import dataclass

import torch
from torch import nn

from spmd_worker.ops.attention.backend import AttentionBackend
from spmd_worker.ops.kernels.api import Kernels, QuantisedKernels
from spmd_worker.ranks.communicator import GroupHandle, single_group
from spmd_worker.ranks.expert_layout import ExpertLayout


@dataclass(frozen=True, slots=True)
class LayerContext:
    """Passed as an argument to every layer's constructor. `layer` is the number, in the whole model, of the layer that
    is being built. `expert_layout` None: ranks share the columns of each expert. `quantised`: `kernels`, where they
    are such. `screens_head`: the head may have a screen (`head_screen.py`).
    """

    tensor_group: GroupHandle
    kernels: Kernels
    attention: AttentionBackend
    dtype: torch.dtype
    device: torch.device
    expert_layout: ExpertLayout | None = None
    layer: int = 0
    quantised: QuantisedKernels | None = None
    screens_head: bool = False

    @property
    def parts_group(self) -> GroupHandle:
        """The ranks whose row-parallel layers leave parts of a sum to what follows them. With quantised kernels each
        gives the sum itself.
        """
        return self.tensor_group if self.quantised is None else single_group(self.tensor_group.ranks[0])

    def parameter(self, *shape: int) -> nn.Parameter:
        """An uninitialised parameter; the loader must fill every element."""
        return nn.Parameter(torch.empty(shape, dtype=self.dtype, device=self.device), requires_grad=False)
