"""Workers that die, raise, hang or are stopped, and drivers that die: everybody hears of it, and nobody is left."""

import asyncio
import logging
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from fork_server import IMPORT_PATH, ForkedProcess, fork_server
from open_links import open_links
from plain_executors import is_running, new_plain, plain, timeouts_after
from ranks import REPOSITORY, environment, kill_all, processes_of, without_unanswered_names
from shared_names import FOLDER, shared_names
from waiting import LIMIT_S, wait_until

from spmd_worker.base.errors import RankFailedError, ReplicaDivergedError, WorkerDiedError, WorkerError
from spmd_worker.executor.multiproc import MultiprocExecutor
from spmd_worker.replica.sequence.step import StepPlan, StepResult

forked = pytest.mark.usefixtures("forked_workers")

DRIVER = """
import time
from plain_executors import new_plain
executor = new_plain(2)
executor.start()
print(*executor.worker_pids, flush=True)
"""

FOLDERS = (*IMPORT_PATH, Path(__file__).parent)
WORK = 'executor.collective_rpc("nap", args=(600.0, 1), non_block=True)\n'


@forked
def test_killed_worker_fails_every_pending_future(
    caplog: pytest.LogCaptureFixture,
):
    with plain(3) as executor, caplog.at_level(logging.ERROR, "spmd_worker"):
        pids = executor.worker_pids
        futures = executor.collective_rpc("nap", args=(600.0,), non_block=True)
        os.kill(pids[1], signal.SIGKILL)
        text = f"worker rank 1 (pid {pids[1]}) was killed by SIGKILL"
        for future in futures:
            error = future.exception(timeout=LIMIT_S)
            assert isinstance(error, WorkerDiedError)
            assert isinstance(error, RankFailedError)
            assert str(error) == text
        assert executor.is_failed
        wait_until(lambda: not any(map(is_running, pids)))
        assert caplog.messages == [f"{text}: the other workers are ended"]


@forked
def test_a_blocking_call_ends_when_a_worker_does():
    with plain() as executor:
        pid = executor.worker_pids[0]
        with pytest.raises(WorkerDiedError, match=r"^worker rank 0 \(.* \d+\) .*code 3$"):
            executor.collective_rpc("act_on", args=(0, "exit"))
        for call in (lambda: executor.collective_rpc("echo"), executor.check_health):
            with pytest.raises(RankFailedError) as raised:
                call()
            assert str(raised.value) == (
                f"worker rank 0 (pid {pid}) exited with code 3 (the executor has failed: make a new one)"
            )


@pytest.mark.gate("hang-*", "exit-*", "fault-*", "die-*", "raise-*")
@forked
@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("raise", "rank 1 raised ValueError in step: went wrong"),
        ("die", "worker rank 1 (pid {pid}) was killed by SIGKILL"),
        pytest.param("exit", "worker rank 1 (pid {pid}) exited with code 3", marks=pytest.mark.matrix),
        pytest.param("fault", "worker rank 1 (pid {pid}) was killed by SIGSEGV", marks=pytest.mark.matrix),
        ("hang", "rank 1 (pid {pid}) has not answered step within 0.9 s"),
        ("stop", "rank 1 (pid {pid}, stopped) has not answered step within 0.9 s"),
    ],
)
def test_failed_step_ends_all_workers(what: str, text: str):
    with plain(timeout_s=LIMIT_S) as executor:
        called: list[bool] = []
        executor.register_failure_callback(lambda: called.append(executor.is_failed))
        pids = executor.worker_pids
        executor.execute_model(StepPlan(step=1))
        executor.collective_rpc("arrange", args=(1, what))
        with ExitStack() as stack:
            if what in ("hang", "stop"):
                # From here on: the start and the step before have as long as they need, and rank 0 in this one.
                limited = replace(executor.config, executor=replace(executor.config.executor, timeout_s=1.0))
                executor.resolved = replace(executor.resolved, config=limited)
                state, worker = {"hang": "", "stop": "stopped"}[what], executor._pool.workers[1]
                stack.enter_context(timeouts_after(executor, lambda x: x[0].done() and worker.state() == state))
            with pytest.raises((WorkerError, WorkerDiedError, TimeoutError)) as raised:
                executor.execute_model(StepPlan(step=2))
        assert str(raised.value) == text.format(pid=pids[1])
        # Like an executor in one process: when the error is out, the callbacks have run, and nothing computes.
        assert called == [True]
        assert not any(map(is_running, pids))
        executor.register_failure_callback(lambda: called.append(False))
        assert called == [True, False]
        with pytest.raises(RankFailedError, match=r"the executor .*failed:"):
            executor.execute_model(StepPlan(step=3))


