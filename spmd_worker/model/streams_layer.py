"""Layer with several residual streams: each of its two parts reads a sum of them, and adds to all
(`layers/hyper_connection.py`).
"""

from typing import Any

from torch import Tensor

from spmd_worker.model.decoder_layer import DecoderLayer
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.hyper_connection import HyperConnection
from spmd_worker.model_config.layer_config import LayerConfig


class Layer(DecoderLayer):
    """`DecoderLayer` over streams [T, N * hidden]."""

    def __init__(self, context: LayerContext, layer: LayerConfig, hidden_size: int, *, defers: bool) -> None:
        assert not defers, "streams are complete on every rank"
        assert layer.streams is not None, layer
        assert layer.norms == (True, False, True, False), layer.norms
        super().__init__(context, layer, hidden_size, defers=defers)
        self.attn_hc = HyperConnection(context, layer.streams, hidden_size)
        self.ffn_hc = HyperConnection(context, layer.streams, hidden_size)

    def forward(
        self, part: Tensor | None, residual: Tensor, *arguments: Any, **options: Any
    ) -> tuple[Tensor | None, Tensor]:
        """`DecoderLayer.forward` of streams; nothing is left to add."""
        assert part is None, "streams are complete"
        assert self.input_layernorm is not None, self.config
        assert self.post_attention_layernorm is not None, self.config
        of_mlp: dict[str, Any] = {key: options.pop(key) for key in ("routes", "token_ids") if key in options}
        x, after, matrix = self.attn_hc.enter(residual)
        output = self._complete(self._mixed(self.input_layernorm(x), *arguments, **options))
        residual = self.attn_hc.leave(residual, output, after, matrix)
        x, after, matrix = self.ffn_hc.enter(residual)
        assert self.mlp is not None, self.config
        of_mlp |= {key: options[key] for key in ("adapters", "is_fused") if options.get(key) is not None}
        metadata = arguments[2]
        output = self._complete(self.mlp(self.post_attention_layernorm(x), slots=metadata.slots, **of_mlp))
        return None, self.ffn_hc.leave(residual, output, after, matrix)
