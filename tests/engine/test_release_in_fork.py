"""A forked process that ends, or forgets an engine, leaves the engine of its parent alone."""

import mmap
import os
from functools import partial
from types import SimpleNamespace

import pytest
from forked_child import in_child

from spmd_worker.base.config.parallel import ParallelConfig
from spmd_worker.base.liveness.heartbeat import Heartbeat
from spmd_worker.engine.life import Life
from spmd_worker.ranks import shared_memory
from spmd_worker.ranks.communicator import GroupHandle
from spmd_worker.ranks.groups import ParallelGroups
from spmd_worker.ranks.shared_memory import SharedMemoryGroup
from spmd_worker.ranks.topology import layout_of


class Written:
    """Calls that any process made, in shared memory."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)

    def add(self, *_: object) -> None:
        self._memory[0] += 1

    @property
    def count(self) -> int:
        return self._memory[0]


def test_engine_resources_are_released_by_own_process_only():
    """The finalizer of `LLM` ran in a forked process that ended by sys.exit, and ended the parent's workers."""
    calls = Written()
    executor = SimpleNamespace(shutdown=calls.add, register_failure_callback=lambda callback: None)
    release = Life(executor, SimpleNamespace(close=calls.add), (), None, Heartbeat()).release
    assert in_child(partial(release, is_closed=False)) == 0
    assert in_child(release) == 0
    assert calls.count == 0
    release()
    assert calls.count == 2


def test_shared_memory_is_unlinked_by_own_process_only(monkeypatch: pytest.MonkeyPatch):
    """The other ranks were told that this one had left."""
    monkeypatch.setattr(shared_memory, "SLOT_BYTES", mmap.PAGESIZE)
    calls = Written()
    library = SimpleNamespace(functions={"shared_leave": calls.add})
    memory = mmap.mmap(-1, 16 * mmap.PAGESIZE)
    group = SharedMemoryGroup(library, GroupHandle((0, 1), 0, None), memory, [os.getpid()] * 2, 1.0, False)
    assert in_child(group.close) == 0
    assert calls.count == 0
    group.close()
    assert calls.count == 1


def test_groups_are_destroyed_by_their_own_process_only():
    calls = Written()
    fast = SimpleNamespace(close=calls.add)
    handle = GroupHandle((0,), 0, None, fast)
    groups = ParallelGroups(layout_of(ParallelConfig()), handle, handle, handle, handle)
    assert in_child(groups.destroy) == 0
    assert calls.count == 0
    groups.destroy()
    assert calls.count == 2


def test_what_a_child_raises_is_seen_here():
    """Negative control of the helper."""

    def fail() -> None:
        raise ValueError("planted")

    assert in_child(fail) == 1
