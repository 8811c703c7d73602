"""Interface of a draft head: one layer that continues the target's hidden states by a token.

At position i it takes the target's states of token i and the id of token i + 1, and its own states score token i + 2;
further drafts take its own states in place of the target's.

T: tokens; S: rows; R: rows that draft.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from kv_cache.cache_engine import LayerCaches
from spmd_worker.model.drafts.draft_names import DraftNames
from spmd_worker.model.layers.checkpoint_layer import CheckpointLayer
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.embedding import StepMedia
from spmd_worker.model.layers.experts import SparseFeedForward
from spmd_worker.model.layers.layer_step import LayerStep
from spmd_worker.model.layers.rotary import RotaryEmbedding
from spmd_worker.model.layers.weight_slice import WeightSlice
from spmd_worker.model.weights.store import WeightStore
from spmd_worker.model_config.model_config import ModelConfig
from spmd_worker.ops.attention.metadata import AttentionMetadata
from spmd_worker.ranks.topology import Stage


@dataclass(frozen=True, slots=True)
class DraftTokens:
    """Positions and regimes, int64 [T], and their attention; `last` int64 [S] are the last tokens of the rows.
    `rope_positions` int64 [3, T] turn queries and keys in place of `positions`.
    """

    positions: Tensor
    regimes: Tensor
    attention: AttentionMetadata
    last: Tensor
    rope_positions: Tensor | None = None


class HeadStack(nn.Module):
    """The modules of a head but its token head, under Llama's names. They are called one by one."""

    joined_layers: None = None

    def join_layers(self) -> None:
        """A head has one layer."""


class DraftHead(nn.Module):
    """A head on the ranks of the last stage. `aux_layers`: layers of the target before which it reads the stream; it
    reads the target's normed output if there are none. `takes_media`: its `forward` takes images.
    """

    aux_layers: tuple[int, ...] = ()
    takes_media = False
    model: HeadStack
    weights: WeightStore

    def __init__(self, context: LayerContext, model_config: ModelConfig) -> None:
        super().__init__()
        self.model_config, self.dtype = model_config, context.dtype
        self._rotaries = tuple(
            RotaryEmbedding(rope, model_config.max_position_embeddings, context.device) for rope in model_config.ropes
        )

    def _new_store(
        self, names: DraftNames, on_meta: Callable[[], "DraftHead"], *, allows_nonfinite: bool
    ) -> WeightStore:
        """`on_meta` makes the same head without memory."""
        layers = {name: each for name, each in self.named_modules() if isinstance(each, CheckpointLayer)}
        slices = partial(_slices, on_meta)
        return WeightStore(names, layers, self.dtype, slices, allows_nonfinite=allows_nonfinite)

    def project(self, hidden: Tensor, aux: tuple[Tensor, ...]) -> Tensor:
        """The target's output [T, hidden] and its stream before `aux_layers` -> [T, hidden of the head]."""
        del aux
        return hidden

    def step(self, tokens: DraftTokens, cache: LayerCaches) -> LayerStep:
        """The tokens as the head's layer sees them."""
        given = (tokens.positions, tokens.regimes, self.dtype, tokens.rope_positions)
        return LayerStep(tuple(rotary.angles(*given) for rotary in self._rotaries), cache[0], tokens.attention)

    @abstractmethod
    def forward(
        self, token_ids: Tensor, tokens: DraftTokens, states: Tensor, cache: LayerCaches, media: StepMedia | None = None
    ) -> Tensor:
        """Ids of the next tokens, int64 [T]; states [T, hidden], the target's projected or the head's own -> its own
        [T, hidden]. Writes the layer's keys and values. `media` are rows of next tokens that are an image's.
        """

    @abstractmethod
    def argmax(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """[R, hidden] -> this rank's maximum logits [R] and their columns, int64 [R]."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of the head's ids."""

    @property
    @abstractmethod
    def first_id(self) -> int:
        """The id of this rank's first column."""

    def forget_addresses(self) -> None:
        """Parameters may have been given other memory: what stacks experts is made again."""
        for module in self.modules():
            if isinstance(module, SparseFeedForward):
                module.forget_addresses()

    def token_ids(self, ids: Tensor) -> Tensor:
        """Ids of the head's vocabulary, int64 [R] -> the target's."""
        return ids


def _slices(on_meta: Callable[[], DraftHead], stage: Stage) -> list[WeightSlice]:
    del stage
    with torch.device("meta"):
        return on_meta().weights.slices
