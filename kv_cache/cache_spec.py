"""Bytes of the cache on one rank, layer by layer: heads x (key size + value size) x dtype a token, and the states that
layers keep of a sequence.

The attention backend decides how keys and values are packed inside a block.
"""

import math
from dataclasses import dataclass
from typing import Final

from kv_cache.layer_groups import ONE_GROUP, LayerGroups

_STATE_BYTES: Final = 4
"""Bytes of a number of a state, float32 whatever the model's dtype is."""


@dataclass(frozen=True, slots=True)
class BlockLayer:
    """Keys and values that one layer keeps of each token: `num_heads` of this rank, sizes in elements of the dtype.

    `value_size` 0: a layer that keeps keys alone, such as latent attention. `index_size`: numbers of a token's further
    key, by which an indexer chooses; every rank has them. `key_size` 0: these numbers alone.
    """

    num_heads: int
    key_size: int
    value_size: int
    index_size: int = 0

    def __post_init__(self) -> None:
        sizes = (self.num_heads, self.key_size + self.index_size, self.value_size + 1, self.index_size + 1)
        assert min(sizes) >= 1, f"every size of a layer's keys is at least 1: {self}"

    @property
    def token_size(self) -> int:
        """Elements of one token."""
        return self.num_heads * (self.key_size + self.value_size) + self.index_size


@dataclass(frozen=True, slots=True)
class StateLayer:
    """Recurrent state that one layer keeps of each sequence, this rank's share: `state`, the shape of its float32
    numbers, () for a convolution alone; `tail`, (K - 1, C), the last inputs of a convolution of K taps and C channels,
    in the model's dtype; `saved`, (most drafts, numbers of a draft), the inputs of a row's drafts in that dtype, (0, 0)
    in a run without drafts. `second_tail` and `second_saved` are those of another convolution of the layer, (0, 0) in
    one without.
    """

    state: tuple[int, ...]
    tail: tuple[int, int]
    saved: tuple[int, int] = (0, 0)
    second_tail: tuple[int, int] = (0, 0)
    second_saved: tuple[int, int] = (0, 0)

    def num_bytes(self, dtype_bytes: int) -> int:
        """Bytes of one sequence."""
        inputs = (self.tail, self.saved, self.second_tail, self.second_saved)
        num_inputs = sum(map(math.prod, inputs))
        return _STATE_BYTES * math.prod(self.state) * bool(self.state) + dtype_bytes * num_inputs


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """This rank's share of the cache: its pipeline stage's layers and its tensor-parallel shard's key-value heads.

    `layers` has an entry for each layer of the stage, None for one that keeps no keys and values of its own; `states`
    too, None for one without a state; it is empty if no layer of the model, of any stage, has one. Behind those of
    layers are parts that layers keep in blocks of another group, `part_of` the layer of each. `dtype_bytes` are
    the bytes of one element, of blocks `block_dtype_bytes` unless it is 0, `block_size` the tokens of one block.
    `group_of` has each layer's group; it is empty if there is one. A layer that reads another one's keys is of that
    one's group.
    """

    layers: tuple[BlockLayer | None, ...]
    dtype_bytes: int
    block_size: int
    states: tuple[StateLayer | None, ...] = ()
    groups: LayerGroups = ONE_GROUP
    group_of: tuple[int, ...] = ()
    draft_layers: tuple[BlockLayer, ...] = ()
    block_dtype_bytes: int = 0
    part_of: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        sizes = (len(self.layers), self.dtype_bytes, self.block_size)
        assert min(sizes) >= 1, f"every size of a cache is at least 1: {self}"
        assert len(self.states) in (0, len(self.layers)), f"states are of each layer: {self}"
        num_grouped = len(self.layers) if self.groups.num_groups > 1 else 0
        assert len(self.group_of) == num_grouped, f"each layer is of a group: {self}"

    @property
    def in_fp8(self) -> str:
        """The dtype of blocks, in words for a log and a plan; "" where it is the model's."""
        return " in FP8" if self.block_dtype_bytes else ""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def layer_of(self, index: int) -> int:
        """The layer of an entry of `layers`."""
        first = len(self.layers) - len(self.part_of)
        return index if index < first else self.part_of[index - first]

    @property
    def shapes(self) -> tuple[BlockLayer, ...]:
        """The distinct layers that have blocks, in the order of their first ones."""
        return tuple(dict.fromkeys(layer for layer in self.layers if layer is not None))

    @property
    def draft_shapes(self) -> tuple[BlockLayer, ...]:
        """The distinct ones of `draft_layers`, in the order of their first ones."""
        return tuple(dict.fromkeys(self.draft_layers))

    def num_layers_of(self, shape: BlockLayer) -> int:
        """Number of layers with blocks of this shape."""
        return self.layers.count(shape)

    @property
    def is_uniform(self) -> bool:
        """Whether every layer has blocks, all of one shape and of one group."""
        return (
            not self.group_of and self.layers[0] is not None and self.num_layers_of(self.layers[0]) == self.num_layers
        )

    def layer_block_bytes(self, layer: BlockLayer) -> int:
        """Bytes of one block in such a layer, keys and values."""
        return layer.token_size * (self.block_dtype_bytes or self.dtype_bytes) * self.block_size

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers of its group, keys and values, and in those of a draft model; 0 if no layer
        has blocks.
        """
        return self.model_block_bytes + self.draft_block_bytes

    @property
    def model_block_bytes(self) -> int:
        """`block_bytes` without a draft model's."""
        sums = [0] * self.groups.num_groups
        for layer, group in zip(self.layers, self.group_of or (0,) * self.num_layers, strict=True):
            sums[group] += 0 if layer is None else self.layer_block_bytes(layer)
        return max(sums)

    @property
    def draft_block_bytes(self) -> int:
        """Bytes of one block in the layers of a draft model."""
        return sum(map(self.layer_block_bytes, self.draft_layers))

    @property
    def layers_bytes(self) -> int:
        """Bytes of one block in each layer, together."""
        return sum(self.layer_block_bytes(layer) for layer in self.layers if layer is not None)

    @property
    def row_block_bytes(self) -> int:
        """Bytes of a row's tokens of one block, in all groups."""
        return self.block_bytes * self.groups.num_groups

    @property
    def most_drafts(self) -> int:
        """Drafts of a row whose inputs layers with states save; 0 if no layer of the stage saves any."""
        return max((layer.saved[0] for layer in self.states if layer is not None), default=0)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one sequence's states in all layers, of a snapshot too."""
        return sum(layer.num_bytes(self.dtype_bytes) for layer in self.states if layer is not None)
