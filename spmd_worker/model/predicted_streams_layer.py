"""Layer that predicts several residual streams, computes with one of them and corrects all (Gemma 3n)."""

import math

from torch import Tensor

from spmd_worker.model.layer_with_inputs import LayerWithInputs
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.layer_step import LayerStep
from spmd_worker.model.layers.predicted_streams import LowRankResidual, StreamPredictor
from spmd_worker.model_config.layer_config import LayerConfig


class Layer(LayerWithInputs):
    """`DecoderLayer` whose stream [T, S * hidden] has S streams of each token, and whose inputs of its own add to all
    streams but the first. What weighs streams, and the projection by way of few numbers, are not quantised.
    """

    def __init__(self, context: LayerContext, layer: LayerConfig, hidden_size: int, *, defers: bool) -> None:
        assert not defers, "outputs are normed before they are added"
        assert layer.predicted_streams is not None, layer
        super().__init__(context, layer, hidden_size, defers=defers)
        plain, streams = context.unquantised, layer.predicted_streams
        self._active = streams.active
        self.altup = StreamPredictor(plain, streams, hidden_size, layer.norm)
        self.laurel = LowRankResidual(plain, streams.rank, hidden_size, layer.norm)

    def forward(self, part: Tensor | None, residual: Tensor, step: LayerStep) -> tuple[Tensor | None, Tensor]:
        """`DecoderLayer.forward`. The stream is a new one."""
        assert (part, step.wanted) == (None, None), "outputs are added at once, of all tokens"
        assert step.inputs is not None, "every layer has inputs of its own"
        assert self.input_layernorm is not None, self.config
        assert self.post_attention_layernorm is not None, self.config
        predicted = self.altup.predicted(residual)
        active = predicted[:, self._active].clone()
        x = self.input_layernorm(active)
        beside = self.laurel(x, step.adapters)
        self._added(self._mixed(x, step), self.attention_output_norm, active)
        active = (active + beside) / math.sqrt(2)
        self.fed_forward(self.post_attention_layernorm(active), active, step)
        corrected = self.altup.corrected(predicted, active)
        of_inputs = self._of_inputs(self.altup.output(corrected), step.inputs, step.adapters)
        corrected[:, 1:].add_(of_inputs.unsqueeze(1))
        return None, corrected.view(residual.shape)
