"""Tensors of the KV cache and the moves of blocks between and within them.

Knows nothing of tables, and never looks inside a block: the attention backend decides how one layer's keys and values
are packed in a block shape. Layers whose blocks have one shape share a tensor; with several groups of layers all share
one, in which a block has its group's layers side by side.

Shapes: tensors of the device [layers of the shape, num_device_blocks, *block_shape],
        tensors of the host   [layers of the shape, num_host_blocks, *block_shape];
        with several groups   [1, num_device_blocks or num_host_blocks, elements of a block].
Layers of a draft model have tensors of their own behind those of the model, indexed by the same blocks.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kv_cache.block_ops import BlockOps
from kv_cache.cache_spec import CacheSpec
from kv_cache.host_memory import HostMemory, lazy_caches, new_host_memory
from kv_cache.host_reserve import HostReserve
from kv_cache.moves import check_moves, run_moves
from kv_cache.state_engine import StateEngine

LayerCaches = Tensor | tuple[Tensor | None, ...]
"""Caches [blocks, *block_shape] of a stage's layers, by index: one tensor [layers, blocks, *block_shape] if all layers
have blocks of one shape, else None for a layer without blocks.
"""


class CacheEngine:
    """One rank's cache: `allocate`, then any number of steps, then `release`; `allocate` may follow again.

    **Unwritten positions.** A fresh cache is zero everywhere, on the CPU too, where the zero pages cost no memory until
    they are written. A reused block still holds its last owner's keys and values, which may be NaN or infinite if that
    row's model overflowed. Nothing here erases them, so a backend must mask positions by selection: a multiplication by
    a weight of zero would carry the NaN into another row.
    """

    def __init__(
        self,
        spec: CacheSpec,
        block_shapes: Sequence[tuple[int, ...]],
        num_device_blocks: int,
        num_host_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        states: StateEngine | None = None,
    ) -> None:
        """`block_shapes`, one for each of `spec.shapes`, then of `spec.draft_shapes`: elements of `dtype` that hold one
        block of one such layer, exactly `spec.layer_block_bytes`. `states` of a model that has some are allocated and
        released with the blocks.
        """
        self.spec = spec
        self.block_shapes = tuple(block_shapes)
        self.num_device_blocks = num_device_blocks
        self.num_host_blocks = num_host_blocks
        self.dtype = dtype
        self.device = device
        self.states = states
        self._tensors: tuple[Tensor, ...] | None = None
        self._layer_caches: LayerCaches = ()
        self._draft_caches: LayerCaches = ()
        self._host: tuple[HostMemory, ...] = ()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors, between `allocate` and `release`."""
        assert self._tensors is not None, "the cache is not allocated"
        return self._tensors

    @property
    def model_tensors(self) -> tuple[Tensor, ...]:
        """`tensors` without those of a draft model, whose contents no name of a block vouches for."""
        return self.tensors[: len(self.tensors) - len(self.spec.draft_shapes)]

    @property
    def draft_caches(self) -> LayerCaches:
        """The caches of a draft model's layers, between `allocate` and `release`."""
        assert self._tensors is not None, "the cache is not allocated"
        return self._draft_caches

    @property
    def layer_caches(self) -> LayerCaches:
        """The caches of all layers, between `allocate` and `release`."""
        assert self._tensors is not None, "the cache is not allocated"
        return self._layer_caches

    def layer_cache(self, layer: int) -> Tensor | None:
        """[num_device_blocks, *block_shape] of a layer of the stage; None if it has no blocks."""
        return self.layer_caches[layer]

    @property
    def num_host_bytes(self) -> int:
        """Host memory of blocks in use; on CUDA 0 before the first block moves there."""
        return sum(each.num_bytes for each in self._host)

    def allocate(self, reserve: HostReserve | None = None) -> None:
        """Make both caches, zero-filled, and on CUDA the side stream that moves blocks between them. On the CPU the
        device cache is the beginning of `reserve`, if there is one.
        """
        assert self._tensors is None, "the cache is allocated already"
        num_shapes, kinds = len(self.spec.shapes), (*self.spec.shapes, *self.spec.draft_shapes)
        shapes = []
        for index, (layer, block_shape) in enumerate(zip(kinds, self.block_shapes, strict=True)):
            packed_bytes, layer_bytes = math.prod(block_shape) * self.dtype.itemsize, self.spec.layer_block_bytes(layer)
            assert packed_bytes == layer_bytes, (
                f"block_shape {block_shape} of {self.dtype} is {packed_bytes} bytes, "
                f"one block of one layer is {layer_bytes}"
            )
            layers = self.spec.layers if index < num_shapes else self.spec.draft_layers
            shapes.append((layers.count(layer), self.num_device_blocks, *block_shape))
        if self.spec.group_of:
            num_elements = self.spec.model_block_bytes // self.dtype.itemsize
            shapes[:num_shapes], num_shapes = [(1, self.num_device_blocks, num_elements)], 1
        if self.states is not None:
            self.states.allocate()
        # A tensor created in inference mode could not be written outside it, and the cache outlives both.
        with torch.inference_mode(False):
            if self.device.type == "cpu":
                of_model = lazy_caches(shapes[:num_shapes], self.dtype, reserve)
                self._tensors = (*of_model, *lazy_caches(shapes[num_shapes:], self.dtype, None))
            else:
                self._tensors = tuple([torch.zeros(each, dtype=self.dtype, device=self.device) for each in shapes])
            self._layer_caches = self._tensors[0] if self.spec.is_uniform else self._by_layer(self.model_tensors)
            self._draft_caches = self._of_draft(self._tensors[len(self.model_tensors) :])
            self._host = tuple([new_host_memory(each, self.num_host_blocks) for each in self._tensors])

    def _by_layer(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
        if self.spec.group_of:
            return tuple(self._in_groups(tensors[0][0]))
        left = {shape: iter(tensor) for shape, tensor in zip(self.spec.shapes, tensors, strict=True)}
        return tuple([None if layer is None else next(left[layer]) for layer in self.spec.layers])

    def _of_draft(self, tensors: tuple[Tensor, ...]) -> LayerCaches:
        if len(tensors) == 1:
            return tensors[0]
        left = {shape: iter(tensor) for shape, tensor in zip(self.spec.draft_shapes, tensors, strict=True)}
        return tuple([next(left[layer]) for layer in self.spec.draft_layers])

    def _in_groups(self, blocks: Tensor) -> Iterator[Tensor | None]:
        """Each layer's part of the blocks of its group, [blocks, elements] -> [blocks, *block_shape]."""
        shape_of = dict(zip(self.spec.shapes, self.block_shapes))
        starts = [0] * self.spec.groups.num_groups
        for layer, group in zip(self.spec.layers, self.spec.group_of, strict=True):
            if layer is None:
                yield None
                continue
            first, shape = starts[group], shape_of[layer]
            starts[group] += math.prod(shape)
            yield blocks[:, first : starts[group]].view(-1, *shape)

    def release(self) -> None:
        """Drop both caches with their contents. Views keep the memory alive, so drop them first."""
        self._tensors, self._layer_caches, self._draft_caches, self._host = None, (), (), ()
        if self.states is not None:
            self.states.release()

    def execute(self, block_ops: BlockOps) -> None:
        """Run one step's moves in the order swap out, copy, swap in (see `BlockOps`).

        On CUDA, work queued on the current stream before this call finishes before a block moves, and work queued after
        it sees the moved blocks.

        Raises ValueError naming the block, before anything moves, if a pair of any kind is outside the caches, a host
        block receives twice, or a device block receives twice, by copy or swap_in.
        """
        check_moves("block", block_ops, self.num_device_blocks, self.num_host_blocks)
        run_moves(block_ops, self.tensors, self._host)
