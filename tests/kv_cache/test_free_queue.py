"""FreeQueue: literal order, the numbered contract, and links broken on purpose."""

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_cache.block import BlockId
from kv_cache.free_queue import FreeQueue


def queue_of(count, *queued):
    """A queue of `count` blocks in which `queued` stand, in this order."""
    queue = FreeQueue(count)
    while len(queue):
        queue.pop(1)
    for block_id in queued:
        queue.append(BlockId(block_id))
    return queue


def test_queue_is_first_in_first_out():
    queue = FreeQueue(3)
    assert list(queue) == [0, 1, 2]
    assert queue.pop(1) == [0]
    queue.append(0)
    assert list(queue) == [1, 2, 0]
    assert len(queue) == 3


def test_prepended_block_is_popped_first():
    queue = queue_of(4, 0, 1)
    queue.prepend(2)
    queue.prepend(3)
    assert list(queue) == [3, 2, 0, 1]
    assert queue.pop(1) == [3]
    queue.append(3)
    assert list(queue) == [2, 0, 1, 3]
    queue.check_integrity()


@pytest.mark.parametrize("enter", [FreeQueue.append, FreeQueue.prepend])
def test_empty_queue_accepts_a_block_at_either_end(enter):
    queue = queue_of(1)
    assert list(queue) == []
    assert 0 not in queue
    enter(queue, 0)
    assert list(queue) == [0]
    assert 0 in queue
    queue.check_integrity()
    assert queue.pop(1) == [0]
    queue.check_integrity()


@pytest.mark.parametrize(("index", "expected"), [(0, [1, 2, 3]), (1, [0, 2, 3]), (3, [0, 1, 2])])
def test_queue_removes_blocks_at_any_position(index, expected):
    queue = FreeQueue(4)
    queue.remove(index)
    assert list(queue) == expected
    assert index not in queue
    queue.check_integrity()


def test_empty_queue_cannot_pop():
    with pytest.raises(AssertionError, match=r"1 blocks wanted, .*0 are free"):
        FreeQueue(0).pop(1)
    FreeQueue(0).check_integrity()


@pytest.mark.parametrize("enter", [FreeQueue.append, FreeQueue.prepend])
def test_queued_block_cannot_be_queued_twice(enter):
    queue = FreeQueue(2)
    with pytest.raises(AssertionError, match=r"block 1 .*queue already"):
        enter(queue, 1)
    assert list(queue) == [0, 1]


def test_unqueued_block_cannot_be_removed():
    with pytest.raises(AssertionError, match=r"block 1 .*not .*queue"):
        queue_of(2, 0).remove(1)


@given(st.lists(st.tuples(st.sampled_from(["append", "prepend", "pop", "remove"]), st.integers(0, 5)), max_size=60))
def test_queue_matches_a_deque_with_removal(operations):
    queue, model = queue_of(6), deque()
    for name, index in operations:
        if name == "append" and index not in model:
            queue.append(index)
            model.append(index)
        elif name == "prepend" and index not in model:
            queue.prepend(index)
            model.appendleft(index)
        elif name == "pop" and model:
            count = min(index, len(model))
            assert queue.pop(count) == [model.popleft() for _ in range(count)]
        elif name == "remove" and index in model:
            queue.remove(index)
            model.remove(index)
        queue.check_integrity()
        assert list(queue) == list(model)
        assert len(queue) == len(model)
        assert [index in queue for index in range(6)] == [index in model for index in range(6)]


def break_backward_link(queue):
    queue._previous[2] = 0


def open_the_ring(queue):
    queue._next[1] = -1


def skip_a_block(queue):
    queue._next[0], queue._previous[2] = 2, 0


def close_a_loop_before_the_end(queue):
    queue._next[2], queue._previous[0] = 0, 2


def lose_a_block(queue):
    skip_a_block(queue)
    queue._num_queued -= 1


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (break_backward_link, "1 is followed by 2, which names 0 before it"),
        (open_the_ring, "open after 1 at position 2"),
        (skip_a_block, "counts 4 blocks but position 3 is 4"),
        (close_a_loop_before_the_end, "4 is followed by 0, which names 2 before it"),
        (lose_a_block, "4 blocks have links, the free queue counts 3"),
    ],
)
def test_queue_check_detects_damaged_links(damage, message):
    queue = FreeQueue(4)
    queue.check_integrity()
    damage(queue)
    with pytest.raises(AssertionError, match=message):
        queue.check_integrity()
