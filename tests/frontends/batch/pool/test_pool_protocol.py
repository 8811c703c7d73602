"""Rules of a pool one by one, on the store in memory: joining, sizes, leases, parts, the merge, damaged objects."""

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from simulated_worker import MemoryStore

from spmd_worker.base.errors import ConfigError, PoolError
from spmd_worker.frontends.batch.pool.members import Lease, Member, heartbeat, join, leave
from spmd_worker.frontends.batch.pool.protocol import (
    Unleased,
    claim,
    claim_merge,
    commit,
    end_merge,
    hand_back,
    range_rows,
    read_done,
    remove_garbage,
    still_holds,
)
from spmd_worker.frontends.batch.pool.records import (
    DoneRecord,
    Entry,
    Merged,
    Part,
    PoolJob,
    RangeRecord,
    done_name,
    range_name,
)
from spmd_worker.frontends.batch.pool.store import Operation, Steps
from spmd_worker.frontends.batch.pool.view import pool_state

JOB = PoolJob({"seed": 1, "sampling.temperature": 0.5}, 8, "out.jsonl", 60.0, 8)


class Pool:
    """Workers that run protocol functions to their end, and count operations."""

    def __init__(self, job: PoolJob = JOB) -> None:
        self.store, self.job, self.counts = MemoryStore(), job, Counter[str]()

    def run(self, steps: Steps[Any]) -> Any:
        answer = None
        while True:
            try:
                operation: Operation = steps.send(answer)
            except StopIteration as end:
                return end.value
            self.counts[type(operation).__name__] += 1
            answer = self.store.perform(operation)

    def join(self, worker: str) -> Member:
        return self.run(join(self.job, worker, {"host": worker}))

    def claim(self, member: Member) -> Any:
        return self.run(claim(member))

    def commit(self, member: Member, lease: Lease, *rows: tuple[int, int]) -> bool:
        return self.run(commit(member, lease, rows or tuple(lease.log.missing()), b"lines"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answers": {**JOB.answers, "seed": 2}}, "seed is 2, and 1 in the pool: every world of a pool must have the"),
        ({"answers": {**JOB.answers, "seed": None}}, "seed is null, and 1 in the pool"),
        ({"answers": {"seed": 1}}, "sampling.temperature is not set, and 0.5 in the pool"),
        ({"num_rows": 9}, "number of rows is 9, and 8 in the pool"),
        ({"output": "other.jsonl"}, "job.output is other.jsonl, and out.jsonl in the pool"),
        ({"lease_s": 30.0}, "job.lease_s is 30.0, and 60.0 in the pool"),
        ({"lease_rows": 4}, "job.lease_rows is 4, and 8 in the pool"),
    ],
)
def test_first_difference_of_jobs_is_named(change: dict[str, Any], message: str):
    pool = Pool()
    pool.join("a")
    pool.job = PoolJob(**{name: getattr(JOB, name) for name in PoolJob.__slots__} | change)
    with pytest.raises(ConfigError, match=message):
        pool.join("b")
    assert not any(name.startswith("workers/b") for name in pool.store.objects)


def test_ids_of_workers_are_new():
    pool = Pool()
    pool.join("a")
    with pytest.raises(PoolError, match=r"workers/a\.json exists in the pool: the id of a worker must be new"):
        pool.run(join(JOB, "a", {"host": "other"}))
    with pytest.raises(ValueError, match="must have 1 to 100 letters"):
        pool.join("a.b")


def test_ranges_shrink_between_limits():
    job = PoolJob({}, 0, "out", 60.0, 4096)
    assert [range_rows(job, rows, 10) for rows in (10**7, 40_000, 4_000, 400, 7)] == [2048, 1000, 100, 64, 7]
    assert range_rows(job, 4_000, 0) == 1000


def test_claim_and_commit_write_what_is_documented():
    pool = Pool()
    member = pool.join("a")
    lease = pool.claim(member)
    assert (lease.log.start, lease.log.stop) == (0, 2)
    assert pool.commit(member, lease, (1, 2))
    assert pool.commit(member, lease)
    assert member.leases == {}
    objects = {name: data for name, (data, _) in pool.store.objects.items() if "000000" in name}
    parts = [f"parts/00000000.000{entry}.a.{nonce}" for entry, nonce in ((2, 1), (3, 2))]
    names = ["ranges/00000000", parts[0], "ranges/00000000.0002", parts[1], "ranges/00000000.0003", "done/00000000"]
    assert list(objects) == names
    assert json.loads(objects[names[0]]) == {"start": 0, "stop": 2, "worker": "a", "nonce": 0}
    done = json.loads(objects["done/00000000"])
    assert [(part["name"], part["spans"]) for part in done["parts"]] == [(parts[0], [[1, 2]]), (parts[1], [[0, 1]])]


