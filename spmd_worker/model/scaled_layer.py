"""Layer whose stream is multiplied by a number behind it; with experts, if it has any, beside a dense feed-forward,
and with inputs of its own, if it has any, behind that (Gemma 4).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from spmd_worker.model.layer_with_inputs import LayerWithInputs
from spmd_worker.model.layers.checkpoint_layer import CheckpointLayer
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.feed_forward import FeedForward
from spmd_worker.model.layers.layer_step import LayerStep
from spmd_worker.model.layers.norm import new_norm
from spmd_worker.model.layers.weight_slice import WeightSlice, replicated
from spmd_worker.model_config.layer_config import LayerConfig


class LayerScalar(CheckpointLayer):
    """One number, [1], a buffer in transformers. Replicated."""

    def __init__(self, context: LayerContext) -> None:
        super().__init__()
        self.value = context.parameter(1)

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        yield replicated(f"{prefix}.value", (1,), f"{prefix}.value", is_buffer=True)


class Layer(LayerWithInputs):
    """`DecoderLayer`, times `layer_scalar`. `mlp` is the sparse feed-forward if there is one, `dense` the other."""

    def __init__(self, context: LayerContext, layer: LayerConfig, hidden_size: int, *, defers: bool) -> None:
        assert not defers, "outputs are normed before they are added"
        super().__init__(context, layer, hidden_size, defers=defers)
        self.layer_scalar = LayerScalar(context)
        self.dense: FeedForward | None = None
        if layer.experts is not None:
            self.dense = FeedForward(context, layer, hidden_size)
            self.dense_output_norm, self.experts_input_norm, self.experts_output_norm = (
                new_norm(context, hidden_size, layer.norm) for _ in range(3)
            )

    def forward(self, part: Tensor | None, residual: Tensor, step: LayerStep) -> tuple[Tensor | None, Tensor]:
        part, residual = super().forward(part, residual, step)
        assert part is None, "the number multiplies the complete stream"
        assert (step.inputs is not None) == (self.config.input_size > 0), self.config
        if step.inputs is not None:
            residual.add_(self._of_inputs(residual, step.inputs, step.adapters))
        return None, residual.mul_(self.layer_scalar.value)

    def fed_forward(self, x: Tensor, residual: Tensor, step: LayerStep) -> Tensor | None:
        if self.dense is None:
            return super().fed_forward(x, residual, step)
        # Normed at once: parts have one buffer in symmetric memory.
        dense = self._normed(self.dense_output_norm, self.dense(x, step.adapters, is_fused=step.is_fused))
        routed = self._fed(self.experts_input_norm(residual), step, router_input=residual)
        both = dense + self._normed(self.experts_output_norm, routed)
        residual.add_(both if self.mlp_output_norm is None else self.mlp_output_norm(both))
        return None

    def _normed(self, norm: torch.nn.Module, part: Tensor) -> Tensor:
        """The norm of the sum of all ranks' parts."""
        normed: Tensor = norm(self._complete(part))
        return normed
