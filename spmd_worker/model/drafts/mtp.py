"""A head for multi-token prediction (https://arxiv.org/abs/2412.19437) in the target's own files.

    states, token i + 1 -> [norm(embedding) | norm(states)] -> projection -> decoder layer -> norm -> logits

The embedding and the token head are the target's; a stage without the embedding has one more, filled from the files.
Releases differ in names, and in what a further draft is made of (`MtpStack`).

T: tokens; R: rows that draft.
"""

from abc import abstractmethod
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from kv_cache.cache_engine import LayerCaches
from spmd_worker.model.decoder_layer import DecoderLayer
from spmd_worker.model.drafts.draft_head import DraftHead, DraftTokens, HeadStack
from spmd_worker.model.drafts.draft_names import DraftNames
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.embedding import StepMedia, VocabularyParallelEmbedding, VocabularyParallelHead
from spmd_worker.model.layers.norm import add_without_norm
from spmd_worker.model_config.model_config import ModelConfig


class MtpStack(HeadStack):
    """A decoder layer, the first of a model of its own, and what is before and behind it. `names` are its files'."""

    names: ClassVar[type[DraftNames]]
    layers: nn.ModuleList

    def __init__(self, context: LayerContext, model_config: ModelConfig, *, has_embedding: bool) -> None:
        super().__init__()

    @property
    @abstractmethod
    def own_embedding(self) -> VocabularyParallelEmbedding:
        """Its embedding, if it has one."""

    @abstractmethod
    def joined(self, embedded: Tensor, states: Tensor) -> Tensor:
        """Embeddings and states [T, hidden] -> the stream [T, hidden] before the decoder layer."""

    @abstractmethod
    def continued(self, stream: Tensor) -> Tensor:
        """The stream [T, hidden] behind the decoder layer -> the head's states, of which the next draft is made."""

    @abstractmethod
    def scored(self, states: Tensor) -> Tensor:
        """The head's states [R, hidden] -> inputs of the token head."""


class MtpHead(DraftHead):
    """`embedding` and `head` are the target's; `embedding` None: another stage has it."""

    takes_media = True

    def __init__(
        self,
        stack_class: type[MtpStack],
        context: LayerContext,
        model_config: ModelConfig,
        embedding: VocabularyParallelEmbedding | None,
        head: VocabularyParallelHead,
        *,
        allows_nonfinite: bool = False,
    ) -> None:
        super().__init__(context, model_config)
        self.model = stack = stack_class(context, model_config, has_embedding=embedding is None)
        # In tuples, so that what is the target's, or in the stack, does not become a submodule.
        self._stack, self._embedding, self._head = (stack,), (embedding or stack.own_embedding,), (head,)
        self._group = context.parts_group
        on_meta = replace(context, device=torch.device("meta"))
        given = (model_config, embedding, head)
        self.weights = self._new_store(
            stack.names(model_config),
            lambda: MtpHead(stack_class, on_meta, *given, allows_nonfinite=allows_nonfinite),
            allows_nonfinite=allows_nonfinite,
        )

    def forward(
        self, token_ids: Tensor, tokens: DraftTokens, states: Tensor, cache: LayerCaches, media: StepMedia | None = None
    ) -> Tensor:
        (stack,), (embedding,) = self._stack, self._embedding
        (layer,) = stack.layers
        assert isinstance(layer, DecoderLayer), layer
        embedded: Tensor = embedding(token_ids)
        if media is not None:
            embedded = embedded.index_copy(0, media.places, media.rows)
        stream = stack.joined(embedded, states)
        part, stream = layer(None, stream, self.step(tokens, cache))
        return stack.continued(stream if part is None else add_without_norm(self._group, part, stream))

    def argmax(self, states: Tensor) -> tuple[Tensor, Tensor]:
        return self._head[0].argmax(self._stack[0].scored(states))

    @property
    def vocab_size(self) -> int:
        return self._head[0].shard.vocab_size

    @property
    def first_id(self) -> int:
        return self._head[0].shard.start
