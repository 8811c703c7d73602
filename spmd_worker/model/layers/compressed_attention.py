"""Attention of DeepSeek V4: to the last tokens and, in most layers, to compressed entries of the groups before.

One key-value head has keys that are values, too. The rotation that a value has as a key is undone behind attention, at
the query's position. Each token's keys, those of its window and then its entries, both ascending, are copied into
blocks of a call of the attention kernels, which reads no positions: a token's bits depend on its query and on these
keys alone. Scores of entries are those of an indexer (`indexer.py`), whose keys are entries of their own.

T: tokens of the step; N: tokens of one call; K: entries of a token; H: heads of this rank; D: head size; E: places for
entries in a block.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, pairwise
from operator import add

import torch
from torch import Tensor, nn

from spmd_worker.model.layers.attention import Sinks
from spmd_worker.model.layers.checkpoint_layer import PackedLayer
from spmd_worker.model.layers.choice_bytes import BLOCK, rows_of
from spmd_worker.model.layers.chosen_keys import IndexQueries, best_keys
from spmd_worker.model.layers.compressed_entries import (
    Compressor,
    Groups,
    completed_groups,
    entry_places,
    on_device,
    row_places,
)
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.indexer import HeadWeights
from spmd_worker.model.layers.layer_step import LayerStep
from spmd_worker.model.layers.linear import ColumnParallelLinear, OutputPart, RowParallelLinear, replicated_linear
from spmd_worker.model.layers.norm import new_norm
from spmd_worker.model.layers.rotary import Angles
from spmd_worker.model.layers.weight_slice import Rectangle, WeightSlice, shard
from spmd_worker.model_config.layer_config import CompressedConfig, LayerConfig
from spmd_worker.ops.attention.listed import ListedKeys, ListKeys
from spmd_worker.ops.attention.metadata import AttentionMetadata
from spmd_worker.ops.kernels.adapters import StepAdapters
from spmd_worker.ops.kernels.group_keys import GroupKeys
from spmd_worker.ranks.topology import shard_range


class GroupedProjection(PackedLayer):
    """Each group of neighbouring heads to `num_outputs` numbers, [T, groups of this rank, inputs] -> [T, groups,
    outputs]: `weight` [groups * outputs, inputs]. It is never quantised.
    """

    def __init__(
        self, context: LayerContext, num_groups: int, groups: tuple[int, int], num_outputs: int, num_inputs: int
    ) -> None:
        super().__init__()
        self._kernels, self._num_groups, self._groups = context.kernels, num_groups, groups
        self._num_outputs = num_outputs
        self._packed_shape: tuple[int, ...] = ()
        self.weight = context.parameter((groups[1] - groups[0]) * num_outputs, num_inputs)

    def forward(self, x: Tensor) -> Tensor:
        out = x.new_empty((*x.shape[:2], self._num_outputs))
        self._kernels.linear_of_heads(x, self._by_group(), out)
        return out

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        shape = (self._num_groups * self._num_outputs, self.shape_of("weight")[1])
        rows = (each * self._num_outputs for each in self._groups)
        yield shard(f"{prefix}.weight", shape, f"{prefix}.weight", 0, *rows)

    def _by_group(self) -> Tensor:
        shape = self._packed_shape if self.is_packed else (self._num_outputs, self.weight.shape[1])
        return self.weight.view(-1, *shape)

    def _pack(self, rows: Tensor) -> Tensor:
        """Rows of complete groups, a row a group."""
        packed = self._kernels.pack_heads(rows.view(-1, self._num_outputs, rows.shape[1]))
        self._packed_shape = tuple(packed.shape[1:])
        return packed.flatten(1)

    def _packed(self) -> Tensor:
        return self._pack(self.weight.detach())

    def _empty_packed(self) -> Tensor | None:
        return None

    def read_region(self, parameter: str, region: Rectangle) -> Tensor:
        if not self.is_packed:
            return super().read_region(parameter, region)
        (start, stop), columns = region
        size, first = self._num_outputs, start // self._num_outputs
        groups = self._by_group()[first : -(-stop // size)].detach()
        found = self._kernels.unpack_heads(groups).flatten(0, 1)
        return found[start - first * size : stop - first * size, slice(*columns)]

    def write_region(self, parameter: str, region: Rectangle, values: Tensor) -> None:
        if not self.is_packed:
            super().write_region(parameter, region, values)
            return
        (start, stop), columns = region
        size, first, end = self._num_outputs, start // self._num_outputs, -(-stop // self._num_outputs)
        rows = self.read_region(parameter, ((first * size, end * size), (0, self.shape_of("weight")[1]))).clone()
        rows[start - first * size : stop - first * size, slice(*columns)] = self._converted(values)
        self.weight.data[first:end] = self._pack(rows)


class EntryIndexer(nn.Module):
    """Choice of the entries that a token sees: keys of entries, queries of tokens, weights of heads."""

    def __init__(self, context: LayerContext, layer: LayerConfig, config: CompressedConfig, hidden_size: int) -> None:
        super().__init__()
        assert config.indexer is not None, config
        self._indexer, self._rate, self._kernels = config.indexer, config.rate, context.kernels
        num_queries = config.indexer.num_heads * config.indexer.head_size
        self.compressor = Compressor(context, config, config.indexer.head_size, hidden_size, layer.norm)
        self.q_b_proj = replicated_linear(context, "q_b_proj", config.query_rank, num_queries)
        self.weights_proj = HeadWeights(context, config.indexer.num_heads, hidden_size)

    def choose(
        self,
        tokens: tuple[Tensor, Tensor, Angles],
        keys: Tensor,
        metadata: AttentionMetadata,
        block_size: int,
        adapters: StepAdapters | None,
    ) -> list[tuple[slice, Tensor]]:
        """Tokens of the step that see fewer entries than there are, some at a time, and their entries, int64 [N, K]
        ascending. `tokens` are hidden states [T, hidden], latents of queries and angles; `keys` is the cache of keys
        [blocks, E, Di].
        """
        choosing = self._choosing(tokens, metadata, adapters)
        return [] if choosing is None else list(self._chosen(choosing, keys, metadata, block_size))

    def listed(
        self,
        listed: ListedKeys,
        tokens: tuple[Tensor, Tensor, Angles],
        keys: Tensor,
        metadata: AttentionMetadata,
        block_size: int,
        adapters: StepAdapters | None,
    ) -> Tensor | None:
        """`choose` of all tokens, on the device, int32 [T, K]; None if they see all entries."""
        choosing = self._choosing(tokens, metadata, adapters)
        if choosing is None or choosing.weights is None:
            return None
        sizes = (block_size, self._indexer.num_chosen, self._rate)
        return listed.choose(choosing.queries, choosing.weights, keys, *sizes)

    def _choosing(
        self, tokens: tuple[Tensor, Tensor, Angles], metadata: AttentionMetadata, adapters: StepAdapters | None
    ) -> IndexQueries | None:
        """Queries of the step; None if its tokens see all entries."""
        if metadata.longest // self._rate <= self._indexer.num_chosen:
            return None
        x, latents, angles = tokens
        queries = self.q_b_proj(latents, adapters).view(len(x), self._indexer.num_heads, -1)
        return IndexQueries(angles.rotate_last(self._kernels, queries), self.weights_proj(x))

    def _chosen(
        self, choosing: IndexQueries, keys: Tensor, metadata: AttentionMetadata, block_size: int
    ) -> Iterator[tuple[slice, Tensor]]:
        tables, rate, num_chosen = metadata.block_tables, self._rate, self._indexer.num_chosen
        for sequence, end in enumerate(metadata.context_lengths):
            start, stop = metadata.query_starts[sequence : sequence + 2]
            position = end - (stop - start)
            first = start + max((num_chosen + 1) * rate - 1 - position, 0)

            def read(entries: Tensor, sequence: int = sequence) -> Tensor:
                sequences = torch.full_like(entries, sequence)
                return keys[entry_places(tables, sequences, entries, rate, block_size)]

            step = rows_of(1)
            for part in range(first, stop, step):
                rows = slice(part, min(part + step, stop))
                ends = torch.arange(position + part - start, position + rows.stop - start, device=keys.device) + 1
                num_seen, most = (ends // rate).unsqueeze(1), (position + rows.stop - start) // rate
                yield (
                    rows,
                    best_keys(self._kernels.plain, choosing.of_rows(rows), read, num_seen, most, num_chosen),
                )


class CompressedAttention(nn.Module):
    """Heads, and the groups in which their outputs are projected, are sharded; every rank has keys and entries."""

    def __init__(self, context: LayerContext, layer: LayerConfig, hidden_size: int) -> None:
        super().__init__()
        config, group, size = layer.compressed, context.tensor_group, layer.head_size
        assert config is not None, "a layer of this kind has its sizes"
        assert layer.rope is not None, "keys are rotated"
        heads = shard_range(layer.num_heads, group.size, group.rank)
        groups = shard_range(config.num_groups, group.size, group.rank)
        self.num_heads, self.num_kv_heads, self.head_size = heads[1] - heads[0], 1, size
        self._config, self._scale, self._rope = config, layer.scale, layer.rope
        self._kernels, self._backend, self._listed = context.kernels, context.attention, context.attention.listed_keys()
        latents = (
            OutputPart("q_a_proj", config.query_rank, 0, config.query_rank),
            OutputPart("kv_proj", size, 0, size),
        )
        self.latent_proj = ColumnParallelLinear(context, hidden_size, latents, has_bias=False)
        query = OutputPart("q_b_proj", layer.num_heads * size, heads[0] * size, heads[1] * size)
        self.query_proj = ColumnParallelLinear(context, config.query_rank, (query,), has_bias=False)
        self.q_a_norm = new_norm(context, config.query_rank, layer.norm)
        self.q_b_norm = new_norm(context, size, replace(layer.norm, has_weight=False, rounds_once=True))
        self.kv_norm = new_norm(context, size, layer.norm)
        self.sinks = Sinks(context, layer.num_heads, heads)
        num_inputs = layer.num_heads * size // config.num_groups
        self.o_a_proj = GroupedProjection(context, config.num_groups, groups, config.output_rank, num_inputs)
        inputs = (groups[0] * config.output_rank, groups[1] * config.output_rank)
        num_outputs = config.num_groups * config.output_rank
        self.o_proj = RowParallelLinear(context, inputs, num_outputs, hidden_size, has_bias=False)
        self.compressor: Compressor | None = None
        self.indexer: EntryIndexer | None = None
        if config.rate:
            self.compressor = Compressor(context, config, size, hidden_size, layer.norm)
        if config.indexer is not None:
            self.indexer = EntryIndexer(context, layer, config, hidden_size)

    def forward(self, x: Tensor, step: LayerStep) -> Tensor:
        """[T, hidden] -> this rank's part of [T, hidden]. Writes the cache, then reads."""
        metadata, adapters = step.metadata, step.adapters
        assert step.wanted is None, "a layer of this kind computes all of its tokens"
        assert metadata.is_causal, "entries are of tokens before"
        angles, sizes = step.ropes[self._rope], [self._config.query_rank, self.head_size]
        query_latents, keys = self.latent_proj(x, adapters).split_with_sizes(sizes, dim=1)
        entry_cache, entry_metadata = (None, metadata) if step.entries is None else step.entries
        key_cache, *beside = self._parts_of(step.key_cache, entry_cache)
        block_size = beside[0].shape[1]
        key = angles.rotate_last(self._kernels, self.kv_norm(keys.contiguous()).unsqueeze(1))
        self._backend.write(key, None, key_cache, metadata)
        latents = self.q_a_norm(query_latents.contiguous())
        tokens = (x, latents, angles)
        query = self.q_b_norm(self.query_proj(latents, adapters).view(len(x), self.num_heads, -1))
        query = angles.rotate_last(self._kernels, query)
        if self._listed is not None:
            assert step.entries is None, "kernels that list keys have one table"
            attended = self._attend_on_device(self._listed, tokens, query, (key_cache, *beside), metadata, adapters)
        else:
            chosen: list[tuple[slice, Tensor]] = []
            if self.compressor is not None:
                groups = completed_groups(metadata, self._config.rate)
                chosen = self._compress(tokens, beside, (metadata, entry_metadata), groups, adapters)
            caches = (key_cache, metadata.block_tables), (beside[2], entry_metadata.block_tables)
            attended = self._attend(query, caches, metadata, chosen, block_size)
        attended = angles.reverse.rotate_last(self._kernels, attended)
        num_groups = self.num_heads * self.head_size // self.o_a_proj.shape_of("weight")[1]
        projected = self.o_a_proj(attended.reshape(len(x), num_groups, -1))
        output: Tensor = self.o_proj(projected.flatten(1), adapters)
        return output

    def _attend_on_device(
        self,
        list_keys: ListKeys,
        tokens: tuple[Tensor, Tensor, Angles],
        query: Tensor,
        caches: tuple[Tensor, ...],
        metadata: AttentionMetadata,
        adapters: StepAdapters | None,
    ) -> Tensor:
        """Write rows and entries of the step, then attend to keys where they are: [T, H, D] -> [T, H, D]. `caches` as
        of `_parts_of`. A layer of a window alone attends to it as others do.
        """
        config, size, sinks = self._config, self.head_size, self.sinks.scores
        key_cache, rows, index_rows, entries, index_entries = caches
        if self.compressor is None:
            return self._backend.attend(
                query, key_cache, metadata, self._scale, config.window, sinks=sinks, value_size=size
            )
        numbers: Tensor | None = None
        listed, both = list_keys(metadata, rows.shape[1]), (metadata, metadata)
        self.compressor.write(tokens[0], rows, entries, both, None, adapters)
        most = metadata.longest // config.rate
        if self.indexer is not None and config.indexer is not None:
            self.indexer.compressor.write(tokens[0], index_rows, index_entries, both, None, adapters)
            numbers = self.indexer.listed(listed, tokens, index_entries, metadata, rows.shape[1], adapters)
            most = config.indexer.num_chosen
        groups = GroupKeys(entries, config.rate, most, numbers)
        return listed.attend(query, key_cache, self._scale, size, groups, config.window, sinks)

    def _compress(
        self,
        tokens: tuple[Tensor, Tensor, Angles],
        beside: list[Tensor],
        metadata: tuple[AttentionMetadata, AttentionMetadata],
        groups: Groups | None,
        adapters: StepAdapters | None,
    ) -> list[tuple[slice, Tensor]]:
        """Write rows and entries of the step, with metadata of each; choose entries as `EntryIndexer.choose` does."""
        assert self.compressor is not None, self._config
        rows, index_rows, entries, index_entries = beside
        self.compressor.write(tokens[0], rows, entries, metadata, groups, adapters)
        if self.indexer is None:
            return []
        self.indexer.compressor.write(tokens[0], index_rows, index_entries, metadata, groups, adapters)
        return self.indexer.choose(tokens, index_entries, metadata[1], rows.shape[1], adapters)

    def _parts_of(self, layer_cache: Tensor, entry_cache: Tensor | None) -> list[Tensor]:
        """Views of a cache [blocks, block elements], and of one of entries, or of the end of the first: keys in the
        backend's layout; rows of tokens [blocks, block size, R], the indexer's too; entries [blocks, E, D], the
        indexer's too, some with no numbers.
        """
        config, size, own = self._config, self.head_size, layer_cache.flatten(1)
        row_size, index_row = config.row_size(size), config.row_size(0)
        block_size = self._block_size(own.shape[1]) if entry_cache is None else own.shape[1] // (size + row_size)
        entries = own[:, block_size * (size + row_size) :] if entry_cache is None else entry_cache
        key_cache, *rows = _views(own, block_size, (size, row_size - index_row, index_row))
        shape = self._backend.block_shape(1, block_size, size, has_values=False)
        of_entries = _views(entries, config.num_entries(block_size), (size, config.index_size))
        return [key_cache.view(len(own), *shape), *rows, *of_entries]

    def _block_size(self, num_elements: int) -> int:
        """Tokens of a block of so many elements."""
        size, config = self.head_size, self._config
        least = num_elements // (size + config.row_size(size) + size + config.index_size)
        return next(
            tokens
            for tokens in range(max(least, 1), num_elements + 1)
            if tokens * (size + config.beside_key(size, tokens)) == num_elements
        )

    def _attend(
        self,
        query: Tensor,
        caches: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]],
        metadata: AttentionMetadata,
        chosen: list[tuple[slice, Tensor]],
        block_size: int,
    ) -> Tensor:
        """Queries [T, H, D] -> [T, H, D]; `caches` of keys and of entries, each with its block tables."""
        config, lengths = self._config, metadata.context_lengths
        if not len(query):
            return query
        most = max(lengths) // config.rate if config.rate else 0
        listed: Tensor | None = None
        if config.indexer is not None and chosen:
            most = config.indexer.num_chosen
            listed = torch.arange(most, device=query.device).expand(len(query), -1).clone()
            for rows, numbers in chosen:
                listed[rows] = numbers
        tokens = [
            (sequence, position)
            for sequence, (count, end) in enumerate(zip(_counts(metadata), lengths, strict=True))
            for position in range(end - count, end)
        ]
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        step = rows_of((min(config.window, max(lengths)) + most) * self.head_size)
        for first in range(0, len(query), step):
            rows = slice(first, first + step)
            seen = SeenKeys(tokens[rows], config, most, query.device)
            keys = self._keys(seen, *caches, None if listed is None else listed[rows], block_size)
            output[rows] = self._attend_apart(query[rows], keys, seen)
        return output

    def _keys(
        self,
        seen: "SeenKeys",
        of_keys: tuple[Tensor, Tensor],
        of_entries: tuple[Tensor, Tensor],
        listed: Tensor | None,
        block_size: int,
    ) -> Tensor:
        """Keys [n, 1, D] in the order of `seen.owners`."""
        (key_cache, key_tables), (entries, tables) = of_keys, of_entries
        owners, columns = seen.of_last
        positions = seen.firsts[owners] + columns
        keys = [
            self._backend.read_keys(
                key_cache, *row_places(key_tables, seen.sequences[owners], positions, block_size), entries.dtype
            )
        ]
        owners, columns = seen.of_entries
        if len(owners):
            numbers = columns if listed is None else listed[owners, columns]
            sequences = seen.sequences[owners]
            keys.append(entries[entry_places(tables, sequences, numbers, self._config.rate, block_size)])
        return torch.cat(keys).unsqueeze(1)

    def _attend_apart(self, query: Tensor, keys: Tensor, seen: "SeenKeys") -> Tensor:
        """Attention of queries [N, H, D] to keys of their own, as `_keys` returns them -> [N, H, D]."""
        backend, size, lengths = self._backend.of_sequences(self.head_size, BLOCK), self.head_size, seen.counts
        num_blocks = -(-max(lengths) // BLOCK)
        shape = backend.block_shape(1, BLOCK, size, has_values=False)
        cache = keys.new_zeros((len(query) * num_blocks, *shape))
        tables = torch.arange(len(cache), device=query.device).view(len(query), num_blocks)
        written = AttentionMetadata(
            query_starts=(0, *accumulate(lengths)),
            context_lengths=lengths,
            block_tables=tables,
            token_blocks=tables[seen.owners, seen.places // BLOCK],
            token_offsets=seen.places % BLOCK,
        )
        backend.write(keys, None, cache, written)
        last = seen.num_last + seen.num_entries - 1
        step = AttentionMetadata(
            query_starts=tuple(range(len(query) + 1)),
            context_lengths=lengths,
            block_tables=tables,
            token_blocks=tables.gather(1, (last // BLOCK).unsqueeze(1)).squeeze(1),
            token_offsets=last % BLOCK,
        )
        return backend.attend(query, cache, step, self._scale, 0, sinks=self.sinks.scores, value_size=size)


class SeenKeys:
    """Keys that N tokens see: those of their windows, and `most` entries at most. `tokens` are (sequence, position).

    `of_last` and `of_entries` are (token, column) of each key of both kinds, int64 [n]; `owners` and `places` of both,
    one kind behind the other, where a token's keys have one row of places. `counts` are on the host.
    """

    def __init__(
        self, tokens: list[tuple[int, int]], config: CompressedConfig, most: int, device: torch.device
    ) -> None:
        last = [min(position + 1, config.window) for _, position in tokens]
        entries = [min((position + 1) // config.rate, most) if config.rate else 0 for _, position in tokens]
        self.counts = tuple(map(add, last, entries))
        self.sequences = on_device([sequence for sequence, _ in tokens], device)
        self.firsts = on_device([position + 1 - count for (_, position), count in zip(tokens, last)], device)
        self.num_last, self.num_entries = on_device(last, device), on_device(entries, device)
        self.of_last, self.of_entries = _spread(self.num_last, sum(last)), _spread(self.num_entries, sum(entries))
        self.owners = torch.cat((self.of_last[0], self.of_entries[0]))
        of_entries = self.num_last[self.of_entries[0]] + self.of_entries[1]
        self.places = torch.cat((self.of_last[1], of_entries))


def _spread(counts: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Index of the owner, and the number among its own, of each of `total` things, of which owners have `counts`."""
    owners = torch.arange(len(counts), device=counts.device).repeat_interleave(counts, output_size=total)
    return owners, torch.arange(total, device=counts.device) - (counts.cumsum(0) - counts)[owners]


def _views(cache: Tensor, count: int, widths: tuple[int, ...]) -> list[Tensor]:
    """Views [blocks, `count`, width] of the beginning of a cache [blocks, elements], one width behind the other."""
    sizes = [count * width for width in widths]
    parts = cache[:, : sum(sizes)].split_with_sizes(sizes, dim=1)
    return [part.view(len(cache), count, width) for part, width in zip(parts, widths, strict=True)]


def _counts(metadata: AttentionMetadata) -> list[int]:
    """Tokens of each sequence of the step."""
    return [stop - start for start, stop in pairwise(metadata.query_starts)]
