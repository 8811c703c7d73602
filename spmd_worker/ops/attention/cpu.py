"""Compiled paged attention on the CPU.

One query row's result depends, bit for bit, on its query and on the keys and values it may see: not on the other rows,
the chunk, the batch, the block size, the placement of blocks or the number of threads. native/attention.cpp describes
the arithmetic and the layout of a block.

T: tokens; Hq, Hkv: query and key-value heads of this rank; D: head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kv_cache.cache_engine import LayerCaches
from spmd_worker.base.numerical_policy import Region
from spmd_worker.native.library import NativeLibrary, native_library
from spmd_worker.native.threads import num_threads
from spmd_worker.native.version import native_version
from spmd_worker.ops.attention.backend import AttentionBackend
from spmd_worker.ops.attention.cache_dtype import FP8, cache_constants, from_cache
from spmd_worker.ops.attention.metadata import AttentionMetadata
from spmd_worker.ops.kernels.adapters import StepAdapters
from spmd_worker.ops.kernels.api import FeedExperts, JoinableLayer
from spmd_worker.ops.kernels.cpu.layers import NativeLayers, StepPointers, join_layers
from spmd_worker.ops.kernels.cpu.panels import NATIVE_DTYPES, check_tensor, dtype_name
from spmd_worker.ops.kernels.distance_scores import DistanceScores
from spmd_worker.ranks.communicator import GroupHandle

MAX_HEAD_SIZE = 576
_HEAD_SIZE_STEP = 16
_KEY_TILE = 64  # keys of a tile, as in native/paged_cache.h
_NOT_ROTATED = (None, None)  # no angles


def cpu_backend_or_reason(
    dtype: torch.dtype, head_sizes: Sequence[int], block_size: int, cache_dtype: torch.dtype | None = None
) -> "CpuBackend | str":
    """The compiled backend, or the reason if it does not support these sizes or this machine. `cache_dtype`: of the
    cache, `cache_dtype.FP8` or, as None, `dtype`.
    """
    reason = _unsupported(dtype, head_sizes, block_size)
    if reason is not None:
        return reason
    library = native_library()
    return library if isinstance(library, str) else CpuBackend(library, dtype, head_sizes, block_size, cache_dtype)


def _unsupported(dtype: torch.dtype, head_sizes: Sequence[int], block_size: int) -> str | None:
    if dtype not in NATIVE_DTYPES:
        return f"compiled attention computes in float32 and bfloat16, not in {dtype_name(dtype)}"
    for size in head_sizes:
        if size % _HEAD_SIZE_STEP != 0 or not 0 < size <= MAX_HEAD_SIZE:
            return f"compiled attention needs a head size that is a multiple of 16 up to {MAX_HEAD_SIZE}, not {size}"
    if block_size < 2 or block_size & (block_size - 1):
        return f"compiled attention needs a block size that is a power of two from 2 on, not {block_size}"
    return None


@dataclass(frozen=True, slots=True)
class _CheckedMetadata:
    """A step's metadata as int64 tensors on the host, checked against a cache of `num_blocks`."""

    source: AttentionMetadata
    num_blocks: int
    num_tokens: int
    query_starts: Tensor
    context_lengths: Tensor
    block_tables: Tensor
    token_blocks: Tensor
    token_offsets: Tensor
    last_visible: Tensor | None

    @property
    def last_address(self) -> int | None:
        return None if self.last_visible is None else self.last_visible.data_ptr()


