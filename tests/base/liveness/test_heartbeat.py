"""The heartbeat of this rank: step, phase, line of code, and whether it waits for other ranks."""

import contextlib
import gc
import importlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
import ranks
from forked_child import in_child
from waiting import LIMIT_S, wait_until

from spmd_worker.base.liveness import heartbeat
from spmd_worker.base.liveness.heartbeat import (
    BETWEEN_STEPS,
    WAITING_MARK,
    Failure,
    FailureKind,
    Heartbeat,
    RankHeartbeat,
    location_of,
)
from spmd_worker.base.metrics.step_times import StepTimes

MODULES_THAT_WAIT = [
    "spmd_worker.ranks.transport.step_channel",
    "spmd_worker.ranks.transport.channel",
    "spmd_worker.engine.data_parallel.round",
    "spmd_worker.frontends.batch.shared_job",
    "spmd_worker.ranks.shared_memory",
]


def test_heartbeat_phases_follow_the_step():
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


def test_heartbeat_phases_interleave_with_steps_in_flight():
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
@pytest.mark.timed
def test_heartbeat_enter_takes_under_ten_microseconds():
    last_heartbeat = Heartbeat()
    started_s = time.perf_counter()
    for _ in range(10_000):
        last_heartbeat.enter("execute")
    assert (time.perf_counter() - started_s) / 10_000 < 10e-6


def test_heartbeat_survives_packing():
    last_heartbeat = RankHeartbeat(
        1, "a b", 77, 5, 3, 812, "execute", 1.5, "x.py:3 f", True, False, Failure(FailureKind.PRIMARY, "é", 1, 2)
    )
    assert RankHeartbeat.unpack(last_heartbeat.pack()) == last_heartbeat
    assert RankHeartbeat.unpack(RankHeartbeat(0, "", 1, 2, 3, 4, "x").pack()).failure is None


@pytest.mark.parametrize("payload", [b"", b"{}", b"[]", b'{"failure": {"kind": "odd"}}', b'{"failure": null, "x": 1}'])
def test_heartbeat_unpack_rejects_invalid_payload(payload: bytes):
    with pytest.raises(ValueError):
        RankHeartbeat.unpack(payload)


def test_thread_location_names_line_and_waiting(monkeypatch: pytest.MonkeyPatch):
    is_there, may_go = threading.Event(), threading.Event()

    def stand_still() -> None:
        is_there.set()
        may_go.wait()

    thread = threading.Thread(target=stand_still)
    thread.start()
    is_there.wait()
    # It may not have left the line before yet.
    wait_until(lambda: location_of(thread.ident)[0].startswith("threading.py:"))
    where, is_waiting = location_of(thread.ident)
    assert not is_waiting
    assert where.startswith("threading.py:")
    monkeypatch.setattr(heartbeat, "_OWN_PACKAGES", (__name__,))
    monkeypatch.setitem(globals(), WAITING_MARK, True)
    where, is_waiting = location_of(thread.ident)
    assert is_waiting
    assert where.endswith(" stand_still")
    may_go.set()
    thread.join()
    assert location_of(thread.ident) == ("", False)


class StandInFrame:
    """A frame that remembers whether garbage may be collected while the frame that called it is asked for."""

    f_globals: ClassVar[dict[str, object]] = {}
    f_code = test_heartbeat_unpack_rejects_invalid_payload.__code__
    f_lineno = 1

    def __init__(self, asked: list[bool], depth: int) -> None:
        self._asked, self._depth = asked, depth

    @property
    def f_back(self) -> "StandInFrame | None":
        self._asked.append(gc.isenabled())
        return StandInFrame(self._asked, self._depth - 1) if self._depth else None


def asked_while_walking(monkeypatch: pytest.MonkeyPatch, *, collects_at_allocations: bool) -> list[bool]:
    asked: list[bool] = []
    monkeypatch.setattr(heartbeat, "_COLLECTS_AT_ALLOCATIONS", collects_at_allocations)
    monkeypatch.setattr(sys, "_current_frames", lambda: {1: StandInFrame(asked, 3)})
    assert location_of(1)[0].endswith(":1 test_heartbeat_unpack_rejects_invalid_payload")
    return asked


