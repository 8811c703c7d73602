"""Self-attention of one decoder layer over the paged cache.

T: tokens of the step; Hq, Hkv: query and key-value heads of this rank; D: head size.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from spmd_worker.model.layers.checkpoint_layer import CheckpointLayer
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.linear import RowParallelLinear, kv_head_range, qkv_linear
from spmd_worker.model.layers.norm import HeadNorms, Norm, new_norm
from spmd_worker.model.layers.rotary import Angles
from spmd_worker.model.layers.weight_slice import WeightSlice, shard
from spmd_worker.model_config.layer_config import LayerConfig
from spmd_worker.ops.attention.metadata import AttentionMetadata, WantedTokens
from spmd_worker.ranks.topology import shard_range


class Sinks(CheckpointLayer):
    """One score a query head, of a key without a value (https://arxiv.org/abs/2309.17453), float32 in every dtype."""

    is_float32 = True

    def __init__(self, context: LayerContext, num_heads: int, heads: tuple[int, int]) -> None:
        super().__init__()
        self._num_heads, self._heads = num_heads, heads
        self.scores = replace(context, dtype=torch.float32).parameter(heads[1] - heads[0])

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        """`prefix` is this layer's name, whose last word the checkpoint's takes the place of."""
        name = f"{prefix.rpartition('.')[0]}.sinks"
        yield shard(name, (self._num_heads,), f"{prefix}.scores", 0, *self._heads)


class Attention(nn.Module):
    """Projections, optional norms of queries and keys, rotary embedding, attention, output projection."""

    def __init__(self, context: LayerContext, layer: LayerConfig, hidden_size: int) -> None:
        super().__init__()
        group, head_size = context.tensor_group, layer.head_size
        first_head, end_head = shard_range(layer.num_heads, group.size, group.rank)
        first_kv_head, end_kv_head = kv_head_range(layer.num_kv_heads, group.size, group.rank)
        self.num_heads, self.num_kv_heads, self.head_size = (
            end_head - first_head,
            end_kv_head - first_kv_head,
            head_size,
        )
        self._sizes = [heads * head_size for heads in (self.num_heads, self.num_kv_heads, self.num_kv_heads)]
        self.window, self.scale, self._score_cap = layer.window, layer.scale, layer.score_cap
        self._qk_norm, self._total_kv_heads, self._rope = layer.qk_norm, layer.num_kv_heads, layer.rope
        self._qkv_clip = layer.qkv_clip
        self._group, self._kernels, self._backend = group, context.kernels, context.attention
        self.qkv_proj = qkv_linear(
            context, hidden_size, layer.num_heads, layer.num_kv_heads, head_size, layer.has_qkv_bias
        )
        self.o_proj = RowParallelLinear(
            context,
            (first_head * head_size, end_head * head_size),
            layer.num_heads * head_size,
            hidden_size,
            layer.has_output_bias,
        )
        is_flat = layer.qk_norm == "flat"
        sizes = [head_size * (heads if is_flat else 1) for heads in (layer.num_heads, layer.num_kv_heads)]
        norms = [
            None if layer.qk_norm in ("none", "each_head") else new_norm(context, size, layer.norm) for size in sizes
        ]
        self.sinks = Sinks(context, layer.num_heads, (first_head, end_head)) if layer.has_sinks else None
        self._is_plain = layer.is_plain_attention
        self.q_norm: Norm | HeadNorms | None = norms[0]
        self.k_norm: Norm | HeadNorms | None = norms[1]
        if layer.qk_norm == "each_head":
            norm = replace(layer.norm, has_bias=False)
            self.q_norm = HeadNorms(context, layer.num_heads, (first_head, end_head), head_size, norm)
            self.k_norm = HeadNorms(context, layer.num_kv_heads, (first_kv_head, end_kv_head), head_size, norm)

    def forward(
        self,
        x: Tensor,
        ropes: tuple[Angles, ...],
        layer_cache: Tensor,
        metadata: AttentionMetadata,
        wanted: WantedTokens | None = None,
        *,
        is_fused: bool = True,
    ) -> Tensor:
        """[T, hidden] -> [T, hidden], this rank's part; writes this step's keys and values before it reads. With
        `wanted` [W, hidden].
        """
        projected = self.qkv_proj(x)
        attended = None
        angles = None if self._rope is None else ropes[self._rope]
        is_one_call = is_fused and self._is_plain and wanted is None and not metadata.sees_later
        if is_one_call and angles is not None and angles.is_plain:
            attended = self._backend.attend_projected(
                projected, (angles.cos, angles.sin), layer_cache, metadata, self.num_heads, self.scale, self.window
            )
        if attended is None:
            query, key, value = self._query_key_value(projected, angles)
            self._backend.write(key, value, layer_cache, metadata)
            if wanted is not None:
                if not len(wanted.rows):
                    return x[:0]
                query, metadata = query[wanted.rows], wanted.metadata
            attended = self._attend_to(query, layer_cache, metadata)
        output: Tensor = self.o_proj(attended)
        return output

    def _query_key_value(self, projected: Tensor, angles: Angles | None) -> tuple[Tensor, Tensor, Tensor]:
        """[T, (Hq + 2 * Hkv) * D] -> [T, Hq, D] and twice [T, Hkv, D], as attention and the cache take them."""
        parts = projected.split_with_sizes(self._sizes, dim=-1)
        if self._qk_norm == "flat":
            parts = (*self._norm_all_heads(parts[0], parts[1]), parts[2])
        if self._qkv_clip:
            parts = tuple(part.clamp(-self._qkv_clip, self._qkv_clip) for part in parts)
        query, key, value = (part.view(len(projected), -1, self.head_size) for part in parts)
        if self._qk_norm in ("head", "each_head") and self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        if angles is not None:
            query, key = (angles.turn(self._kernels, each) for each in (query, key))
            query = query if angles.query_factors is None else query * angles.query_factors
        if self._qk_norm == "head_after_rope" and self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        return query, key, value

    def _attend_to(self, query: Tensor, layer_cache: Tensor, metadata: AttentionMetadata) -> Tensor:
        """[T, Hq, D] -> [T, Hq * D]."""
        bounds = (self._score_cap, None if self.sinks is None else self.sinks.scores)
        attended = self._backend.attend(query, layer_cache, metadata, self.scale, self.window, *bounds)
        return attended.view(len(query), -1)

    def _norm_all_heads(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [T, Hq * D] and keys [T, Hkv * D], of which the heads of all ranks are one row of the norm: so that
        its bits are those of one rank.
        """
        assert self.q_norm is not None, "flat norms have weights"
        assert self.k_norm is not None, "flat norms have weights"
        size, rank = self._group.size, self._group.rank
        # Of heads that several ranks hold, each counts once.
        num_copies = max(size // self._total_kv_heads, 1)
        whole_query = self.q_norm(self._all_ranks(query, 1))
        whole_key = self.k_norm(self._all_ranks(key, num_copies))
        first, first_kv = rank * query.shape[1], rank // num_copies * key.shape[1]
        return whole_query[:, first : first + query.shape[1]], whole_key[:, first_kv : first_kv + key.shape[1]]

    def _all_ranks(self, part: Tensor, num_copies: int) -> Tensor:
        if self._group.size == 1:
            return part
        return torch.cat(self._group.all_gather(part.contiguous())[::num_copies].unbind(), dim=1)