def test_operations_of_a_claim_do_not_grow():
    def counts_of(num_ranges: int) -> tuple[int, int, int]:
        pool = Pool(PoolJob({}, 10 * num_ranges + 100, "out", 60.0, 20))
        for number in range(num_ranges):
            record = RangeRecord(10 * number, 10 * number + 10, "past", number)
            pool.store.objects[range_name(number)] = record.to_bytes(), 0
        member, totals = pool.join("a"), []
        for _ in range(2):
            pool.counts.clear()
            lease = pool.claim(member)
            totals.append(pool.counts.total())
        assert lease.log.number == num_ranges + 1
        pool.counts.clear()
        assert pool.commit(member, lease)
        return totals[0], totals[1], pool.counts.total()

    assert counts_of(3000) == (29, 3, 4)
    assert counts_of(30) == (15, 3, 4)


def test_dead_holder_is_replaced_and_cannot_commit():
    pool = Pool(PoolJob({}, 2, "out", 4.0, 4))
    dead, other = pool.join("dead"), pool.join("other")
    lease = pool.claim(dead)
    rest = pool.claim(other)
    assert pool.claim(other) is Unleased.WAIT
    assert pool.commit(other, rest)
    pool.store.now += 4
    taken = pool.claim(other)
    assert taken.log.number == lease.log.number
    assert not pool.run(still_holds(lease))
    assert [each.log.name for each in pool.run(heartbeat("dead", {}, [lease]))] == ["ranges/00000000"]
    assert not pool.commit(dead, lease)
    assert dead.leases == {}
    assert not pool.commit(dead, lease)
    assert pool.commit(other, taken)
    assert pool.claim(other) is Unleased.OVER


def test_taken_over_lease_stays_fenced_after_scans():
    """The worker reads the log of a range that it took over and lost: its lease must not follow the log."""
    pool = Pool(PoolJob({}, 4, "out", 4.0, 4))
    first, second, third = (pool.join(name) for name in ("first", "second", "third"))
    pool.claim(first), pool.claim(first)
    for member in (second, third):
        while isinstance(lease := pool.claim(member), Lease):
            assert pool.commit(member, lease)
    pool.store.now += 4
    taken = pool.claim(second)
    pool.store.now += 4
    lost = pool.claim(third)
    while lost.log.number != taken.log.number:
        assert pool.commit(third, lost)
        lost = pool.claim(third)
    assert pool.claim(second) is Unleased.WAIT
    assert not pool.commit(second, taken)


def test_handed_back_range_keeps_its_parts():
    pool = Pool(PoolJob({}, 16, "out", 60.0, 16))
    first, second = pool.join("first"), pool.join("second")
    lease = pool.claim(first)
    assert pool.commit(first, lease, (0, 1))
    assert pool.run(hand_back(first, lease))
    assert first.leases == {}
    while (taken := pool.claim(second)).log.number != 0:
        assert pool.commit(second, taken)
    assert taken.log.missing() == [(1, lease.log.stop)]


def test_interrupted_commit_is_settled():
    pool = Pool()
    member = pool.join("a")
    for is_created in (False, True):
        lease = pool.claim(member)
        steps, answer = commit(member, lease, tuple(lease.log.missing()), b"lines"), None
        while (operation := steps.send(answer)).name != lease.log.entry_name or not hasattr(operation, "data"):
            answer = pool.store.perform(operation)
        if is_created:
            pool.store.perform(operation)
        with pytest.raises(KeyboardInterrupt):
            steps.throw(KeyboardInterrupt())
        assert pool.run(hand_back(member, lease))
        assert lease.log.is_over
        assert done_name(lease.log.number) in pool.store.objects
        assert member.leases == {}


def test_merge_has_one_holder_and_one_end():
    pool = Pool(PoolJob({}, 1, "out", 4.0, 4))
    first, second = pool.join("first"), pool.join("second")
    assert pool.commit(first, pool.claim(first))
    assert {pool.claim(first), pool.claim(second)} == {Unleased.OVER}
    merge = pool.run(claim_merge(first))
    assert pool.run(claim_merge(second)) is None
    pool.run(leave("first", {"reason": "killed"}))
    again = pool.run(claim_merge(second))
    assert not pool.run(end_merge(first, merge, Merged(1, 2, "other")))
    assert pool.run(end_merge(second, again, Merged(1, 2, "sha")))
    assert pool.run(claim_merge(first)) == Merged(1, 2, "sha")


def test_garbage_is_what_no_entry_names():
    pool = Pool(PoolJob({}, 1, "out", 4.0, 4))
    member = pool.join("a")
    assert pool.commit(member, pool.claim(member))
    named = frozenset(part.name for part in pool.run(read_done(member, 0, 0)).parts)
    pool.store.objects["parts/00000000.0002.dead.7"] = b"lines", 0
    named |= {"parts/00000000.backup", "parts/000001234.0002.a.1"}
    pool.store.objects |= dict.fromkeys(named - pool.store.objects.keys(), (b"", 0))
    assert pool.run(remove_garbage(0, named)) == 1
    assert {name for name in pool.store.objects if name.startswith("parts/")} == named


