"""The gated feed-forward of one decoder layer: silu(gate) * up, then down (https://arxiv.org/abs/2002.05202).

T: tokens of the step.
"""

from torch import Tensor, nn

from spmd_worker.distributed.topology import shard_range
from spmd_worker.layers.context import LayerContext
from spmd_worker.layers.linear import RowParallelLinear, gate_up_linear
from spmd_worker.model_config.model_config import ModelConfig


class FeedForward(nn.Module):
    """[T, hidden] -> this rank's part of [T, hidden], as of `RowParallelLinear`."""

    def __init__(self, context: LayerContext, model_config: ModelConfig) -> None:
        super().__init__()
        group = context.tensor_group
        columns = shard_range(model_config.intermediate_size, group.size, group.rank)
        self.intermediate_size = columns[1] - columns[0]
        self.gate_up_proj = gate_up_linear(
            context, model_config.hidden_size, model_config.intermediate_size, model_config.has_mlp_bias
        )
        self.down_proj = RowParallelLinear(
            context, columns, model_config.intermediate_size, model_config.hidden_size, model_config.has_mlp_bias
        )

    def forward(self, x: Tensor, *, is_fused: bool = True) -> Tensor:
        """[T, hidden] -> [T, hidden], this rank's part."""
        output: Tensor = self.down_proj(self.gate_up_proj(x, is_fused=is_fused))
        return output
