"""Watchdogs that share a heartbeat store: one report with the right diagnosis, and no rank left
running. Ranks are threads here, in driven time.

`tests/scenarios/test_fault_matrix.py` breaks real ranks.
"""

import faulthandler
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from driven_time import DrivenTime
from made_up_store import MadeUpStore
from our_logger import logger_as_it_was
from waiting import NotInTime, wait_until

from spmd_worker.base.errors import ConfigError, RankFailedError, ReplicaDivergedError
from spmd_worker.base.liveness import coordinated_shutdown as ending
from spmd_worker.base.liveness import heartbeat_exchange as exchange
from spmd_worker.base.liveness import main_thread, stall_clock, watchdog
from spmd_worker.base.liveness.bounded import within
from spmd_worker.base.liveness.coordinated_shutdown import CoordinatedShutdown
from spmd_worker.base.liveness.error_file import read_records, write_elastic_file
from spmd_worker.base.liveness.failure_diagnosis import SETTLE_S
from spmd_worker.base.liveness.heartbeat import RankHeartbeat
from spmd_worker.base.liveness.heartbeat_store import HeartbeatStore
from spmd_worker.base.liveness.watchdog import Watchdog
from spmd_worker.base.liveness.watched import Watched
from spmd_worker.base.process import node_name, start_time_of

LONG_S, LIMIT_S = 1000.0, 300.0

# The end of a process is played by the end of a thread.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
HEADING = "rank status at the last heartbeats:"


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # In driven time nobody computes: what this thread really does between two moments is no measure.
    monkeypatch.setattr(stall_clock, "cpu_seconds_of", lambda native_id: 0.0)
    # No disk hangs, and what is written is there, however long that takes.
    for module in (ending, main_thread, watchdog):
        monkeypatch.setattr(module, "within", lambda limit_s, action: within(LIMIT_S, action))
    with logger_as_it_was() as logger:
        logger.propagate = True
        yield


class Ranks:
    """`num_ranks` watchdogs over one store, in driven time. `exits` are the codes with which processes would have
    ended, by rank.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_ranks: int, folder: Path, **options) -> None:
        self.store = MadeUpStore()
        self.time = DrivenTime()
        self.exits: dict[int, int] = {}
        ranks = tuple(range(num_ranks))
        options = {"timeout_s": LONG_S, "run_dir": folder, "exits": True} | options
        self.all = [
            Watchdog(Watched(rank, ranks, **options), lambda: HeartbeatStore(self.store, "watch"), self.time.clock())
            for rank in ranks
        ]
        monkeypatch.setattr(watchdog, "exit_now", self._exit)

    def start(self, ranks: tuple[int, ...]) -> None:
        self.begin(*(self.all[rank] for rank in ranks))
        self.wait_until(lambda: all(f"watch/heartbeat/{rank}" in self.store.values for rank in ranks))

    def begin(self, *watchdogs: Watchdog) -> None:
        """Start them, and return when their threads take part in time, which else would pass without them."""
        for each in watchdogs:
            each.start()
        threads = [thread for each in watchdogs for thread in (each._thread, each._exchange._thread)]
        try:
            wait_until(lambda: all(self.time.takes_part(thread) for thread in threads))
        except NotInTime as error:
            faulthandler.dump_traceback(all_threads=True)
            missing = [thread for thread in threads if not self.time.takes_part(thread)]
            raise NotInTime(f"threads that have not waited: {missing} (their stacks are above)") from error

    def stop(self) -> None:
        for each in self.all:
            each.stop()

    def wait_until(self, is_so: Callable[[], object]) -> None:
        assert self.time.wait_until(is_so, LIMIT_S)

    def wait_for_exits(self, num_exits: int) -> dict[int, int]:
        self.wait_until(lambda: len(self.exits) == num_exits)
        return self.exits

    def _exit(self, code: int) -> None:
        for each in self.all:
            if each._thread is threading.current_thread():
                self.exits[each.watched.rank] = code
        # What ends the process ends its thread.
        raise SystemExit


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Ranks]]:
    made: list[Ranks] = []

    def make_ranks(num_ranks: int, **options) -> Ranks:
        made.append(Ranks(monkeypatch, num_ranks, tmp_path, **options))
        return made[-1]

    yield make_ranks
    for each in made:
        each.stop()


def test_exception_ends_all_ranks_with_one_report(make, tmp_path: Path, capsys):
    ranks = make(3)
    ranks.start((0, 1, 2))
    for each in ranks.all:
        each.heartbeat.enter("execute", 812)
    ranks.all[1].fail(ValueError("boom"))
    assert ranks.wait_for_exits(3) == {0: 1, 1: 1, 2: 1}
    text = capsys.readouterr().err
    assert text.count(HEADING) == 1
    assert text.count("error: rank 1 raised ValueError at step 812: boom\n") == 1
    assert [line.split("  ")[1:3] for line in text.splitlines() if line.startswith("  rank")] == [
        ["rank 0", "step 812"],
        ["rank 1", "step 812"],
        ["rank 2", "step 812"],
    ]
    records = read_records(tmp_path)
    assert [record.rank for record in records] == [0, 1, 2]
    assert all(record.diagnosis.ranks == (1,) for record in records)
    assert 'ValueError("boom")' in records[1].traceback or "ValueError: boom" in records[1].traceback
    assert records[0].traceback == ""


@pytest.mark.parametrize("after_s", [0.0, 0.01, 0.1, 0.2, 0.3, 0.6])
def test_rank_0_reports_failures_of_other_ranks(make, after_s: float):
    """It reads an alarm up to a period after it was raised; the rank that failed once took over just before."""
    ranks = make(2)
    ranks.start((0, 1))
    ranks.time.advance(5.0 + after_s)
    ranks.all[1].fail(ValueError("boom"))
    ranks.wait_for_exits(2)
    assert [each._exchange.is_reporter for each in ranks.all] == [True, False]


def test_secondary_failure_is_not_reported_as_cause(make, capsys):
    ranks = make(2)
    ranks.start((0, 1))
    ranks.all[0].fail(RankFailedError("rank 1 is gone"))
    ranks.all[1].fail(KeyError("w"), "loading the model")
    ranks.wait_for_exits(2)
    assert "error: rank 1 raised KeyError while loading the model: 'w'\n" in capsys.readouterr().err


def test_lowest_living_rank_reports_for_dead_rank_0(make, capsys):
    ranks = make(3)
    dead = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    publish(ranks.store, RankHeartbeat(0, node_name(), dead.pid, start_time_of(dead.pid), 1, 5, "execute"))
    ranks.start((1, 2))
    ranks.wait_until(lambda: all(each._exchange.statuses()[0].last_heartbeat for each in ranks.all[1:]))
    dead.kill()
    dead.wait()
    assert sorted(ranks.wait_for_exits(2)) == [1, 2]
    text = capsys.readouterr().err
    assert text.count(HEADING) == 1
    assert "error: rank 0 is gone: last seen in step 5, phase execute, " in text


def recorded_kills(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Signals of the module alone, which are not sent. Those of others are: the collector may end a process that an
    earlier test left, in any thread, and waits for it.
    """
    killed: list[tuple[int, int]] = []
    own = {**vars(os), "kill": lambda *arguments: killed.append(arguments)}
    monkeypatch.setattr(ending, "os", SimpleNamespace(**own))
    return killed


