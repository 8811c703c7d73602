"""Protocols of attention over a paged cache.

T: tokens; Hq, Hkv: query and key-value heads of this rank; D: head size. The layout of a block belongs to the backend;
other code copies complete blocks.
"""

import inspect
import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from kv_cache.cache_engine import LayerCaches
from kv_cache.cache_spec import BlockLayer, CacheSpec
from spmd_worker.base.numerical_policy import Region, source_version
from spmd_worker.ops.attention.listed import ListKeys
from spmd_worker.ops.attention.metadata import AttentionMetadata
from spmd_worker.ops.kernels.adapters import StepAdapters
from spmd_worker.ops.kernels.api import FeedExperts, JoinableLayer
from spmd_worker.ops.kernels.distance_scores import DistanceScores
from spmd_worker.ranks.communicator import GroupHandle


class JoinedLayers(Protocol):
    """The layers of a stage in one call, with their weights."""

    def run(
        self,
        residual: Tensor,
        angles: Sequence[tuple[Tensor, Tensor]],
        cache: LayerCaches,
        metadata: AttentionMetadata,
        adapters: StepAdapters | None = None,
        feed: FeedExperts | None = None,
    ) -> Tensor | None:
        """The residual stream [T, hidden], which is updated up to the last layer's output; cosines and sines [T, D /
        2] of each rope; caches [blocks, *block_shape] of layers -> this rank's part of the last layer's output, [T,
        hidden], or None if layers add their outputs at once. `feed` computes layers' experts.

        As many layers run as the cache has.
        """


class FixedAttention(Protocol):
    """Metadata in tensors with fixed addresses, for kernels that are recorded once and replayed for other steps."""

    def fill(self, metadata: AttentionMetadata, num_tokens: int) -> AttentionMetadata:
        """Copy a step's metadata, padded to `num_tokens` with tokens that write and see nothing. Returns the metadata
        to compute with, the same object for every step of that size and `kind`.
        """


class AttentionBackend(Protocol):
    """Passed as an argument to the attention layers."""

    def numerics(self) -> Region:
        """Its region of a numerical policy; by default its class, and the file of that."""
        return Region(type(self).__qualname__, source_version(inspect.getfile(type(self))))

    def block_shape(
        self, num_kv_heads: int, block_size: int, head_size: int, *, has_values: bool = True
    ) -> tuple[int, ...]:
        """Shape of one block of one layer: num_kv_heads * block_size * head_size elements of keys, and as many of
        values if it `has_values`.
        """

    def write(self, key: Tensor, value: Tensor | None, layer_cache: Tensor, metadata: AttentionMetadata) -> None:
        """Write keys and values [T, Hkv, D] of this step to `layer_cache` [blocks, *block_shape]; None: keys alone."""

    def read_keys(self, layer_cache: Tensor, blocks: Tensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
        """Keys [N, D], of `dtype`, of a cache that has one key-value head and no values, in `blocks` at `offsets`,
        int64 [N].
        """

    def read_tokens(
        self,
        layer_cache: Tensor,
        num_kv_heads: int,
        blocks: Tensor,
        offsets: Tensor,
        dtype: torch.dtype,
        heads: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Keys and values [N, Hkv, D], of `dtype`, of a cache with values, in `blocks` at `offsets`, int64 [N], or
        [N, D] of one head each, `heads` int64 [N].
        """

    def attend(
        self,
        query: Tensor,
        layer_cache: Tensor,
        metadata: AttentionMetadata,
        scale: float,
        window: int,
        score_cap: float = 0.0,
        sinks: Tensor | None = None,
        value_size: int = 0,
        distance_bias: Tensor | None = None,
        distance_scores: DistanceScores | None = None,
    ) -> Tensor:
        """Attention of queries [T, Hq, D] over the cache, this step's keys included -> [T, Hq, D]: causal, unless
        `metadata.sees_later`, or up to `metadata.last_visible`.

        `window` 0 sees all keys; above 0, the last `window` keys, the query's own included; below 0, the keys of the
        query's chunk: those at positions with the same quotient by -window. If `score_cap` is above 0,
        scores are cap * tanh(score * scale / cap). `sinks`, float32 [Hq], are one more score per head, of a key without
        a value (https://arxiv.org/abs/2309.17453).

        `value_size` above 0: blocks have no values, which are the first so many elements of the keys of the only
        key-value head (https://arxiv.org/abs/2405.04434) -> [T, Hq, value_size].

        `distance_bias`, float32 [Hq, 2 * M + 1], is added to scaled, capped scores: column M + d, with d the key's
        position less the query's, bounded to [-M, M]. `distance_scores` are added to scores before they are scaled;
        there is no cap then.
        """

    def attend_projected(
        self,
        projected: Tensor,
        angles: tuple[Tensor, Tensor],
        layer_cache: Tensor,
        metadata: AttentionMetadata,
        num_heads: int,
        scale: float,
        window: int,
    ) -> Tensor | None:
        """Rotary embedding, `write` and causal `attend` in one call, with the same results; None if not supported.

        `projected` [T, (Hq + 2 * Hkv) * D] has each token's queries, keys and values and may be overwritten; `angles`
        are cosines and sines [T, D / 2] -> [T, Hq * D].
        """
        return None

    def listed_keys(self) -> ListKeys | None:
        """Choice of keys, and attention to lists of them, on the device; None if not supported."""
        return None

    def of_sequences(self, head_size: int, block_size: int) -> "AttentionBackend":
        """A backend of the same kind for heads of `head_size`, a multiple of 16, in blocks of `block_size`."""
        return self

    def join_layers(self, layers: Sequence[JoinableLayer], group: GroupHandle) -> JoinedLayers | None:
        """All layers of a stage in one call, with the same results; None if not supported."""
        return None


def block_shapes(backend: AttentionBackend, spec: CacheSpec) -> tuple[tuple[int, ...], ...]:
    """Shape of one block of one layer, for each of `spec.shapes`."""
    return _shapes(backend, spec.shapes, spec.block_size)


def draft_block_shapes(backend: AttentionBackend, spec: CacheSpec) -> tuple[tuple[int, ...], ...]:
    """Shape of one block of one layer of a draft, for each of `spec.draft_shapes`."""
    return _shapes(backend, spec.draft_shapes, spec.block_size)


def _shapes(backend: AttentionBackend, layers: tuple[BlockLayer, ...], block_size: int) -> tuple[tuple[int, ...], ...]:
    return tuple([block_shape_of(backend, each, block_size) for each in layers])


def block_shape_of(backend: AttentionBackend, layer: BlockLayer, block_size: int) -> tuple[int, ...]:
    """Shape of one block of a layer. With an indexer's keys it is flat: the backend's block, then these keys in the
    order of tokens.
    """
    assert layer.value_size in (layer.key_size, 0), layer
    if not layer.key_size:
        return (block_size * layer.index_size,)
    shape = backend.block_shape(layer.num_heads, block_size, layer.key_size, has_values=layer.value_size > 0)
    return (math.prod(shape) + block_size * layer.index_size,) if layer.index_size else shape
