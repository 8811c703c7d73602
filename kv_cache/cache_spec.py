"""Bytes of the cache on one rank, layer by layer: heads x (key size + value size) x dtype.

The attention backend decides how keys and values are packed inside a block.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockLayer:
    """Keys and values that one layer keeps of each token: `num_heads` of this rank, sizes in elements of the dtype.

    `value_size` 0: a layer that keeps keys alone, such as latent attention.
    """

    num_heads: int
    key_size: int
    value_size: int

    def __post_init__(self) -> None:
        sizes = (self.num_heads, self.key_size, self.value_size + 1)
        assert min(sizes) >= 1, f"every size of a layer's keys is at least 1: {self}"

    @property
    def token_size(self) -> int:
        """Elements of one token."""
        return self.num_heads * (self.key_size + self.value_size)


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """This rank's share of the cache: its pipeline stage's layers and its tensor-parallel shard's key-value heads.

    `layers` has an entry for each layer of the stage, None for one that keeps no keys and values of its own.
    `dtype_bytes` are the bytes of one element, `block_size` the tokens of one block.
    """

    layers: tuple[BlockLayer | None, ...]
    dtype_bytes: int
    block_size: int

    def __post_init__(self) -> None:
        sizes = (len(self.layers), self.dtype_bytes, self.block_size)
        assert min(sizes) >= 1, f"every size of a cache is at least 1: {self}"

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def shapes(self) -> tuple[BlockLayer, ...]:
        """The distinct layers that have blocks, in the order of their first ones."""
        return tuple(dict.fromkeys(layer for layer in self.layers if layer is not None))

    def num_layers_of(self, shape: BlockLayer) -> int:
        """Number of layers with blocks of this shape."""
        return self.layers.count(shape)

    @property
    def is_uniform(self) -> bool:
        """Whether every layer has blocks, all of one shape."""
        return self.layers[0] is not None and self.num_layers_of(self.layers[0]) == self.num_layers

    def layer_block_bytes(self, layer: BlockLayer) -> int:
        """Bytes of one block in such a layer, keys and values."""
        return layer.token_size * self.dtype_bytes * self.block_size

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers, keys and values; 0 if no layer has blocks."""
        return sum(self.layer_block_bytes(layer) for layer in self.layers if layer is not None)
