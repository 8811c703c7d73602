"""FreeQueue: literal order, the numbered contract, and links broken on purpose."""

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_cache.block import Block, BlockId
from kv_cache.free_queue import FreeQueue


def make_blocks(count):
    return [Block(BlockId(index)) for index in range(count)]


def order(queue):
    return [block.block_id for block in queue]


def test_blocks_leave_in_the_order_in_which_they_were_appended():
    blocks = make_blocks(3)
    queue = FreeQueue(blocks)
    assert order(queue) == [0, 1, 2]
    assert queue.pop_first() is blocks[0]
    queue.append(blocks[0])
    assert order(queue) == [1, 2, 0]
    assert len(queue) == 3


def test_a_block_that_is_put_first_is_the_next_to_go():
    blocks = make_blocks(4)
    queue = FreeQueue(blocks[:2])
    queue.prepend(blocks[2])
    queue.prepend(blocks[3])
    assert order(queue) == [3, 2, 0, 1]
    assert queue.pop_first() is blocks[3]
    queue.append(blocks[3])
    assert order(queue) == [2, 0, 1, 3]
    queue.check_integrity()


@pytest.mark.parametrize("enter", [FreeQueue.append, FreeQueue.prepend])
def test_an_empty_queue_takes_a_block_at_either_end(enter):
    (block,), queue = make_blocks(1), FreeQueue()
    enter(queue, block)
    assert order(queue) == [0]
    queue.check_integrity()
    assert queue.pop_first() is block
    queue.check_integrity()


@pytest.mark.parametrize(("index", "expected"), [(0, [1, 2, 3]), (1, [0, 2, 3]), (3, [0, 1, 2])])
def test_a_block_is_removed_from_either_end_and_from_the_middle(index, expected):
    blocks = make_blocks(4)
    queue = FreeQueue(blocks)
    queue.remove(blocks[index])
    assert order(queue) == expected
    assert blocks[index].next_free is None
    assert blocks[index].previous_free is None
    queue.check_integrity()


def test_an_emptied_queue_takes_blocks_again():
    blocks = make_blocks(1)
    queue = FreeQueue(blocks)
    queue.pop_first()
    assert len(queue) == 0
    assert order(queue) == []
    queue.check_integrity()
    queue.append(blocks[0])
    assert order(queue) == [0]


def test_an_empty_queue_has_nothing_to_give():
    with pytest.raises(AssertionError, match="no block is free"):
        FreeQueue().pop_first()


@pytest.mark.parametrize("enter", [FreeQueue.append, FreeQueue.prepend])
def test_a_queued_block_is_not_queued_twice(enter):
    blocks = make_blocks(2)
    queue = FreeQueue(blocks)
    with pytest.raises(AssertionError, match="block 1 is in the free queue already"):
        enter(queue, blocks[1])
    assert order(queue) == [0, 1]


def test_a_block_that_is_not_queued_is_not_removed():
    with pytest.raises(AssertionError, match="block 7 is not in the free queue"):
        FreeQueue(make_blocks(2)).remove(Block(BlockId(7)))


@given(
    st.lists(st.tuples(st.sampled_from(["append", "prepend", "pop_first", "remove"]), st.integers(0, 5)), max_size=60)
)
def test_the_queue_is_a_deque_with_cheap_removal(operations):
    blocks, queue, model = make_blocks(6), FreeQueue(), deque()
    for name, index in operations:
        if name == "append" and index not in model:
            queue.append(blocks[index])
            model.append(index)
        elif name == "prepend" and index not in model:
            queue.prepend(blocks[index])
            model.appendleft(index)
        elif name == "pop_first" and model:
            assert queue.pop_first().block_id == model.popleft()
        elif name == "remove" and index in model:
            queue.remove(blocks[index])
            model.remove(index)
        queue.check_integrity()
        assert order(queue) == list(model)
        assert len(queue) == len(model)


def break_backward_link(blocks):
    blocks[2].previous_free = blocks[0]


def open_the_ring(blocks):
    blocks[1].next_free = None


def skip_a_block(blocks):
    blocks[0].next_free, blocks[2].previous_free = blocks[2], blocks[0]


def close_a_loop_before_the_end(blocks):
    blocks[2].next_free, blocks[0].previous_free = blocks[0], blocks[2]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (break_backward_link, r"Block\(2.*names Block\(0"),
        (open_the_ring, r"open after Block\(1"),
        (skip_a_block, r"counts 4 blocks but place 3"),
        (close_a_loop_before_the_end, r"Block\(-1.* is followed by Block\(0.*names Block\(2"),
    ],
)
def test_a_damaged_link_is_found(damage, message):
    blocks = make_blocks(4)
    queue = FreeQueue(blocks)
    queue.check_integrity()
    damage(blocks)
    with pytest.raises(AssertionError, match=message):
        queue.check_integrity()