def test_silent_rank_is_named_and_killed_after_timeout(make, monkeypatch, capsys):
    """Only a sibling process on this node is killed."""
    killed = recorded_kills(monkeypatch)
    ranks = make(2, timeout_s=4.0)
    silent = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    monkeypatch.setattr(ending, "parent_of", lambda pid: 1)
    publish(ranks.store, RankHeartbeat(1, node_name(), silent.pid, start_time_of(silent.pid), 1, 5, "execute"))
    ranks.start((0,))
    ranks.all[0].heartbeat.enter("between steps")
    ranks.wait_for_exits(1)
    assert 4.0 < ranks.time.now_s < 12.0
    assert "error: rank 1 is silent: last seen in step 5, phase execute, " in capsys.readouterr().err
    assert killed == [(silent.pid, 9)]
    silent.communicate(b"\n")


def test_foreign_process_is_never_killed(make, monkeypatch):
    """Its number came over the network; only a sibling with the same birth is ended."""
    killed = recorded_kills(monkeypatch)
    own = os.getpid()
    for last_heartbeat in (
        RankHeartbeat(1, node_name(), 1, start_time_of(1), 1, 5, "execute"),
        RankHeartbeat(1, node_name(), own, start_time_of(own) + 1, 1, 5, "execute"),
        RankHeartbeat(1, "another node", own, start_time_of(own), 1, 5, "execute"),
    ):
        statuses = [
            ending.RankStatus(0, RankHeartbeat(0, node_name(), own, start_time_of(own), 1, 5, "execute")),
            ending.RankStatus(1, last_heartbeat, 60.0),
        ]
        ending.end_silent(statuses, ending.Diagnosis((1,), "rank 1 is silent"), 0)
    assert killed == []
    sibling = RankHeartbeat(1, node_name(), own, start_time_of(own), 1, 5, "execute")
    ending.end_silent([statuses[0], ending.RankStatus(1, sibling)], ending.Diagnosis((1,), "x"), 0)
    assert killed == [(own, 9)]


def test_rank_without_heartbeat_is_killed_by_its_environment(monkeypatch):
    killed = recorded_kills(monkeypatch)
    # This process stands for the launcher, or for a shell from which two jobs were started: its children are ranks.
    monkeypatch.setenv("MASTER_PORT", "29500")
    ranks = {
        (rank, port): subprocess.Popen(
            [sys.executable, "-c", "input()"],
            stdin=subprocess.PIPE,
            env={**os.environ, "RANK": str(rank), "MASTER_PORT": port},
        )
        for rank, port in ((0, "29500"), (1, "29500"), (11, "29500"), (1, "29501"))
    }
    try:
        own = ranks[0, "29500"].pid
        last_heartbeat = RankHeartbeat(0, node_name(), own, start_time_of(own), 1, 5, "execute")
        statuses = [ending.RankStatus(0, last_heartbeat), ending.RankStatus(1, None), ending.RankStatus(11, None)]
        diagnosis = ending.Diagnosis((1,), "rank 1 is silent: no heartbeat since the start")
        ending.end_silent(statuses, diagnosis, 0)
        assert killed == [(ranks[1, "29500"].pid, 9)]
    finally:
        for process in ranks.values():
            process.communicate(b"\n")


