"""Exactly once in a pool, whatever happens between two operations: simulated histories, and rules broken on purpose.

Every interleaving of two workers up to a depth, and random ones of two to six. Each history ends with the whole output;
`simulated_history.History.check` has the promises.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
from pool_simulator import explore, random_history
from simulated_history import Action, History
from simulated_worker import Flaws, LocalTime, Plan, Violation
from stress_seed import SEED

from spmd_worker.base.errors import PoolError
from spmd_worker.frontends.batch.pool import members, protocol
from spmd_worker.frontends.batch.pool.records import Entry, PoolJob
from spmd_worker.frontends.batch.pool.store import List, Touch

NUM_OF_GATE, NUM_OF_STRESS, STRESS_RUNS = 750, 25_000, 4
SCENARIOS = ("two rows", "two rows of a dead holder", "merge")


def two_workers(scenario: str, num_faults: int) -> History:
    """Two workers that have joined, and with a dead holder a third that leased the first row."""
    num_rows = 0 if scenario == "merge" else 2
    has_dead = "dead" in scenario
    history = History(PoolJob({}, num_rows, "out", 4.0, 2), [Plan()] * (3 if has_dead else 2), None, num_faults)
    for index, worker in enumerate(history.workers):
        worker.is_observed = True
        while worker.member is None or (has_dead and index == 2 and not worker.member.leases):
            history.do(Action("step", index))
    if has_dead:
        history.faults_left += 1
        history.do(Action("crash", 2))
        for _ in range(5):
            history.pass_time()
    return history


def check_random(seeds: range) -> dict[str, Any]:
    totals = Counter[str]()
    for seed in seeds:
        history = random_history(seed)
        totals.update(history.kinds)
        totals.update(events=history.num_steps, rows=history.job.num_rows, computed=history.num_computed)
        totals.update(taken=history.num_takeovers, lost=history.num_lost)
    return dict(totals)


@pytest.mark.guarantee("Exactly once in a pool")
def test_random_histories_keep_every_row():
    totals = check_random(range(NUM_OF_GATE))
    assert all(totals[kind] > 80 for kind in ("crash", "interrupt", "pause", "repeat", "delay", "join")), totals
    assert totals["taken"] > 100, totals
    assert totals["lost"] > 0, totals


@pytest.mark.stress
@pytest.mark.guarantee("Exactly once in a pool")
@pytest.mark.parametrize("run", range(STRESS_RUNS))
def test_many_random_histories_keep_every_row(run: int):
    first = NUM_OF_GATE + (SEED * STRESS_RUNS + run) * NUM_OF_STRESS
    totals = check_random(range(first, first + NUM_OF_STRESS))
    print(f"\nPOOL HISTORIES {NUM_OF_STRESS} random from {first}: {totals}", end="")


@pytest.mark.parametrize(
    ("scenario", "num_faults", "depth"),
    [("two rows", 0, 20), ("two rows", 1, 6), ("two rows of a dead holder", 1, 4), ("merge", 1, 7)],
)
@pytest.mark.guarantee("Exactly once in a pool")
def test_every_interleaving_keeps_every_row(scenario: str, num_faults: int, depth: int):
    num_states, num_histories = explore(lambda: two_workers(scenario, num_faults), depth)
    assert num_histories > 1
    assert num_states > num_histories


@pytest.mark.stress
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize(("num_faults", "depth"), [(1, 24), (2, 9), (3, 6)])
def test_deep_interleavings_keep_every_row(scenario: str, num_faults: int, depth: int):
    found = explore(lambda: two_workers(scenario, num_faults), depth)
    print(f"\nPOOL INTERLEAVINGS {scenario}, {num_faults} faults, depth {depth}: {found} states, histories", end="")


def unfenced(member: members.Member, lease: members.Lease) -> Iterator[Any]:
    """Settles an entry under any free number: the lease of another worker in between does not matter."""
    if lease.unsettled is not None and not lease.is_lost:
        name, data = lease.unsettled
        while not (yield from members.create_own(lease.log.entry_name, data)):
            lease.log.next_entry += 1
        lease.log.apply(Entry.from_bytes(name, data))
        if lease.log.is_over and lease.log.merged is None:
            yield from protocol._summarise(lease.log)
            member.leases.pop(lease.log.number, None)
        lease.unsettled = None
    return not lease.is_lost


def by_local_clock(member: members.Member) -> Iterator[Any]:
    """Compares the server's times with the worker's own clock."""
    now = yield LocalTime()
    yield Touch(f"workers/{member.worker}.beat", b"{}")
    listed = yield List("workers/")
    return members.live_of(listed, now, member.job.lease_s) | {member.worker}


def of_last_time(member: members.Member) -> Iterator[Any]:
    """Uses a listing of workers from before the logs were read."""
    live = yield from live_workers(member)
    before, last_live[member] = last_live.get(member, live), live
    return before


live_workers = members.live_workers
last_live: dict[members.Member, frozenset[str]] = {}


@pytest.mark.control("Exactly once in a pool")
@pytest.mark.parametrize(
    ("patched", "flaws", "has_jumps", "num_histories"),
    [
        pytest.param(("_settle", unfenced), Flaws(), False, 400, id="no fencing"),
        pytest.param(("live_workers", by_local_clock), Flaws(), True, 600, id="lease by local clock"),
        pytest.param(("live_workers", of_last_time), Flaws(), False, 1000, id="liveness read before logs"),
        pytest.param(None, Flaws(creates_twice=True), False, 100, id="create is not exclusive"),
        pytest.param(None, Flaws(creates_in_halves=True), False, 100, id="create is not atomic"),
        pytest.param(None, Flaws(merges_early=True), False, 100, id="merge before all is done"),
    ],
)
def test_broken_rule_is_found(patched: Any, flaws: Flaws, has_jumps: bool, num_histories: int):
    last_live.clear()
    with mock.patch.object(protocol, *patched) if patched else nullcontext():
        assert any(is_broken(seed, flaws, has_jumps) for seed in range(num_histories))


def is_broken(seed: int, flaws: Flaws, has_jumps: bool) -> bool:
    try:
        random_history(seed, flaws, has_jumps)
    except (Violation, PoolError):
        return True
    return False


def test_jumps_of_local_clocks_have_no_effect():
    assert sum(random_history(seed, has_jumps=True).kinds["jump"] for seed in range(100)) > 20
