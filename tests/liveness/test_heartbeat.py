"""What a rank says of itself, and what is found out beside it."""

import contextlib
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ranks
from waiting import LIMIT_S, wait_until

from spmd_worker.liveness import heartbeat
from spmd_worker.liveness.heartbeat import (
    BETWEEN_STEPS,
    Failure,
    FailureKind,
    Heartbeat,
    RankHeartbeat,
    born_at,
    cpu_seconds_of,
    current_frames,
    node_name,
    parent_of,
    stand_of,
)
from spmd_worker.metrics.step_times import StepTimes


def test_the_phases_of_a_step_follow_one_another():
    last_heartbeat = Heartbeat()
    times = StepTimes(last_heartbeat)
    seen = [last_heartbeat.now]
    times.begin()
    seen.append(last_heartbeat.now)
    for phase in ("schedule", "lockstep", "execute", "apply"):
        times.end(phase)
        seen.append(last_heartbeat.now)
    times.begin()
    seen.append(last_heartbeat.now)
    assert seen == [
        (0, "starting"),
        (1, "schedule"),
        (1, "lockstep"),
        (1, "execute"),
        (1, "apply"),
        (1, "execute"),
        (2, "schedule"),
    ]


def test_with_several_steps_under_way_phases_come_in_another_order_and_each_is_a_move():
    """A step is begun while two others are in flight, of which the older is then taken in."""
    last_heartbeat = Heartbeat()
    times = StepTimes(last_heartbeat)
    seen = []
    times.begin(7)
    for phase in ("schedule", "lockstep", "execute", "apply", "execute", "apply", "execute"):
        times.end(phase)
        seen.append(last_heartbeat.now)
    assert [moment.phase for moment in seen] == ["lockstep", "execute", "apply", "execute", "apply", "execute", "apply"]
    assert {moment.step for moment in seen} == {7}
    assert len({id(moment) for moment in seen}) == len(seen)
    last_heartbeat.enter(BETWEEN_STEPS)
    assert last_heartbeat.now == (7, BETWEEN_STEPS)


@pytest.mark.stress
def test_saying_where_a_step_is_takes_less_than_a_microsecond_or_two():
    last_heartbeat = Heartbeat()
    started_s = time.perf_counter()
    for _ in range(10_000):
        last_heartbeat.enter("execute")
    assert (time.perf_counter() - started_s) / 10_000 < 10e-6


def test_a_heartbeat_survives_its_way():
    last_heartbeat = RankHeartbeat(
        1, "a b", 77, 5, 3, 812, "execute", 1.5, "x.py:3 f", True, False, Failure(FailureKind.PRIMARY, "é", 1, 2)
    )
    assert RankHeartbeat.unpack(last_heartbeat.pack()) == last_heartbeat
    assert RankHeartbeat.unpack(RankHeartbeat(0, "", 1, 2, 3, 4, "x").pack()).failure is None


@pytest.mark.parametrize("payload", [b"", b"{}", b"[]", b'{"failure": {"kind": "odd"}}', b'{"failure": null, "x": 1}'])
def test_what_is_no_heartbeat_is_refused(payload: bytes):
    with pytest.raises(ValueError):
        RankHeartbeat.unpack(payload)


def test_a_process_is_known_by_its_birth_and_a_zombie_is_gone():
    own = born_at(os.getpid())
    assert own is not None
    assert own > 0
    assert node_name() == node_name() != ""
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    assert parent_of(child.pid) == os.getpid()
    # Nobody has asked for its exit code yet.
    wait_until(lambda: born_at(child.pid) is None)
    child.wait()
    assert parent_of(child.pid) is None


def test_the_files_in_which_a_rank_waits_for_others_are_there():
    """They were moved once, and ranks that waited were taken for ranks that hung."""
    own = [place for place in heartbeat._WAITING_PLACES if place.startswith("/spmd_worker/")]
    assert len(own) == len(heartbeat._WAITING_PLACES) - 1
    assert [place for place in own if not (ranks.REPOSITORY / place[1:]).is_file()] == []


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


def test_what_a_thread_computed_is_known_and_nothing_of_one_that_is_not_there():
    is_there, may_go = threading.Event(), threading.Event()
    idle = threading.Thread(target=lambda: (is_there.set(), may_go.wait()))
    idle.start()
    is_there.wait()
    before_s = cpu_seconds_of(threading.get_native_id())
    deadline_s = time.thread_time() + 0.1
    while time.thread_time() < deadline_s:
        continue
    assert 0.05 < cpu_seconds_of(threading.get_native_id()) - before_s < 1.0
    assert cpu_seconds_of(idle.native_id) < 0.05
    may_go.set()
    idle.join()
    assert cpu_seconds_of(2**22 + 1) is None


def test_a_process_about_which_nothing_can_be_told_is_not_taken_for_dead(monkeypatch: pytest.MonkeyPatch):
    """With too many files open /proc cannot be read, and every other rank would look dead."""

    def fail(*arguments: object, **options: object) -> str:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(heartbeat.Path, "read_text", fail)
    with pytest.raises(OSError, match="Too many open files"):
        born_at(os.getpid())
    assert cpu_seconds_of(os.getpid()) is None


LOOKING = """
import gc, sys, threading, time
from spmd_worker.liveness.heartbeat import current_frames

class Litter:
    def __init__(self):
        self.itself = self
    def __del__(self):
        # Lets go of the interpreter, as any finalizer may.
        time.sleep(0.001)

def start_threads():
    while True:
        thread = threading.Thread(target=lambda: None)
        thread.start()
        thread.join()

look = {"ours": current_frames, "plain": sys._current_frames}[sys.argv[1]]
gc.set_threshold(10)
threading.Thread(target=start_threads, daemon=True).start()
for _ in range(int(sys.argv[2])):
    gc.disable()
    litter = [Litter() for _ in range(20)]
    del litter
    # What asks for memory next collects it.
    gc.enable()
    look()
    assert gc.isenabled()
    sys.stdout.write(".")
    sys.stdout.flush()
"""
NUM_LOOKS = 100


@contextlib.contextmanager
def looking_at_threads(way: str, num_looks: int, looks: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that leaves a byte in `looks` for each look."""
    environment = {**os.environ, "PYTHONPATH": str(ranks.REPOSITORY)}
    with looks.open("wb") as stdout:
        command = [sys.executable, "-c", LOOKING, way, str(num_looks)]
        process = subprocess.Popen(command, env=environment, stdout=stdout)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_looking_at_threads_while_others_start_and_garbage_is_collected_waits_for_nobody(tmp_path: Path):
    with looking_at_threads("ours", NUM_LOOKS, tmp_path / "looks") as process:
        assert process.wait(LIMIT_S) == 0
    assert (tmp_path / "looks").stat().st_size == NUM_LOOKS


@pytest.mark.skipif(sys.version_info >= (3, 11, 9), reason="Python 3.11.9 collects nothing meanwhile")
def test_the_interpreters_own_way_to_look_waits_for_ever(tmp_path: Path):
    """Negative control: sooner or later no look comes any more. Whether that takes long decides nothing."""
    looks, seen = tmp_path / "looks", [-1]

    def is_stuck() -> bool:
        num_looks = looks.stat().st_size
        seen[:] = [num_looks, *(seen if seen[0] == num_looks else [])]
        return len(seen) == 300

    with looking_at_threads("plain", 10**9, looks) as process:
        wait_until(is_stuck)
        assert process.poll() is None


def test_who_collects_no_garbage_does_not_after_a_look_either():
    gc.disable()
    try:
        assert threading.get_ident() in current_frames()
        assert not gc.isenabled()
    finally:
        gc.enable()
