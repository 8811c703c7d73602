"""The feed-forward of one decoder layer: act(gate) * up, then down (https://arxiv.org/abs/2002.05202), or without a
gate act(up), then down.

T: tokens of the step.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spmd_worker.model.layers.checkpoint_layer import CheckpointLayer
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.linear import ActivatedLinear, GatedLinear, RowParallelLinear, gate_up_linear, up_linear
from spmd_worker.model.layers.weight_slice import WeightSlice, whole
from spmd_worker.model_config.layer_config import LayerConfig
from spmd_worker.ranks.topology import shard_range


class Xielu(CheckpointLayer):
    """[T, I] -> [T, I], by numbers that are learned (https://arxiv.org/abs/2411.13010): a parabola above 0 and an
    exponential below, computed in float32 and rounded once. Whole on every rank.
    """

    def __init__(self, context: LayerContext) -> None:
        super().__init__()
        self._kernels = context.kernels
        self.alpha_p, self.alpha_n = context.parameter(1), context.parameter(1)
        self.beta, self.eps = context.parameter(), context.parameter()

    def forward(self, x: Tensor) -> Tensor:
        """Below 0: alpha_n * (e^x - 1 - x) + beta * x; above: alpha_p * x^2 + beta * x."""
        rows, beta = x.float(), self.beta.float()
        above, below = F.softplus(self.alpha_p.float()), beta + F.softplus(self.alpha_n.float())
        # e^x - 1 is 2 t / (1 - t) with t = tanh(x / 2): the kernel is row-wise, as torch's expm1 is not.
        tanh = self._kernels.bound(torch.minimum(rows, self.eps.float()) / 2, 1.0)
        falling = 2 * tanh / (1 - tanh) - rows
        return (torch.where(rows > 0, above * rows * rows, below * falling) + beta * rows).to(x.dtype)

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        """`prefix` is this layer's name."""
        for name, shape in (("alpha_p", (1,)), ("alpha_n", (1,)), ("beta", ()), ("eps", ())):
            yield whole(f"{prefix}.{name}", shape, f"{prefix}.{name}", is_buffer=shape == ())


class FeedForward(nn.Module):
    """[T, hidden] -> this rank's part of [T, hidden], as of `RowParallelLinear`."""

    def __init__(self, context: LayerContext, layer: LayerConfig, hidden_size: int) -> None:
        super().__init__()
        group, size, has_bias = context.tensor_group, layer.intermediate_size, layer.has_mlp_bias
        columns = shard_range(size, group.size, group.rank)
        self.intermediate_size = columns[1] - columns[0]
        self.activation, self.is_gated = layer.activation, layer.is_gated
        if layer.is_gated:
            self.gate_up_proj: GatedLinear = gate_up_linear(context, hidden_size, size, has_bias, layer.activation)
        else:
            self.act_fn = Xielu(context) if layer.activation == "xielu" else None
            in_kernel = "" if self.act_fn is not None else layer.activation
            self.up_proj: ActivatedLinear = up_linear(context, hidden_size, size, has_bias, in_kernel)
        self.down_proj = RowParallelLinear(context, columns, size, hidden_size, has_bias)

    def forward(self, x: Tensor, *, is_fused: bool = True) -> Tensor:
        """[T, hidden] -> [T, hidden], this rank's part."""
        opened = self.gate_up_proj(x, is_fused=is_fused) if self.is_gated else self._opened(x)
        output: Tensor = self.down_proj(opened)
        return output

    def _opened(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.up_proj(x)
        return outputs if self.act_fn is None else self.act_fn(outputs)
