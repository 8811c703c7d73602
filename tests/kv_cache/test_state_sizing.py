"""size_states: slots of sequences, snapshots and the host, within the memory that blocks leave."""

from dataclasses import replace

import pytest

from kv_cache.cache_spec import BlockLayer, CacheSpec, StateLayer
from kv_cache.state_sizing import StateNeed, size_states, slot_tokens

MIB, GIB = 2**20, 2**30
# Qwen3.5-9B: 24 layers of 32 heads of 128 x 128 with 8,192 channels, 8 layers of 4 KV heads of 256, in bfloat16.
STATES = (StateLayer((32, 128, 128), (3, 8192)),) * 24 + (None,) * 8
SPEC = CacheSpec((None,) * 24 + (BlockLayer(4, 256, 256),) * 8, 2, 16, STATES)
NEED = StateNeed(None, 256, None, has_snapshots=True, max_model_len=4096)


def numbers(spec: CacheSpec, need: StateNeed, left_bytes: int) -> tuple[int, int]:
    sizing = size_states(spec, need, left_bytes)
    return sizing.num_seqs, sizing.num_snapshots


def test_slot_bytes_are_those_of_the_model():
    assert SPEC.slot_bytes == 24 * (4 * 32 * 128 * 128 + 2 * 3 * 8192) == 51511296
    assert SPEC.block_bytes == 8 * 16 * 2 * 2 * 4 * 256
    assert slot_tokens(SPEC) == 1572


def test_default_leaves_two_thousand_tokens_a_sequence():
    left = 100 * (SPEC.slot_bytes + 2048 * 32 * 1024) + 1000
    sizing = size_states(SPEC, NEED, left)
    assert sizing.num_seqs == 100
    # A quarter of what the slots leave.
    assert sizing.num_snapshots == (left - 100 * SPEC.slot_bytes) // 4 // SPEC.slot_bytes == 32
    assert sizing.num_slots == 132
    assert sizing.num_host_slots == 0


def test_default_is_256_with_much_memory():
    assert numbers(SPEC, NEED, 300 * GIB) == (256, 512)
    assert numbers(SPEC, replace(NEED, most_seqs=64), 300 * GIB) == (64, 128)


def test_longest_sequence_always_has_blocks():
    """131,072 tokens take 4 GiB: of 5 GiB the default would give 45 sequences slots and leave too few blocks."""
    need = replace(NEED, max_model_len=131072)
    assert size_states(SPEC, NEED, 5 * GIB).num_seqs == 45
    assert numbers(SPEC, need, 5 * GIB) == (GIB // SPEC.slot_bytes, 0) == (20, 0)


def test_number_set_by_hand_is_used_or_refused():
    need = replace(NEED, num_seqs=30)
    assert size_states(SPEC, need, 2 * GIB).num_seqs == 30
    words = (
        r"scheduler.max_num_seqs=30 needs recurrent states of 1.4 GiB, 49.1 MiB a sequence, but 1.0 GiB are left for "
        r"states and blocks, of which a sequence of model.max_model_len tokens takes 128.0 MiB: lower it to at most "
        r"18, or leave it out to use what fits"
    )
    with pytest.raises(ValueError, match=words):
        size_states(SPEC, need, GIB)
    assert size_states(SPEC, replace(need, num_seqs=18), GIB).num_seqs == 18
    with pytest.raises(ValueError, match=r"a running sequence needs recurrent states of 49.1 MiB.*use more memory"):
        size_states(SPEC, NEED, 130 * MIB)


def test_snapshots_set_by_hand_are_used_or_refused():
    need = replace(NEED, num_seqs=10, num_snapshots=8)
    assert numbers(SPEC, need, GIB) == (10, 8)
    with pytest.raises(ValueError, match=r"cache.num_state_snapshots=9 needs .*, but 8 fit beside the states of 10"):
        size_states(SPEC, replace(need, num_snapshots=9), GIB)
    assert numbers(SPEC, replace(need, has_snapshots=False), GIB) == (10, 0)


def test_given_blocks_are_subtracted_first():
    blocks = GIB // SPEC.block_bytes
    assert size_states(SPEC, replace(NEED, num_blocks=blocks), 2 * GIB).num_seqs == 20
    assert numbers(SPEC, replace(NEED, num_blocks=blocks), 0) == (1, 0)


def test_numbers_beside_given_blocks_are_used_as_they_are():
    need = StateNeed(4, 256, 2, has_snapshots=True, max_model_len=4096, num_blocks=9)
    assert need.is_given
    assert numbers(SPEC, need, 0) == (4, 2)
    assert not replace(need, num_snapshots=None).is_given
    assert replace(need, num_snapshots=None, has_snapshots=False).is_given


def test_host_slots_take_half_of_the_swap_space():
    assert size_states(SPEC, NEED, 300 * GIB, swap_space_bytes=4 * GIB).num_host_slots == 2 * GIB // SPEC.slot_bytes
    assert size_states(SPEC, replace(NEED, num_seqs=3), GIB, swap_space_bytes=4 * GIB).num_host_slots == 3


def test_stage_without_states_fits_any_number():
    stage = replace(SPEC, layers=SPEC.layers[24:], states=SPEC.states[24:])
    assert numbers(stage, NEED, GIB * 200) == (256, 512)
    assert size_states(stage, replace(NEED, num_seqs=999), GIB).num_seqs == 999


def test_model_without_blocks_sizes_slots_alone():
    spec = replace(SPEC, layers=SPEC.layers[:24], states=SPEC.states[:24])
    assert size_states(spec, NEED, 10 * spec.slot_bytes).num_seqs == 10
    assert slot_tokens(spec) == 0


def test_states_in_words():
    left = 256 * (SPEC.slot_bytes + 2048 * 32 * 1024)
    assert size_states(SPEC, replace(NEED, num_snapshots=64), left).note == (
        "12.3 GiB: 256 of 49.1 MiB (24 layers of 32 heads of 128 x 128 float32, 3 x 8,192 inputs), 64 snapshots 3.1 GiB"
        "; a state costs as much as 1,572 tokens"
    )
    conv = CacheSpec((None, None), 2, 16, (StateLayer((), (2, 2048)),) * 2)
    need = replace(NEED, num_seqs=2, has_snapshots=False)
    assert size_states(conv, need, GIB).note == "32.0 KiB: 2 of 16.0 KiB (2 layers of 2 x 2,048 inputs)"
    drafting = replace(SPEC, states=(replace(STATES[0], saved=(4, 8320)),) * 24 + (None,) * 8)
    assert drafting.slot_bytes == SPEC.slot_bytes + 24 * 2 * 4 * 8320
    assert (
        ": 2 of 50.6 MiB (24 layers of 32 heads of 128 x 128 float32, 3 x 8,192 inputs, 4 x 8,320 inputs of drafts)"
        in (size_states(drafting, need, 2 * GIB).note)
    )
