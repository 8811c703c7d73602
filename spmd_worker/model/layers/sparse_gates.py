"""Gated linear layer of which few gates are open: those above a bound that follows from all gates of the row.

T: tokens of the step; I: columns of this rank.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.linear import ColumnParallelLinear, GatedLinear, OutputPart
from spmd_worker.model.layers.row_means import row_lengths, row_means
from spmd_worker.ops.kernels.adapters import StepAdapters
from spmd_worker.ranks.leaves import column_range


class SparseGatedLinear(GatedLinear):
    """`GatedLinear` whose gates lose the mean of their row and `cutoff` of its standard deviations, and are 0 if that
    is more. Ranks exchange their gates, so that a row has the bits that it has on one rank.
    """

    def __init__(
        self, context: LayerContext, input_size: int, size: int, has_bias: bool, activation: str, cutoff: float
    ) -> None:
        start, stop = context.columns(size)
        parts = tuple(OutputPart(name, size, start, stop) for name in ("gate_proj", "up_proj"))
        super().__init__(context, input_size, parts, has_bias, activation)
        self.pairs_gates = False
        # As transformers rounds it.
        self._cutoff = float(torch.tensor(cutoff, dtype=context.dtype))
        self._group = context.tensor_group
        ranks = range(self._group.size)
        ranges = [column_range(size, context.num_leaves, self._group.size, rank) for rank in ranks]
        self._widths = [end - first for first, end in ranges]

    def forward(self, x: Tensor, adapters: StepAdapters | None = None, *, is_fused: bool = True) -> Tensor:
        gates, ups = ColumnParallelLinear.forward(self, x, adapters).chunk(2, dim=1)
        row = self._gathered(gates).float()
        mean = row_means(row)
        bound = mean + row_lengths(row - mean) * self._cutoff
        kept = F.relu(gates.float() - bound).to(gates.dtype)
        return self._kernels.activate_and_mul(torch.cat((kept, ups), dim=1), self._activation)

    def _gathered(self, gates: Tensor) -> Tensor:
        """The gates of all ranks, [T, I of all], in the order of one rank's."""
        if self._group.size == 1:
            return gates
        most = max(self._widths)
        padded = F.pad(gates, (0, most - gates.shape[1])).contiguous()
        parts = self._group.all_gather(padded).unbind()
        return torch.cat([part[:, :width] for part, width in zip(parts, self._widths, strict=True)], dim=1)
