"""size_cache: numbers, the reason in words, and the message for a cache that is too small."""

import re
from dataclasses import replace

import pytest
from cache_specs import uniform_spec
from hypothesis import given
from hypothesis import strategies as st

from kv_cache.cache_sizing import (
    CacheNeed,
    CacheSizing,
    MemoryMeasurement,
    check_cache_holds_one_sequence,
    format_bytes,
    size_cache,
)

GIB = 2**30
SPEC = uniform_spec(num_layers=32, num_kv_heads=8, head_size=128, dtype_bytes=2, block_size=16)  # 2 MiB a block
MEASUREMENT = MemoryMeasurement(
    total_bytes=80 * GIB, weights_bytes=16 * GIB, activation_bytes=GIB, non_torch_bytes=GIB // 2
)


def size(measurement=MEASUREMENT, **changes) -> CacheSizing:
    need = CacheNeed(changes.pop("max_num_seqs", 256), changes.pop("max_model_len", 8192))
    keywords = {
        "num_blocks": None,
        "memory_utilization": 0.5,
        "swap_space_bytes": 0,
        "is_swap_space_on_device": False,
    }
    return size_cache(SPEC, measurement, need, **(keywords | changes))


def test_given_block_count_needs_no_measurement():
    sizing = size(None, num_blocks=100, swap_space_bytes=5 * 2**20)
    assert (sizing.num_device_blocks, sizing.num_host_blocks) == (100, 2)
    assert sizing.reason == (
        "cache on the device: 100 blocks of 16 tokens (1600 tokens, 200.0 MiB), 2.0 MiB each\n"
        "  set by cache.num_blocks\n"
        "swap space on the host: 2 blocks of 16 tokens (32 tokens, 4.0 MiB)\n"
        "  set by cache.swap_space_gib"
    )


def test_given_block_count_overrides_the_measurement():
    assert size(num_blocks=7).num_device_blocks == 7


