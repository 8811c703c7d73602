"""PendingMoves: the literal pairs of one step, whatever order they were decided in."""

import pytest

from kv_cache.block_ops import BlockOps
from kv_cache.pending_moves import PendingMoves


def test_moves_are_returned_once_as_pairs():
    moves = PendingMoves()
    moves.copy(1, 2)
    moves.swap_in(10, 3)
    moves.swap_out(4, 11)
    assert moves.take() == BlockOps(swap_in=((10, 3),), swap_out=((4, 11),), copy=((1, 2),))
    assert moves.take() == BlockOps()


def test_moves_keep_the_order_of_decision():
    moves = PendingMoves()
    for source, destination in ((5, 6), (1, 2), (3, 4)):
        moves.copy(source, destination)
        moves.swap_out(source, destination)
    block_ops = moves.take()
    assert block_ops.copy == block_ops.swap_out == ((5, 6), (1, 2), (3, 4))


def test_copy_chain_reads_the_first_source():
    moves = PendingMoves()
    moves.copy(1, 2)
    moves.copy(2, 3)
    moves.copy(3, 4)
    assert moves.take().copy == ((1, 2), (1, 3), (1, 4))


def test_copy_after_swap_in_becomes_second_swap_in():
    moves = PendingMoves()
    moves.swap_in(10, 2)
    moves.copy(2, 3)
    moves.copy(3, 4)
    assert moves.take() == BlockOps(swap_in=((10, 2), (10, 3), (10, 4)))


def test_overwritten_block_is_copied_from_itself():
    """Block 2 was swapped in, freed and handed out again: what it holds when the step begins is what is copied."""
    moves = PendingMoves()
    moves.swap_in(10, 2)
    moves.overwrite([2])
    moves.copy(2, 3)
    assert moves.take() == BlockOps(copy=((2, 3),))


def test_copy_back_to_its_source_moves_nothing():
    moves = PendingMoves()
    moves.copy(1, 2)
    moves.overwrite([1])
    moves.copy(2, 1)
    assert not moves.receives(1)
    moves.copy(1, 3)
    assert moves.take().copy == ((1, 2), (1, 3))


def test_overwritten_block_drops_its_pending_moves():
    moves = PendingMoves()
    moves.copy(1, 2)
    moves.copy(2, 3)
    moves.swap_in(10, 4)
    moves.swap_out(5, 11)
    assert [moves.receives(block_id) for block_id in range(6)] == [False, False, True, True, True, False]
    moves.overwrite([2, 4, 5])
    assert [moves.receives(block_id) for block_id in range(6)] == [False, False, False, True, False, False]
    assert moves.take() == BlockOps(copy=((1, 3),), swap_out=((5, 11),))


def test_copies_can_exchange_blocks():
    moves = PendingMoves()
    moves.copy(0, 2)
    moves.copy(1, 3)
    moves.copy(2, 1)
    moves.copy(3, 0)
    assert moves.take().copy == ((0, 2), (1, 3), (0, 1), (1, 0))


def test_source_can_be_swapped_out_and_copied():
    moves = PendingMoves()
    moves.copy(1, 2)
    moves.swap_out(1, 10)
    assert moves.take() == BlockOps(swap_out=((1, 10),), copy=((1, 2),))


@pytest.mark.parametrize("arrive", [lambda moves: moves.copy(1, 2), lambda moves: moves.swap_in(10, 2)])
def test_arriving_block_cannot_be_swapped_out(arrive):
    moves = PendingMoves()
    arrive(moves)
    with pytest.raises(AssertionError, match="block 2 receives a move"):
        moves.swap_out(2, 11)


def test_host_block_receives_the_last_swap_out_only():
    """Its first owner let go of it in this very step."""
    moves = PendingMoves()
    moves.swap_out(1, 10)
    moves.swap_out(2, 10)
    assert moves.take().swap_out == ((2, 10),)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda moves: moves._copies.update({1: 1}), "block 1 is to be copied to itself"),
        (lambda moves: (moves.copy(1, 2), moves._swap_ins.update({2: 0})), "block 2 is to receive a copy and a swap"),
        (lambda moves: moves.copy(4, 2), "copy 4 to 2: there are 4 blocks"),
        (lambda moves: moves.swap_in(2, 1), "swap-in of host block 2 of 2"),
        (lambda moves: moves.swap_in(0, 4), "swap-in to block 4 of 4"),
        (lambda moves: moves.swap_out(4, 0), "swap-out of block 4 of 4"),
        (lambda moves: moves.swap_out(0, 2), "swap-out to host block 2 of 2"),
    ],
)
def test_move_check_detects_impossible_moves(damage, message):
    moves = PendingMoves()
    moves.copy(0, 3)
    moves.check_integrity(4, 2)
    damage(moves)
    with pytest.raises(AssertionError, match=message):
        moves.check_integrity(4, 2)
