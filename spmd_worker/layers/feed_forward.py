"""The feed-forward of one decoder layer: act(gate) * up, then down (https://arxiv.org/abs/2002.05202), or without a
gate act(up), then down.

T: tokens of the step.
"""

from torch import Tensor, nn

from spmd_worker.distributed.topology import shard_range
from spmd_worker.layers.context import LayerContext
from spmd_worker.layers.linear import ActivatedLinear, GatedLinear, RowParallelLinear, gate_up_linear, up_linear
from spmd_worker.model_config.layer_config import LayerConfig


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
            self.up_proj: ActivatedLinear = up_linear(context, hidden_size, size, has_bias, layer.activation)
        self.down_proj = RowParallelLinear(context, columns, size, hidden_size, has_bias)

    def forward(self, x: Tensor, *, is_fused: bool = True) -> Tensor:
        """[T, hidden] -> [T, hidden], this rank's part."""
        opened = self.gate_up_proj(x, is_fused=is_fused) if self.is_gated else self.up_proj(x)
        output: Tensor = self.down_proj(opened)
        return output
