"""Decoder layers in one call of the compiled library, with the results of the layers' modules. Layers with experts end
calls: the caller computes these.

A call from Python costs 10 to 20 microseconds with its tensors; a layer has seven, and in a step of few tokens they
take as long as the GEMMs. The modules run if a model has layers that this call does not compute.

The structures are those of `layers.cpp`, field by field.

T: tokens; H: hidden size; Hq, Hkv: query and key-value heads of this rank; D: head size; I: intermediate size of it.
"""

import ctypes
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import chain
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kv_cache.cache_engine import LayerCaches
from spmd_worker.model_config.int8_format import PANEL, panel_bytes, row_bytes
from spmd_worker.model_config.layer_config import LayerConfig, NormConfig
from spmd_worker.native.library import NativeLibrary
from spmd_worker.native.threads import num_threads
from spmd_worker.ops.kernels.adapters import AdapterStack, StepAdapters
from spmd_worker.ops.kernels.api import FeedExperts, JoinableLayer, LayerSizes, LayerWeights
from spmd_worker.ops.kernels.cpu.adapters import NativeStack
from spmd_worker.ops.kernels.cpu.panels import (
    ACTIVATIONS,
    are_byte_panels,
    are_gated_panels,
    are_panels,
    are_stored_panels,
    check_tensor,
    dtype_name,
    leaf_integers,
)
from spmd_worker.ops.kernels.cpu.stored_panels import stored_panels_fit
from spmd_worker.ranks.communicator import GroupHandle
from spmd_worker.ranks.shared_memory import SharedMemoryGroup

_WEIGHTS: Final = ("qkv", "output", "gates", "down")
AdapterStacks = Callable[[], Iterable[AdapterStack | None]]
_NUM_ADAPTED: Final = 4
"""Linear layers of a layer, each with a stack of adapters."""
_NORMS: Final = ("input_norm", "attention_output_norm", "feed_forward_norm", "feed_forward_output_norm")
"""Norms of the stream and of outputs."""
_NUMBERS: Final = ("window", "rope", "stored")
_TENSORS: Final = tuple(each.name for each in fields(LayerWeights) if each.name not in _NUMBERS)

_MAX_CALL_TOKENS: Final = 4096
"""Layers times tokens of one call, which bounds how long a signal to stop the program waits."""


@dataclass(frozen=True, slots=True)
class StepPointers:
    """Addresses and sizes of a step's metadata; the caller keeps the memory. `groups` have the block tables, their
    stride and the blocks of the tokens of each group of layers, `group_of` the group of each layer, empty with one.
    """

    num_blocks: int
    groups: tuple[tuple[int, int, int], ...]
    group_of: tuple[int, ...]
    token_offsets: int
    query_starts: int
    context_lengths: int
    num_sequences: int
    num_tokens: int


def _fields(*names: str, kind: Any = ctypes.c_int64) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names]


class _Layer(ctypes.Structure):
    _fields_ = [*_fields(*_TENSORS, kind=ctypes.c_void_p), *_fields(*_NUMBERS)]


class _Stack(ctypes.Structure):
    _fields_ = [
        ("layers", ctypes.POINTER(_Layer)),
        *_fields(
            *("hidden_size", "num_heads", "num_kv_heads", "head_size", "intermediate_size", "block_size"),
            *("cache_in_bytes", "has_bytes", "norm_kind", "activation", "defers"),
        ),
        *_fields("output_leaf_ends", "down_leaf_ends", "num_output_leaves", "num_down_leaves"),
        *_fields("epsilon", "norm_offset", "scale", "score_cap", "multiplier", kind=ctypes.c_float),
    ]


class _Ranks(ctypes.Structure):
    _fields_ = _fields("memory", "rank", "size", "slot_bytes", "spin_ns", "timeout_ns", "processes", "few_elements")


