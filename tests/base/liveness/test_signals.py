"""A batch job that is asked to end keeps what is finished, ends soon, and goes on from there when it is started again.

Commits by count and by time are switched off here, so that what is kept is kept because of the signal.
"""

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace

import pytest
import ranks
from fork_server import ForkedProcess, fork_server
from forked_child import in_child
from job_attempts import LAUNCH, MODEL, Attempt, slow_after, write_rows
from waiting import wait_until

from spmd_worker.base.liveness import signals as signals_module
from spmd_worker.base.liveness.signals import EndingSignals
from spmd_worker.frontends.batch.run_dir.journal import read_journal

FIRST_STEPS = 80
"""What a job makes before a test strikes it. Those that are struck are slow from then on."""
NUM_ROWS = 60
NO_COMMITS = ("job.commit_rows=100000", "job.commit_s=3600")
LIMIT_S = 240.0


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("whole")
    write_rows(folder, NUM_ROWS)
    assert start(folder).wait(LIMIT_S) == 0
    return (folder / "out.jsonl").read_bytes()


def start(folder: Path, *more: str, is_slow: bool = False) -> ForkedProcess:
    """Without a launcher, as `python launch.py`."""
    script = slow_after(FIRST_STEPS, folder) if is_slow else (str(LAUNCH),)
    command = [
        *(*script, f"model.path={MODEL}", "model.dtype=float32", "device=cpu"),
        *("cache.num_blocks=512", "scheduler.max_num_seqs=32"),
        *(f"job.input={folder / 'rows.jsonl'}", f"job.output={folder / 'out.jsonl'}", *NO_COMMITS, *more),
    ]
    with open(folder / "log", "ab") as log:
        return fork_server().fork(command, ranks.environment("", {}), folder, log, log)


def wait_for_rows(folder: Path, process: ForkedProcess | None = None) -> None:
    """Until the job has answered some rows, by its own account."""
    steps = folder / "out.jsonl.run" / "steps.csv"

    def has_answered() -> bool:
        assert process is None or process.poll() is None, (folder / "log").read_text()
        return steps.exists() and steps.read_bytes().count(b"\n") > FIRST_STEPS

    wait_until(has_answered)


def num_kept(folder: Path) -> int:
    return len(list(read_journal(folder / "out.jsonl.run")))


def test_signal_in_forked_process_ends_only_that_process(monkeypatch: pytest.MonkeyPatch):
    """It was written into the pipe of its parent, which ended, and the child went on."""
    seen: SimpleQueue[int] = SimpleQueue()
    monkeypatch.setattr(EndingSignals, "_end_soon", lambda self, number: seen.put(number))
    signals = EndingSignals(lambda: None, lambda number: None, 0.0)
    signals.install()
    try:
        assert in_child(lambda: signal.raise_signal(signal.SIGTERM)) == -signal.SIGTERM
        assert in_child(signals.uninstall) == 0
        # After whatever came before.
        signal.raise_signal(signal.SIGUSR1)
        assert seen.get(timeout=LIMIT_S) == signal.SIGUSR1
    finally:
        signals.uninstall()
    assert seen.empty()


def test_uninstalled_signals_leave_no_thread(monkeypatch: pytest.MonkeyPatch):
    """One that takes its time to leave."""
    run = EndingSignals._run
    monkeypatch.setattr(EndingSignals, "_run", lambda self, reader: (run(self, reader), time.sleep(0.3)))
    monkeypatch.setattr(signals_module, "_LEAVE_S", LIMIT_S)
    before, signals = signal.getsignal(signal.SIGTERM), EndingSignals(lambda: None, lambda number: None, 0.0)
    signals.install()
    assert signal.getsignal(signal.SIGTERM) is not before
    signals.uninstall()
    assert not signals._thread.is_alive()
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("is_ignored", [True, False])
def test_hangup_is_handled_unless_nohup_ignores_it(is_ignored: bool):
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN if is_ignored else signal.SIG_DFL)
    before, ending = signal.getsignal(signal.SIGHUP), EndingSignals(lambda: None, lambda number: None, 0.0)
    try:
        ending.install()
        assert (signal.getsignal(signal.SIGHUP) is signal.SIG_IGN) == is_ignored
        assert signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL
        ending.uninstall()
        assert signal.getsignal(signal.SIGHUP) is before
    finally:
        signal.signal(signal.SIGHUP, former)


