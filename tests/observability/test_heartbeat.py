"""What a rank says of itself, and what is found out beside it."""

import os
import subprocess
import sys
import threading
import time

import pytest

from spmd_worker.observability import heartbeat
from spmd_worker.observability.heartbeat import (
    BETWEEN_STEPS,
    Beat,
    Failure,
    FailureKind,
    Heartbeat,
    StallClock,
    WatchClock,
    born_at,
    node_name,
    parent_of,
    stand_of,
)
from spmd_worker.observability.step_times import StepTimes


def test_the_phases_of_a_step_follow_one_another():
    beat = Heartbeat()
    times = StepTimes(beat)
    seen = [beat.now]
    times.begin()
    seen.append(beat.now)
    for phase in ("schedule", "lockstep", "execute", "apply"):
        times.end(phase)
        seen.append(beat.now)
    times.begin()
    seen.append(beat.now)
    assert seen == [
        (0, "starting"),
        (1, "schedule"),
        (1, "lockstep"),
        (1, "execute"),
        (1, "apply"),
        (1, BETWEEN_STEPS),
        (2, "schedule"),
    ]


def test_saying_where_a_step_is_takes_less_than_a_microsecond_or_two():
    beat = Heartbeat()
    started_s = time.perf_counter()
    for _ in range(10_000):
        beat.enter("execute")
    assert (time.perf_counter() - started_s) / 10_000 < 10e-6


def test_a_heartbeat_survives_its_way():
    beat = Beat(1, "a b", 77, 5, 3, 812, "execute", 1.5, "x.py:3 f", True, False, Failure(FailureKind.OWN, "é", 1, 2))
    assert Beat.unpack(beat.pack()) == beat
    assert Beat.unpack(Beat(0, "", 1, 2, 3, 4, "x").pack()).failure is None


@pytest.mark.parametrize("payload", [b"", b"{}", b"[]", b'{"failure": {"kind": "odd"}}', b'{"failure": null, "x": 1}'])
def test_what_is_no_heartbeat_is_refused(payload: bytes):
    with pytest.raises(ValueError):
        Beat.unpack(payload)


def test_a_process_is_known_by_its_birth_and_a_zombie_is_gone():
    own = born_at(os.getpid())
    assert own is not None
    assert own > 0
    assert node_name() == node_name() != ""
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    assert parent_of(child.pid) == os.getpid()
    deadline_s = time.monotonic() + 10
    while born_at(child.pid) is not None and time.monotonic() < deadline_s:
        time.sleep(0.01)
    # Nobody has asked for its exit code yet.
    assert born_at(child.pid) is None
    child.wait()
    assert parent_of(child.pid) is None


def test_the_line_of_a_thread_is_named_and_so_is_waiting_for_other_ranks(monkeypatch: pytest.MonkeyPatch):
    is_there, may_go = threading.Event(), threading.Event()

    def stand_still() -> None:
        is_there.set()
        may_go.wait()

    thread = threading.Thread(target=stand_still)
    thread.start()
    is_there.wait()
    where, is_waiting = stand_of(thread.ident)
    assert not is_waiting
    assert where.startswith("threading.py:")
    monkeypatch.setattr(heartbeat, "_OWN_PLACES", (os.path.basename(__file__),))
    monkeypatch.setattr(heartbeat, "_WAITING_PLACES", (os.path.basename(__file__),))
    where, is_waiting = stand_of(thread.ident)
    assert is_waiting
    assert where.endswith(" stand_still")
    may_go.set()
    thread.join()
    assert stand_of(thread.ident) == ("", False)


def test_a_stall_counts_from_the_last_move():
    beat = Heartbeat()
    beat.enter("execute", 3)
    stall = StallClock(beat)
    stall.look(10.0)
    assert stall.look(12.0) == (3, "execute")
    assert stall.stalled_s == 12.0
    beat.enter("execute", 4)
    stall.look(13.0)
    stall.look(15.0)
    assert (stall.age_s, stall.stalled_s) == (2.0, 2.0)


def test_computing_is_progress_while_a_rank_starts_and_not_in_a_step(monkeypatch: pytest.MonkeyPatch):
    beat, cpu_s = Heartbeat(), [0.0]
    monkeypatch.setattr(heartbeat.time, "process_time", lambda: cpu_s[0])
    beat.enter("loading the model")
    stall = StallClock(beat)
    for now_s in (100.0, 200.0, 300.0):
        cpu_s[0] += 50
        stall.look(now_s)
    assert (stall.age_s, stall.stalled_s) == (300.0, 0.0)
    stall.look(400.0)
    assert stall.stalled_s == 100.0
    beat.enter("execute", 1)
    stall.look(500.0)
    cpu_s[0] += 50
    stall.look(600.0)
    assert stall.stalled_s == 100.0


def test_a_pause_of_the_whole_process_hardly_counts(monkeypatch: pytest.MonkeyPatch):
    now_s = [1000.0]
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now_s[0])
    clock = WatchClock()
    now_s[0] += 0.25
    assert clock.tick() == 0.25
    now_s[0] += 3600
    assert clock.tick() == 1.25
