"""CacheSpec: bytes of one rank's share."""

from dataclasses import replace

import pytest
from cache_specs import uniform_spec

from kv_cache.block import num_blocks_for
from kv_cache.cache_spec import BlockLayer, CacheSpec


def test_block_bytes_count_keys_and_values_of_layers():
    spec = uniform_spec(num_layers=24, num_kv_heads=2, head_size=64, dtype_bytes=2, block_size=16)
    assert spec.layer_block_bytes(spec.shapes[0]) == 2 * 2 * 64 * 2 * 16 == 8192
    assert spec.block_bytes == 24 * 8192
    assert spec.is_uniform


def test_layers_of_several_shapes_add_their_bytes():
    wide, latent = BlockLayer(2, 64, 64), BlockLayer(1, 576, 0)
    spec = CacheSpec((None, wide, latent, wide), dtype_bytes=2, block_size=16)
    assert spec.shapes == (wide, latent)
    assert [spec.num_layers_of(each) for each in spec.shapes] == [2, 1]
    assert spec.layer_block_bytes(latent) == 576 * 2 * 16
    assert spec.block_bytes == 2 * 8192 + 576 * 2 * 16
    assert not spec.is_uniform
    assert not replace(spec, layers=(wide, None)).is_uniform


def test_spec_without_cached_layers_has_no_bytes():
    spec = CacheSpec((None, None), dtype_bytes=2, block_size=16)
    assert (spec.shapes, spec.block_bytes, spec.num_layers, spec.is_uniform) == ((), 0, 2, False)


@pytest.mark.parametrize("sizes", [(0, 64, 64), (2, 0, 64), (2, 64, -1)])
def test_zero_size_is_rejected(sizes: tuple[int, int, int]):
    with pytest.raises(AssertionError, match="at least 1: BlockLayer"):
        BlockLayer(*sizes)
    with pytest.raises(AssertionError, match="at least 1: CacheSpec"):
        CacheSpec((), dtype_bytes=2, block_size=16)


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (4096, 256)])
def test_partial_block_counts_as_one(num_tokens, num_blocks):
    assert num_blocks_for(num_tokens, 16) == num_blocks