@pytest.mark.guarantee("A rank that does not move for timeout_s has failed")
def test_stuck_main_thread_warns_once_then_fails(make, tmp_path, caplog, capsys):
    ranks = make(1, timeout_s=20.0)
    ranks.start((0,))
    ranks.all[0].heartbeat.enter("execute", 7)
    assert ranks.wait_for_exits(1) == {0: 1}
    assert 20.0 < ranks.time.now_s < 25.0
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert warnings[0].startswith("step 7 makes no progress in phase execute for 4.0 s now, at ")
    assert f"stacks are in {tmp_path / 'stacks.rank0.txt'}" in warnings[0]
    assert "test_watchdog.py" in (tmp_path / "stacks.rank0.txt").read_text()
    assert "error: rank 0 is stuck: step 7, phase execute, for " in capsys.readouterr().err
    [record] = read_records(tmp_path)
    assert record.statuses[0].last_heartbeat.failure.text.startswith("rank 0 is stuck: step 7")


@pytest.mark.control("A rank that does not move for timeout_s has failed")
def test_stall_check_detects_a_watchdog_that_never_stalls(
    make,
    tmp_path,
    caplog,
    capsys,
    monkeypatch: pytest.MonkeyPatch,
    control,
):
    """Negative control."""
    never = property(lambda self: 0.0, lambda self, value: None)
    monkeypatch.setattr(stall_clock.StallClock, "stalled_s", never, raising=False)
    with control():
        test_stuck_main_thread_warns_once_then_fails(make, tmp_path, caplog, capsys)


def test_moving_main_thread_is_left_alone(make, caplog):
    ranks = make(1, timeout_s=4.0)
    ranks.start((0,))
    for step in range(20):
        ranks.all[0].heartbeat.enter("execute", step)
        ranks.time.advance(1.0)
    ranks.all[0].heartbeat.enter("between steps")
    ranks.time.advance(30.0)
    assert caplog.records == []
    assert ranks.exits == {}


@pytest.mark.finding(number="B8")
def test_stacks_reach_stderr_only_at_the_hard_limit(make, caplog, capfd):
    """A step that took a fifth of the limit once printed the stacks of all threads, and then went on."""
    ranks = make(1, timeout_s=20.0, run_dir=None, exits=False)
    ranks.all[0].heartbeat.enter("execute", 7)
    ranks.start((0,))
    ranks.wait_until(lambda: bool(caplog.records))
    ranks.time.advance(10.0)
    assert "step 7 makes no progress in phase execute for 4.0 s now" in caplog.text
    assert "stacks" not in caplog.text + capfd.readouterr().err
    ranks.time.advance(10.0)
    assert "[rank 0] stacks:" in capfd.readouterr().err


@pytest.mark.finding(number="B8")
def test_second_start_counts_as_a_start(make, caplog, capfd):
    """Worker processes that an engine starts after its first step once made its watchdog print stacks."""
    ranks = make(1, timeout_s=20.0, run_dir=None)
    ranks.start((0,))
    ranks.all[0].heartbeat.enter("execute", 7)
    ranks.all[0].heartbeat.enter("joining the other ranks", 0)
    ranks.time.advance(19.0)
    assert (caplog.text, capfd.readouterr().err, ranks.exits) == ("", "", {})


def test_external_signal_is_named_and_sets_exit_code(make, capsys, monkeypatch):
    seen = []
    report = CoordinatedShutdown.report
    monkeypatch.setattr(
        CoordinatedShutdown,
        "report",
        lambda self, *found: (seen.append((self._rank, ranks.all[self._rank].is_reporting)), report(self, *found)),
    )
    ranks = make(2)
    ranks.start((0, 1))
    ranks.all[1].signalled()
    assert ranks.wait_for_exits(2) == {0: 1, 1: 143}
    # Signals look at it: no process ends while it tells why.
    assert sorted(seen) == [(0, True), (1, True)]
    assert not any(each.is_reporting for each in ranks.all)
    assert "error: rank 1 received SIGTERM from outside the job\n" in capsys.readouterr().err


def test_signalled_rank_waits_briefly_for_a_slow_disk(make, monkeypatch):
    """The launcher's SIGTERM after a kill: with a commit that hung the others took 5.3 s to end."""
    limits: dict[int, float] = {}

    def recorded(limit_s: float, action: Callable[[], object]) -> object:
        limits.update({each.watched.rank: limit_s for each in ranks.all if action == each._run_before_exit})
        return action()

    monkeypatch.setattr(watchdog, "within", recorded)
    ranks = make(3)
    ranks.start((0, 1, 2))
    ranks.all[1].signalled()
    assert ranks.wait_for_exits(3) == {0: 1, 1: 143, 2: 1}
    assert limits == {0: ending.LEAVE_S, 1: watchdog._SAVE_AGAIN_S, 2: ending.LEAVE_S}
    # A signal of this moment: what it saves has had no time yet.
    ranks.all[2].signalled()
    assert ranks.all[2]._saving_s() > ending.LEAVE_S - 0.5


