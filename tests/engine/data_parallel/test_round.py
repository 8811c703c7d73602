"""What replicas share: places are taken once, nobody waits to take, and whoever waits hears of failure and silence."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from plain_store import PlainStore
from waiting import at_least

from spmd_worker.base.errors import RankFailedError
from spmd_worker.engine.data_parallel import round as round_module
from spmd_worker.engine.data_parallel.round import ReplicaRound, share_of
from spmd_worker.engine.data_parallel.store import put_bytes, take_bytes


@dataclass
class Clock:
    """Stands still unless it is moved."""

    now_s: float = 100.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(round_module, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    return clock


def rounds(num_replicas: int, timeout_s: float = 30.0, store: PlainStore | None = None) -> list[ReplicaRound]:
    prefix, store = "engine 1/round 1", store or PlainStore()
    return [ReplicaRound(store, prefix, replica, num_replicas, timeout_s) for replica in range(num_replicas)]


def test_round_shares_shrink_from_half_to_one():
    num_left, shares = 40, []
    while num_left:
        shares.append(share_of(num_left, 2, most=8))
        num_left -= shares[-1]
    assert shares == [8, 8, 6, 4, 3, 2, 2, 1, 1, 1, 1, 1, 1, 1]
    assert [share_of(num_left, 4, most=100) for num_left in (0, -3, 1, 7, 80)] == [0, 0, 1, 1, 10]


def test_round_positions_are_taken_once():
    first, second = rounds(2)
    assert [first.take(10, 9), first.take(10, 9), second.take(10, 1), first.take(10, 9)] == [
        range(2),
        range(2, 4),
        range(4, 5),
        range(5, 6),
    ]
    rest = [place for _ in range(5) for place in second.take(10, 9)]
    assert rest == [6, 7, 8, 9]
    assert not first.take(10, 9)
    assert not first.take(0, 9)


def test_four_replicas_at_once_take_every_place_once():
    def take_all(each: ReplicaRound) -> list[int]:
        taken: list[int] = []
        while places := each.take(5000, 7):
            taken += places
        return taken

    with ThreadPoolExecutor(4) as pool:
        taken = list(pool.map(take_all, rounds(4)))
    assert sorted(place for places in taken for place in places) == list(range(5000))


def test_round_has_own_keys_and_removes_them():
    store = PlainStore()
    first, second = rounds(2, store=store)
    first.take(4, 4)
    first.count(4)
    for each in (first, second):
        each.send_heartbeat()
        each.finish()
    assert first.is_over
    first.forget()
    assert not store.values
    later = ReplicaRound(store, "engine 1/round 2", 0, 2, 30.0)
    assert later.take(4, 4) == range(1)
    assert later.num_counted == 0
    assert not later.is_over


def test_round_is_over_when_all_replicas_finished():
    each = rounds(3)
    each[1].finish()
    each[0].finish()
    assert not each[0].is_over
    each[2].finish()
    assert all(one.is_over for one in each)


def test_round_failure_reaches_waiters_and_first_wins():
    first, second, third = rounds(3)
    threading.Timer(0.2, second.fail, ["rank 1 raised ValueError: of its own"]).start()
    with pytest.raises(RankFailedError, match=r"^rank 1 .*ValueError: .*own$"):
        wait(first)
    third.fail("rank 2 heard of it")
    with pytest.raises(RankFailedError, match="of its own"):
        third.send_heartbeat()


def test_whoever_waits_hears_of_silence_after_the_timeout():
    first, _ = rounds(2, timeout_s=1.0)
    with at_least(1.0), pytest.raises(RankFailedError, match=r"^replica 1 is silent: .* 1 s$"):
        wait(first)


def test_round_waits_for_slow_replica_with_heartbeat(clock: Clock):
    """The control of the test before: the beats make the difference."""
    first, second = rounds(2, timeout_s=1.0)
    for _ in range(50):
        clock.now_s += 0.2
        second.send_heartbeat()
        first.check_others()
    clock.now_s += 0.9
    first.check_others()
    clock.now_s += 0.2
    with pytest.raises(RankFailedError, match="replica 1 is silent"):
        first.check_others()


def test_beats_are_few(clock: Clock):
    store = PlainStore()
    (first,) = rounds(1, store=store)
    assert sum(first.send_heartbeat() for _ in range(1000)) == 1
    assert store.values["engine 1/round 1/heartbeat/0"] == b"1"


def wait(each: ReplicaRound) -> None:
    for _ in each.wait(lambda: each.is_over):
        continue


@pytest.mark.parametrize("size", [0, 1, 1 << 20, (3 << 20) + 5], ids=str)
def test_store_bytes_are_put_and_taken_once(size: int):
    store, payload = PlainStore(), bytes(index % 251 for index in range(size))
    assert take_bytes(store, "rows") is None
    put_bytes(store, "rows", payload)
    assert take_bytes(store, "rows") == payload
    assert take_bytes(store, "rows") is None
    assert not store.values
