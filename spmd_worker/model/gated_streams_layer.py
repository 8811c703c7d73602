"""Layer with several residual streams, which may begin with embedded n-grams (Qwen4)."""

from typing import Any

from torch import Tensor

from kv_cache.layer_states import LayerStates
from spmd_worker.model.decoder_layer import DecoderLayer
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.gated_streams import StreamMixer, inject
from spmd_worker.model.layers.ngrams import Ngrams
from spmd_worker.model.layers.rotary import Angles
from spmd_worker.model.layers.run_indexer import StepRuns
from spmd_worker.model_config.layer_config import LayerConfig
from spmd_worker.ops.attention.metadata import AttentionMetadata, WantedTokens
from spmd_worker.ops.kernels.adapters import StepAdapters


class Layer(DecoderLayer):
    """`DecoderLayer` whose stream [T, S * hidden] has S streams of each token: each part reads a mean of them. What
    weighs streams, and n-grams, are not quantised, as routers are not.
    """

    def __init__(self, context: LayerContext, layer: LayerConfig, hidden_size: int, *, defers: bool) -> None:
        assert not defers, "outputs are added to several streams"
        assert layer.gated_streams is not None, layer
        super().__init__(context, layer, hidden_size, defers=defers)
        self.attn_hyper_connection, self.mlp_hyper_connection = (
            StreamMixer(context.unquantised, layer.gated_streams, hidden_size, layer.norm) for _ in range(2)
        )
        self.ple = None if layer.ngrams is None else Ngrams(context.unquantised, layer, hidden_size)

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
        **unused: Any,
    ) -> tuple[Tensor | None, Tensor]:
        """`DecoderLayer.forward`; `token_ids` int64 [T] of the step, and the `runs` that end in it."""
        assert (part, wanted) == (None, None), "outputs are added at once, of all tokens"
        assert not unused, unused
        assert self.mlp is not None, "every layer has a feed-forward"
        if self.ple is not None:
            assert token_ids is not None, "n-grams are of ids"
            assert states is not None, "n-grams have a state"
            residual.add_(self.ple(residual, token_ids, states, metadata))
        x, gates = self.attn_hyper_connection.mixed(residual)
        more: dict[str, Any] = {} if self.config.indexer is None else {"runs": runs}
        arguments = (x, ropes, layer_cache, metadata, None)
        output = self._mixed(*arguments, states=states, adapters=adapters, is_fused=is_fused, **more)
        inject(residual, self._complete(output), gates)
        x, gates = self.mlp_hyper_connection.mixed(residual)
        options = self._feed_forward_options(metadata, adapters, routes)
        inject(residual, self._complete(self.mlp(x, is_fused=is_fused, **options)), gates)
        return None, residual