def test_rank_logs_failed_saving_and_exits(make, caplog: pytest.LogCaptureFixture):
    ranks = make(2)

    def save() -> None:
        raise OSError(28, "No space left on device")

    ranks.all[1].before_exit = save
    ranks.start((0, 1))
    ranks.all[1].fail(ValueError("boom"))
    assert ranks.wait_for_exits(2) == {0: 1, 1: 1}
    (record,) = [each for each in caplog.records if each.message == "saving before the exit failed"]
    assert "No space left" in str(record.exc_info)


def test_signalled_rank_that_ends_well_exits_well(make, capsys):
    ranks = make(2)
    ranks.start((0, 1))
    for each in ranks.all:
        each.signalled()
    ranks.stop()
    assert ranks.exits == {}
    assert capsys.readouterr().err == ""
    assert RankHeartbeat.unpack(ranks.store.values["watch/heartbeat/1"]).has_ended


@pytest.mark.parametrize("is_full", [False, True])
def test_only_rank_records_its_cause_once(make, tmp_path, caplog, is_full: bool):
    """An error of the engine, which the job reports again: on a full disk the warning came twice."""
    if is_full:
        (tmp_path / "error.rank0.json").mkdir()
    (rank,) = make(1).all
    if not is_full:
        rank.signalled()
    rank.fail(ValueError("the cause"))
    rank.fail(ValueError("after it"))
    assert caplog.text.count("the error record could not be written") == is_full
    if not is_full:
        (record,) = read_records(tmp_path)
        assert "the cause" in record.diagnosis.text


@pytest.mark.parametrize("error", [ReplicaDivergedError("step 7 did not run"), ConfigError("seed=x")])
def test_rank_0_errors_get_no_second_report(make, tmp_path, capsys, error):
    """Errors that rank 0 prints itself."""
    ranks = make(2)
    ranks.start((0, 1))
    ranks.all[0].fail(error)
    code = 70 if isinstance(error, ReplicaDivergedError) else 1
    assert ranks.wait_for_exits(2) == {0: code, 1: code}
    assert capsys.readouterr().err == ""
    assert read_records(tmp_path) == []


def test_false_alarm_is_forgotten_and_the_next_counts(make, monkeypatch, capsys):
    """A rank that was silent for long sends heartbeats again before there was a diagnosis."""
    ranks = make(2)
    ranks.start((0, 1))
    ranks.all[1]._exchange.alarm()
    ranks.wait_until(lambda: all(each._exchange.is_alarmed for each in ranks.all))
    ranks.wait_until(lambda: not any(each._exchange.is_alarmed for each in ranks.all))
    assert ranks.exits == {}
    # Silent for longer than would count during an alarm.
    monkeypatch.setattr(exchange, "PERIOD_S", 4.0)
    ranks.time.advance(10.0)
    assert ranks.exits == {}
    ranks.all[1].fail(ValueError("boom"))
    assert ranks.wait_for_exits(2) == {0: 1, 1: 1}
    assert "error: rank 1 raised ValueError while starting: boom\n" in capsys.readouterr().err


def test_signalled_stuck_rank_exits_as_failed(make):
    ranks = make(2, timeout_s=4.0)
    ranks.start((0, 1))
    # This thread, which waits, is the main thread of both.
    for each in ranks.all:
        each.heartbeat.enter("execute", 7)
    ranks.wait_until(lambda: all(each._failure is not None for each in ranks.all))
    ranks.all[1].signalled()
    assert ranks.wait_for_exits(2) == {0: 1, 1: 1}