@forked
def test_failed_step_future_fails_the_executor():
    with plain() as executor:
        called = threading.Event()
        executor.register_failure_callback(called.set)
        executor.collective_rpc("arrange", args=(1, "raise"))
        future = executor.execute_model(StepPlan(step=1), non_block=True)
        assert str(future.exception(timeout=LIMIT_S)) == "rank 1 raised ValueError in step: went wrong"
        assert executor.is_failed
        assert called.wait(LIMIT_S)


@forked
def test_a_coroutine_that_waits_hears_of_a_death():
    async def main(executor: MultiprocExecutor) -> str:
        futures = executor.collective_rpc("nap", args=(600.0,), non_block=True)
        waiting = asyncio.gather(*map(asyncio.wrap_future, futures), return_exceptions=True)
        await asyncio.sleep(0.05)
        os.kill(executor.worker_pids[0], signal.SIGTERM)
        first, second = await asyncio.wait_for(waiting, LIMIT_S)
        assert str(first) == str(second)
        return str(first)

    with plain() as executor:
        assert asyncio.run(main(executor)) == f"worker rank 0 (pid {executor.worker_pids[0]}) was killed by SIGTERM"


@forked
def test_failure_callback_may_raise_or_shut_down(caplog: pytest.LogCaptureFixture):
    with plain() as executor:
        called: list[str] = []

        def break_down() -> None:
            called.append("first")
            raise KeyError("broken callback")

        done = threading.Event()
        for callback in (break_down, executor.shutdown, lambda: called.append("last"), done.set):
            executor.register_failure_callback(callback)
        os.kill(executor.worker_pids[1], signal.SIGKILL)
        assert done.wait(LIMIT_S)
        assert called == ["first", "last"]
        assert "a failure callback raised" in caplog.text


@forked
def test_shutdown_fails_pending_calls():
    with plain() as executor:
        futures = executor.collective_rpc("nap", args=(600.0, 1), non_block=True)
        assert futures[0].result(timeout=LIMIT_S) == 0
        step = executor.execute_model(StepPlan(step=1), non_block=True)
        raised: list[BaseException] = []

        def call() -> None:
            try:
                executor.collective_rpc("echo")
            except RuntimeError as error:
                raised.append(error)

        waiter = threading.Thread(target=call)
        waiter.start()
        pending = executor._pool._pending._futures
        wait_until(lambda: [rank for (_, rank), (method, _) in list(pending.items()) if method == "echo"] == [1])
        executor.shutdown()
        waiter.join(LIMIT_S)
        text = "the executor was shut down while rank 1 ran"
        assert str(futures[1].exception(timeout=0)) == f"{text} nap"
        assert str(step.exception(timeout=0)) == f"{text} step"
        assert [str(error) for error in raised] == [f"{text} echo"]
        assert not executor.is_failed
        with pytest.raises(RuntimeError, match=r"executor .*shut down: "):
            executor.collective_rpc("echo")


@forked
def test_shutdown_leaves_no_resources():
    with plain():
        pass
    threads, descriptors = threading.enumerate(), Counter(open_links())
    before = shared_names([os.getpid()])
    for how in ("idle", "busy", "failed"):
        with plain() as executor:
            pids = executor.worker_pids
            assert all(map(is_running, pids))
            names = shared_names([*pids, os.getpid()]) - before
            if how == "busy":
                executor.collective_rpc("nap", args=(600.0,), non_block=True)
            if how == "failed":
                os.kill(pids[0], signal.SIGKILL)
                wait_until(lambda executor=executor: executor.is_failed)
        executor.shutdown()
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids), "not even a zombie"
        # What was left of an earlier test may go meanwhile.
        assert [thread for thread in threading.enumerate() if thread not in threads] == []
        assert not Counter(open_links()) - descriptors
        wait_until(lambda names=names: names.isdisjoint(os.listdir(FOLDER)))


