"""Layer with several residual streams, of one of two kinds, which may begin with embedded n-grams."""

from typing import Any

from torch import Tensor

from kv_cache.layer_states import LayerStates
from spmd_worker.model.decoder_layer import DecoderLayer
from spmd_worker.model.layers.balanced_streams import StreamMatrix
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.gated_streams import StreamMixer
from spmd_worker.model.layers.ngrams import Ngrams
from spmd_worker.model.layers.norm import Norm
from spmd_worker.model.layers.rotary import Angles
from spmd_worker.model.layers.run_indexer import StepRuns
from spmd_worker.model_config.layer_config import LayerConfig
from spmd_worker.model_config.stream_config import BalancedStreamsConfig
from spmd_worker.ops.attention.metadata import AttentionMetadata, WantedTokens
from spmd_worker.ops.kernels.adapters import StepAdapters


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
        self._lists_experts = layer.experts is not None and layer.experts.num_listed_tokens > 0

    def forward(
        self,
        part: Tensor | None,
        residual: Tensor,
        ropes: tuple[Angles, ...],
        layer_cache: Tensor | None,
        metadata: AttentionMetadata,
        wanted: WantedTokens | None = None,
        *,
        states: LayerStates | None = None,
        adapters: StepAdapters | None = None,
        is_fused: bool = True,
        token_ids: Tensor | None = None,
        runs: StepRuns | None = None,
        routes: list[Tensor] | None = None,
        of_entries: tuple[Tensor, AttentionMetadata] | None = None,
        **unused: Any,
    ) -> tuple[Tensor | None, Tensor]:
        """`DecoderLayer.forward`; `token_ids` int64 [T] of the step, and the `runs` that end in it; `of_entries` as in
        `CompressedAttention.forward`.
        """
        assert (part, wanted) == (None, None), "outputs are added at once, of all tokens"
        assert not unused, unused
        assert self.mlp is not None, "every layer has a feed-forward"
        if self.ple is not None:
            assert token_ids is not None, "n-grams are of ids"
            assert states is not None, "n-grams have a state"
            residual.add_(self.ple(residual, token_ids, states, metadata))
        x, weights = self.attn_hyper_connection.enter(residual)
        more: dict[str, Any] = {} if self.config.indexer is None else {"runs": runs}
        if of_entries is not None:
            more["of_entries"] = of_entries
        arguments = (_normed(self.input_layernorm, x), ropes, layer_cache, metadata, None)
        output = self._mixed(*arguments, states=states, adapters=adapters, is_fused=is_fused, **more)
        self.attn_hyper_connection.leave(residual, self._complete(output), *weights)
        x, weights = self.mlp_hyper_connection.enter(residual)
        options = self._feed_forward_options(metadata, adapters, routes)
        if self._lists_experts:
            options["token_ids"] = token_ids
        output = self.mlp(_normed(self.post_attention_layernorm, x), is_fused=is_fused, **options)
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