def test_waiting_ranks_log_below_warning_without_stacks(make, monkeypatch, caplog, capfd):
    """The terminal is left to the rank they wait for."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(main_thread, "location_of", lambda thread_id: ("channel.py:4 receive", True))
    ranks = make(1, timeout_s=2.0, run_dir=None, exits=False)
    ranks.all[0].heartbeat.enter("execute", 7)
    ranks.start((0,))
    ranks.wait_until(lambda: bool(caplog.records))
    [record] = caplog.records
    assert record.levelno == logging.INFO
    assert record.getMessage().startswith("step 7 waits for other ranks in phase execute for ")
    assert record.getMessage().endswith(" s now, at channel.py:4 receive")
    assert capfd.readouterr().err == ""


def test_rank_that_waited_too_long_is_not_stuck(make, monkeypatch, capsys):
    """Regression: it gave up after the watchdog had seen the limit, and the phase in which it closed was the cause."""
    location = ("channel.py:4 receive", True)
    monkeypatch.setattr(main_thread, "location_of", lambda thread_id: location)
    ranks = make(2, timeout_s=4.0)
    ranks.start((0, 1))
    for each in ranks.all:
        each.heartbeat.enter("execute", 7)
    ranks.wait_until(lambda: all(each._failure is not None for each in ranks.all))
    location = ("engine.py:9 close", False)
    ranks.all[1].heartbeat.enter("closing")
    assert ranks.wait_for_exits(2) == {0: 1, 1: 1}
    text = capsys.readouterr().err
    assert "error: ranks 0, 1 are waiting for another rank, or for each other: step 7, phase execute, for 4." in text
    assert "at channel.py:4 receive" in text


def test_guest_finds_the_cause_of_a_secondary_error(make):
    ranks = make(2, exits=False, run_dir=None)
    ranks.start((0, 1))
    secondary = RuntimeError("gloo: Connection closed by peer")
    ranks.all[1].fail(ValueError("boom"))
    ranks.all[0].fail(secondary)
    assert ranks.all[0].find_cause(secondary) == "rank 1 raised ValueError while starting: boom"
    # The rank that failed has a better error of its own.
    assert ranks.all[1].find_cause(ValueError("boom")) is None
    assert ranks.all[1].find_cause(secondary) is None


def test_guest_error_is_unchanged_without_a_known_cause(make):
    alone = make(1, exits=False, run_dir=None)
    alone.start((0,))
    assert alone.all[0].find_cause(RuntimeError("gloo: Connection closed by peer")) is None
    program = make(2)
    program.start((0, 1))
    assert program.all[0].find_cause(RuntimeError("gloo: Connection closed by peer")) is None


def check_a_failure_ends_nothing(ranks: Ranks) -> None:
    ranks.start((0, 1))
    ranks.all[1].fail(ValueError("boom"))
    ranks.wait_until(lambda: all(each._diagnosis is not None for each in ranks.all))
    ranks.time.advance(10.0)
    assert ranks.exits == {}


@pytest.mark.control("Your own script hears who failed and lives on")
def test_guest_check_detects_ended_processes(make, control):
    """Negative control: they are watched as ranks of a program of ours are."""
    ranks = make(2, exits=True, run_dir=None)
    with control():
        check_a_failure_ends_nothing(ranks)
    assert ranks.exits == {0: 1, 1: 1}


def test_guest_logs_the_diagnosis_and_ends_nothing(make, caplog, capsys):
    check_a_failure_ends_nothing(make(2, exits=False, run_dir=None))
    assert capsys.readouterr().err == ""
    [message] = [record.getMessage() for record in caplog.records]
    assert message.startswith("rank 1 raised ValueError while starting: boom; rank status at the last heartbeats:")


def test_ranks_report_alone_when_the_store_is_gone(make, capsys):
    ranks = make(2)
    ranks.start((0, 1))
    ranks.store.is_gone = True
    ranks.wait_until(lambda: all(each._exchange.is_lost for each in ranks.all))
    assert ranks.exits == {}
    ranks.all[0].fail(ValueError("boom"))
    assert ranks.wait_for_exits(1) == {0: 1}
    assert "error: rank 0 raised ValueError while starting: boom\n" in capsys.readouterr().err


def test_store_lost_with_rank_0_yields_one_report(make, capsys):
    """A store in rank 0's process, as without torchrun. No rank reported once, as rank 0 had just been heard."""
    ranks = make(3)
    host = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    publish(ranks.store, RankHeartbeat(0, node_name(), host.pid, start_time_of(host.pid), 1, 5, "execute"))
    ranks.start((1, 2))
    ranks.wait_until(lambda: all(each._exchange.statuses()[0].last_heartbeat for each in ranks.all[1:]))
    host.kill()
    host.wait()
    ranks.store.is_gone = True
    assert sorted(ranks.wait_for_exits(2)) == [1, 2]
    text = capsys.readouterr().err
    assert text.count(HEADING) == 1
    assert "error: rank 0 is gone: last seen in step 5, phase execute, " in text


def test_unreachable_store_yields_one_report_naming_rank_0(make, capsys):
    """Rank 0 kept it, and ended before the others came: each left the report to rank 0 once, and none was made."""

    def connect() -> HeartbeatStore:
        raise ConnectionError("Connection refused")

    ranks = make(3)
    for each in ranks.all[1:]:
        each._exchange._connect = connect
        ranks.begin(each)
    ranks.wait_until(lambda: all(each._exchange.is_lost for each in ranks.all[1:]))
    for each in ranks.all[1:]:
        each.fail(ConnectionError("Connection refused"))
    assert sorted(ranks.wait_for_exits(2)) == [1, 2]
    text = capsys.readouterr().err
    assert text.count(HEADING) == 1
    assert "error: ranks 0, 2 are silent: no heartbeat since the start" in text


def test_local_ranks_stay_heard_when_store_is_gone(make):
    """They would end each other."""
    ranks = make(2, timeout_s=4.0)
    ranks.start((0, 1))
    for each in ranks.all:
        each.heartbeat.enter("between steps")
    ranks.store.is_gone = True
    ranks.time.advance(20.0)
    assert ranks.exits == {}
    assert not any(each.is_silent for each in ranks.all[0]._exchange.statuses())


def test_large_world_forgets_statuses_read_during_an_alarm(make, monkeypatch):
    """A rank looked at during an alarm is not silent after it."""
    monkeypatch.setattr(exchange, "MAX_RANKS_THAT_SEE_ALL", 2)
    ranks = make(3, timeout_s=4.0)
    ranks.start((0, 1, 2))
    for each in ranks.all:
        each.heartbeat.enter("between steps")
    ranks.all[2]._exchange.alarm()
    ranks.wait_until(lambda: ranks.all[1]._exchange.is_alarmed)
    ranks.wait_until(lambda: ranks.all[1]._exchange.statuses()[2].last_heartbeat is not None)
    ranks.wait_until(lambda: not any(each._exchange.is_alarmed for each in ranks.all))
    ranks.time.advance(20.0)
    assert ranks.exits == {}
    assert ranks.all[1]._exchange.statuses()[2].last_heartbeat is None