@pytest.mark.gate("9-4")
@forked
@pytest.mark.matrix
@pytest.mark.parametrize("num_workers", [pytest.param(2, marks=pytest.mark.stress), 4])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_worker_death_at_any_moment_is_named(num_workers: int, number: signal.Signals):
    moments = random.Random(0)
    for _ in range(5):
        with plain(num_workers) as executor:
            pids = executor.worker_pids
            rank = moments.randrange(num_workers)
            killer = threading.Timer(moments.uniform(0.0, 0.1), os.kill, (pids[rank], number))
            killer.start()
            with pytest.raises(WorkerDiedError) as raised:
                run_steps(executor)
            text = f"worker rank {rank} (pid {pids[rank]}) was killed by {number.name}"
            assert str(raised.value).startswith(text)
            wait_until(lambda pids=pids: not any(map(is_running, pids)))


def test_an_executor_that_cannot_start_leaves_nothing(monkeypatch: pytest.MonkeyPatch):
    threads = threading.enumerate()
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(FileNotFoundError, match="/no/such/python"):
        new_plain().start()
    assert [thread for thread in threading.enumerate() if thread not in threads] == []


@forked
def test_the_store_listens_on_loopback_only():
    with plain() as executor:
        port = executor._store.port

        def is_listed(place: str) -> bool:
            """Read in pieces, between which other sockets come and go, the table may lack what is there."""
            lines = Path("/proc/net/tcp").read_text().splitlines()
            return place in [line.split()[1] for line in lines]

        wait_until(lambda: is_listed(f"0100007F:{port:04X}"))
        assert not is_listed(f"00000000:{port:04X}")
        with socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S):
            pass
        everywhere = Path("/proc/net/tcp6")
        assert not everywhere.exists() or f":{port:04X} 0000" not in everywhere.read_text()
        assert executor.collective_rpc("variables", args=("GLOO_SOCKET_IFNAME",)) == [{"GLOO_SOCKET_IFNAME": "lo"}] * 2


def test_worker_outlives_thread_that_started_it():
    made: list[MultiprocExecutor] = []

    def make() -> None:
        executor = new_plain()
        executor.start()
        made.append(executor)

    maker = threading.Thread(target=make)
    maker.start()
    maker.join()
    time.sleep(0.2)
    try:
        assert made[0].collective_rpc("echo") == [((), {})] * 2
    finally:
        made[0].shutdown()


@pytest.mark.gate("True")
@pytest.mark.parametrize("is_one_stopped", [False, True])
def test_workers_end_when_driver_is_killed(tmp_path: Path, is_one_stopped: bool):
    token = secrets.token_hex(16)
    driver = start_driver(tmp_path, DRIVER + WORK + "time.sleep(600)", token)
    try:
        wait_until(lambda: (tmp_path / "stdout").read_text().endswith("\n"))
        pids = [int(word) for word in (tmp_path / "stdout").read_text().split()]
        assert sorted(processes_of(token)) == sorted([driver.pid, *pids])
        if is_one_stopped:
            os.kill(pids[0], signal.SIGSTOP)
        driver.kill()
        driver.wait(LIMIT_S)
        wait_until(lambda: processes_of(token) == [])
    finally:
        kill_all(token)


@pytest.mark.gate("at work")
@pytest.mark.parametrize(
    ("ending", "code"),
    [
        pytest.param("", 0, id="idle"),
        pytest.param(WORK, 0, id="at work"),
        pytest.param("raise SystemExit(7)", 7, id="exit", marks=pytest.mark.stress),
        pytest.param("raise KeyError('of the driver')", 1, id="exception", marks=pytest.mark.matrix),
    ],
)
def test_workers_end_quietly_with_the_driver(tmp_path: Path, ending: str, code: int):
    token = secrets.token_hex(16)
    driver = start_driver(tmp_path, DRIVER + ending, token)
    try:
        returncode = driver.wait(LIMIT_S)
        assert processes_of(token) == []
        errors = without_unanswered_names((tmp_path / "stderr").read_text())
        assert returncode == code, errors
        assert errors == "" or "KeyError: 'of the driver'" in errors.splitlines()[-1]
        assert len((tmp_path / "stdout").read_text().split()) == 2, "it had its workers"
    finally:
        kill_all(token)


