"""Protocol functions on a store that fails, heartbeats in a thread, and the ranges of a merge."""

import errno
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from spmd_worker.base.errors import ConfigError
from spmd_worker.frontends.batch.pool.driver import Heartbeats, done_ranges, new_worker, run
from spmd_worker.frontends.batch.pool.members import Lease, join, leave
from spmd_worker.frontends.batch.pool.posix_store import PosixStore, open_folder
from spmd_worker.frontends.batch.pool.protocol import Unleased, claim, claim_merge, commit, end_merge
from spmd_worker.frontends.batch.pool.records import Merged, PoolJob
from spmd_worker.frontends.batch.pool.store import List, Read, Touch
from spmd_worker.frontends.batch.pool.view import read_pool

JOB = PoolJob({"seed": 1}, 9, "out.jsonl", 0.2, 4)


class FailingStore(PosixStore):
    """Every operation fails first; a create has taken effect then."""

    def __init__(self, folder: Path, error: int = errno.EIO) -> None:
        super().__init__(folder)
        self.error, self.is_failing = error, False

    def create(self, name: str, data: bytes) -> bool:
        self.is_failing = not self.is_failing
        found = super().create(name, data)
        if self.is_failing:
            raise OSError(self.error, "the answer was lost")
        return found


@pytest.fixture
def store(tmp_path: Path) -> PosixStore:
    return open_folder(tmp_path)


def compute_all(store: PosixStore, pauses_s: tuple[float, ...] = (0.0,)) -> list[tuple[int, int]]:
    member = run(store, join(JOB, new_worker(), {}), pauses_s)
    while isinstance(lease := run(store, claim(member), pauses_s), Lease):
        assert run(store, commit(member, lease, tuple(lease.log.missing()), b"lines"), pauses_s)
    assert lease is Unleased.OVER
    merge = run(store, claim_merge(member), pauses_s)
    found = [(record.start, record.stop) for record in done_ranges(store, member)]
    assert isinstance(merge, Lease)
    assert run(store, end_merge(member, merge, Merged(9, 90, "sha")), pauses_s)
    run(store, leave(member.worker, {"reason": "done"}), pauses_s)
    return found


def test_lost_answers_are_asked_for_again(tmp_path: Path, store: PosixStore):
    store.touch("parts/00000000.0002.dead.1", b"garbage")
    found = compute_all(FailingStore(tmp_path))
    assert [row for start, stop in found for row in range(start, stop)] == list(range(9))
    assert len(store.list("parts/")) == len(store.list("ranges/")) / 2 == len(found)
    state = read_pool(store)
    assert (state.num_rows_done, state.merged, state.open_ranges) == (9, Merged(9, 90, "sha"), ())
    assert [each.end for each in state.workers] == [{"reason": "done"}]
    assert store.list("clock/") == []


def test_error_that_stays_is_raised(tmp_path: Path, store: PosixStore):
    with pytest.raises(OSError, match="lost"):
        compute_all(FailingStore(tmp_path), ())
    with pytest.raises(OSError, match="lost"):
        compute_all(FailingStore(open_folder(tmp_path / "other").folder, errno.EROFS), (60.0, 60.0))


def test_heartbeats_show_counts_and_find_lost_leases(store: PosixStore):
    member = run(store, join(JOB, "slow", {}))
    lease, lost = run(store, claim(member)), []
    assert isinstance(lease, Lease)
    # Another worker's, as if this one had been stopped.
    assert store.create(lease.log.entry_name, b'{"kind": "lease", "worker": "quick", "nonce": 0}')
    with Heartbeats(store, member, lambda: {"rows": 3}, lost.append) as heartbeats:
        wait_until(lambda: lost)
        heartbeats.send()
    assert lost == [lease]
    assert read_pool(store).workers[0].counts == {"rows": 3}


def test_failed_heartbeat_is_followed_by_the_next(store: PosixStore, caplog: pytest.LogCaptureFixture):
    member = run(store, join(JOB, "a", {}))
    touches: list[Any] = []

    def touch(name: str, data: bytes) -> None:
        touches.append(name)
        raise OSError(errno.ENOSPC, "No space left on device")

    store.touch = touch  # type: ignore[method-assign]  # of this store alone
    with Heartbeats(store, member, dict, lambda lease: None):
        wait_until(lambda: len(touches) > 2)
    assert "No heartbeat could be sent to the pool" in caplog.text


def test_view_of_no_pool_names_the_way_out(store: PosixStore):
    with pytest.raises(ConfigError, match="there is no pool: no job"):
        read_pool(store)


def test_steps_are_operations_in_order(store: PosixStore):
    seen = []

    def steps() -> Any:
        for operation in (Touch("workers/a.beat", b"1"), Read("workers/a.beat"), List("workers/")):
            seen.append((yield operation))
        return "end"

    assert run(store, steps()) == "end"
    assert seen[:2] == [None, b"1"]
    assert [each.name for each in seen[2]] == ["workers/a.beat"]