class CpuBackend(AttentionBackend):
    """Implements `attention.backend.AttentionBackend` for one dtype, the head sizes of a model and a block size."""

    def __init__(
        self,
        library: NativeLibrary,
        dtype: torch.dtype,
        head_sizes: Sequence[int],
        block_size: int,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        reason = _unsupported(dtype, head_sizes, block_size)
        if reason is not None:
            raise ValueError(reason)
        self._library = library
        self._dtype, self._head_sizes, self._block_size = dtype, tuple(head_sizes), block_size
        self.cache_dtype = cache_dtype or dtype
        assert self.cache_dtype in (dtype, FP8), (dtype, cache_dtype)
        self._write = library.functions[f"write_{dtype_name(dtype)}"]
        self._attend = library.functions[f"attend_{dtype_name(dtype)}"]
        self._attend_projected = library.functions[f"attend_projected_{dtype_name(dtype)}"]
        self._may_use_amx = library.has_amx
        self.arithmetic = f"{library.instruction_set}, AMX {'in use' if library.has_amx else 'not used'}"
        # Of the last step, by group: all layers of one share one metadata, which the first converts and checks.
        self._checked: dict[int, _CheckedMetadata] = {}

    def numerics(self) -> Region:
        constants = {"amx": self._library.has_amx, "key_tile": _KEY_TILE, **cache_constants(self.cache_dtype)}
        return Region(f"native {self._library.instruction_set}", native_version(), constants)

    def block_shape(
        self, num_kv_heads: int, block_size: int, head_size: int, *, has_values: bool = True
    ) -> tuple[int, ...]:
        """Flat."""
        assert block_size == self._block_size, (block_size, self._block_size)
        assert head_size in self._head_sizes, (head_size, self._head_sizes)
        return ((1 + has_values) * num_kv_heads * block_size * head_size,)

    def write(self, key: Tensor, value: Tensor | None, layer_cache: Tensor, metadata: AttentionMetadata) -> None:
        """Tokens and heads may be strided."""
        size, checked = key.shape[2], self._check(metadata, layer_cache)
        cache = self._cache_arguments(layer_cache, size, has_values=value is not None)
        shape = (checked.num_tokens, cache[2], size)
        self._write(
            *cache,
            *self._row_arguments(key, shape),
            *((None, 0, 0) if value is None else self._row_arguments(value, shape)),
            *_NOT_ROTATED,
            *(checked.token_blocks.data_ptr(), checked.token_offsets.data_ptr()),
            *(checked.num_tokens, num_threads()),
        )

    def read_keys(self, layer_cache: Tensor, blocks: Tensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
        # [blocks, D / pair, block size, pair], as in native/paged_cache.h
        pair = 2 if self._dtype == torch.bfloat16 else 1
        cells = layer_cache.view(len(layer_cache), -1, self._block_size, pair)
        return from_cache(cells[blocks, :, offsets].flatten(1), dtype)

    def read_tokens(
        self,
        layer_cache: Tensor,
        num_kv_heads: int,
        blocks: Tensor,
        offsets: Tensor,
        dtype: torch.dtype,
        heads: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        # Keys [D / pair, block size, pair], then values [block size / pair, D, pair], of each head.
        pair, size = (2 if self._dtype == torch.bfloat16 else 1), self._block_size
        parts, read = layer_cache.view(len(layer_cache), num_kv_heads, 2, -1), slice(None) if heads is None else heads
        head_size = parts.shape[3] // size
        of_keys = parts[:, :, 0].view(-1, num_kv_heads, head_size // pair, size, pair)
        keys = of_keys[blocks, read, :, offsets].flatten(-2)
        of_pairs = parts[:, :, 1].view(-1, num_kv_heads, size // pair, head_size, pair)
        values = of_pairs[blocks, read, offsets // pair, :, offsets % pair]
        return from_cache(keys, dtype), from_cache(values, dtype)

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
        """Tokens and heads of `query` may be strided."""
        (num_heads, size), checked = query.shape[1:], self._check(metadata, layer_cache)
        cache = self._cache_arguments(layer_cache, size, has_values=not value_size)
        num_kv_heads = cache[2]
        assert 0 <= value_size <= size, (value_size, size)
        assert value_size % _HEAD_SIZE_STEP == 0, value_size
        assert num_heads % num_kv_heads == 0, (num_heads, num_kv_heads)
        if sinks is not None:
            sinks = sinks.contiguous()
            check_tensor(sinks, torch.float32, (num_heads,))
        if distance_bias is not None:
            assert not value_size, "latents have no biases"
            assert distance_bias.shape[1] % 2 == 1, distance_bias.shape
            check_tensor(distance_bias, torch.float32, (num_heads, distance_bias.shape[1]))
        if distance_scores is not None:
            assert (score_cap, distance_bias, value_size) == (0.0, None, 0), "scores of distances are with plain ones"
            assert num_heads == num_kv_heads, (num_heads, num_kv_heads)
        rows = self._row_arguments(query, (checked.num_tokens, num_heads, size))
        output = torch.empty((*query.shape[:2], value_size or size), dtype=self._dtype)
        self._attend(
            *cache,
            *(checked.block_tables.data_ptr(), checked.block_tables.stride(0)),
            *(*rows, num_heads),
            *_NOT_ROTATED,
            *(checked.query_starts.data_ptr(), checked.context_lengths.data_ptr(), len(checked.context_lengths)),
            *(scale, score_cap, window, metadata.num_later_keys(window), checked.last_address),
            None if sinks is None else sinks.data_ptr(),
            *_distance_arguments(distance_bias, distance_scores, query, metadata),
            *(value_size, output.data_ptr(), self._may_use_amx, num_threads()),
        )
        return output

    def attend_projected(
        self,
        projected: Tensor,
        angles: tuple[Tensor, Tensor],
        layer_cache: Tensor,
        metadata: AttentionMetadata,
        num_heads: int,
        scale: float,
        window: int,
    ) -> Tensor:
        """`angles` have the dtype of `projected`."""
        assert metadata.is_causal, "this call is causal"
        # Angles of all of a head, in halves.
        size, checked = 2 * angles[0].shape[1], self._check(metadata, layer_cache)
        cache = self._cache_arguments(layer_cache, size)
        num_kv_heads, num_tokens = cache[2], checked.num_tokens
        assert num_heads % num_kv_heads == 0, (num_heads, num_kv_heads)
        check_tensor(projected, self._dtype, (num_tokens, (num_heads + 2 * num_kv_heads) * size))
        for each in angles:
            check_tensor(each, self._dtype, (num_tokens, size // 2))
        output = torch.empty((num_tokens, num_heads * size), dtype=self._dtype)
        self._attend_projected(
            *cache,
            *(checked.block_tables.data_ptr(), checked.block_tables.stride(0)),
            *(projected.data_ptr(), projected.stride(0), num_heads),
            *(angles[0].data_ptr(), angles[1].data_ptr()),
            *(checked.token_blocks.data_ptr(), checked.token_offsets.data_ptr(), num_tokens),
            *(checked.query_starts.data_ptr(), checked.context_lengths.data_ptr(), len(checked.context_lengths)),
            *(scale, 0.0, window, output.data_ptr(), self._may_use_amx, num_threads()),
        )
        return output

    def of_sequences(self, head_size: int, block_size: int) -> "CpuBackend":
        return CpuBackend(self._library, self._dtype, (head_size,), block_size)

    def join_layers(self, layers: Sequence[JoinableLayer], group: GroupHandle) -> "CpuLayers | None":
        joined = join_layers(self._library, layers, self._block_size, group, self.cache_dtype)
        return None if joined is None else CpuLayers(self, joined)

    def addresses(self, metadata: AttentionMetadata, layer_cache: Tensor, head_size: int) -> StepPointers:
        """Addresses of a step's metadata for caches like `layer_cache`; valid until the next step."""
        assert metadata.is_causal, "joined layers are causal"
        self._cache_arguments(layer_cache, head_size)
        groups = [self._check(each, layer_cache) for each in (metadata, *metadata.others)]
        checked = groups[0]
        return StepPointers(
            len(layer_cache),
            tuple(
                (each.block_tables.data_ptr(), each.block_tables.stride(0), each.token_blocks.data_ptr())
                for each in groups
            ),
            metadata.group_of,
            checked.token_offsets.data_ptr(),
            *(checked.query_starts.data_ptr(), checked.context_lengths.data_ptr()),
            *(len(checked.context_lengths), checked.num_tokens),
        )

    def _cache_arguments(self, layer_cache: Tensor, head_size: int, *, has_values: bool = True) -> tuple[int, ...]:
        assert layer_cache.dtype == self.cache_dtype, (layer_cache.dtype, self.cache_dtype)
        assert layer_cache.is_cpu, layer_cache.device
        assert layer_cache.ndim == 2, layer_cache.shape
        assert layer_cache.stride(1) == 1, layer_cache.stride()
        num_kv_heads = layer_cache.shape[1] // ((1 + has_values) * self._block_size * head_size)
        shape = self.block_shape(num_kv_heads, self._block_size, head_size, has_values=has_values)
        assert layer_cache.shape[1:] == shape, (layer_cache.shape, shape)
        sizes = (num_kv_heads, head_size, self._block_size, self.cache_dtype == FP8)
        return (layer_cache.data_ptr(), layer_cache.stride(0), *sizes)

    def _row_arguments(self, rows: Tensor, shape: tuple[int, int, int]) -> tuple[int, int, int]:
        """Address and strides of [T, heads, D]."""
        assert rows.shape == shape, (rows.shape, shape)
        assert rows.dtype == self._dtype, (rows.dtype, self._dtype)
        assert rows.is_cpu, rows.device
        assert rows.stride(2) == 1, rows.stride()
        return rows.data_ptr(), rows.stride(0), rows.stride(1)

    def _check(self, metadata: AttentionMetadata, layer_cache: Tensor) -> _CheckedMetadata:
        num_blocks = layer_cache.shape[0]
        checked = self._checked.get(id(metadata))
        if checked is None or checked.source is not metadata or checked.num_blocks != num_blocks:
            if any(not each.source.is_of_step(metadata) for each in self._checked.values()):
                self._checked.clear()
            checked = self._checked[id(metadata)] = _check_metadata(metadata, num_blocks, self._block_size)
        return checked


class CpuLayers:
    """Implements `attention.backend.JoinedLayers`."""

    def __init__(self, backend: CpuBackend, layers: NativeLayers) -> None:
        self._backend, self._layers = backend, layers

    def run(
        self,
        residual: Tensor,
        angles: Sequence[tuple[Tensor, Tensor]],
        cache: LayerCaches,
        metadata: AttentionMetadata,
        adapters: StepAdapters | None = None,
        feed: FeedExperts | None = None,
    ) -> Tensor | None:
        first = cache[0]
        assert first is not None, "a layer without blocks has no attention"
        pointers = self._backend.addresses(metadata, first, 2 * angles[0][0].shape[1])
        return self._layers.run(residual, angles, cache, pointers, adapters, feed)


def _distance_arguments(
    bias: Tensor | None, scores: DistanceScores | None, query: Tensor, metadata: AttentionMetadata
) -> tuple[int | None, ...]:
    """Bias of distances and its largest, scores of queries and of keys, their strides, columns."""
    if scores is None:
        of_bias = (None, 0) if bias is None else (bias.data_ptr(), bias.shape[1] // 2)
        return (*of_bias, None, None, 0, 0, None)
    scores.check(query, metadata.query_starts, metadata.context_lengths)
    first, last = scores.tables
    _check_range("columns", scores.columns, min(first.shape[2], last.shape[2]))
    addresses = [None if each is None else each.data_ptr() for each in (scores.of_queries, scores.of_keys)]
    return (None, len(scores.columns) // 2, *addresses, *first.stride()[:2], scores.columns.data_ptr())


def _check_metadata(metadata: AttentionMetadata, num_blocks: int, block_size: int) -> _CheckedMetadata:
    """Raise AssertionError for metadata with which the compiled code would read or write out of bounds."""
    starts = torch.tensor(metadata.query_starts, dtype=torch.int64)
    lengths = torch.tensor(metadata.context_lengths, dtype=torch.int64)
    tables, num_tokens = metadata.block_tables, int(starts[-1])
    assert len(starts) == len(lengths) + 1 == len(tables) + 1, (len(starts), len(lengths), len(tables))
    counts = starts.diff()
    assert starts[0] == 0, metadata.query_starts
    assert bool((counts >= 0).all()), metadata.query_starts
    assert bool((lengths >= counts).all()), (metadata.query_starts, metadata.context_lengths)
    longest = max(metadata.context_lengths, default=0)
    assert longest <= tables.shape[1] * block_size, (longest, tables.shape, block_size)
    _check_indices("block_tables", tables, num_blocks)
    _check_indices("token_blocks", metadata.token_blocks, num_blocks)
    _check_indices("token_offsets", metadata.token_offsets, block_size)
    assert metadata.token_blocks.shape == metadata.token_offsets.shape == (num_tokens,), num_tokens
    return _CheckedMetadata(
        source=metadata,
        num_blocks=num_blocks,
        num_tokens=num_tokens,
        query_starts=starts,
        context_lengths=lengths,
        block_tables=tables.contiguous(),
        token_blocks=metadata.token_blocks.contiguous(),
        token_offsets=metadata.token_offsets.contiguous(),
        last_visible=None if metadata.last_visible is None else _checked_sight(metadata, starts, lengths),
    )


def _checked_sight(metadata: AttentionMetadata, starts: Tensor, lengths: Tensor) -> Tensor:
    """Raise AssertionError unless the last visible keys are there and in order and, in causal attention, at or behind
    their tokens.
    """
    last_visible = metadata.last_visible
    assert last_visible is not None
    assert last_visible.dtype == torch.int32, last_visible.dtype
    counts = starts.diff()
    ends = lengths.repeat_interleave(counts)
    positions = torch.arange(int(starts[-1])) + (lengths - starts[1:]).repeat_interleave(counts)
    assert last_visible.shape == positions.shape, (last_visible.shape, positions.shape)
    in_order = torch.ones(len(positions), dtype=torch.bool)
    in_order[1:] = last_visible[1:] >= last_visible[:-1]
    in_order[starts[:-1][counts > 0]] = True
    least = torch.zeros_like(positions) if metadata.sees_later else positions
    assert bool((in_order & (least <= last_visible) & (last_visible < ends)).all()), last_visible
    return last_visible.contiguous()


def _check_indices(name: str, indices: Tensor, end: int) -> None:
    assert indices.dtype == torch.int64, (name, indices.dtype)
    _check_range(name, indices, end)


def _check_range(name: str, indices: Tensor, end: int) -> None:
    assert indices.device.type == "cpu", (name, indices.device)
    if indices.numel() > 0:
        lowest, highest = (int(bound) for bound in indices.aminmax())
        assert 0 <= lowest <= highest < end, f"{name}: {lowest} to {highest} of {end}"