def test_rank_exits_when_its_record_cannot_be_written(make, tmp_path, caplog, capsys):
    for rank in range(2):
        (tmp_path / f"error.rank{rank}.json.partial").mkdir()
    ranks = make(2)
    ranks.start((0, 1))
    ranks.all[1].fail(ValueError("boom"))
    assert ranks.wait_for_exits(2) == {0: 1, 1: 1}
    assert "the error record could not be written" in caplog.text
    assert "error: rank 1 raised ValueError while starting: boom\n" in capsys.readouterr().err
    assert [path.suffix for path in tmp_path.iterdir()] == [".partial"] * 2


def test_elastic_error_file_is_written_by_the_culprit(make, tmp_path, monkeypatch):
    """The file has torchrun's format."""
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    ranks = make(2)
    ranks.start((0, 1))
    ranks.all[0].fail(RankFailedError("rank 1 is gone"))
    assert not path.exists()
    ranks.all[1].fail(ValueError("boom"))
    message = json.loads(path.read_text())["message"]
    assert message["message"] == "rank 1 raised ValueError while starting: boom"
    assert message["extraInfo"]["py_callstack"].endswith("ValueError: boom\n")
    # Seconds since 1970, by which torchrun finds the earliest.
    assert len(message["extraInfo"]["timestamp"]) == 10
    write_elastic_file("text", "", 1234567.8, {"TORCHELASTIC_ERROR_FILE": str(path)})
    assert json.loads(path.read_text())["message"]["extraInfo"]["timestamp"] == "1234567"


def test_elastic_error_file_names_a_rank_busy_computing(make, tmp_path, monkeypatch, capsys):
    """The rank computes while another waits in vain."""
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    ranks = make(2)
    ranks.start((0, 1))
    ranks.all[1].heartbeat.enter("execute", 7)
    # So long that it cannot have begun after the wait.
    ranks.wait_until(lambda: ranks.all[1]._main.stall.age_s > SETTLE_S + 1)
    ranks.all[0].fail(RuntimeError("gloo: Timed out waiting 5000ms"))
    assert ranks.wait_for_exits(2) == {0: 1, 1: 1}
    assert "error: rank 1 is busy while others waited for too long: step 7, phase execute, " in capsys.readouterr().err
    assert json.loads(path.read_text())["message"]["message"].startswith("rank 1 is busy while")


def test_main_thread_exits_after_the_failure_is_known(make):
    ranks = make(2)
    ranks.start((0, 1))
    ranks.all[0].fail(ValueError("boom"))
    # The process ends in the watchdog's thread; this one, which waits for it, is left over here.
    with pytest.raises(SystemExit):
        ranks.all[0].leave(3)
    assert ranks.exits[0] == 3
    # Before it ended, so that no other rank waits for the word.
    assert ranks.all[0]._exchange.is_reported


def test_guest_without_close_is_named_to_waiting_ranks(make, monkeypatch):
    """Its program once seemed to have been killed."""
    ranks = make(2, exits=False, run_dir=None)
    ranks.start((0, 1))
    ranks.all[1].heartbeat.enter("closing", 3)
    ranks.all[1].leave_unclosed()
    # Before its groups are taken down, which may take a while.
    began_s = ranks.time.now_s
    ranks.wait_until(lambda: RankHeartbeat.unpack(ranks.store.values["watch/heartbeat/1"]).failure is not None)
    assert ranks.time.now_s == began_s
    ranks.all[1].stop()
    secondary = RuntimeError("gloo: Connection closed by peer")
    ranks.all[0].fail(secondary)
    cause = ranks.all[0].find_cause(secondary)
    assert cause.startswith(
        "rank 1 has left without close(): its program ended, or its LLM was deleted; last seen in step 3, phase closing"
    )


def test_guest_exception_is_named_when_it_leaves_unclosed(make, monkeypatch):
    ranks = make(2, exits=False, run_dir=None)
    ranks.start((0, 1))
    monkeypatch.setattr(sys, "last_value", KeyError("x"), raising=False)
    ranks.all[1].leave_unclosed()
    ranks.all[1].stop()
    secondary = RankFailedError("rank 1 is gone: no answer to step 3")
    ranks.all[0].fail(secondary)
    assert (
        ranks.all[0]
        .find_cause(secondary)
        .startswith("rank 1 has left without close() after KeyError: 'x': its program")
    )


def test_closed_guest_is_named_while_others_go_on(make):
    ranks = make(2, exits=False, run_dir=None)
    ranks.start((0, 1))
    ranks.all[1].stop()
    secondary = RuntimeError("gloo: Connection closed by peer")
    ranks.all[0].fail(secondary)
    assert ranks.all[0].find_cause(secondary).startswith("rank 1 has ended while others went on: last seen in step 0, ")