def test_view_shows_workers_and_open_ranges():
    pool = Pool(PoolJob({}, 8, "out", 4.0, 16))
    first, second = pool.join("first"), pool.join("second")
    assert pool.commit(first, pool.claim(first))
    lease = pool.claim(first)
    pool.store.now += 3
    member_lease = pool.claim(second)
    pool.run(heartbeat("second", {"rows": 5}, []))
    pool.run(leave("second", {"reason": "SIGTERM"}))
    state = pool.run(pool_state(5.0))
    assert (state.num_ranges, state.num_rows_done) == (3, 1)
    assert state.num_rows_allocated == member_lease.log.stop
    shown = [(each.number, each.holder, each.is_held, each.age_s) for each in state.open_ranges]
    assert shown == [(lease.log.number, "first", False, 5.0), (member_lease.log.number, "second", False, 2.0)]
    workers = [(each.worker, each.is_live, each.age_s, each.counts, each.end) for each in state.workers]
    assert workers == [
        ("first", False, 5.0, {}, None),
        ("second", False, 2.0, {"rows": 5}, {"reason": "SIGTERM"}),
    ]
    assert (state.merger, state.merged) == (None, None)


PART = Part("parts/00000000.0002.a.1", ((0, 2),), 5, "digest")


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("job.json", b"{", "job.json of the pool is not JSON"),
        ("job.json", b'{"format_version": 1}', "job.json is damaged .'answers' must be of type dict"),
        ("job.json", JOB.to_bytes().replace(b'version": 1', b'version": 9'), "job.json is not of format 1"),
        (range_name(0), b"[]", "ranges/00000000 of the pool must be a JSON object"),
        (range_name(0), RangeRecord(3, 3, "b", 0).to_bytes(), "ranges/00000000 is damaged .rows 3 to 3"),
        (
            range_name(0),
            RangeRecord(0, 99, "b", 0).to_bytes(),
            "of the pool ends with row 99, but the job has 8",
        ),
        (done_name(0), DoneRecord(0, 3, (PART,)).to_bytes(), "done/00000000 of the pool has rows 0 to 3, not all from"),
        (done_name(0), DoneRecord(0, 1, (PART,)).to_bytes(), "rows ..0, 2.,. are not of its range"),
    ],
)
def test_damaged_object_is_named(name: str, data: bytes, message: str):
    pool = Pool()
    pool.store.objects[name] = data, 0

    def use() -> None:
        member = pool.join("a")
        pool.claim(member)
        pool.run(read_done(member, 0, 0))

    with pytest.raises(PoolError, match=message):
        use()


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (Entry("part", "b", 0, PART).to_bytes(), "is a part by 'b', but the range is held by 'a'"),
        (Entry("part", "a", 0, PART).to_bytes().replace(b"[[0, 2]]", b"[[0, 1], [0, 1]]"), "are not of its range"),
        (Entry("part", "a", 0, PART).to_bytes().replace(b"[[0, 2]]", b"[[0]]"), "its spans are not pairs"),
        (Entry("gift", "a", 0).to_bytes(), "ranges/00000000.0002 is damaged .kind 'gift'."),
        (Entry("part", "a", 0).to_bytes(), "'part' must be of type dict"),
        (Entry("lease", "a", -1).to_bytes(), "'nonce' is -1"),
        (b'{"kind": "lease", "worker": "a", "nonce": 1, "more": 1}', "or of another version .it has 'more'."),
    ],
)
def test_damaged_entry_is_named(entry: bytes, message: str):
    pool = Pool(PoolJob({}, 2, "out", 60.0, 16))
    member = pool.join("a")
    pool.store.objects[range_name(0)] = RangeRecord(0, 2, "a", 0).to_bytes(), 0
    pool.store.objects[f"{range_name(0)}.0002"] = entry, 0
    with pytest.raises(PoolError, match=message):
        pool.claim(member)


def test_foreign_names_are_ignored():
    pool = Pool(PoolJob({}, 1, "out", 60.0, 16))
    for name in ("ranges/notes.txt", "done/00000000~", "workers/me", "workers/a.b.beat"):
        pool.store.objects[name] = b"?", 0
    member = pool.join("a")
    assert pool.commit(member, pool.claim(member))
    assert pool.claim(member) is Unleased.OVER
    assert [each.worker for each in pool.run(pool_state(0.0)).workers] == ["a"]


def test_range_beyond_the_job_is_not_taken_over():
    """Regression: worlds waited without end for rows that no input has."""
    pool = Pool()
    first = pool.join("a")
    pool.claim(first)
    record = RangeRecord.from_bytes("", pool.store.objects[range_name(0)][0])
    late = pool.join("b")
    late.next_row, late.next_number, late.open = JOB.num_rows, 1, {0: None}
    pool.store.objects[range_name(0)] = replace(record, stop=JOB.num_rows + 1).to_bytes(), 0
    with pytest.raises(PoolError, match="ranges/00000000 of the pool ends with row 9, but the job has 8 rows: restore"):
        pool.claim(late)
