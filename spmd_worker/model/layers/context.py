"""Constructor argument of every layer: rank group, kernels, attention backend, dtype and device of parameters."""

from dataclasses import dataclass, field, replace

import torch
from torch import nn

from spmd_worker.model_config.stored_format import LayerFormats
from spmd_worker.ops.attention.backend import AttentionBackend
from spmd_worker.ops.kernels.api import IntegerKernels, Kernels, QuantisedKernels
from spmd_worker.ranks.communicator import GroupHandle, single_group
from spmd_worker.ranks.expert_layout import ExpertLayout
from spmd_worker.ranks.leaves import column_range


@dataclass(frozen=True, slots=True)
class LayerContext:
    """`layer` is the index, in the full model, of the layer being built. `expert_layout` None: tensor parallelism
    within each expert. `quantised` is `kernels`, if they are quantised. `stored` are formats of weights that are held
    as the checkpoint stores them, for `Kernels.expert_kernels` that decode experts, or in `Kernels.stored_panels`.
    `num_leaves` is that of row-parallel layers (`ranks/leaves.py`). `has_float32_head`: logits are float32 sums, not
    rounded.
    """

    tensor_group: GroupHandle
    kernels: Kernels
    attention: AttentionBackend
    dtype: torch.dtype
    device: torch.device
    expert_layout: ExpertLayout | None = None
    layer: int = 0
    quantised: QuantisedKernels | None = None
    stored: LayerFormats = field(default_factory=dict)
    num_leaves: int = 1
    has_float32_head: bool = False

    def columns(self, num_columns: int) -> tuple[int, int]:
        """Columns (start, stop) of a feed-forward that this rank has."""
        return column_range(num_columns, self.num_leaves, self.tensor_group.size, self.tensor_group.rank)

    @property
    def parts_group(self) -> GroupHandle:
        """Ranks that sum the outputs of row-parallel layers: with integer kernels these are sums already."""
        return self.tensor_group if self.integer is None else single_group(self.tensor_group.ranks[0])

    @property
    def integer(self) -> IntegerKernels | None:
        """`quantised`, if its ranks add integer sums."""
        return None if self.quantised is None else self.quantised.integer

    @property
    def of_head(self) -> "LayerContext":
        """That of the embedding and the token head, which quantised kernels may leave in the model's dtype."""
        head = None if self.quantised is None else self.quantised.head
        return self if head is None else replace(self, kernels=head, quantised=None)

    @property
    def unquantised(self) -> "LayerContext":
        """That of layers whose weights stay in the model's dtype."""
        return replace(self, kernels=self.kernels.plain, quantised=None)

    def parameter(self, *shape: int) -> nn.Parameter:
        """An uninitialised parameter; the loader must fill every element."""
        return nn.Parameter(torch.empty(shape, dtype=self.dtype, device=self.device), requires_grad=False)
