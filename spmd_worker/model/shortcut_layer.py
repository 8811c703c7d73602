"""Layer whose experts are beside a dense feed-forward, and whose output of them is added behind the next layer
(LongCat-Flash, https://arxiv.org/abs/2509.01322).
"""

from torch import Tensor

from spmd_worker.model.decoder_layer import DecoderLayer
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.feed_forward import FeedForward
from spmd_worker.model.layers.layer_step import LayerStep
from spmd_worker.model_config.layer_config import LayerConfig


class Layer(DecoderLayer):
    """`DecoderLayer`. In a layer with experts these are `mlp`, and `dense` is the other feed-forward, of the same
    input; in the next one the dense one is `mlp`.
    """

    def __init__(self, context: LayerContext, layer: LayerConfig, hidden_size: int, *, defers: bool) -> None:
        assert not defers, "an output is added two layers later"
        super().__init__(context, layer, hidden_size, defers=defers)
        self.dense = None if layer.experts is None else FeedForward(context, layer, hidden_size)

    def fed_forward(self, x: Tensor, residual: Tensor, step: LayerStep) -> Tensor | None:
        assert step.carried is not None, "the decoder passes on what a layer computes for the next one"
        if self.dense is None:
            super().fed_forward(x, residual, step)
            residual.add_(step.carried.pop())
            return None
        routed = self._complete(self._fed(x, step))
        # Parts have one buffer in symmetric memory.
        step.carried.append(routed if self._group.fast is None else routed.clone())
        return self._added(self.dense(x, step.adapters, is_fused=step.is_fused), None, residual)
