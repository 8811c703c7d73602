"""CacheSpec: bytes of one rank's share."""

import pytest

from kv_cache.block import num_blocks_for
from kv_cache.cache_spec import CacheSpec


def test_block_bytes_count_keys_and_values_of_layers():
    spec = CacheSpec(num_layers=24, num_kv_heads=2, head_size=64, dtype_bytes=2, block_size=16)
    assert spec.layer_block_bytes == 2 * 2 * 64 * 2 * 16 == 8192
    assert spec.block_bytes == 24 * 8192


def test_zero_size_is_rejected():
    with pytest.raises(AssertionError, match="num_kv_heads=0"):
        CacheSpec(num_layers=1, num_kv_heads=0, head_size=64, dtype_bytes=2, block_size=16)


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (4096, 256)])
def test_partial_block_counts_as_one(num_tokens, num_blocks):
    assert num_blocks_for(num_tokens, 16) == num_blocks