def test_guests_leaving_together_without_close_are_no_failure(make, caplog, capsys):
    ranks = make(2, exits=False, run_dir=None)
    ranks.start((0, 1))
    for each in ranks.all:
        each.heartbeat.enter("between steps")
    ranks.all[1].leave_unclosed()
    ranks.all[1].stop()
    ranks.time.advance(20.0)
    ranks.all[0].leave_unclosed()
    ranks.stop()
    assert caplog.records == []
    assert capsys.readouterr().err == ""


def test_watchdog_stop_leaves_no_thread(make):
    # One that an earlier test has left may end meanwhile.
    before = threading.enumerate()
    ranks = make(2)
    ranks.start((0, 1))
    assert sum(thread not in before for thread in threading.enumerate()) == 4
    ranks.stop()
    ranks.stop()
    assert [thread for thread in threading.enumerate() if thread not in before] == []


def named_apart(ranks: Ranks, *ours: int) -> None:
    """Each rank found a first name of its own."""
    for rank in ours:
        ranks.all[rank]._exchange._connect = lambda rank=rank: HeartbeatStore(
            ranks.store, f"watch/heartbeat/{rank}/run"
        )


@pytest.mark.parametrize("joins", [True, False])
def test_ranks_with_different_names_meet_under_agreed_name(make, joins: bool):
    """A rank that had made an attempt more was never heard, and its failure was told as no heartbeat since the start.
    The second is the control.
    """
    ranks = make(2, exits=False, run_dir=None)
    named_apart(ranks, 0, 1)
    for each in ranks.all:
        ranks.begin(each)
    ranks.wait_until(lambda: all(each._exchange.is_connected for each in ranks.all))
    if joins:
        for each in ranks.all:
            each.join_run("r")
        ranks.wait_until(lambda: all(len(each._exchange.peers.published) == 1 for each in ranks.all))
    ranks.all[1].fail(ValueError("boom"))
    secondary = RuntimeError("gloo: Connection closed by peer")
    ranks.all[0].fail(secondary)
    expected = "rank 1 raised ValueError while starting: boom" if joins else None
    cause = ranks.all[0].find_cause(secondary)
    assert cause == (expected or "rank 1 is silent: no heartbeat since the start")


def test_failed_attempt_is_forgotten_when_next_attempt_joins(make, caplog):
    """Rank 1 failed, and tried again, while rank 0 waited for it: rank 0's watchdog had ended by then."""
    ranks = make(2, exits=False, run_dir=None)
    ranks.start((0, 1))
    ranks.all[1].fail(ConfigError("seed=x"))
    ranks.wait_until(lambda: ranks.all[0]._diagnosis is not None)
    ranks.all[1].stop()
    again = Watchdog(Watched(1, (0, 1), LONG_S), lambda: HeartbeatStore(ranks.store, "watch/again"), ranks.time.clock())
    ranks.all.append(again)
    ranks.begin(again)
    for each in (ranks.all[0], again):
        each.join_run("r")
    ranks.wait_until(lambda: ranks.all[0]._exchange.peers.published == {1})
    ranks.time.advance(10.0)
    assert (ranks.all[0]._diagnosis, again._diagnosis, caplog.records) == (None, None, [])
    again.fail(ValueError("boom"))
    secondary = RuntimeError("gloo: Connection closed by peer")
    ranks.all[0].fail(secondary)
    assert ranks.all[0].find_cause(secondary) == "rank 1 raised ValueError while starting: boom"


def test_failure_before_joining_is_known_under_new_name(make):
    """A program's: a signal, say. Its process ends anyway."""
    ranks = make(2)
    ranks.start((0, 1))
    ranks.all[1].signalled()
    for each in ranks.all:
        each.join_run("r")
    assert ranks.wait_for_exits(2) == {0: 1, 1: 143}
    assert int(ranks.store.values["spmd_worker/watch/run r/alarms"]) >= 1


def test_ended_attempt_marks_its_first_name_and_run(make):
    """A failed attempt marks its name as over, and so does one that joined a run."""
    ranks = make(3, exits=False, run_dir=None)
    for rank, each in enumerate(ranks.all):
        each._exchange._connect = lambda rank=rank: HeartbeatStore(ranks.store, f"watch/first{rank}")
        ranks.begin(each)
    ranks.wait_until(lambda: all(f"watch/first{rank}/heartbeat/{rank}" in ranks.store.values for rank in range(3)))
    ranks.all[0].stop()
    ranks.all[1].join_run("r")
    ranks.wait_until(lambda: "spmd_worker/watch/run r/heartbeat/1" in ranks.store.values)
    assert [f"watch/first{rank}/over" in ranks.store.values for rank in range(3)] == [True, True, False]


def test_recovered_store_is_used_under_the_run_name(make, caplog):
    """One error ended the exchange for good, and the other ranks took this one for silent and killed it."""
    ranks = make(2, timeout_s=20.0)
    ranks.start((0, 1))
    for each in ranks.all:
        each.heartbeat.enter("between steps")
        each.join_run("r")
    ranks.time.advance(5.0)
    ranks.store.is_gone = True
    ranks.time.advance(18.0)
    assert all(each._exchange.is_lost for each in ranks.all)
    counts = [each._count for each in ranks.all]
    ranks.store.is_gone = False
    ranks.wait_until(lambda: not any(each._exchange.is_lost for each in ranks.all))
    ranks.time.advance(30.0)
    assert ranks.exits == {}
    warnings = [record.getMessage() for record in caplog.records]
    assert warnings == 2 * [
        "the heartbeat store does not answer (Broken pipe): until it does, other ranks may consider this one silent"
    ]
    for rank, count in enumerate(counts):
        last = RankHeartbeat.unpack(ranks.store.values[f"spmd_worker/watch/run r/heartbeat/{rank}"])
        assert last.count > count
    ranks.all[1].fail(ValueError("boom"))
    assert ranks.wait_for_exits(2) == {0: 1, 1: 1}


