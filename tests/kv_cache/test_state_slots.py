"""Slots of recurrent states: owners, snapshots, their order of eviction, and the moves of a step."""

import pytest

from kv_cache.state_ops import StateOps
from kv_cache.state_slots import StateSlots, check_state_block_size, snapshot_interval

A, B, C = b"a" * 16, b"b" * 16, b"c" * 16


def with_snapshots(*names: bytes, num_slots: int = 4, num_host_slots: int = 2) -> tuple[StateSlots, int]:
    """Slots of which one is owned, and has been kept under each name in a step of its own."""
    slots = StateSlots(num_slots, num_host_slots)
    slot = slots.take()
    for name in names:
        assert slots.snapshot(slot, name)
        slots.take_state_ops()
    return slots, slot


def test_slots_are_taken_in_order_and_reused():
    slots = StateSlots(3)
    assert [slots.take(), slots.take()] == [0, 1]
    slots.release(0)
    assert slots.take() == 0
    assert slots.take_state_ops() == StateOps()
    slots.check_integrity([0, 1])


def test_snapshot_is_copy_in_free_slot():
    slots, slot = with_snapshots()
    assert not slots.has_snapshot(A)
    assert slots.snapshot(slot, A)
    assert slots.take_state_ops() == StateOps(copy=((0, 1),))
    assert (slots.has_snapshot(A), slots.num_snapshots, slots.num_used_slots) == (True, 1, 1)
    slots.check_integrity([slot])


def test_hit_copies_and_keeps_snapshot():
    slots, slot = with_snapshots(A)
    assert slots.take_from(A) == 2
    assert slots.take_state_ops() == StateOps(copy=((1, 2),))
    assert slots.has_snapshot(A)
    slots.check_integrity([slot, 2])


def test_hit_in_step_of_snapshot_copies_its_source():
    """Both copies read what the step before has left: the snapshot's slot holds nothing yet."""
    slots, slot = with_snapshots()
    slots.snapshot(slot, A)
    assert slots.take_from(A) == 2
    assert slots.take_state_ops() == StateOps(copy=((0, 1), (0, 2)))


def test_last_free_slot_is_snapshot_itself():
    slots, slot = with_snapshots(A, num_slots=2)
    assert slots.take_from(A) == 1
    assert slots.take_state_ops() == StateOps()
    assert not slots.has_snapshot(A)
    slots.check_integrity([slot, 1])


def test_last_free_slot_receives_snapshot_of_same_step():
    slots, slot = with_snapshots(num_slots=2)
    slots.snapshot(slot, A)
    assert slots.take_from(A) == 1
    assert slots.take_state_ops() == StateOps(copy=((0, 1),))


def test_least_recently_used_snapshot_is_evicted():
    slots, _ = with_snapshots(A, B, C)
    slots.release(slots.take_from(A))
    # A's hit evicted B, whose slot is free now; A is used more recently than C.
    assert [slots.has_snapshot(name) for name in (A, B, C)] == [True, False, True]
    slots.take()
    slots.take()
    assert [slots.has_snapshot(name) for name in (A, B, C)] == [True, False, False]


def test_evicted_snapshot_may_be_source_in_its_step():
    """Copies read all sources before they write: whoever gets the snapshot's slot next starts from zeros."""
    slots, slot = with_snapshots(A, num_slots=3)
    hit = slots.take_from(A)
    slots.release(slot)
    assert (slots.take(), slots.take_state_ops()) == (slot, StateOps(copy=((1, hit),)))


def test_snapshot_needs_slot_that_no_sequence_owns():
    slots, slot = with_snapshots(num_slots=1)
    assert not slots.snapshot(slot, A)
    assert slots.take_state_ops() == StateOps()


def test_forgotten_snapshot_is_taken_first():
    slots, slot = with_snapshots(A, B)
    slots.forget(B)
    slots.forget(C)
    assert slots.snapshot(slot, C)
    assert slots.take_state_ops() == StateOps(copy=((0, 2),))
    assert [slots.has_snapshot(name) for name in (A, B, C)] == [True, False, True]
    slots.check_integrity([slot])