class _Step(ctypes.Structure):
    _fields_ = [
        *_fields("residual", "x", "projected", "attended", "opened", "bytes", "maxima", "wide"),
        *_fields("angles", "layers", "offsets", "query_starts", "context_lengths"),
        *_fields("num_sequences", "num_tokens", "num_threads", "adapters", "layer_adapters", "columns"),
    ]


class NativeLayers:
    """The layers of one stage on one rank, whose weights keep their addresses. Made by `join_layers`."""

    def __init__(
        self,
        library: NativeLibrary,
        layers: Sequence[LayerWeights],
        sizes: LayerSizes,
        block_size: int,
        fast: SharedMemoryGroup | None,
        adapter_stacks: AdapterStacks | None = None,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        """`adapter_stacks` has those of the layers, in the order of calls."""
        self._adapter_stacks = adapter_stacks or (lambda: ())
        self._layers, self._sizes, self._fast = tuple(layers), sizes, fast
        with_experts = [number + 1 for number, each in enumerate(layers) if each.gates is None]
        # For each layer, the end of a call that begins there: after the next one with experts.
        ends = [*with_experts, len(layers)]
        self._ends = [ends[bisect_right(with_experts, number)] for number in range(len(layers))]
        # Keeps the memory whose addresses it has: a parameter may be given other memory.
        self._memory = [[None if each is None else each.detach() for each in _tensors(layer)] for layer in layers]
        self._has_bytes = _has_bytes(layers[0])
        self._dtype = next(norm.dtype for norm in _norms(layers[0]) if norm is not None)
        self._cache_dtype = cache_dtype or self._dtype
        self._function = library.functions[f"run_layers_{dtype_name(self._dtype)}"]
        addresses = [
            _Layer(
                *(None if each is None else each.data_ptr() for each in tensors),
                *(layer.window, layer.rope, _stored(layer)),
            )
            for layer, tensors in zip(layers, self._memory, strict=True)
        ]
        all_ends = (sizes.output_leaf_ends, sizes.down_leaf_ends)
        self._leaf_ends = [leaf_integers(ends) if ends else (ctypes.c_int64 * 0)() for ends in all_ends]
        self._stack = _Stack(
            *((_Layer * len(layers))(*addresses), sizes.hidden_size, sizes.num_heads, sizes.num_kv_heads),
            *(sizes.head_size, sizes.intermediate_size, block_size, self._cache_dtype != self._dtype, self._has_bytes),
            *(_norm_kind(sizes.norm), ACTIVATIONS.index(sizes.activation), sizes.defers),
            *(ctypes.addressof(ends) for ends in self._leaf_ends),
            *(*map(len, self._leaf_ends), sizes.norm.eps, sizes.norm.offset),
            *(sizes.scale, sizes.score_cap, sizes.multiplier),
        )

    def run(
        self,
        residual: Tensor,
        angles: Sequence[tuple[Tensor, Tensor]],
        cache: LayerCaches,
        step: StepPointers,
        adapters: StepAdapters | None = None,
        feed: FeedExperts | None = None,
    ) -> Tensor | None:
        """The residual stream [T, H], which is updated up to the last layer's output; cosines and sines [T, D / 2] of
        each rope; caches [blocks, elements of a block] of the first layers or of all -> this rank's part of the last
        layer's output, [T, H], None if layers do not defer; of several ranks float32, and no row of their steps has an
        adapter. `feed` is needed for layers with experts.
        """
        sizes, num_tokens, fast = self._sizes, step.num_tokens, self._fast
        assert fast is None or adapters is None, "adapters add to complete sums"
        check_tensor(residual, self._dtype, (num_tokens, sizes.hidden_size))
        assert all(layer.rope < len(angles) for layer in self._layers), len(angles)
        for each in chain.from_iterable(angles):
            check_tensor(each, self._dtype, (num_tokens, sizes.head_size // 2))
        addresses = (ctypes.c_void_p * (2 * len(angles)))(*(each.data_ptr() for each in chain.from_iterable(angles)))
        blocks = self._blocks(cache, step)
        heads_size = sizes.num_heads * sizes.head_size
        widths = (sizes.hidden_size, heads_size + 2 * sizes.num_kv_heads * sizes.head_size, heads_size)
        work = [torch.empty((num_tokens, width), dtype=self._dtype) for width in (*widths, sizes.intermediate_size)]
        widest = row_bytes(max(sizes.hidden_size, heads_size, sizes.intermediate_size)) if self._has_bytes else 0
        rows = torch.empty((num_tokens, widest), dtype=torch.int8)
        maxima = torch.empty(num_tokens if self._has_bytes else 0, dtype=torch.float32)
        shape, wide = (num_tokens, sizes.hidden_size), None
        if fast is not None and fast.part_buffer(shape, torch.float32) is None:
            wide = torch.empty(shape, dtype=torch.float32)
        rows_of_adapters, stacks, columns = 0, None, None
        if adapters is not None:
            rows_of_adapters, stacks = adapters.layout.address, self._adapter_addresses()
        if adapters is not None or sizes.activation != "silu":
            columns = torch.empty((num_tokens + 1, 2 * sizes.intermediate_size), dtype=self._dtype)
        arguments = _Step(
            *(residual.data_ptr(), *(each.data_ptr() for each in (*work, rows, maxima))),
            *(0 if wide is None else wide.data_ptr(), ctypes.addressof(addresses)),
            *(blocks.ctypes.data, step.token_offsets, step.query_starts, step.context_lengths),
            *(step.num_sequences, num_tokens, num_threads(), rows_of_adapters),
            *(0 if stacks is None else ctypes.addressof(stacks), 0 if columns is None else columns.data_ptr()),
        )
        ranks = None if fast is None else ctypes.byref(_Ranks(*fast.addresses()))
        end, num_layers, each_call = 0, len(cache), max(1, _MAX_CALL_TOKENS // max(1, num_tokens))
        part = work[0]
        while end < num_layers:
            first, end = end, min(end + each_call, self._ends[end], num_layers)
            result = self._function(ctypes.byref(self._stack), ctypes.byref(arguments), ranks, first, end)
            if fast is not None:
                fast.check(result)
            last = self._layers[end - 1]
            if last.gates is None:
                assert feed is not None, "layers with experts"
                fed = feed(end - 1, residual if last.feed_forward_norm is None else part)
                assert (fed is not None) == sizes.defers, (end, sizes)
                if fed is not None:
                    part = fed.contiguous()
                    check_tensor(part, self._dtype, (num_tokens, sizes.hidden_size))
                    arguments.x = part.data_ptr()
        if fast is None:
            return part if sizes.defers else None
        # The last GEMM wrote its part there, and no other collective has begun since.
        own = fast.part_buffer(shape, torch.float32) if wide is None else wide
        assert own is not None, "parts of one size have a slot or none"
        return own

    def _blocks(self, cache: LayerCaches, step: StepPointers) -> "npt.NDArray[np.int64]":
        """A row of addresses and strides for each layer, the fields of `LayerBlocks` in `layers.cpp`."""
        sizes, num_layers = self._sizes, len(cache)
        assert num_layers <= len(self._layers), (num_layers, len(self._layers))
        block_elements = 2 * sizes.num_kv_heads * self._stack.block_size * sizes.head_size
        rows = np.empty((num_layers, 5), dtype=np.int64)
        # Layers in one tensor are alike.
        for each, row in zip(cache[:1] if isinstance(cache, Tensor) else cache, rows):
            assert each is not None, "a layer without blocks has no attention"
            assert each.shape == (step.num_blocks, block_elements), (each.shape, step.num_blocks, block_elements)
            assert each.dtype == self._cache_dtype, (each.dtype, self._cache_dtype)
            assert each.is_cpu, each.device
            assert each.stride(1) == 1, each.stride()
            row[0], row[1] = each.data_ptr(), each.stride(0)
        if isinstance(cache, Tensor):
            rows[:, 0] = cache.data_ptr() + cache.stride(0) * cache.itemsize * np.arange(num_layers)
            rows[:, 1] = cache.stride(1)
        rows[:, 2:] = [step.groups[group] for group in step.group_of[:num_layers]] or step.groups
        return rows

    def _adapter_addresses(self) -> "ctypes.Array[ctypes.c_void_p]":
        """Structures of the stacks that the step's adapters may be in; null for empty ones."""
        addresses: list[int | None] = []
        for stack in self._adapter_stacks():
            assert stack is None or isinstance(stack, NativeStack), type(stack)
            addresses.append(None if stack is None or stack.is_empty else stack.address)
        assert len(addresses) == _NUM_ADAPTED * len(self._layers), (len(addresses), len(self._layers))
        return (ctypes.c_void_p * len(addresses))(*addresses)


def join_layers(
    library: NativeLibrary,
    layers: Sequence[JoinableLayer],
    block_size: int,
    group: GroupHandle,
    cache_dtype: torch.dtype | None = None,
) -> NativeLayers | None:
    """None if the call does not compute one of the layers, layers differ in sizes, a weight is not in panels, the group
    does not exchange tensors in shared memory, or its ranks exchange int8 sums.
    """
    fast = group.fast
    if group.size > 1 and not (isinstance(fast, SharedMemoryGroup) and group.has_tree):
        return None
    if not layers or not all(_computes(layer.config) for layer in layers):
        return None
    weights, all_sizes = [layer.weights() for layer in layers], {layer.sizes() for layer in layers}
    sizes = max(all_sizes, key=lambda each: each.intermediate_size)
    if not all_sizes <= {sizes, replace(sizes, intermediate_size=0, activation="silu", down_leaf_ends=())}:
        return None
    if group.size > 1 and any(layer.gates is None for layer in weights):
        return None
    # Outputs are complete where they are scaled or added at once, which takes a sum over ranks.
    if group.size > 1 and not (sizes.defers and sizes.multiplier == 1.0):
        return None
    is_gated = sizes.activation == "silu"
    are_packed = all(_is_packed(each, is_gated=is_gated) for each in weights)
    if not (are_packed or (group.size == 1 and all(map(_has_bytes, weights)))):
        return None
    for each in weights:
        _check_shapes(each, sizes)
    assert fast is None or isinstance(fast, SharedMemoryGroup), type(fast)
    return NativeLayers(library, weights, sizes, block_size, fast, partial(_stacks_of, layers), cache_dtype)


def _stacks_of(layers: Sequence[JoinableLayer]) -> Iterator[AdapterStack | None]:
    return chain.from_iterable(layer.adapter_stacks() for layer in layers)


def _computes(layer: LayerConfig) -> bool:
    """Whether the call computes layers of this kind."""
    is_gated = layer.is_gated and not layer.bound and layer.activation in ACTIVATIONS
    is_fed = layer.has_feed_forward and (layer.experts is not None or is_gated)
    has_other_wires = layer.is_parallel or layer.has_cross_attention or layer.norms_sums or layer.has_scalar
    has_norms = any(layer.norms) and layer.norm.has_weight and not layer.norm.has_bias
    return is_fed and not has_other_wires and not layer.input_size and has_norms and layer.has_plain_heads


def _norm_kind(norm: NormConfig) -> int:
    """Numbered as in `layers.cpp`."""
    return 0 if norm.is_plain else 2 if norm.kind == "layer" else 1


def _tensors(layer: LayerWeights) -> tuple[Tensor | None, ...]:
    return tuple(getattr(layer, name) for name in _TENSORS)


def _norms(layer: LayerWeights) -> tuple[Tensor | None, ...]:
    """Norms of the stream and of outputs."""
    return tuple(getattr(layer, name) for name in _NORMS)


def _is_packed(layer: LayerWeights, *, is_gated: bool) -> bool:
    """Whether all weights are elements or as stored, in panels, gates and up projection in one if `is_gated`."""
    are_gates, gates = are_gated_panels if is_gated else are_panels, layer.gates
    is_right = gates is None or (gates.shape[1] == 1 + is_gated if are_stored_panels(gates) else are_gates(gates))
    others = [each for each in (layer.qkv, layer.output, layer.down) if each is not None]
    return is_right and all(are_panels(each) or are_stored_panels(each) for each in others)


def _stored(layer: LayerWeights) -> int:
    """Bits of the weights that are as stored, numbered as in `layers.cpp`."""
    weights = (layer.qkv, layer.output, layer.gates, layer.down)
    return sum(each is not None and are_stored_panels(each) << number for number, each in enumerate(weights))


def _has_bytes(layer: LayerWeights) -> bool:
    """Whether all weights are int8 in panels."""
    weights = (layer.qkv, layer.output, layer.gates, layer.down)
    return all(each is None or are_byte_panels(each) for each in weights)


def _check_shapes(layer: LayerWeights, sizes: LayerSizes) -> None:
    """Raise AssertionError for weights that the compiled code would read out of bounds."""
    hidden, heads_size = sizes.hidden_size, sizes.num_heads * sizes.head_size
    projected, opened = heads_size + 2 * sizes.num_kv_heads * sizes.head_size, sizes.intermediate_size
    has_bytes = _has_bytes(layer)
    (dtype,) = {norm.dtype for norm in _norms(layer) if norm is not None}

    def count(num_inputs: int, num_outputs: int) -> int:
        return num_outputs // PANEL * panel_bytes(num_inputs) if has_bytes else num_inputs * num_outputs

    weight_sizes = {
        "qkv": (projected, hidden),
        "output": (hidden, heads_size),
        "gates": (2 * opened, hidden),
        "down": (hidden, opened),
    }
    counts = {
        **dict.fromkeys(_NORMS, hidden),
        "query_norm": sizes.head_size,
        "key_norm": sizes.head_size,
        **{name: count(num_inputs, num_outputs) for name, (num_outputs, num_inputs) in weight_sizes.items()},
        "qkv_bias": projected,
        "output_bias": hidden,
        "gates_bias": 2 * opened,
        "down_bias": hidden,
    }
    assert sizes.num_heads % sizes.num_kv_heads == 0, (sizes.num_heads, sizes.num_kv_heads)
    assert (layer.query_norm is None) == (layer.key_norm is None), "norms of heads come together"
    assert (layer.gates is None) == (layer.down is None), "a feed-forward has both"
    if has_bytes:
        num_parts, gates = (2 if sizes.activation == "silu" else 1), layer.gates
        assert gates is None or gates.shape[1] == num_parts, (gates.shape, num_parts)
        assert layer.qkv.shape[1] == 1, layer.qkv.shape
    else:
        assert sizes.output_leaf_ends[-1] == heads_size, sizes
        assert sizes.down_leaf_ends[-1:] == ((opened,) if opened else ()), sizes
    if sizes.defers:
        # An output is added with the next norm.
        assert [each is not None for each in _norms(layer)] == [True, False, True, False], _norms(layer)
    for name, tensor in zip(_TENSORS, _tensors(layer), strict=True):
        if tensor is not None and name in _WEIGHTS and are_stored_panels(tensor):
            assert dtype == torch.bfloat16, dtype
            assert stored_panels_fit(tensor, *weight_sizes[name]), (name, tensor.shape, weight_sizes[name])
        elif tensor is not None:
            is_of_bytes = has_bytes and name in _WEIGHTS
            assert tensor.numel() == counts[name], (name, tensor.shape, counts[name])
            assert tensor.dtype == (torch.int8 if is_of_bytes else dtype), (name, tensor.dtype)
            assert tensor.is_cpu, (name, tensor.device)
            assert tensor.is_contiguous(), (name, tensor.stride())
