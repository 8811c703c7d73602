"""Locks of a run directory and an output: holders, rejected processes, and waiting for ending ones."""

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import ranks
from waiting import wait_until

from spmd_worker.base.errors import ConfigError
from spmd_worker.frontends.batch import file_lock
from spmd_worker.frontends.batch.file_lock import ENDING, FileLock, LockHolder
from spmd_worker.frontends.batch.run_dir.run_lock import RunLock

HOLD = """
import os, sys, time
from pathlib import Path
from spmd_worker.frontends.batch.run_dir.run_lock import RunLock
with RunLock(Path(sys.argv[1]), Path(sys.argv[2])) as lock:
    lock.note("answers rows")
    print(os.getpid(), flush=True)
    time.sleep(3600)
"""
START = """
import subprocess, sys
subprocess.run([sys.executable, "-c", *sys.argv[1:]])
"""


def files_of(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Content and time of the last change, of every file below."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


@contextmanager
def holder(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that holds the locks, and the process that started it."""
    command = [sys.executable, "-c", START, HOLD, str(tmp_path / "run"), str(tmp_path / "out.jsonl")]
    environment = {**os.environ, "PYTHONPATH": str(ranks.REPOSITORY)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        try:
            yield parent, pid
        finally:
            end(pid)
            parent.kill()


def end(pid: int) -> None:
    # Nobody here waits for it: it may be gone at any moment.
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def instead_of_waiting(
    monkeypatch: pytest.MonkeyPatch, action: Callable[[], object], monotonic: Callable[[], float] = time.monotonic
) -> list[int]:
    """Do `action` where the lock would wait a while; returns a list that grows each time. Other threads sleep on."""
    calls: list[int] = []

    def sleep(_seconds: float) -> None:
        calls.append(1)
        action()

    monkeypatch.setattr(file_lock, "time", SimpleNamespace(sleep=sleep, monotonic=monotonic))
    return calls


@pytest.mark.guarantee("One job a run directory and output")
@pytest.mark.parametrize(
    ("run_dir", "output", "key"),
    [("run", "another.jsonl", "job.run_dir"), ("new", "out.jsonl", "job.output"), ("run", "out.jsonl", "job.run_dir")],
)
def test_rejected_job_names_holder_and_changes_nothing(tmp_path: Path, run_dir: str, output: str, key: str):
    with holder(tmp_path) as (_, pid):
        before = files_of(tmp_path)
        with pytest.raises(ConfigError) as caught, RunLock(tmp_path / run_dir, tmp_path / output):
            pass
        assert files_of(tmp_path) == before
        assert not (tmp_path / "new").exists()
    text = str(caught.value)
    assert text.startswith(f"{key}={tmp_path}/")
    assert f"is in use by a running job (process {pid}, started " in text
    assert " s ago, " in text
    assert sys.executable in text
    if key == "job.run_dir":
        assert "answers rows: " in text


def test_killed_holder_leaves_its_locks_to_the_next(tmp_path: Path):
    with holder(tmp_path) as (_, pid):
        end(pid)
        wait_until(lambda: not Path(f"/proc/{pid}").exists() or file_lock.is_exiting(pid))
        with RunLock(tmp_path / "run", tmp_path / "out.jsonl"):
            record = json.loads((tmp_path / "run" / "lock").read_text())
            assert record["pid"] == os.getpid()
    assert not (tmp_path / "out.jsonl.partial").exists()


def test_orphaned_holder_is_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with holder(tmp_path) as (parent, pid):
        parent.kill()
        parent.wait()
        waits = instead_of_waiting(monkeypatch, lambda: end(pid))
        with RunLock(tmp_path / "run", tmp_path / "out.jsonl"):
            assert waits


def test_ending_holder_is_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first = RunLock(tmp_path / "run", tmp_path / "out.jsonl")
    with first:
        first.note(ENDING)
        waits = instead_of_waiting(monkeypatch, lambda: first.__exit__(None, None, None))
        with RunLock(tmp_path / "run", tmp_path / "out.jsonl"):
            assert waits == [1]


def test_holder_that_never_ends_is_awaited_only_briefly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    now_s = iter(range(100))
    waits = instead_of_waiting(monkeypatch, lambda: None, lambda: float(next(now_s)))
    with RunLock(tmp_path / "run", tmp_path / "out.jsonl") as first:
        first.note(ENDING)
        with pytest.raises(ConfigError, match=f"{ENDING}: "), RunLock(tmp_path / "run", tmp_path / "other.jsonl"):
            pass
    assert 10 < len(waits) < 20


@pytest.mark.control("One job a run directory and output")
def test_lock_test_detects_lock_that_never_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(LockHolder, "is_leaving", False)
    with pytest.raises(ConfigError, match=r"^job\.run_dir=.* in use .*\(process \d+, "):
        test_orphaned_holder_is_awaited(tmp_path, monkeypatch)


@pytest.mark.control("One job a run directory and output")
def test_second_job_gets_in_without_kernel_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Negative control: the lock rejects it, not the content of the file."""
    with holder(tmp_path):
        with pytest.raises(ConfigError), RunLock(tmp_path / "run", tmp_path / "out.jsonl"):
            pass
        monkeypatch.setattr(file_lock.fcntl, "flock", lambda descriptor, flags: None)
        with RunLock(tmp_path / "run", tmp_path / "out.jsonl"):
            assert json.loads((tmp_path / "run" / "lock").read_text())["pid"] == os.getpid()


def test_removed_lock_file_is_not_a_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Between opening and locking: the one that had it removes it, and a third makes a new one."""
    path = tmp_path / "out.partial"
    first = FileLock(path, "it", "give another", is_temporary=True)
    locked = file_lock.fcntl.flock

    def flock(descriptor: int, flags: int) -> None:
        monkeypatch.setattr(file_lock.fcntl, "flock", locked)
        first.__exit__(None, None, None)
        locked(descriptor, flags)

    first.__enter__()
    monkeypatch.setattr(file_lock.fcntl, "flock", flock)
    with FileLock(path, "it", "give another", is_temporary=True), pytest.raises(ConfigError, match=r"^it .*in use"):
        FileLock(path, "it", "give another").__enter__()


def test_ending_note_stays_despite_notes_of_other_threads(tmp_path: Path):
    """A signal's thread notes it while the main thread goes on for a while."""
    with FileLock(tmp_path / "lock", "it", "give another") as lock:
        lock.note("answers rows")
        lock.note(ENDING)
        lock.note("writes the output")
        assert json.loads((tmp_path / "lock").read_text())["doing"] == ENDING


def test_note_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What follows them, the last commit of a job that ends, must not be missed for them."""

    def fails(*_: object) -> int:
        raise OSError(24, "Too many open files")

    with FileLock(tmp_path / "lock", "it", "give another") as lock:
        for name in ("start_time_of", "_is_same_file"):
            with monkeypatch.context() as broken:
                broken.setattr(file_lock, name, fails)
                lock.note("answers rows")
        lock.note(ENDING)
        assert json.loads((tmp_path / "lock").read_text())["doing"] == ENDING


def test_leftovers_of_an_earlier_job_are_no_obstacle(tmp_path: Path):
    (tmp_path / "out.jsonl.partial").write_bytes(b"half a line" * 1000)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "lock").write_text("4711\n")
    with RunLock(tmp_path / "run", tmp_path / "out.jsonl"):
        assert json.loads((tmp_path / "out.jsonl.partial").read_text())["pid"] == os.getpid()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK], ids=["ENOSYS", "ENOLCK"])
def test_file_system_without_locks_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int):
    def refuse(descriptor: int, how: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(file_lock.fcntl, "flock", refuse)
    expected = rf"^job\.output=\S+out\.jsonl is on a file system that cannot lock .*\({os.strerror(number)}\): mount it"
    with pytest.raises(ConfigError, match=expected), RunLock(tmp_path / "run", tmp_path / "out.jsonl"):
        raise AssertionError("it has the lock")
