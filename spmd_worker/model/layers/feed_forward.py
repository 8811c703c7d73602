"""Feed-forward of one decoder layer: act(gate) * up, then down (https://arxiv.org/abs/2002.05202), or act(up), then
down.

T: tokens of the step; I: columns of this rank.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spmd_worker.model.layers.checkpoint_layer import CheckpointLayer
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.linear import (
    ColumnParallelLinear,
    GatedLinear,
    OutputPart,
    RowParallelLinear,
    gate_up_linear,
)
from spmd_worker.model.layers.sparse_gates import SparseGatedLinear
from spmd_worker.model_config.layer_config import LayerConfig
from spmd_worker.ops.kernels.adapters import StepAdapters


class Xielu(CheckpointLayer):
    """[T, I] -> [T, I], an activation with learned numbers (https://arxiv.org/abs/2411.13010): a parabola above 0 and
    an exponential below, computed in float32 and rounded once. Replicated.
    """

    def __init__(self, context: LayerContext) -> None:
        super().__init__()
        self._kernels = context.kernels
        self.alpha_p, self.alpha_n = context.parameter(1), context.parameter(1)
        self.beta, self.eps = context.parameter(), context.parameter()

    def forward(self, x: Tensor) -> Tensor:
        """alpha_n * (e^x - 1 - x) + beta * x below 0, alpha_p * x^2 + beta * x above."""
        rows, beta = x.float(), self.beta.float()
        above, below = F.softplus(self.alpha_p.float()), beta + F.softplus(self.alpha_n.float())
        # e^x - 1 is 2 t / (1 - t) with t = tanh(x / 2): the kernel is row-wise, as torch's expm1 is not.
        tanh = self._kernels.bound(torch.minimum(rows, self.eps.float()) / 2, 1.0)
        falling = 2 * tanh / (1 - tanh) - rows
        return (torch.where(rows > 0, above * rows * rows, below * falling) + beta * rows).to(x.dtype)


class FeedForward(nn.Module):
    """[T, hidden] -> this rank's part of [T, hidden], like that of `RowParallelLinear`."""

    def __init__(self, context: LayerContext, layer: LayerConfig, hidden_size: int) -> None:
        super().__init__()
        size, has_bias = layer.intermediate_size, layer.has_mlp_bias
        columns = context.columns(size)
        self.intermediate_size = columns[1] - columns[0]
        self._activation, self._is_gated, self._kernels = layer.activation, layer.is_gated, context.kernels
        self.gate_up_proj: GatedLinear
        if layer.gate_cutoff is not None:
            self.gate_up_proj = SparseGatedLinear(
                context, hidden_size, size, has_bias, layer.activation, layer.gate_cutoff
            )
        elif layer.is_gated:
            self.gate_up_proj = gate_up_linear(
                context, hidden_size, size, has_bias, layer.activation, layer.bound, layer.mlp_multipliers[0]
            )
        else:
            self.act_fn = Xielu(context) if layer.activation == "xielu" else None
            self.up_proj = ColumnParallelLinear(
                context, hidden_size, (OutputPart("up_proj", size, *columns),), has_bias
            )
        has_bias = has_bias or layer.has_down_bias
        self.down_proj = RowParallelLinear(context, columns, size, hidden_size, has_bias, layer.mlp_multipliers[1])

    def forward(self, x: Tensor, adapters: StepAdapters | None = None, *, is_fused: bool = True) -> Tensor:
        if self._is_gated:
            activated = self.gate_up_proj(x, adapters, is_fused=is_fused)
        else:
            outputs = self.up_proj(x, adapters)
            kernels = self._kernels
            activated = kernels.activate(outputs, self._activation) if self.act_fn is None else self.act_fn(outputs)
        output: Tensor = self.down_proj(activated, adapters)
        return output
