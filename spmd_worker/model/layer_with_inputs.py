"""Layer that may have inputs of its own (`LayerConfig.input_size`), which a gate and a projection bring to its streams.

T: tokens of the step; P: numbers of a layer.
"""

from torch import Tensor

from spmd_worker.model.decoder_layer import DecoderLayer
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.linear import replicated_linear
from spmd_worker.model.layers.norm import new_norm
from spmd_worker.model_config.layer_config import LayerConfig
from spmd_worker.ops.kernels.adapters import StepAdapters


class LayerWithInputs(DecoderLayer):
    """`DecoderLayer` with the weights for its own inputs, if it has any; what it does with them is a subclass's."""

    def __init__(self, context: LayerContext, layer: LayerConfig, hidden_size: int, *, defers: bool) -> None:
        super().__init__(context, layer, hidden_size, defers=defers)
        self._kernels = context.kernels
        if layer.input_size:
            self.per_layer_input_gate = replicated_linear(
                context, "per_layer_input_gate", hidden_size, layer.input_size
            )
            self.per_layer_projection = replicated_linear(
                context, "per_layer_projection", layer.input_size, hidden_size
            )
            self.post_per_layer_input_norm = new_norm(context, hidden_size, layer.norm)

    def _of_inputs(self, x: Tensor, inputs: Tensor, adapters: StepAdapters | None) -> Tensor:
        """`inputs` [T, P], gated by x [T, hidden], projected and normed, [T, hidden]."""
        gates = self._kernels.activate(self.per_layer_input_gate(x, adapters), self.config.activation)
        normed: Tensor = self.post_per_layer_input_norm(self.per_layer_projection(gates * inputs, adapters))
        return normed
