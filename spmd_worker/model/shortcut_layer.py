"""Layer whose experts are beside a dense feed-forward, and whose output of them is added behind the next layer
(LongCat-Flash, https://arxiv.org/abs/2509.01322).
"""

from typing import Any

from torch import Tensor

from spmd_worker.model.decoder_layer import DecoderLayer
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.feed_forward import FeedForward
from spmd_worker.model_config.layer_config import LayerConfig


class Layer(DecoderLayer):
    """`DecoderLayer`. In a layer with experts these are `mlp`, and `dense` is the other feed-forward, of the same
    input; in the next one the dense one is `mlp`.
    """

    def __init__(self, context: LayerContext, layer: LayerConfig, hidden_size: int, *, defers: bool) -> None:
        assert not defers, "an output is added two layers later"
        super().__init__(context, layer, hidden_size, defers=defers)
        self.dense = None if layer.experts is None else FeedForward(context, layer, hidden_size)

    def _fed_forward(
        self, x: Tensor, residual: Tensor, *, carried: list[Tensor] | None = None, **options: Any
    ) -> Tensor | None:
        """`carried` has the output of experts between the layer that computes it and the one that adds it."""
        assert carried is not None, "the decoder passes on what a layer computes for the next one"
        assert self.mlp is not None, self.config
        if self.dense is None:
            super()._fed_forward(x, residual, **options)
            residual.add_(carried.pop())
            return None
        routed = self._complete(self.mlp(x, **options))
        # Parts have one buffer in symmetric memory.
        carried.append(routed if self._group.fast is None else routed.clone())
        of_dense = {key: value for key, value in options.items() if key not in ("slots", "routes")}
        return self._added(self.dense(x, **of_dense), None, residual)
