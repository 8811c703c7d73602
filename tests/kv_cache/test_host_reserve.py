import time

import pytest
import torch
from waiting import wait_until

from kv_cache import host_reserve
from kv_cache.cache_engine import CacheEngine
from kv_cache.cache_spec import CacheSpec
from kv_cache.host_memory import lazy_cache
from kv_cache.host_reserve import HostReserve

MIB = 2**20


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * 4096


def wait_for(reserve: HostReserve, num_bytes: int) -> None:
    wait_until(lambda: reserve.committed_bytes >= num_bytes)
    assert reserve.committed_bytes == num_bytes


def test_as_much_is_committed_as_was_asked_for_and_no_more():
    before = resident_bytes()
    reserve = HostReserve()
    assert resident_bytes() - before < 4 * MIB
    reserve.commit(100 * MIB + 5)
    wait_for(reserve, 100 * MIB + 5)
    assert 98 * MIB < resident_bytes() - before < 110 * MIB


def test_what_is_taken_is_the_zeroed_beginning_of_the_memory_and_may_be_larger_than_what_is_committed():
    reserve = HostReserve()
    reserve.commit(16 * MIB)
    wait_for(reserve, 16 * MIB)
    before = resident_bytes()
    memory = reserve.take(1 << 30)
    assert memory is not None
    assert len(memory) == 1 << 30
    values = torch.frombuffer(memory, dtype=torch.uint8)
    assert values.data_ptr() % (2 * MIB) == 0
    assert not values[: 20 * MIB].any()
    assert not values[-4096:].any()
    assert resident_bytes() - before < 16 * MIB


def test_taking_ends_the_commitment():
    reserve = HostReserve()
    reserve.commit(1 << 40)
    time.sleep(0.05)
    assert reserve.take(MIB) is not None
    committed = reserve.committed_bytes
    time.sleep(0.1)
    assert reserve.committed_bytes == committed


def test_more_than_the_machine_has_is_not_there():
    assert HostReserve().take(1 << 50) is None


def test_a_cache_takes_the_memory_and_its_first_blocks_are_the_first_bytes():
    reserve = HostReserve()
    cache = lazy_cache((3, 5, 8), torch.float32, reserve)
    assert cache.shape == (3, 5, 8)
    first = cache.data_ptr()
    assert [cache[layer, block].data_ptr() - first for block in (0, 1) for layer in range(3)] == [
        32 * number for number in range(6)
    ]
    assert not cache.any()


def test_a_cache_that_is_larger_has_memory_of_its_own():
    class Small(HostReserve):
        def take(self, num_bytes: int) -> None:
            return None

    cache = lazy_cache((3, 5, 8), torch.float32, Small())
    assert cache.shape == (3, 5, 8)
    assert not cache.any()


@pytest.mark.parametrize("has_reserve", [False, True])
def test_blocks_move_alike_wherever_the_cache_lies(has_reserve: bool):
    spec = CacheSpec(num_layers=3, num_kv_heads=1, head_size=16, dtype_bytes=4, block_size=4)
    engine = CacheEngine(spec, (128,), 6, 4, torch.float32, torch.device("cpu"))
    engine.allocate(HostReserve() if has_reserve else None)
    for block in range(6):
        for layer in range(3):
            engine.device_cache[layer, block] = 10 * layer + block
    engine.swap_out([(2, 1), (5, 3)])
    engine.copy([(0, 2)])
    engine.swap_in([(1, 5), (3, 0)])
    assert [[float(engine.device_cache[layer, block, 7]) for block in range(6)] for layer in range(3)] == [
        [10 * layer + block for block in (5, 1, 0, 3, 4, 2)] for layer in range(3)
    ]


def test_what_is_offered_is_there_until_it_is_taken_back():
    assert host_reserve.offered() is None
    reserve = HostReserve()
    host_reserve.offer(reserve)
    assert host_reserve.offered() is reserve
    host_reserve.offer(None)
    assert host_reserve.offered() is None
