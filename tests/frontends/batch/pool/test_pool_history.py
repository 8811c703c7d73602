"""The history of a pool and its progress are what its worlds did, by the clock of the store."""

import pytest
from timed_pools import STARTED_S, TOKENS_A_ROW, World, make_pool

from spmd_worker.base.errors import PoolError
from spmd_worker.frontends.batch.pool.pool_history import Holding, read_history
from spmd_worker.frontends.batch.pool.pool_metrics import values
from spmd_worker.frontends.batch.pool.pool_progress import make_progress
from spmd_worker.frontends.batch.pool.records import range_name
from spmd_worker.frontends.batch.pool.view import read_pool

ONE = [World("one-1", 0, 100)]


def test_every_lease_and_part_has_its_time():
    """Ranges of 200, 150, 50 and 50 rows at 100 rows a second, after 20 s of loading."""
    store = make_pool(800, [World("one-1", 0, 100)], lease_rows=400)
    first, *_ = read_history(store).holdings
    times = [STARTED_S + 20.0 + 0.5 * number for number in range(5)]
    assert first == Holding(0, "one-1", times[0], times[4], "done", tuple((time_s, 50) for time_s in times[1:]))
    assert sum(each.num_rows for each in read_history(store).holdings) == 800


def test_range_of_a_dead_world_changes_hands():
    worlds = [World("one-1", 0, 100, dies_s=25.0), World("two-2", 0, 100)]
    store = make_pool(2000, worlds, lease_rows=1000)
    lost = [each for each in read_history(store).holdings if each.end == "lost"]
    assert [(each.worker, each.num_rows < 500) for each in lost] == [("one-1", True)]
    after = [each for each in read_history(store).holdings if each.number == lost[0].number][1]
    assert (after.worker, after.end) == ("two-2", "done")
    assert after.num_rows + lost[0].num_rows == after.parts[-1][1] * 4
    # Not before the lease has ended.
    assert after.start_s - STARTED_S >= 25.0 + 60.0 - 15.0


def test_history_is_of_the_last_ranges():
    store = make_pool(800, [World("one-1", 0, 100)], lease_rows=64)
    num_ranges = read_pool(store).num_ranges
    history = read_history(store, max_ranges=3)
    assert {each.number for each in history.holdings} == set(range(num_ranges - 3, num_ranges))
    assert history.num_skipped == num_ranges - 3


def test_entry_without_its_range_is_reported():
    store = make_pool(800, [World("one-1", 0, 100)], lease_rows=400)
    store.delete(range_name(1))
    with pytest.raises(PoolError, match=r"ranges/00000001\.0002 of the pool or an entry before it is missing"):
        read_history(store)


def test_rates_begin_when_a_worker_joins():
    progress = make_progress(read_pool(make_pool(10_000, [World("one-1", 0, 100)], until_s=80.0)))
    (worker,) = progress.workers
    # The last heartbeat is older than the last part.
    assert 0 < worker.num_rows <= progress.state.num_rows_done
    assert worker.rows_per_s == pytest.approx(worker.num_rows / (worker.state.joined_age_s - worker.state.age_s))
    assert progress.tokens_per_s == pytest.approx(TOKENS_A_ROW * worker.rows_per_s)
    assert progress.left_s == pytest.approx((10_000 - progress.state.num_rows_done) / worker.rows_per_s)


def test_workers_are_slow_dead_left_and_failed():
    worlds = [
        *(World(f"usual-{number}", 0, 100) for number in range(3)),
        World("slow-1", 0, 20),
        World("dead-1", 0, 100, dies_s=60),
        World("left-1", 0, 100, ends_s=60),
        World("failed-1", 0, 100, ends_s=60, fails=True),
    ]
    progress = make_progress(read_pool(make_pool(500_000, worlds, until_s=150.0)))
    assert {worker.name: worker.status for worker in progress.workers} == {
        **dict.fromkeys(("usual-0", "usual-1", "usual-2"), "alive"),
        **{f"{status}-1": status for status in ("slow", "dead", "left", "failed")},
    }
    # What left handed its ranges back; what died still has them.
    assert [len(worker.ranges) for worker in progress.workers if worker.name in ("dead-1", "left-1")] == [1, 0]
    assert {each.holder for each in progress.waiting_ranges} == {"dead-1", None}


@pytest.mark.parametrize("rows_per_s", [100, 1])
def test_range_without_progress_is_old(rows_per_s: float):
    """A hanging world that still sends heartbeats."""
    worlds = [World("usual-1", 0, 100), World("hangs-1", 0, rows_per_s), World("usual-2", 0, 100)]
    state = read_pool(make_pool(500_000, worlds, until_s=300.0))
    assert {each.holder for each in make_progress(state).old_ranges} == ({"hangs-1"} if rows_per_s == 1 else set())


def test_prometheus_has_the_values_of_the_pool():
    found = values(read_pool(make_pool(800, [World("one-1", 0, 100)])))
    assert {name: found[name] for name in ("pool_rows", "pool_rows_done", "pool_workers_ended", "pool_merged")} == {
        **dict.fromkeys(("pool_rows", "pool_rows_done"), 800),
        **dict.fromkeys(("pool_workers_ended", "pool_merged"), 1),
    }