def test_cleared_names_find_nothing():
    slots, slot = with_snapshots(A, B)
    slots.clear_names()
    assert slots.num_snapshots == 0
    slots.check_integrity([slot])


def test_fork_copies_in_next_step():
    slots, parent = with_snapshots()
    forks = [slots.fork(parent), slots.fork(parent)]
    assert slots.take_state_ops() == StateOps(copy=((0, 1), (0, 2)))
    slots.check_integrity([parent, *forks])


def test_copy_to_released_slot_is_dropped():
    slots, parent = with_snapshots()
    fork = slots.fork(parent)
    grandchild = slots.fork(fork)
    slots.release(fork)
    assert slots.take_state_ops() == StateOps(copy=((0, grandchild),))


def test_state_is_swapped_out_and_in():
    slots, slot = with_snapshots()
    host_slot = slots.swap_out(slot)
    # The freed slot may be reused at once: the swap-out reads it first.
    assert (slots.take(), slots.take_state_ops()) == (0, StateOps(swap_out=((0, 0),)))
    assert slots.num_used_host_slots == 1
    assert (slots.swap_in(host_slot), slots.num_used_host_slots) == (1, 1)
    slots.check_integrity([0, 1])
    assert slots.take_state_ops() == StateOps(swap_in=((0, 1),))
    assert slots.num_used_host_slots == 0


def test_host_slot_is_reused_after_step_that_reads_it():
    slots, slot = with_snapshots(num_host_slots=1)
    other = slots.take()
    back = slots.swap_in(slots.swap_out(slot))
    assert not slots.can_swap_out(other)
    slots.take_state_ops()
    assert slots.can_swap_out(other)
    slots.check_integrity([other, back])


def test_state_arrives_in_slot_of_snapshot_of_same_step():
    """The snapshot is evicted before it is made: its copy is dropped."""
    slots, slot = with_snapshots(num_slots=2)
    host_slot = slots.swap_out(slot)
    slots.take_state_ops()
    assert slots.snapshot(slots.take(), A)
    assert (slots.swap_in(host_slot), slots.take_state_ops()) == (1, StateOps(swap_in=((0, 1),)))


def test_slot_that_is_to_receive_is_not_swapped_out():
    slots, parent = with_snapshots()
    fork = slots.fork(parent)
    assert (slots.can_swap_out(parent), slots.can_swap_out(fork)) == (True, False)
    slots.take_state_ops()
    assert slots.can_swap_out(fork)


@pytest.mark.parametrize(("owned", "host"), [([0, 1], []), ([], []), ([0, 0], []), ([0], [0])])
def test_integrity_detects_wrong_owners(owned: list[int], host: list[int]):
    slots, _ = with_snapshots(A)
    with pytest.raises(AssertionError, match="owners"):
        slots.check_integrity(owned, host)


@pytest.mark.parametrize("block_size", [1, 16, 64, 128, 192])
def test_block_sizes_that_meet_grid_are_accepted(block_size: int):
    check_state_block_size(block_size)


@pytest.mark.parametrize("block_size", [0, 24, 48, 96])
def test_other_block_sizes_are_rejected(block_size: int):
    with pytest.raises(ValueError, match=rf"cache\.block_size={block_size} must divide 64 .* use 16, 32, 64 or 128"):
        check_state_block_size(block_size)


@pytest.mark.parametrize(
    ("slot_bytes", "token_bytes", "interval"),
    [(49 * 2**20, 2**15, 1600), (1, 2**15, 64), (64 * 2**15, 2**15, 64), (64 * 2**15 + 1, 2**15, 128)],
)
def test_interval_makes_states_cost_what_tokens_cost(slot_bytes: int, token_bytes: int, interval: int):
    assert snapshot_interval(slot_bytes, token_bytes) == interval
