"""Bytes of the cache on one rank: layers x key-value heads x head size x dtype.

The attention backend decides how keys and values are packed inside a block.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """This rank's share of the cache: its pipeline stage's layers and its tensor-parallel shard's key-value heads.

    `head_size` is in elements, `dtype_bytes` the bytes of one element, `block_size` the tokens of one block.
    """

    num_layers: int
    num_kv_heads: int
    head_size: int
    dtype_bytes: int
    block_size: int

    def __post_init__(self) -> None:
        sizes = (self.num_layers, self.num_kv_heads, self.head_size, self.dtype_bytes, self.block_size)
        assert min(sizes) >= 1, f"every size of a cache is at least 1: {self}"

    @property
    def layer_block_bytes(self) -> int:
        """Bytes of one block in one layer, keys and values."""
        return 2 * self.num_kv_heads * self.head_size * self.dtype_bytes * self.block_size

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers, keys and values."""
        return self.num_layers * self.layer_block_bytes