def test_uninstalled_signals_cancel_the_drain_timer():
    """A program that drained in time, in a process that goes on."""
    ending = EndingSignals(lambda: None, lambda number: None, 0.0, drain=lambda: None, drain_s=LIMIT_S)
    ending.install()
    ending._act(signal.SIGTERM, is_first=True)
    (timer,) = ending._timers
    assert not timer.finished.is_set()
    ending.uninstall()
    assert timer.finished.is_set()


class Exits:
    """What a process would have ended with, by threads that go on here."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.codes: SimpleQueue[int] = SimpleQueue()
        monkeypatch.setattr(signals_module.os, "_exit", self._exit)
        for name in ("_INTERRUPTED_S", "_LEAVE_S"):
            monkeypatch.setattr(signals_module, name, 0.05)

    def _exit(self, code: int) -> None:
        self.codes.put(code)
        raise SystemExit(code)


@contextmanager
def acted_on(numbers: list[signal.Signals], keep: Callable[[], None]) -> Iterator[None]:
    """By a thread, as signals are that come from outside. It has ended afterwards, and so have those that end later."""
    reader, writer = os.pipe()
    os.write(writer, bytes(numbers))
    ending = EndingSignals(keep, lambda number: None, 0.0)
    thread = threading.Thread(target=ending._run, args=(reader,), daemon=True)
    thread.start()
    os.close(writer)
    yield
    for each in (thread, *ending._timers):
        each.join(LIMIT_S)
        assert not each.is_alive()


def test_signalled_process_exits_after_its_report(monkeypatch: pytest.MonkeyPatch):
    """By count: it looks until it has been told, but not for ever."""
    for num_busy, num_looks in ((0, 1), (3, 4), (10**6, 30)):
        looks, waits, codes = [], [], []

        def is_reporting(looks: list[int] = looks, num_busy: int = num_busy) -> bool:
            looks.append(1)
            return len(looks) <= num_busy

        monkeypatch.setattr(signals_module, "time", SimpleNamespace(sleep=waits.append))
        monkeypatch.setattr(signals_module.os, "_exit", codes.append)
        EndingSignals(lambda: None, lambda number: None, 3.5, is_reporting=is_reporting)._end_soon(signal.SIGTERM)
        assert (len(looks), codes) == (num_looks, [128 + signal.SIGTERM])
        assert (waits[0], sum(waits[1:]) < 2.0) == (3.5, True)


ended_in_a_thread = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


SIGNALS = pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 138)],
    ids=["Ctrl-C", "SIGTERM", "SIGUSR1"],
)


@pytest.mark.guarantee("Exit codes 143, 138, 130")
@ended_in_a_thread
@SIGNALS
def test_signalled_process_exits_when_the_disk_hangs(monkeypatch: pytest.MonkeyPatch, number, code):
    assert exit_code_of(monkeypatch, number) == code


def exit_code_of(monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> int:
    """What a process ends with whose disk never answers."""
    exits, answers = Exits(monkeypatch), threading.Event()
    with acted_on([number], answers.wait):
        code = exits.codes.get(timeout=LIMIT_S)
        answers.set()
    return code


@pytest.mark.control("Exit codes 143, 138, 130")
@ended_in_a_thread
@SIGNALS
def test_signal_check_detects_another_exit_code(monkeypatch: pytest.MonkeyPatch, number, code):
    """Negative control: a process that ends with the number of its signal alone."""
    for end in ("_end_soon", "_leave"):
        monkeypatch.setattr(EndingSignals, end, lambda self, number: os._exit(number))
    with pytest.raises(AssertionError, match=rf"assert {int(number)} == {code}"):
        test_signalled_process_exits_when_the_disk_hangs(monkeypatch, number, code)


@ended_in_a_thread
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("of ours")], ids=repr)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signalled_process_reports_rows_it_cannot_keep(monkeypatch, capsys, error: Exception, number):
    exits = Exits(monkeypatch)
    # Until it has said so.
    monkeypatch.setattr(signals_module, "_LEAVE_S", LIMIT_S)

    def keep() -> None:
        raise error

    with acted_on([number], keep):
        assert exits.codes.get(timeout=LIMIT_S) == 128 + number
    assert f"error: finished rows could not be kept: {error}\n" in capsys.readouterr().err


@pytest.mark.gate("SIGTERM", "Ctrl-C")
@pytest.mark.guarantee("SIGTERM, SIGUSR1, Ctrl-C keep what is finished")
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("numbers", "exit_codes"),
    [
        pytest.param([signal.SIGTERM], [143], marks=pytest.mark.matrix),
        pytest.param([signal.SIGUSR1], [138], marks=pytest.mark.stress),
        pytest.param([signal.SIGHUP], [129], marks=pytest.mark.stress),
        ([signal.SIGINT], [1]),
        pytest.param([signal.SIGINT, signal.SIGINT, signal.SIGINT], [1, 130], marks=pytest.mark.stress),
    ],
    ids=["SIGTERM", "SIGUSR1", "SIGHUP", "Ctrl-C", "Ctrl-C thrice"],
)
def test_signalled_job_keeps_finished_rows(tmp_path: Path, expected: bytes, numbers, exit_codes):
    write_rows(tmp_path, NUM_ROWS)
    # Steps are written at once, so that the test sees how far the job is.
    process = start(tmp_path, is_slow=True)
    try:
        wait_for_rows(tmp_path, process)
        for number in numbers:
            process.send_signal(number)
        assert process.wait(LIMIT_S) in exit_codes, (tmp_path / "log").read_text()
        said = "interrupted: " if numbers[0] is signal.SIGINT else f"error: received {numbers[0].name}: the same"
        # A second Ctrl-C may come before the first is reported.
        assert len(numbers) > 1 or said in (tmp_path / "log").read_text()
    finally:
        process.kill()
    kept = num_kept(tmp_path)
    assert kept > 0
    assert start(tmp_path).wait(LIMIT_S) == 0
    assert (tmp_path / "out.jsonl").read_bytes() == expected
    assert json.loads((tmp_path / "out.jsonl.run" / "metrics.json").read_text())["resumed_rows"] == kept


@pytest.mark.stress
@pytest.mark.control("SIGTERM, SIGUSR1, Ctrl-C keep what is finished")
def test_signal_check_detects_rows_lost_without_commits(tmp_path: Path):
    """The control: what the other tests find was kept because of the signal."""
    write_rows(tmp_path, NUM_ROWS)
    process = start(tmp_path, is_slow=True)
    wait_for_rows(tmp_path, process)
    process.kill()
    process.wait(LIMIT_S)
    assert num_kept(tmp_path) == 0


@pytest.mark.stress
def test_warned_ranks_keep_finished_rows(tmp_path: Path, expected: bytes):
    write_rows(tmp_path, NUM_ROWS)
    script = slow_after(FIRST_STEPS, tmp_path)
    attempt = Attempt(tmp_path, "two shards", *NO_COMMITS, torchrun=(), script=script)
    wait_for_rows(tmp_path)
    for rank in (0, 1):
        attempt.send(signal.SIGUSR1, rank)
    assert attempt.close() != 0
    kept = num_kept(tmp_path)
    assert kept > 0
    assert "received SIGUSR1" in (tmp_path / "log").read_text()
    assert start(tmp_path).wait(LIMIT_S) == 0
    assert (tmp_path / "out.jsonl").read_bytes() == expected


@pytest.mark.matrix
@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.stress)])
def test_killed_rank_resumes_by_itself_with_max_restarts(tmp_path: Path, expected: bytes, victim: int):
    write_rows(tmp_path, NUM_ROWS)
    script = slow_after(FIRST_STEPS, tmp_path)
    attempt = Attempt(tmp_path, "two shards", torchrun=("--max-restarts", "2"), script=script)
    wait_for_rows(tmp_path)
    attempt.send(signal.SIGKILL, victim)
    (tmp_path / "struck").touch()
    assert attempt.close() == 0, (tmp_path / "log").read_text()
    assert (tmp_path / "out.jsonl").read_bytes() == expected
    log = (tmp_path / "log").read_text()
    assert "the job is resumed" in log
    assert re.search(r"(?m)^answered before +\d+$", log), log
    metrics = json.loads((tmp_path / "out.jsonl.run" / "metrics.json").read_text())
    assert 0 < metrics["resumed_rows"] < metrics["rows"]