def test_remote_ranks_are_not_silent_during_store_outage(make):
    ranks = make(2, timeout_s=20.0)
    ranks.start((0,))
    ranks.all[0].heartbeat.enter("between steps")
    far = RankHeartbeat(1, "another node", 7, 8, 1, 5, "between steps")
    publish(ranks.store, far)
    ranks.wait_until(lambda: ranks.all[0]._exchange.statuses()[1].last_heartbeat == far)
    ranks.time.advance(10.0)
    ranks.store.is_gone = True
    ranks.time.advance(7.0)
    ranks.store.is_gone = False
    ranks.wait_until(lambda: not ranks.all[0]._exchange.is_lost)
    assert ranks.all[0]._exchange.statuses()[1].heard_ago_s < 1.0
    # Long after what would have been its silence.
    ranks.time.advance(15.0)
    assert (ranks.exits, ranks.all[0]._diagnosis) == ({}, None)
    # Control: it is silent all the same.
    assert ranks.wait_for_exits(1) == {0: 1}


def test_rank_publishes_its_end_when_the_store_recovers(make):
    """It left without a word, and the others missed its process."""
    ranks = make(2, timeout_s=20.0)
    ranks.start((0, 1))
    ranks.store.is_gone = True
    ranks.wait_until(lambda: all(each._exchange.is_lost for each in ranks.all))
    ranks.store.is_gone = False
    ranks.all[1].stop()
    assert RankHeartbeat.unpack(ranks.store.values["watch/heartbeat/1"]).has_ended
    ranks.wait_until(lambda: not ranks.all[0]._exchange.is_lost)
    # Where it does not answer the end waits for nothing.
    ranks.store.is_gone = True
    ranks.wait_until(lambda: ranks.all[0]._exchange.is_lost)
    ranks.all[0].stop()
    assert not ranks.all[0]._exchange._thread.is_alive()


def test_store_loss_is_logged_each_time(make, caplog):
    ranks = make(2, timeout_s=200.0)
    ranks.start((0,))
    for num_losses in (1, 2):
        ranks.store.is_gone = True
        ranks.time.advance(10.0)
        ranks.store.is_gone = False
        ranks.wait_until(lambda: not ranks.all[0]._exchange.is_lost)
        assert len(caplog.records) == num_losses


def test_gone_process_is_forgotten_when_its_rank_rejoins(make, monkeypatch, caplog):
    """Rank 1 was started again on the same node. Rank 0 raised an alarm in the new run, and looked for a heartbeat."""
    ranks = make(2, timeout_s=20.0, exits=False)
    is_there = monkeypatch.setattr
    ranks.start((0, 1))
    ranks.all[1].fail(ConfigError("seed=x"))
    ranks.wait_until(lambda: ranks.all[0]._diagnosis is not None)
    ranks.all[1].stop()
    is_there(ranks.all[0]._exchange.peers, "_has_no_process", lambda last_heartbeat: True)
    ranks.wait_until(lambda: ranks.all[0]._exchange.peers._gone.get(1) is not None)
    ranks.all[0].join_run("r")
    ranks.wait_until(lambda: not ranks.all[0]._exchange.is_moving)
    assert ranks.all[0]._exchange.peers._gone.get(1) is None
    ranks.time.advance(5.0)
    assert ranks.all[0]._thread.is_alive()
    assert not ranks.all[0]._exchange.is_alarmed


def test_alarm_is_raised_after_the_store_recovers(make):
    ranks = make(2, exits=False, run_dir=None)
    ranks.start((0, 1))
    ranks.store.is_gone = True
    ranks.all[1]._exchange.alarm()
    ranks.wait_until(lambda: ranks.all[1]._exchange.is_lost)
    assert ranks.store.values["watch/alarms"] == b"0"
    ranks.store.is_gone = False
    ranks.wait_until(lambda: ranks.store.values["watch/alarms"] == b"1")


def test_store_connection_retries_back_off_until_the_end(make):
    asked_s: list[float] = []
    ranks = make(2)

    def connect() -> HeartbeatStore:
        asked_s.append(ranks.time.now_s)
        raise ConnectionError("Connection refused")

    ranks.all[0]._exchange._connect = connect
    ranks.begin(ranks.all[0])
    ranks.wait_until(lambda: len(asked_s) == 6)
    assert asked_s == [0.0, 0.5, 1.5, 3.5, 7.5, 11.5]
    ranks.stop()
    assert not ranks.all[0]._exchange._thread.is_alive()


def publish(store: MadeUpStore, last_heartbeat: RankHeartbeat) -> None:
    store.set(f"watch/heartbeat/{last_heartbeat.rank}", last_heartbeat.pack().decode())
