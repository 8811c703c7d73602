import re
import time
from pathlib import Path

import pytest
import torch
from cache_specs import uniform_spec
from waiting import wait_until

from kv_cache import host_reserve
from kv_cache.block_ops import BlockOps
from kv_cache.cache_engine import CacheEngine
from kv_cache.host_memory import lazy_caches
from kv_cache.host_reserve import HostReserve

MIB = 2**20


def resident_bytes(reserve: HostReserve) -> int:
    """Of the reserve's mapping alone: what earlier tests have left comes and goes in this process."""
    lines, is_ours = Path("/proc/self/smaps").read_text(encoding="ascii", errors="replace").splitlines(), False
    for line in lines:
        words = line.split()
        if re.fullmatch("[0-9a-f]+-[0-9a-f]+", words[0]):
            start, stop = (int(each, 16) for each in words[0].split("-"))
            is_ours = start <= reserve._address + 2 * MIB < stop
        elif is_ours and words[0] == "Rss:":
            return int(words[1]) * 1024
    raise AssertionError("the mapping is not listed")


def wait_for(reserve: HostReserve, num_bytes: int) -> None:
    wait_until(lambda: reserve.committed_bytes >= num_bytes)
    assert reserve.committed_bytes == num_bytes


def test_reserve_commits_exactly_the_requested_bytes():
    reserve = HostReserve()
    before = resident_bytes(reserve)
    assert before < 4 * MIB
    reserve.commit(100 * MIB + 5)
    wait_for(reserve, 100 * MIB + 5)
    assert 98 * MIB < resident_bytes(reserve) - before < 110 * MIB


def test_reserve_yields_zeroed_memory_beyond_the_committed():
    reserve = HostReserve()
    reserve.commit(16 * MIB)
    wait_for(reserve, 16 * MIB)
    before = resident_bytes(reserve)
    memory = reserve.take(1 << 30)
    assert memory is not None
    assert len(memory) == 1 << 30
    values = torch.frombuffer(memory, dtype=torch.uint8)
    assert values.data_ptr() % (2 * MIB) == 0
    assert not values[: 20 * MIB].any()
    assert not values[-4096:].any()
    assert resident_bytes(reserve) - before < 16 * MIB


def test_reserve_stops_prefaulting_once_handed_out():
    reserve = HostReserve()
    # No more than a small machine has, should this thread get no core for a while.
    reserve.commit(1 << 30)
    wait_until(lambda: reserve.committed_bytes > 0)
    assert reserve.take(MIB) is not None
    committed = reserve.committed_bytes
    time.sleep(0.1)
    assert reserve.committed_bytes == committed


def test_reserve_is_none_when_memory_is_exhausted():
    assert HostReserve().take(1 << 50) is None


def test_cache_layout_starts_at_the_reserved_bytes():
    reserve = HostReserve()
    (cache,) = lazy_caches([(3, 5, 8)], torch.float32, reserve)
    assert cache.shape == (3, 5, 8)
    first = cache.data_ptr()
    assert [cache[layer, block].data_ptr() - first for block in (0, 1) for layer in range(3)] == [
        32 * number for number in range(6)
    ]
    assert not cache.any()


@pytest.mark.parametrize("has_reserve", [True, False])
def test_block_of_several_shapes_is_contiguous(has_reserve: bool):
    reserve = HostReserve() if has_reserve else None
    few, many = lazy_caches([(1, 5, 8), (2, 5, 2, 2)], torch.float32, reserve)
    assert (few.shape, many.shape) == ((1, 5, 8), (2, 5, 2, 2))
    places = [few[0, 1].data_ptr(), many[0, 1].data_ptr(), many[1, 1].data_ptr(), few[0, 2].data_ptr()]
    assert [place - few.data_ptr() for place in places] == [64, 96, 112, 128]
    assert lazy_caches([], torch.float32, reserve) == ()


def test_cache_allocates_memory_without_a_fitting_reserve():
    class Small(HostReserve):
        def take(self, num_bytes: int) -> None:
            return None

    (cache,) = lazy_caches([(3, 5, 8)], torch.float32, Small())
    assert cache.shape == (3, 5, 8)
    assert not cache.any()


@pytest.mark.parametrize("has_reserve", [False, True])
def test_blocks_move_alike_in_any_memory(has_reserve: bool):
    spec = uniform_spec(num_layers=3, num_kv_heads=1, head_size=16, dtype_bytes=4, block_size=4)
    engine = CacheEngine(spec, [(128,)], 6, 4, torch.float32, torch.device("cpu"))
    engine.allocate(HostReserve() if has_reserve else None)
    for block in range(6):
        for layer in range(3):
            engine.tensors[0][layer, block] = 10 * layer + block
    engine.execute(BlockOps(swap_out=((2, 1), (5, 3))))
    engine.execute(BlockOps(copy=((0, 2),)))
    engine.execute(BlockOps(swap_in=((1, 5), (3, 0))))
    assert [[float(engine.tensors[0][layer, block, 7]) for block in range(6)] for layer in range(3)] == [
        [10 * layer + block for block in (5, 1, 0, 3, 4, 2)] for layer in range(3)
    ]


def test_offered_reserve_stays_until_withdrawn():
    assert host_reserve.offered() is None
    reserve = HostReserve()
    host_reserve.offer(reserve)
    assert host_reserve.offered() is reserve
    host_reserve.offer(None)
    assert host_reserve.offered() is None
