"""A head of EAGLE-3 (https://arxiv.org/abs/2503.01840).

    streams before three layers -> fc -> states
    states, token i + 1 -> attention of [input_layernorm(embedding) | hidden_norm(states)], added to the states
                        -> feed-forward -> norm -> logits of the most frequent ids

T: tokens; V: ids of the head.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from kv_cache.cache_engine import LayerCaches
from spmd_worker.model.drafts.draft_head import DraftHead, DraftTokens, HeadStack
from spmd_worker.model.drafts.draft_names import EagleNames, EmbeddingNames
from spmd_worker.model.layers.attention import Attention
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.embedding import StepMedia, VocabularyParallelEmbedding, VocabularyParallelHead
from spmd_worker.model.layers.feed_forward import FeedForward
from spmd_worker.model.layers.layer_step import LayerStep
from spmd_worker.model.layers.linear import replicated_linear
from spmd_worker.model.layers.norm import add_without_norm, new_norm
from spmd_worker.model.weights.store import WeightStore
from spmd_worker.model_config.model_config import ModelConfig
from spmd_worker.resolved_draft import DraftRun


class EagleLayer(nn.Module):
    """The head's layer: a decoder layer whose attention reads two states a token."""

    def __init__(self, context: LayerContext, model_config: ModelConfig, *, norms_stream: bool) -> None:
        super().__init__()
        (layer,), size = model_config.layers, model_config.hidden_size
        self._group, self._norms_stream = context.parts_group, norms_stream
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (
            new_norm(context, size, model_config.norm) for _ in range(3)
        )
        self.self_attn = Attention(context, layer, size, input_size=2 * size)
        self.mlp = FeedForward(context, layer, size)

    def forward(self, embedded: Tensor, states: Tensor, step: LayerStep) -> Tensor:
        """Embeddings and states [T, hidden] -> the stream [T, hidden]."""
        normed = self.hidden_norm(states)
        stream = (normed if self._norms_stream else states).clone()
        both = torch.cat((self.input_layernorm(embedded), normed), dim=-1)
        stream = add_without_norm(self._group, self.self_attn(both, step), stream)
        return add_without_norm(self._group, self.mlp(self.post_attention_layernorm(stream)), stream)


class EagleStack(HeadStack):
    """fc, the layer and its norm, perhaps an embedding."""

    def __init__(self, context: LayerContext, draft: DraftRun, target_size: int) -> None:
        super().__init__()
        config, size = draft.model_config, draft.model_config.hidden_size
        if draft.has_embedding:
            self.embed_tokens = VocabularyParallelEmbedding(context.of_head, config.vocab_size, size)
        self.fc = replicated_linear(context, "fc", len(draft.aux_layers) * target_size, size)
        self.layers = nn.ModuleList([EagleLayer(context, config, norms_stream=draft.norms_stream)])
        self.norm = new_norm(context, size, config.norm)


class EagleHead(DraftHead):
    """`embedding` is the target's, for heads without one. Where it is None, because another stage has it, they have a
    copy, filled by `embedding_weights` from the target's files. `d2t` int64 [V] are the distances from ids of the head
    to those of the target, read from the files (`head_files.py`).
    """

    def __init__(
        self,
        context: LayerContext,
        draft: DraftRun,
        embedding: VocabularyParallelEmbedding | None,
        target: ModelConfig,
        *,
        allows_nonfinite: bool = False,
    ) -> None:
        super().__init__(context, draft.model_config)
        self.aux_layers = draft.aux_layers
        self.model = stack = EagleStack(context, draft, target.hidden_size)
        self.lm_head = VocabularyParallelHead(context.of_head, draft.vocab_size, draft.model_config.hidden_size, None)
        self.d2t = torch.zeros(draft.vocab_size, dtype=torch.int64, device=context.device)
        on_meta = replace(context, device=torch.device("meta"))
        self.weights = self._new_store(
            EagleNames(draft.model_config),
            lambda: EagleHead(on_meta, draft, embedding, target, allows_nonfinite=allows_nonfinite),
            allows_nonfinite=allows_nonfinite,
        )
        self.embedding_weights: WeightStore | None = None
        if draft.has_embedding:
            embedding = stack.embed_tokens
        elif embedding is None:
            # A submodule, but not one that the head's own files fill.
            embedding = self.target_embedding = VocabularyParallelEmbedding(
                context.of_head, target.num_embeddings, target.embedding_size
            )
            self.embedding_weights = embedding_store(
                embedding, target, context.dtype, allows_nonfinite=allows_nonfinite
            )
        # In a tuple, so that the target's embedding does not become a submodule.
        self._parts = (stack, embedding)

    def project(self, hidden: Tensor, aux: tuple[Tensor, ...]) -> Tensor:
        del hidden
        states: Tensor = self._parts[0].fc(torch.cat(aux, dim=-1))
        return states

    def forward(
        self, token_ids: Tensor, tokens: DraftTokens, states: Tensor, cache: LayerCaches, media: StepMedia | None = None
    ) -> Tensor:
        assert (tokens.rope_positions, media) == (None, None), "the head takes no images"
        stack, embedding = self._parts
        stream: Tensor = stack.layers[0](embedding(token_ids), states, self.step(tokens, cache))
        return stream

    def argmax(self, states: Tensor) -> tuple[Tensor, Tensor]:
        return self.lm_head.argmax(self._parts[0].norm(states))

    @property
    def vocab_size(self) -> int:
        return self.lm_head.shard.vocab_size

    @property
    def first_id(self) -> int:
        return self.lm_head.shard.start

    def token_ids(self, ids: Tensor) -> Tensor:
        return ids + self.d2t[ids]


def embedding_store(
    embedding: VocabularyParallelEmbedding, target: ModelConfig, dtype: torch.dtype, *, allows_nonfinite: bool
) -> WeightStore:
    """A store that fills a copy of the target's embedding from the target's files."""
    names, layers = EmbeddingNames(target), {"model.embed_tokens": embedding}
    return WeightStore(names, layers, dtype, lambda _: names.slices(layers), allows_nonfinite=allows_nonfinite)
