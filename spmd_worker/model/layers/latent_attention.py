"""Multi-head latent attention (https://arxiv.org/abs/2405.04434) of one decoder layer, over a cache of latents.

Keys and values of all heads are W_uk c and W_uv c of one latent c. The cache has c and a rotated part that all heads
share, and no keys and values: for every token, in prompts and in decode alike, a query is multiplied with W_uk instead
("absorbed"), so that it is compared with the latents themselves, and the weighted sum of latents with W_uv. In bfloat16
both products are rounded once.

T: tokens of the step; H: heads of this rank; N, R: parts of a head without and with rotation; C: latent; V: value;
W: tokens of `WantedTokens`.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from spmd_worker.model.layers.checkpoint_layer import PackedLayer
from spmd_worker.model.layers.chosen_keys import ChosenKeys, latent_keys
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.head_growth import HeadGrowth
from spmd_worker.model.layers.indexer import Indexer
from spmd_worker.model.layers.layer_step import LayerStep
from spmd_worker.model.layers.linear import ColumnParallelLinear, OutputPart, RowParallelLinear, replicated_linear
from spmd_worker.model.layers.norm import RMSNorm
from spmd_worker.model.layers.rotary import Angles
from spmd_worker.model.layers.weight_slice import Rectangle, WeightSlice, shard
from spmd_worker.model_config.layer_config import LatentConfig, LayerConfig
from spmd_worker.ops.kernels.gates import sigmoid
from spmd_worker.ranks.topology import shard_range


class LatentProjection(PackedLayer):
    """W_uk and W_uv of this rank's heads, the checkpoint's `kv_b_proj`: `weight` [H * (N + V), C], or, packed, a row a
    head with both parts in the kernels' order. It is never quantised.
    """

    def __init__(self, context: LayerContext, latent: LatentConfig, num_heads: int, heads: tuple[int, int]) -> None:
        super().__init__()
        self._latent, self._num_heads, self._heads, self._kernels = latent, num_heads, heads, context.kernels
        self._key_shape: tuple[int, ...] = ()
        self._value_shape: tuple[int, ...] = ()
        self.weight = context.parameter((heads[1] - heads[0]) * self._head_rows, latent.rank)

    @property
    def _head_rows(self) -> int:
        """Rows of a head in the checkpoint: N of W_uk, then V of W_uv."""
        return self._latent.nope_size + self._latent.value_size

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        rows, (start, stop) = self._head_rows, self._heads
        shape = (self._num_heads * rows, self._latent.rank)
        yield shard(f"{prefix}.weight", shape, f"{prefix}.weight", 0, start * rows, stop * rows)

    def to_latents(self, queries: Tensor, out: Tensor) -> None:
        """`out` [T, H, C] = q W_uk of queries [T, H, N]."""
        self._kernels.linear_of_heads(queries, self._parts()[0], out)

    def to_values(self, latents: Tensor) -> Tensor:
        """[T, H, C] -> [T, H, V]."""
        out = latents.new_empty((*latents.shape[:2], self._latent.value_size))
        self._kernels.linear_of_heads(latents, self._parts()[1], out)
        return out

    def _parts(self) -> tuple[Tensor, Tensor]:
        """W_uk as [H, C, N] and W_uv as [H, V, C], packed if the layer is."""
        if not self.is_packed:
            keys, values = self._by_head(self.weight).split_with_sizes(self._sizes, dim=1)
            return keys.transpose(1, 2), values
        keys, values = self.weight.split_with_sizes([size * self._latent.rank for size in self._sizes], dim=1)
        return keys.view(len(keys), *self._key_shape), values.view(len(values), *self._value_shape)

    @property
    def _sizes(self) -> list[int]:
        return [self._latent.nope_size, self._latent.value_size]

    def _by_head(self, rows: Tensor) -> Tensor:
        return rows.view(-1, self._head_rows, rows.shape[1])

    def _packed_heads(self, rows: Tensor) -> Tensor:
        """Complete heads [n * (N + V), C] -> [n, (N + V) * C]."""
        keys, values = self._by_head(rows).split_with_sizes(self._sizes, dim=1)
        packed = self._kernels.pack_heads(keys.transpose(1, 2).contiguous()), self._kernels.pack_heads(values)
        self._key_shape, self._value_shape = (tuple(each.shape[1:]) for each in packed)
        return torch.cat([each.flatten(1) for each in packed], dim=1)

    def _packed(self) -> Tensor:
        return self._packed_heads(self.weight.detach())

    def _empty_packed(self) -> Tensor | None:
        return None

    def read_region(self, parameter: str, region: Rectangle) -> Tensor:
        if not self.is_packed:
            return super().read_region(parameter, region)
        (start, stop), columns = region
        rows, first, end = self._head_rows, start // self._head_rows, -(-stop // self._head_rows)
        keys, values = (self._kernels.unpack_heads(each[first:end].detach()) for each in self._parts())
        found = torch.cat((keys.transpose(1, 2), values), dim=1).flatten(0, 1)
        return found[start - first * rows : stop - first * rows, slice(*columns)]

    def write_region(self, parameter: str, region: Rectangle, values: Tensor) -> None:
        if not self.is_packed:
            super().write_region(parameter, region, values)
            return
        (start, stop), columns = region
        rows, first, end = self._head_rows, start // self._head_rows, -(-stop // self._head_rows)
        heads = self.read_region(parameter, ((first * rows, end * rows), (0, self._latent.rank)))
        heads[start - first * rows : stop - first * rows, slice(*columns)] = self._converted(values)
        self.weight.data[first:end] = self._packed_heads(heads)


class LatentAttention(nn.Module):
    """Projections to queries and latents with norms between, rotary embedding, attention, output projection. Heads are
    sharded; every rank has the latents.
    """

    def __init__(self, context: LayerContext, layer: LayerConfig, hidden_size: int) -> None:
        super().__init__()
        latent, group = layer.latent, context.tensor_group
        assert latent is not None, "a layer of this kind has its sizes"
        heads = shard_range(layer.num_heads, group.size, group.rank)
        self.num_heads, self.num_kv_heads, self.head_size = heads[1] - heads[0], 1, latent.key_size
        self._latent, self._scale, self._rope = latent, layer.scale, layer.rope
        self._kernels, self._backend = context.kernels, context.attention
        parts = []
        if layer.kv_layer is None:
            parts.append(OutputPart("kv_a_proj_with_mqa", latent.key_size, 0, latent.key_size))
        name, num_inputs = ("q_b_proj", latent.query_rank) if latent.query_rank else ("q_proj", hidden_size)
        total, start, stop = (each * latent.query_size for each in (layer.num_heads, *heads))
        query = OutputPart(name, total, start, stop)
        self.q_a_layernorm: RMSNorm | None = None
        if latent.query_rank:
            parts.insert(0, OutputPart("q_a_proj", latent.query_rank, 0, latent.query_rank))
            self.q_a_layernorm = RMSNorm(context, latent.query_rank, latent.norm_eps)
        self.latent_proj: ColumnParallelLinear | None = None
        if parts:
            self.latent_proj = ColumnParallelLinear(context, hidden_size, tuple(parts), layer.has_qkv_bias)
        self.query_proj = ColumnParallelLinear(context, num_inputs, (query,), has_bias=False)
        # A layer that reads the latents of another makes none.
        self.kv_a_layernorm = RMSNorm(context, latent.rank, latent.norm_eps) if layer.kv_layer is None else None
        self.softmax_scaling = HeadGrowth(context, layer.num_heads, heads) if latent.grows_by_head else None
        self.kv_b_proj = LatentProjection(context, latent, layer.num_heads, heads)
        inputs = (heads[0] * latent.value_size, heads[1] * latent.value_size)
        num_values = layer.num_heads * latent.value_size
        self.g_proj: ColumnParallelLinear | None = None
        self._heads = slice(*heads)
        if layer.output_gate:
            assert (layer.output_gate, layer.gate_activation) == ("head", "sigmoid"), layer
            # A rank's gates alone may be too few for the GEMMs that all of them take.
            self.g_proj = replicated_linear(context, "g_proj", hidden_size, layer.num_heads)
        self.o_proj = RowParallelLinear(context, inputs, num_values, hidden_size, layer.has_output_bias)
        self._chosen: ChosenKeys | None = None
        self.indexer: Indexer | None = None
        if latent.indexer is not None:
            kept = latent_keys(latent)
            self._chosen = ChosenKeys(context.attention, context.kernels.plain, latent.indexer, kept)
            if not latent.indexer.is_shared:
                self.indexer = Indexer(context, latent, hidden_size, self._chosen)

    def forward(self, x: Tensor, step: LayerStep) -> Tensor:
        """[T, hidden] -> this rank's part of [T, hidden], [W, hidden] with `wanted`. Writes the cache, then reads."""
        metadata, wanted, adapters, ropes = step.metadata, step.wanted, step.adapters, step.ropes
        angles, latent = None if self._rope is None else ropes[self._rope], self._latent
        projected = x[:, :0] if self.latent_proj is None else self.latent_proj(x, adapters)
        query_latents, latents = projected.tensor_split([latent.query_rank], dim=1)
        latent_cache, index_cache = step.key_cache, None
        if self._chosen is not None and latent.index_size:
            latent_cache, index_cache = self._chosen.parts_of(latent_cache)
        if self.indexer is not None and index_cache is not None:
            self.indexer.write(x, angles, index_cache, metadata, adapters)
        if self.kv_a_layernorm is not None:
            self._backend.write(self._keys(self.kv_a_layernorm, latents, angles), None, latent_cache, metadata)
        if wanted is not None and not len(wanted.rows):
            return x[:0]
        hidden, of_all, choice = x, adapters, step.choice
        if self.q_a_layernorm is not None:
            x = self.q_a_layernorm(query_latents)
        log_lengths = ropes[0].log_lengths if ropes else None
        query, rows = self._query(self.query_proj(x, adapters), angles, log_lengths), None
        if wanted is not None:
            query, metadata, adapters, rows = query[wanted.rows], wanted.metadata, wanted.adapters, wanted.rows
        if self.indexer is not None and index_cache is not None:
            choice = [] if choice is None else choice
            choice[:] = self.indexer.choose((hidden, x, angles, log_lengths), index_cache, metadata, of_all, rows)
        if self._chosen is not None:
            assert choice is not None, "the decoder passes on what layers choose for others"
            attended = self._chosen.attend(query, latent_cache, metadata, self._scale, choice)
        else:
            attended = self._backend.attend(query, latent_cache, metadata, self._scale, 0, value_size=latent.rank)
        values = self.kv_b_proj.to_values(attended)
        if self.g_proj is not None:
            gates = self.g_proj(hidden if rows is None else hidden[rows], adapters)[:, self._heads]
            values = values * sigmoid(gates.float()).to(values.dtype).unsqueeze(-1)
        output: Tensor = self.o_proj(values.flatten(1), adapters)
        return output

    def _keys(self, norm: RMSNorm, latents: Tensor, angles: Angles | None) -> Tensor:
        """[T, C + R] as projected -> [T, 1, C + R], the first part normed and multiplied, the other rotated."""
        values, key_part = latents.tensor_split([self._latent.rank], dim=1)
        key_part = key_part.unsqueeze(1)
        if angles is not None:
            key_part = angles.rotate(self._kernels, key_part)
        normed = norm(values) if self._latent.multiplier == 1.0 else norm(values) * self._latent.multiplier
        return torch.cat((normed.unsqueeze(1), key_part), dim=-1)

    def _query(self, projected: Tensor, angles: Angles | None, log_lengths: Tensor | None) -> Tensor:
        """[T, H * (N + R)] -> [T, H, C + R], absorbed."""
        sizes = [self._latent.nope_size, self._latent.rope_size]
        plain, rotated = projected.view(len(projected), self.num_heads, -1).split_with_sizes(sizes, dim=-1)
        if angles is not None:
            rotated = angles.rotate(self._kernels, rotated)
        factors = None if angles is None else angles.query_factors
        if self.softmax_scaling is not None:
            factors = self.softmax_scaling(log_lengths)
        if factors is not None:
            plain, rotated = plain * factors, rotated * factors
        query = projected.new_empty((len(projected), self.num_heads, self.head_size))
        self.kv_b_proj.to_latents(plain, query[..., : self._latent.rank])
        query[..., self._latent.rank :] = rotated
        return query
