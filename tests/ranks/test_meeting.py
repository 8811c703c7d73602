"""Ranks agree on a world's name in a store that holds what dead ranks and given-up attempts left there."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from waiting import wait_until

from spmd_worker.base.errors import RankFailedError
from spmd_worker.base.liveness.heartbeat import location_of
from spmd_worker.ranks import meeting
from spmd_worker.ranks.meeting import meet

LONG, SHORT = timedelta(seconds=240), timedelta(seconds=0.05)


@pytest.fixture
def store() -> Any:
    return dist.HashStore()


def together(*calls: Callable[[], str]) -> list[str]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def all_meet(store: Any, size: int = 3) -> str:
    names = together(*(lambda rank=rank: meet(store, rank, size, LONG) for rank in range(size)))
    assert len(set(names)) == 1, names
    return names[0]


def arrive(store: Any, rank: int, world: str | None = None) -> None:
    """A rank that is killed after it has come; with `world`, after it has taken what is offered then."""
    arrival = f"dead {rank}"
    store.set(f"at/{rank}", arrival)
    if world is not None:
        store.set(f"taken/{world}/{arrival}", "1")


def test_each_world_has_a_unique_name(store: Any):
    assert len({all_meet(store) for _ in range(5)}) == 5


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_late_rank_meets_the_others(store: Any, rank: int):
    with ThreadPoolExecutor(3) as pool:
        early = [pool.submit(meet, store, other, 3, LONG) for other in range(3) if other != rank]
        if rank:
            wait_until(lambda: store.check([f"offer/{store.get(f'at/{3 - rank}').decode()}"]))
        assert not any(each.done() for each in early)
        name = meet(store, rank, 3, LONG)
        assert {each.result() for each in early} == {name}


def test_dead_rank_before_the_offer_is_skipped(store: Any):
    arrive(store, 1)
    all_meet(store)


def test_dead_rank_after_accepting_is_not_counted(store: Any):
    """All the others go when the one that comes in its place has taken the name too."""
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(meet, store, 0, 3, LONG)
        store.set("at/1", "dead 1")
        wait_until(lambda: store.check(["offer/dead 1"]))
        arrive(store, 1, store.get("offer/dead 1").decode())
        # Here instead of it.
        second = pool.submit(meet, store, 1, 3, LONG)
        wait_until(lambda: store.get("at/1") != b"dead 1")
        third = pool.submit(meet, store, 2, 3, LONG)
        assert first.result() == second.result() == third.result()


def test_dead_rank_0_offer_is_replaced(store: Any):
    with ThreadPoolExecutor(3) as pool:
        others = [pool.submit(meet, store, rank, 3, LONG) for rank in (1, 2)]
        for rank in (1, 2):
            wait_until(lambda rank=rank: store.check([f"at/{rank}"]))
            arrival = store.get(f"at/{rank}").decode()
            store.set(f"offer/{arrival}", "dead world")
            wait_until(lambda arrival=arrival: store.check([f"taken/dead world/{arrival}"]))
        name = meet(store, 0, 3, LONG)
        assert {each.result() for each in others} == {name} != {"dead world"}


def test_started_world_is_kept_despite_a_new_offer(store: Any):
    """A slow rank: rank 0 has said "go", has failed since, and offers another name."""

    class Slow:
        """Says that it has taken the name, and looks again when the others are further."""

        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def set(self, key: str, value: str) -> None:
            self.inner.set(key, value)
            if key.startswith("taken/"):
                self.inner.set(f"go/{key.split('/')[1]}", "1")
                self.inner.set(f"offer/{key.split('/')[2]}", "the next")

        def get(self, key: str) -> bytes:
            return bytes(self.inner.get(key))

        def check(self, keys: list[str]) -> bool:
            return bool(self.inner.check(keys))

    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(meet, Slow(store), 1, 2, LONG)
        wait_until(lambda: store.check(["at/1"]))
        store.set(f"offer/{store.get('at/1').decode()}", "the first")
        assert slow.result() == "the first"


def test_missing_ranks_are_named_and_can_come_later(store: Any, monkeypatch: pytest.MonkeyPatch):
    looks: list[bool] = []

    def has_accepted() -> bool:
        arrival = store.get("at/2").decode()
        offer = f"offer/{arrival}"
        return store.check([offer]) and store.check([f"taken/{store.get(offer).decode()}/{arrival}"])

    def now_s() -> float:
        """Rank 0's time is over when it has looked once more since rank 2 has accepted."""
        if threading.current_thread() is threading.main_thread():
            looks.extend([True] * has_accepted())
        return 3.0 if len(looks) > 1 else 0.0

    monkeypatch.setattr(meeting, "time", SimpleNamespace(monotonic=now_s, sleep=time.sleep))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(meet, store, 2, 4, LONG)
        wait_until(lambda: store.check(["at/2"]))
        with pytest.raises(RankFailedError, match=r"^rank 1, 3 .*joined in 2 s: "):
            meet(store, 0, 4, timedelta(seconds=2))
        names: list[Future[str]] = []
        with ThreadPoolExecutor(3) as later:
            names = [later.submit(meet, store, rank, 4, LONG) for rank in (0, 1, 3)]
        assert len({each.result() for each in names}) == 1


def test_rank_that_times_out_is_not_counted(store: Any):
    for rank in (1, 2):
        with pytest.raises(RankFailedError, match=r"^rank 0 .*joined with .*0\.05 s"):
            meet(store, rank, 3, SHORT)
    with pytest.raises(RankFailedError, match=r"^rank 1, 2 .*not joined"):
        meet(store, 0, 3, SHORT)
    all_meet(store)


def test_interrupted_rank_is_not_counted(store: Any):
    class Interrupted:
        """Ctrl-C when the name is taken."""

        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        def check(self, keys: list[str]) -> bool:
            if keys[0].startswith("go/"):
                raise KeyboardInterrupt
            return bool(store.check(keys))

    error: list[BaseException] = []

    def interrupted() -> None:
        try:
            meet(Interrupted(), 1, 3, LONG)
        except KeyboardInterrupt as caught:
            error.append(caught)

    thread = threading.Thread(target=interrupted)
    with ThreadPoolExecutor(3) as pool:
        thread.start()
        first = pool.submit(meet, store, 0, 3, LONG)
        thread.join()
        assert error
        third = pool.submit(meet, store, 2, 3, LONG)
        second = pool.submit(meet, store, 1, 3, LONG)
        assert first.result() == second.result() == third.result()


def test_meeting_rank_is_seen_waiting_for_others(store: Any):
    """Else it would be taken for the busy one that the others wait for."""
    thread = threading.Thread(target=meet, args=(store, 1, 2, LONG))
    thread.start()
    wait_until(lambda: store.check(["at/1"]) and location_of(thread.ident or 0)[1])
    assert meet(store, 0, 2, LONG)
    thread.join()
