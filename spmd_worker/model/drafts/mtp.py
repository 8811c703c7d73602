"""A layer for multi-token prediction (https://arxiv.org/abs/2412.19437) of DeepSeek V3 and its likes.

    states, token i + 1 -> [enorm(embedding) | hnorm(states)] -> eh_proj -> decoder layer -> shared_head.norm -> logits

The embedding and the token head are the target's; a stage without the embedding has the copy of the layer's files.

T: tokens.
"""

from dataclasses import replace
from typing import Final

import torch
from torch import Tensor, nn

from kv_cache.cache_engine import LayerCaches
from spmd_worker.model.decoder_layer import DecoderLayer
from spmd_worker.model.drafts.draft_head import DraftHead, HeadStack
from spmd_worker.model.drafts.draft_names import DraftNames
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.embedding import VocabularyParallelEmbedding, VocabularyParallelHead
from spmd_worker.model.layers.linear import replicated_linear
from spmd_worker.model.layers.norm import add_without_norm, new_norm
from spmd_worker.model_config.model_config import ModelConfig
from spmd_worker.ops.attention.metadata import AttentionMetadata

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
        """[R, hidden] for the token head."""
        rows: Tensor = self.shared_head[_NORM](stream)
        return rows


class MtpStack(HeadStack):
    """The layer, the first of a model of its own."""

    def __init__(self, layer: MtpLayer) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer])


class MtpHead(DraftHead):
    """`embedding` and `head` are the target's; `embedding` None: another stage has it."""

    def __init__(
        self,
        context: LayerContext,
        model_config: ModelConfig,
        embedding: VocabularyParallelEmbedding | None,
        head: VocabularyParallelHead,
        *,
        allows_nonfinite: bool = False,
    ) -> None:
        super().__init__(context, model_config)
        # In tuples, so that what is the target's, or in the stack, does not become a submodule.
        self._layer = (MtpLayer(context, model_config, has_embedding=embedding is None),)
        self.model = MtpStack(self._layer[0])
        self._embedding, self._head = (embedding or self._layer[0].embed_tokens,), (head,)
        self._group = context.parts_group
        on_meta = replace(context, device=torch.device("meta"))
        self.weights = self._new_store(
            DraftNames(model_config),
            lambda: MtpHead(on_meta, model_config, embedding, head, allows_nonfinite=allows_nonfinite),
            allows_nonfinite=allows_nonfinite,
        )

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        rope_regimes: Tensor,
        states: Tensor,
        cache: LayerCaches,
        metadata: AttentionMetadata,
    ) -> Tensor:
        (layer,), (embedding,) = self._layer, self._embedding
        stream = layer.joined(embedding(token_ids), states)
        part, stream = layer(None, stream, self.angles(positions, rope_regimes), cache[0], metadata)
        return stream if part is None else add_without_norm(self._group, part, stream)

    def argmax(self, states: Tensor) -> tuple[Tensor, Tensor]:
        return self._head[0].argmax(self._layer[0].normed(states))

    @property
    def vocab_size(self) -> int:
        return self._head[0].shard.vocab_size

    @property
    def first_id(self) -> int:
        return self._head[0].shard.start
