"""size_cache: numbers, the reason in words, and the message for a cache that is too small."""

import re
from dataclasses import replace

import pytest
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
from kv_cache.cache_spec import CacheSpec

GIB = 2**30
SPEC = CacheSpec(num_layers=32, num_kv_heads=8, head_size=128, dtype_bytes=2, block_size=16)  # 2 MiB a block
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


def test_a_given_number_needs_no_measurement():
    sizing = size(None, num_blocks=100, swap_space_bytes=5 * 2**20)
    assert (sizing.num_device_blocks, sizing.num_host_blocks) == (100, 2)
    assert sizing.reason == (
        "cache on the device: 100 blocks of 16 tokens (1600 tokens, 200.0 MiB), 2.0 MiB each\n"
        "  set by cache.num_blocks\n"
        "swap space on the host: 2 blocks of 16 tokens (32 tokens, 4.0 MiB)\n"
        "  set by cache.swap_space_gib"
    )


def test_a_given_number_wins_over_a_measurement():
    assert size(num_blocks=7).num_device_blocks == 7


def test_without_a_number_the_cache_gets_what_the_rest_leaves():
    sizing = size()
    assert sizing.num_device_blocks == (40 * GIB - 17 * GIB - GIB // 2) // (2 * 2**20) == 11520
    assert sizing.reason == (
        "cache on the device: 11520 blocks of 16 tokens (184320 tokens, 22.5 GiB), 2.0 MiB each\n"
        "  device memory 80.0 GiB, of which cache.gpu_memory_utilization=0.5 allows 40.0 GiB\n"
        "  weights 16.0 GiB\n"
        "  activations of the largest step 1.0 GiB\n"
        "  outside the tensors 512.0 MiB\n"
        "  left for the cache 22.5 GiB, room for 11520 blocks\n"
        "  limited by memory: 256 sequences (scheduler.max_num_seqs) of 8192 tokens (model.max_model_len)"
        " could use 131072 blocks\n"
        "swap space on the host: 0 blocks of 16 tokens (0 tokens, 0 B)"
    )


def test_the_cache_is_no_larger_than_the_sequences_can_use():
    sizing = size(max_num_seqs=4, max_model_len=1000)
    assert sizing.num_device_blocks == 4 * 63
    assert "limited by need: 4 sequences" in sizing.reason
    assert "use at most 252 blocks" in sizing.reason


def test_a_model_larger_than_the_memory_leaves_no_blocks_rather_than_a_negative_number():
    sizing = size(memory_utilization=0.2)
    assert sizing.num_device_blocks == 0
    assert "left for the cache -1.5 GiB, room for 0 blocks" in sizing.reason


def test_how_the_activations_are_known_is_said():
    sizing = size(replace(MEASUREMENT, activation_note="measured"))
    assert "  activations of the largest step 1.0 GiB (measured)\n" in sizing.reason


def test_swap_space_beside_the_device_takes_nothing_of_the_cache():
    sizing = size(swap_space_bytes=4 * GIB)
    assert (sizing.num_device_blocks, sizing.num_host_blocks) == (11520, 2048)
    assert sizing.reason.endswith(
        "swap space on the host: 2048 blocks of 16 tokens (32768 tokens, 4.0 GiB)\n  set by cache.swap_space_gib"
    )


def test_swap_space_in_the_memory_of_the_cache_is_taken_from_it():
    sizing = size(swap_space_bytes=4 * GIB, is_swap_space_on_device=True)
    assert (sizing.num_device_blocks, sizing.num_host_blocks) == (11520 - 2048, 2048)
    assert "\n  swap space 4.0 GiB\n  left for the cache 18.5 GiB, room for 9472 blocks\n" in sizing.reason


def test_a_given_number_of_blocks_is_not_lowered_for_swap_space():
    sizing = size(None, num_blocks=100, swap_space_bytes=GIB, is_swap_space_on_device=True)
    assert (sizing.num_device_blocks, sizing.num_host_blocks) == (100, 512)


def test_swap_space_is_no_larger_than_the_sequences_can_use_and_what_is_left_over_goes_to_the_cache():
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
def test_whatever_was_measured_the_numbers_are_between_nothing_and_what_is_useful(
    figures, swap_space_bytes, is_swap_space_on_device, max_num_seqs
):
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


def test_without_number_and_measurement_there_is_nothing_to_size_from():
    with pytest.raises(AssertionError, match="needs a measurement"):
        size(None)


def test_a_given_number_too_small_for_one_sequence_is_refused_with_the_way_out():
    message = (
        "cache.num_blocks=3 holds 48 tokens but model.max_model_len is 4096: "
        "raise cache.num_blocks to at least 256 or lower max_model_len"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check_cache_holds_one_sequence(3, 16, 4096)


def test_a_profiled_number_too_small_for_one_sequence_names_the_memory():
    message = (
        "memory leaves room for 3 cache blocks, which hold 48 tokens, but model.max_model_len is 4096: "
        "raise cache.gpu_memory_utilization or lower model.max_model_len"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check_cache_holds_one_sequence(3, 16, 4096, is_profiled=True)


def test_swap_space_that_took_the_memory_is_a_way_out():
    with pytest.raises(ValueError, match=r"raise cache\.gpu_memory_utilization or lower model\.max_model_len or cache"):
        check_cache_holds_one_sequence(3, 16, 4096, is_profiled=True, has_swap_space_on_device=True)


def test_the_number_named_as_the_way_out_is_accepted_and_one_less_is_not():
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
def test_bytes_are_written_in_the_largest_unit_there_is_one_of(num_bytes, text):
    assert format_bytes(num_bytes) == text