def test_cache_gets_the_memory_that_remains():
    sizing = size()
    assert sizing.num_device_blocks == (40 * GIB - 17 * GIB - GIB // 2) // (2 * 2**20) == 11520
    assert sizing.reason == (
        "cache on the device: 11520 blocks of 16 tokens (184320 tokens, 22.5 GiB), 2.0 MiB each\n"
        "  device memory 80.0 GiB, of which cache.gpu_memory_utilization=0.5 allows 40.0 GiB\n"
        "  weights 16.0 GiB\n"
        "  activations of the largest step 1.0 GiB\n"
        "  outside the tensors 512.0 MiB\n"
        "  left for the cache 22.5 GiB: 11520 blocks\n"
        "  limited by memory: 256 sequences (scheduler.max_num_seqs) of 8192 tokens (model.max_model_len)"
        " could use 131072 blocks\n"
        "swap space on the host: 0 blocks of 16 tokens (0 tokens, 0 B)"
    )


def test_cache_is_limited_by_the_sequences():
    sizing = size(max_num_seqs=4, max_model_len=1000)
    assert sizing.num_device_blocks == 4 * 63
    assert "limited by need: 4 sequences" in sizing.reason
    assert "use at most 252 blocks" in sizing.reason


def test_oversized_model_leaves_zero_blocks():
    sizing = size(memory_utilization=0.2)
    assert sizing.num_device_blocks == 0
    assert "left for the cache -1.5 GiB: 0 blocks" in sizing.reason


def test_sizing_reason_says_how_activations_were_measured():
    sizing = size(replace(MEASUREMENT, activation_note="measured"))
    assert "  activations of the largest step 1.0 GiB (measured)\n" in sizing.reason


def test_host_swap_space_takes_no_cache_memory():
    sizing = size(swap_space_bytes=4 * GIB)
    assert (sizing.num_device_blocks, sizing.num_host_blocks) == (11520, 2048)
    assert sizing.reason.endswith(
        "swap space on the host: 2048 blocks of 16 tokens (32768 tokens, 4.0 GiB)\n  set by cache.swap_space_gib"
    )


def test_device_swap_space_reduces_the_cache():
    sizing = size(swap_space_bytes=4 * GIB, is_swap_space_on_device=True)
    assert (sizing.num_device_blocks, sizing.num_host_blocks) == (11520 - 2048, 2048)
    assert "\n  swap space 4.0 GiB\n  left for the cache 18.5 GiB: 9472 blocks\n" in sizing.reason


def test_given_block_count_ignores_swap_space():
    sizing = size(None, num_blocks=100, swap_space_bytes=GIB, is_swap_space_on_device=True)
    assert (sizing.num_device_blocks, sizing.num_host_blocks) == (100, 512)


def test_swap_space_is_limited_by_the_sequences():
    """The remainder goes to the cache."""
    sizing = size(swap_space_bytes=100 * GIB, is_swap_space_on_device=True, max_num_seqs=4, max_model_len=1000)
    assert (sizing.num_device_blocks, sizing.num_host_blocks) == (252, 252)
    assert sizing.reason.endswith(
        "swap space on the host: 252 blocks of 16 tokens (4032 tokens, 504.0 MiB)\n"
        "  limited by need: 4 sequences (scheduler.max_num_seqs) of 1000 tokens (model.max_model_len)"
        " use at most 252 blocks"
    )


@given(
    figures=st.lists(st.integers(-(2**45), 2**45), min_size=4, max_size=4),
    swap_space_bytes=st.integers(-(2**40), 2**45),
    is_swap_space_on_device=st.booleans(),
    max_num_seqs=st.integers(1, 4096),
)
def test_block_counts_stay_between_zero_and_need(figures, swap_space_bytes, is_swap_space_on_device, max_num_seqs):
    sizing = size(
        MemoryMeasurement(*figures),
        swap_space_bytes=swap_space_bytes,
        is_swap_space_on_device=is_swap_space_on_device,
        max_num_seqs=max_num_seqs,
    )
    num_useful = CacheNeed(max_num_seqs, 8192).num_blocks(SPEC.block_size)
    assert 0 <= sizing.num_device_blocks <= num_useful == max_num_seqs * 512
    assert 0 <= sizing.num_host_blocks <= num_useful
    if is_swap_space_on_device:
        taken_bytes = (sizing.num_device_blocks + sizing.num_host_blocks) * SPEC.block_bytes + sum(figures[1:])
        assert sizing.num_device_blocks == 0 or taken_bytes <= int(figures[0] * 0.5)


def test_sizing_requires_block_count_or_measurement():
    with pytest.raises(AssertionError, match="needs a measurement"):
        size(None)


def test_too_few_given_blocks_error_names_the_minimum():
    message = (
        "cache.num_blocks=3 holds 48 tokens but model.max_model_len is 4096: "
        "raise cache.num_blocks to at least 256 or lower max_model_len"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check_cache_holds_one_sequence(3, 16, 4096)


def test_too_few_profiled_blocks_error_names_the_memory():
    message = (
        "memory holds 3 cache blocks, 48 tokens, but model.max_model_len is 4096: "
        "raise cache.gpu_memory_utilization or lower model.max_model_len"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check_cache_holds_one_sequence(3, 16, 4096, is_profiled=True)


def test_too_few_blocks_error_suggests_less_swap_space():
    with pytest.raises(ValueError, match=r"\.gpu_memory_utilization or .*\.max_model_len or cache\.swap_space_gib"):
        check_cache_holds_one_sequence(3, 16, 4096, is_profiled=True, has_swap_space_on_device=True)


def test_suggested_minimum_is_accepted_and_one_less_rejected():
    check_cache_holds_one_sequence(256, 16, 4096)
    check_cache_holds_one_sequence(256, 16, 4095)
    with pytest.raises(ValueError, match="at least 256"):
        check_cache_holds_one_sequence(255, 16, 4096)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (24 * 2**20, "24.0 MiB"),
        (80 * GIB, "80.0 GiB"),
        (-2 * GIB, "-2.0 GiB"),
    ],
)
def test_bytes_are_formatted_in_the_fitting_unit(num_bytes, text):
    assert format_bytes(num_bytes) == text
