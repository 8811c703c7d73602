"""Specs of caches whose layers are alike."""

from kv_cache.cache_spec import BlockLayer, CacheSpec


def uniform_spec(num_layers: int, num_kv_heads: int, head_size: int, dtype_bytes: int, block_size: int) -> CacheSpec:
    """Keys and values of one size in each layer."""
    return CacheSpec((BlockLayer(num_kv_heads, head_size, head_size),) * num_layers, dtype_bytes, block_size)
