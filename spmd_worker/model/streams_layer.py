"""Layer with several residual streams, of one of two kinds, which may begin with embedded n-grams."""

from torch import Tensor

from spmd_worker.model.decoder_layer import DecoderLayer
from spmd_worker.model.layers.balanced_streams import StreamMatrix
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.gated_streams import StreamMixer
from spmd_worker.model.layers.layer_step import LayerStep
from spmd_worker.model.layers.ngrams import Ngrams
from spmd_worker.model.layers.norm import Norm
from spmd_worker.model_config.layer_config import LayerConfig
from spmd_worker.model_config.stream_config import BalancedStreamsConfig


class Layer(DecoderLayer):
    """`DecoderLayer` whose stream [T, S * hidden] has S streams of each token: each part reads one sum of them, and
    adds to all. What weighs streams, and n-grams, are not quantised, as routers are not.
    """

    def __init__(self, context: LayerContext, layer: LayerConfig, hidden_size: int, *, defers: bool) -> None:
        assert not defers, "outputs are added to several streams"
        super().__init__(context, layer, hidden_size, defers=defers)
        self.attn_hyper_connection, self.mlp_hyper_connection = (
            _new_connection(context.unquantised, layer, hidden_size) for _ in range(2)
        )
        self.ple = None if layer.ngrams is None else Ngrams(context.unquantised, layer, hidden_size)

    def forward(self, part: Tensor | None, residual: Tensor, step: LayerStep) -> tuple[Tensor | None, Tensor]:
        """`DecoderLayer.forward`."""
        assert (part, step.wanted) == (None, None), "outputs are added at once, of all tokens"
        if self.ple is not None:
            assert step.token_ids is not None, "n-grams are of ids"
            assert step.states is not None, "n-grams have a state"
            residual.add_(self.ple(residual, step.token_ids, step.states, step.metadata))
        x, weights = self.attn_hyper_connection.enter(residual)
        output = self._mixed(_normed(self.input_layernorm, x), step)
        self.attn_hyper_connection.leave(residual, self._complete(output), *weights)
        x, weights = self.mlp_hyper_connection.enter(residual)
        output = self._fed(_normed(self.post_attention_layernorm, x), step)
        self.mlp_hyper_connection.leave(residual, self._complete(output), *weights)
        return None, residual


def _new_connection(context: LayerContext, layer: LayerConfig, hidden_size: int) -> StreamMatrix | StreamMixer:
    """Weights of the streams around one part of a layer."""
    streams = layer.streams
    assert streams is not None, layer
    if isinstance(streams, BalancedStreamsConfig):
        return StreamMatrix(context, streams, hidden_size)
    return StreamMixer(context, streams, hidden_size, layer.norm)


def _normed(norm: Norm | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)
