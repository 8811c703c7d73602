"""Layers for multi-token prediction of DeepSeek V3 and its likes, numbered behind the target's last one.

    states, token i + 1 -> [enorm(embedding) | hnorm(states)] -> eh_proj -> decoder layer -> shared_head.norm -> logits

A further draft takes the stream as it is behind the layer. A copy of the embedding is in the layer's files.

T: tokens.
"""

from typing import Final

import torch
from torch import Tensor, nn

from spmd_worker.model.decoder_layer import DecoderLayer
from spmd_worker.model.drafts.draft_names import DraftNames
from spmd_worker.model.drafts.mtp import MtpStack
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.embedding import VocabularyParallelEmbedding
from spmd_worker.model.layers.linear import replicated_linear
from spmd_worker.model.layers.norm import new_norm
from spmd_worker.model_config.model_config import ModelConfig

_NORM: Final = "norm"


class MtpLayer(DecoderLayer):
    """A decoder layer with what is before and behind it, all under one prefix of the checkpoint."""

    def __init__(self, context: LayerContext, model_config: ModelConfig, *, has_embedding: bool) -> None:
        (layer,), size, norm = model_config.layers, model_config.hidden_size, model_config.norm
        super().__init__(context, layer, size, defers=layer.is_plain_wiring)
        self.enorm, self.hnorm = (new_norm(context, size, norm) for _ in range(2))
        self.eh_proj = replicated_linear(context, "eh_proj", 2 * size, size)
        self.shared_head = nn.ModuleDict({_NORM: new_norm(context, size, norm)})
        if has_embedding:
            sizes = (model_config.num_embeddings, model_config.embedding_size)
            self.embed_tokens = VocabularyParallelEmbedding(context.of_head, *sizes)

    def joined(self, embedded: Tensor, states: Tensor) -> Tensor:
        """Embeddings and states [T, hidden] -> the stream [T, hidden] before the decoder layer."""
        stream: Tensor = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(states)), dim=-1))
        return stream

    def normed(self, stream: Tensor) -> Tensor:
        """[T, hidden] for the token head."""
        rows: Tensor = self.shared_head[_NORM](stream)
        return rows


class DeepseekStack(MtpStack):
    """The layer."""

    names = DraftNames

    def __init__(self, context: LayerContext, model_config: ModelConfig, *, has_embedding: bool) -> None:
        super().__init__(context, model_config, has_embedding=has_embedding)
        self.layers = nn.ModuleList([MtpLayer(context, model_config, has_embedding=has_embedding)])

    @property
    def own_embedding(self) -> VocabularyParallelEmbedding:
        return self._layer.embed_tokens

    def joined(self, embedded: Tensor, states: Tensor) -> Tensor:
        return self._layer.joined(embedded, states)

    def continued(self, stream: Tensor) -> Tensor:
        return stream

    def scored(self, states: Tensor) -> Tensor:
        return self._layer.normed(states)

    @property
    def _layer(self) -> MtpLayer:
        (layer,) = self.layers
        assert isinstance(layer, MtpLayer), layer
        return layer