def test_frame_walk_disables_garbage_collection(monkeypatch: pytest.MonkeyPatch):
    """To ask a frame for its caller makes an object; a finalizer run there could let the thread leave those frames."""
    assert gc.isenabled()
    assert asked_while_walking(monkeypatch, collects_at_allocations=True) == [False] * 4
    assert gc.isenabled()


def test_frame_walk_check_detects_garbage_collection(monkeypatch: pytest.MonkeyPatch):
    """Negative control: as it is where the interpreter does not collect at allocations."""
    assert asked_while_walking(monkeypatch, collects_at_allocations=False) == [True] * 4


@pytest.mark.parametrize("name", MODULES_THAT_WAIT)
def test_thread_in_waiting_module_is_seen_waiting(name: str):
    """A copy of the module's namespace, with a function that waits in it."""
    namespace = {**vars(importlib.import_module(name)), "is_there": threading.Event(), "may_go": threading.Event()}
    exec("def stand_still():\n    is_there.set()\n    may_go.wait()", namespace)
    thread = threading.Thread(target=namespace["stand_still"])
    thread.start()
    namespace["is_there"].wait()
    try:
        # It may not have left the line before yet.
        wait_until(lambda: location_of(thread.ident) == ("<string>:3 stand_still", True))
    finally:
        namespace["may_go"].set()
        thread.join()


LOOKING = """
import gc, os, sys, threading, time
from spmd_worker.base.liveness.heartbeat import location_of

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

ours = lambda: location_of(threading.main_thread().ident)
look = {"ours": ours, "plain": sys._current_frames}[sys.argv[1]]
gc.set_threshold(10)
threading.Thread(target=start_threads, daemon=True).start()
os.write(1, b".")
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
    """A process that leaves a byte in `looks` when it begins, and one for each look."""
    environment = {**os.environ, "PYTHONPATH": str(ranks.REPOSITORY)}
    with looks.open("wb") as stdout:
        command = [sys.executable, "-c", LOOKING, way, str(num_looks)]
        process = subprocess.Popen(command, env=environment, stdout=stdout)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.stress
def test_location_never_deadlocks_with_threads_and_collection(tmp_path: Path):
    with looking_at_threads("ours", NUM_LOOKS, tmp_path / "looks") as process:
        assert process.wait(LIMIT_S) == 0
    assert (tmp_path / "looks").stat().st_size == 1 + NUM_LOOKS


@pytest.mark.stress
@pytest.mark.skipif(sys.version_info >= (3, 11, 9), reason="Python 3.11.9 collects nothing meanwhile")
def test_location_check_detects_interpreter_deadlock(tmp_path: Path):
    """Negative control: sooner or later no look comes any more. Whether that takes long decides nothing."""
    looks, seen = tmp_path / "looks", [-1]

    def is_stuck() -> bool:
        num_looks = looks.stat().st_size
        seen[:] = [num_looks, *(seen if seen[0] == num_looks else [])]
        return num_looks > 0 and len(seen) == 300

    with looking_at_threads("plain", 10**9, looks) as process:
        wait_until(is_stuck)
        assert process.poll() is None


def test_location_leaves_garbage_collection_disabled():
    gc.disable()
    try:
        assert location_of(threading.get_ident())[0]
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_fork_during_a_look_leaves_a_free_child():
    """The child had a lock that nobody would release, and no garbage collection."""
    is_in = threading.Event()

    def look() -> None:
        with heartbeat._not_collecting():
            is_in.set()
            # The fork waits for the end of the look, however long that takes.
            time.sleep(0.05)

    def check() -> None:
        taken: list[bool] = []
        thread = threading.Thread(target=lambda: taken.append(heartbeat._looks.acquire(blocking=False)))
        thread.start()
        thread.join()
        assert (taken, gc.isenabled()) == ([True], True)

    thread = threading.Thread(target=look)
    thread.start()
    is_in.wait()
    assert in_child(check) == 0
    thread.join()
    assert gc.isenabled()