def test_a_worker_without_a_driver_ends_by_itself():
    ours, theirs = socket.socketpair()
    arguments = [0, theirs.fileno(), os.getpid(), logging.WARNING]
    names = ("--rank", "--descriptor", "--driver-pid", "--log-level")
    words = [word for pair in zip(names, map(str, arguments), strict=True) for word in pair]
    command = [sys.executable, "-m", "spmd_worker.executor.worker_process", *words]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()], cwd=REPOSITORY) as worker:
        theirs.close()
        try:
            with pytest.raises(subprocess.TimeoutExpired):
                worker.wait(1)
            ours.close()
            assert worker.wait(120) == 1
        finally:
            worker.kill()


def test_worker_process_begins_without_terminal(tmp_path: Path):
    """Its standard streams are closed; the end of the terminal, as Ctrl-C, is for the driver alone."""
    source = f"""
import os, pathlib, signal, socket, sys
from spmd_worker.executor import worker_process
ours, theirs = socket.socketpair()
names = ("--rank", "0", "--descriptor", str(theirs.fileno()), "--driver-pid", str(os.getppid()), "--log-level", "30")
sys.argv[1:] = names
def run(*_):
    print("to nobody", file=sys.stderr)
    pathlib.Path({str(tmp_path / "told")!r}).write_text(repr(signal.getsignal(signal.SIGHUP)))
worker_process.WorkerTasks.run = run
os._exit(worker_process.main())
"""
    command = ["sh", "-c", '"$0" -c "$1" >&- 2>&-; :', sys.executable, source]
    subprocess.run(command, cwd=REPOSITORY, timeout=120, check=True)
    assert (tmp_path / "told").read_text() == repr(signal.SIG_IGN)


def run_steps(executor: MultiprocExecutor) -> None:
    for step in range(1, 1_000_000):
        executor.execute_model(StepPlan(step=step))


def start_driver(folder: Path, source: str, token: str) -> ForkedProcess:
    """The driver is forked, its workers are fresh interpreters. What it says goes into `folder`."""
    (folder / "driver.py").write_text(source)
    variables = environment(token, {"PYTHONPATH": os.pathsep.join(map(str, FOLDERS))})
    with (folder / "stdout").open("wb") as stdout, (folder / "stderr").open("wb") as stderr:
        return fork_server().fork([str(folder / "driver.py")], variables, REPOSITORY, stdout, stderr)


@forked
@pytest.mark.parametrize("non_block", [False, True])
def test_diverged_masks_name_the_workers(non_block: bool):
    """Only the output rank's result was looked at: ranks that sample under other masks went on."""
    with plain(3) as executor:

        def step(number: int, *masks: int) -> StepResult:
            executor.collective_rpc("make_masks", args=(tuple([(each,) if each else () for each in masks]),))
            found = executor.execute_model(StepPlan(step=number), non_block=non_block)
            return executor.wait_for_step(found) if isinstance(found, Future) else found

        # Negative control: equal ones, and none, are nobody's fault.
        assert step(7, 5, 5, 5).mask_checksums == (5,)
        assert step(8, 0, 0, 0).mask_checksums == ()
        with pytest.raises(ReplicaDivergedError) as raised:
            step(9, 5, 5, 6)
        words = "step 9: rank 2 diverged from rank 0: mask_checksums: [5] on rank 0, [6] on rank 2; "
        assert str(raised.value).startswith(words)
        assert executor.is_failed


def test_masks_differ_only_on_sampling_stages():
    results = [StepResult(3, (rank,), mask_checksums=(5,) if rank > 1 else ()) for rank in range(4)]
    executor = new_plain(4)
    assert executor._aggregate(results, 2).mask_checksums == (5,)
    # Negative control: one that samples and made none.
    results[3] = StepResult(3, (3,))
    with pytest.raises(ReplicaDivergedError, match=r"rank 3 diverged .*mask_checksums: \[5\] .* 2, \[\] .* 3\b"):
        executor._aggregate(results, 2)
