"""Self-attention of one decoder layer over the paged cache.

T: tokens of the step; Hq, Hkv: query and key-value heads of this rank; D: head size; V: size of a value's head, D or
less; W: tokens of `WantedTokens`.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spmd_worker.model.layers.checkpoint_layer import CheckpointLayer
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.distances import StepDistances, distance_scores
from spmd_worker.model.layers.head_indexer import HeadIndexer
from spmd_worker.model.layers.layer_step import LayerStep
from spmd_worker.model.layers.linear import ColumnParallelLinear, OutputPart, RowParallelLinear, kv_head_range
from spmd_worker.model.layers.norm import HeadNorms, Norm, new_norm
from spmd_worker.model.layers.rotary import Angles
from spmd_worker.model.layers.run_indexer import RunIndexer
from spmd_worker.model.layers.weight_slice import WeightSlice, shard
from spmd_worker.model_config.layer_config import LayerConfig, NormConfig
from spmd_worker.ops.kernels.adapters import StepAdapters
from spmd_worker.ops.kernels.distance_scores import DistanceScores
from spmd_worker.ops.kernels.gates import sigmoid
from spmd_worker.ops.kernels.reference_recurrent import softplus
from spmd_worker.ranks.topology import shard_range


class Sinks(CheckpointLayer):
    """One score per query head, of a key without a value (https://arxiv.org/abs/2309.17453): float32 [Hq]."""

    is_float32 = True

    def __init__(self, context: LayerContext, num_heads: int, heads: tuple[int, int]) -> None:
        super().__init__()
        self._num_heads, self._heads = num_heads, heads
        self.scores = replace(context, dtype=torch.float32).parameter(heads[1] - heads[0])

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        name = f"{prefix.rpartition('.')[0]}.sinks"
        yield shard(name, (self._num_heads,), f"{prefix}.scores", 0, *self._heads)


def _bare(norm: NormConfig) -> NormConfig:
    """The norm without weights, rounded once."""
    return NormConfig(eps=norm.eps, rounds_once=True, has_weight=False)


class Attention(nn.Module):
    """Projections, optional norms of queries and keys, rotary embedding, attention, an optional gate of each head,
    output projection. Its input has `input_size` numbers a token, by default the hidden size.
    """

    def __init__(
        self, context: LayerContext, layer: LayerConfig, hidden_size: int, input_size: int | None = None
    ) -> None:
        super().__init__()
        group, size, value_size = context.tensor_group, layer.head_size, layer.value_head_size
        heads = shard_range(layer.num_heads, group.size, group.rank)
        kv_heads = kv_head_range(layer.num_kv_heads, group.size, group.rank)
        self.num_heads, self.num_kv_heads, self.head_size = heads[1] - heads[0], kv_heads[1] - kv_heads[0], size
        self._value_size, self._value_multiplier = value_size, layer.value_multiplier
        self.window, self.scale, self._score_cap = layer.window or -layer.chunk, layer.scale, layer.score_cap
        self._qk_norm, self._total_kv_heads, self._rope = layer.qk_norm, layer.num_kv_heads, layer.rope
        self._qkv_clip, self._is_plain = layer.qkv_clip, layer.is_plain_attention
        self._key_multiplier, (self._in_multiplier, out_multiplier) = layer.key_multiplier, layer.attention_multipliers
        self._group, self._kernels, self._backend = group, context.kernels, context.attention
        assert layer.output_gate in ("", "head", "number", "projected"), layer.output_gate
        self._gate = {"sigmoid": sigmoid, "softplus": softplus}[layer.gate_activation]
        self._has_gates = layer.output_gate == "number"
        assert not self._has_gates or layer.qk_norm != "flat", "a flat norm is of queries alone"
        self._reads_other = layer.kv_layer is not None
        of_keys = (("k_proj", size), ("v_proj", value_size))[: layer.num_key_projections]
        shares = [
            ("q_proj", layer.num_heads, heads, size * (1 + self._has_gates)),
            *((name, layer.num_kv_heads, kv_heads, each) for name, each in of_keys),
        ]
        parts = tuple(
            OutputPart(name, total * each, start * each, stop * each, name != "k_proj" or layer.has_key_bias)
            for name, total, (start, stop), each in shares
        )
        self._sizes = [part.stop - part.start for part in parts]
        self.qkv_proj = ColumnParallelLinear(context, input_size or hidden_size, parts, layer.has_qkv_bias)
        inputs, num_inputs = (heads[0] * value_size, heads[1] * value_size), layer.num_heads * value_size
        self.o_proj = RowParallelLinear(context, inputs, num_inputs, hidden_size, layer.has_output_bias, out_multiplier)
        self._distances = layer.distances
        self.pos_proj: ColumnParallelLinear | None = None
        if layer.distances is not None and layer.distances.num_projections:
            kinds = ["q_proj"] * layer.distances.has_queries + ["k_proj"] * layer.distances.has_keys
            of_rows = [replace(part, name=f"pos_{part.name}") for part in parts if part.name in kinds]
            has_bias = layer.has_qkv_bias and any(part.has_bias for part in of_rows)
            self.pos_proj = ColumnParallelLinear(context, hidden_size, tuple(of_rows), has_bias)
        self.g_proj: ColumnParallelLinear | None = None
        if layer.output_gate in ("head", "projected"):
            num_gates = 1 if layer.output_gate == "head" else value_size
            total, start, stop = (each * num_gates for each in (layer.num_heads, *heads))
            gates = (OutputPart("g_proj", total, start, stop),)
            self.g_proj = ColumnParallelLinear(context, hidden_size, gates, has_bias=False)
        self.sinks = Sinks(context, layer.num_heads, heads) if layer.has_sinks else None
        self.indexer: RunIndexer | HeadIndexer | None = None
        if layer.indexer is not None:
            assert (self.window, layer.score_cap, layer.has_sinks, value_size) == (0, 0.0, False, size), layer
            new_indexer = HeadIndexer if layer.indexer.is_by_head else RunIndexer
            self.indexer = new_indexer(context, layer, hidden_size, self.num_kv_heads)
        assert not self._reads_other or layer.qk_norm in ("none", "head"), layer.qk_norm
        has_values_norm = layer.norms_values and not self._reads_other
        self.v_norm = new_norm(context, size, _bare(layer.norm)) if has_values_norm else None
        self.q_norm: Norm | HeadNorms | None = None
        self.k_norm: Norm | HeadNorms | None = None
        if layer.qk_norm == "each_head":
            norm = replace(layer.norm, has_bias=False)
            self.q_norm = HeadNorms(context, layer.num_heads, heads, size, norm)
            self.k_norm = HeadNorms(context, layer.num_kv_heads, kv_heads, size, norm)
        elif layer.qk_norm == "bare_after_rope":
            self.q_norm = self.k_norm = new_norm(context, size, _bare(layer.norm))
        elif layer.qk_norm != "none":
            is_flat = layer.qk_norm == "flat"
            self.q_norm = new_norm(context, size * (layer.num_heads if is_flat else 1), layer.norm)
            if not self._reads_other:
                self.k_norm = new_norm(context, size * (layer.num_kv_heads if is_flat else 1), layer.norm)

    def forward(self, x: Tensor, step: LayerStep) -> Tensor:
        """[T, hidden] -> this rank's part of [T, hidden], [W, hidden] with `wanted`. Writes the cache, unless it is
        another layer's, then reads.
        """
        layer_cache, metadata, wanted, adapters = step.key_cache, step.metadata, step.wanted, step.adapters
        projected = self.qkv_proj(x if self._in_multiplier == 1.0 else x * self._in_multiplier, adapters)
        attended = None
        angles = None if self._rope is None else step.ropes[self._rope]
        is_one_call = step.is_fused and self._is_plain and wanted is None and metadata.is_causal
        if is_one_call and angles is not None and angles.is_plain:
            attended = self._backend.attend_projected(
                projected, (angles.cos, angles.sin), layer_cache, metadata, self.num_heads, self.scale, self.window
            )
        index_cache: Tensor | None = None
        if self.indexer is not None:
            layer_cache, index_cache = self.indexer.chosen.parts_of(layer_cache)
        if attended is None:
            if self._reads_other:
                query = self._query(projected, angles)
            else:
                query, key, value = self._query_key_value(projected, angles)
                self._backend.write(key, value, layer_cache, metadata)
            if self.indexer is not None and index_cache is not None:
                choosing = self.indexer.write((x, angles, step.runs), index_cache, metadata, adapters)
            if wanted is not None:
                if not len(wanted.rows):
                    return x[:0]
                query, metadata = query[wanted.rows], wanted.metadata
            bounds = (self._score_cap, None if self.sinks is None else self.sinks.scores)
            of_layer = (layer_cache, metadata, self.scale, self.window, *bounds)
            more: dict[str, Any] = {"distance_bias": step.distance_bias}
            if step.distances is not None:
                assert wanted is None, "sequences are complete"
                more["distance_scores"] = self._distance_scores(query, key, step.distances, adapters)
            if self.indexer is not None and index_cache is not None:
                caches, rows = (layer_cache, index_cache), None if wanted is None else wanted.rows
                attended = self.indexer.chosen.attend_by(choosing, query, caches, metadata, self.scale, rows)
            else:
                attended = self._backend.attend(query, *of_layer, **more)
            attended = attended[..., : self._value_size].flatten(1)
        if wanted is not None:
            x, adapters = x[wanted.rows], wanted.adapters
        if self.g_proj is not None:
            attended = self._gated(attended, self.g_proj(x, adapters).view(len(attended), self.num_heads, -1))
        if self._has_gates:
            heads = projected[:, : self._sizes[0]] if wanted is None else projected[wanted.rows, : self._sizes[0]]
            attended = self._gated(attended, heads.view(len(attended), self.num_heads, -1)[..., self.head_size :])
        output: Tensor = self.o_proj(attended, adapters)
        return output

    def _distance_scores(
        self, query: Tensor, key: Tensor, distances: StepDistances, adapters: StepAdapters | None
    ) -> DistanceScores:
        """Products of queries and keys [T, Hq, D] with embedded distances."""
        assert self._distances is not None, "the layer has none"
        layer = self.qkv_proj if self.pos_proj is None else self.pos_proj
        own = adapters if layer.is_adapted(adapters) else None
        of_step = (self._kernels, self._distances, query, key, distances)
        return distance_scores(*of_step, self._projected_distances, own)

    def _projected_distances(self, rows: Tensor, adapters: StepAdapters | None) -> tuple[Tensor | None, Tensor | None]:
        """Embedded distances [W, hidden] as queries and as keys [W, Hq * D], as far as they are needed."""
        if self.pos_proj is None:
            query, key, _ = self.qkv_proj(rows, adapters).split_with_sizes(self._sizes, dim=-1)
            return query, key
        parts = self.pos_proj.parts
        projected = self.pos_proj(rows, adapters).split_with_sizes([each.stop - each.start for each in parts], dim=-1)
        found = {each.name: columns for each, columns in zip(parts, projected, strict=True)}
        return found.get("pos_q_proj"), found.get("pos_k_proj")

    def _gated(self, attended: Tensor, gates: Tensor) -> Tensor:
        """Heads [T, Hq * V] times the activated gates [T, Hq, 1 or V] of each, rounded to the dtype."""
        heads = attended.view(len(attended), self.num_heads, self._value_size)
        return (heads * self._gate(gates.float()).to(heads.dtype)).flatten(1)

    def _query_key_value(self, projected: Tensor, angles: Angles | None) -> tuple[Tensor, Tensor, Tensor]:
        """[T, (Hq + 2 * Hkv) * D] -> query [T, Hq, D], key and value [T, Hkv, D]. With gates a head of `projected` has
        its query, then its gate. Smaller values end with zeros.
        """
        query, key, *values = projected.split_with_sizes(self._sizes, dim=-1)
        value = values[0] if values else key
        key = key if self._key_multiplier == 1.0 else key * self._key_multiplier
        if self._qk_norm == "flat":
            query, key = self._norm_all_heads(query, key)
        if self._qkv_clip:
            query, key, value = (part.clamp(-self._qkv_clip, self._qkv_clip) for part in (query, key, value))
        query = query.view(len(projected), self.num_heads, -1)[..., : self.head_size]
        key = key.view(len(projected), -1, self.head_size)
        value = value.view(len(projected), -1, self._value_size)
        value = value if self._value_multiplier == 1.0 else value * self._value_multiplier
        value = value if self._value_size == self.head_size else F.pad(value, (0, self.head_size - self._value_size))
        value = value if self.v_norm is None else self.v_norm(value)
        if self._qk_norm in ("head", "each_head") and self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        if angles is not None:
            query, key = angles.rotate(self._kernels, query), angles.rotate(self._kernels, key)
            query = query if angles.query_factors is None else (query * angles.query_factors).to(query.dtype)
        if (
            self._qk_norm in ("head_after_rope", "bare_after_rope")
            and self.q_norm is not None
            and self.k_norm is not None
        ):
            query, key = self.q_norm(query), self.k_norm(key)
        return query, key, value

    def _query(self, projected: Tensor, angles: Angles | None) -> Tensor:
        """[T, Hq * D] -> [T, Hq, D], in a layer without keys."""
        query = projected.view(len(projected), self.num_heads, -1)
        query = query if self.q_norm is None else self.q_norm(query)
        return query if angles is None else angles.rotate(self._kernels, query)

    def _norm_all_heads(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [T, Hq * D] and keys [T, Hkv * D], normed over the heads of all ranks with the bits of one rank."""
        assert self.q_norm is not None, "flat norms have weights"
        assert self.k_norm is not None, "flat norms have weights"
        size, rank = self._group.size, self._group.rank
        # A head that several ranks have counts once.
        num_copies = max(size // self._total_kv_heads, 1)
        all_queries = self.q_norm(self._all_ranks(query, 1))
        all_keys = self.k_norm(self._all_ranks(key, num_copies))
        first, first_kv = rank * query.shape[1], rank // num_copies * key.shape[1]
        return all_queries[:, first : first + query.shape[1]], all_keys[:, first_kv : first_kv + key.shape[1]]

    def _all_ranks(self, part: Tensor, num_copies: int) -> Tensor:
        if self._group.size == 1:
            return part
        return torch.cat(self._group.all_gather(part.contiguous())[::num_copies].unbind(), dim=1)
