"""What is progress and what is a stall, in literal seconds."""

import pytest

from spmd_worker.base.liveness import stall_clock
from spmd_worker.base.liveness.heartbeat import BETWEEN_STEPS, CLOSING, Heartbeat
from spmd_worker.base.liveness.stall_clock import StallClock, WatchClock

MAIN = 77


class MadeUpThread:
    """What the main thread computes; `cpu_s` None: the system does not say."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cpu_s: float | None = 0.0
        monkeypatch.setattr(stall_clock, "cpu_seconds_of", lambda native_id: self.cpu_s if native_id == MAIN else None)


@pytest.fixture
def thread(monkeypatch: pytest.MonkeyPatch) -> MadeUpThread:
    return MadeUpThread(monkeypatch)


def test_stall_counts_from_the_last_move(thread: MadeUpThread):
    last_heartbeat = Heartbeat()
    last_heartbeat.enter("execute", 3)
    stall = StallClock(last_heartbeat)
    stall.look(10.0, MAIN, False)
    assert stall.look(12.0, MAIN, False) == (3, "execute")
    assert stall.stalled_s == 12.0
    last_heartbeat.enter("execute", 4)
    stall.look(13.0, MAIN, False)
    stall.look(15.0, MAIN, True)
    assert (stall.age_s, stall.stalled_s) == (2.0, 2.0)


def test_stall_ends_while_the_step_computes(thread: MadeUpThread):
    """A slow step that computes is no stall; one that stops computing is."""
    last_heartbeat = Heartbeat()
    last_heartbeat.enter("execute", 1)
    stall = StallClock(last_heartbeat)
    thread.cpu_s = 50.0
    stall.look(100.0, MAIN, False)
    # What was computed before the first look does not count.
    assert stall.stalled_s == 100.0
    for now_s in (200.0, 300.0):
        thread.cpu_s += 50
        stall.look(now_s, MAIN, False)
    assert (stall.age_s, stall.stalled_s) == (300.0, 0.0)
    # A wait from which the thread wakes up now and then.
    thread.cpu_s += 1
    stall.look(400.0, MAIN, False)
    assert stall.stalled_s == 100.0
    thread.cpu_s = None
    stall.look(500.0, MAIN, False)
    assert stall.stalled_s == 200.0


def test_computing_is_measured_per_second_at_any_rate(thread: MadeUpThread):
    """The number of looks has no effect."""
    last_heartbeat = Heartbeat()
    last_heartbeat.enter("execute", 1)
    stall = StallClock(last_heartbeat)
    stall.look(10.0, MAIN, False)
    # The kernel's smallest amount, in the middle of twenty looks.
    for look in range(1, 21):
        thread.cpu_s += 0.01 if look == 10 else 0
        stall.look(10.0 + 0.05 * look, MAIN, False)
    assert stall.stalled_s == pytest.approx(11.0)


def test_computing_is_no_progress_when_waiting_spins(thread: MadeUpThread):
    last_heartbeat = Heartbeat()
    last_heartbeat.enter("execute", 1)
    stall = StallClock(last_heartbeat, spins=True)
    for now_s in (1.0, 2.0, 3.0):
        thread.cpu_s += 1
        stall.look(now_s, MAIN, False)
    assert stall.stalled_s == 3.0


def test_starting_rank_stalls_only_while_waiting_for_others(thread: MadeUpThread):
    """A model that comes over a slow network, a compiler in another process, a lock: nothing here computes."""
    last_heartbeat = Heartbeat()
    last_heartbeat.enter("loading the model")
    stall = StallClock(last_heartbeat)
    stall.look(3600.0, MAIN, False)
    assert (stall.age_s, stall.stalled_s) == (3600.0, 0.0)
    stall.look(3700.0, MAIN, True)
    assert stall.stalled_s == 100.0


def test_stall_never_counts_between_steps_but_while_closing(thread: MadeUpThread):
    last_heartbeat = Heartbeat()
    last_heartbeat.enter(BETWEEN_STEPS, 5)
    stall = StallClock(last_heartbeat)
    stall.look(3600.0, MAIN, True)
    assert (stall.age_s, stall.stalled_s) == (3600.0, 0.0)
    last_heartbeat.enter(CLOSING)
    stall.look(3601.0, MAIN, True)
    stall.look(3611.0, MAIN, True)
    assert stall.stalled_s == 10.0


def test_watch_clock_limits_a_pause_of_the_process():
    now_s = [1000.0]
    clock = WatchClock(lambda: now_s[0])
    now_s[0] += 0.25
    assert clock.tick() == 0.25
    now_s[0] += 3600
    assert clock.tick() == 1.25
