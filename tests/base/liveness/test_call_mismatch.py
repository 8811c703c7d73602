"""Ranks that wait in different calls are logged once, after a while, unless they merely wait."""

import logging

import pytest
from made_up_store import MadeUpStore

from spmd_worker.base.liveness import call_mismatch
from spmd_worker.base.liveness.call_mismatch import CallMismatch
from spmd_worker.base.liveness.failure_diagnosis import RankStatus
from spmd_worker.base.liveness.heartbeat import BETWEEN_STEPS, RankHeartbeat
from spmd_worker.base.liveness.heartbeat_store import HeartbeatStore
from spmd_worker.base.liveness.watchdog import Watchdog
from spmd_worker.base.liveness.watched import Watched

LIMIT_S = 10.0
GATHER = "channel.py:50 gather"


def status(rank: int, phase: str, waits_at: str = "", where: str = "script.py:1 f", step: int = 7) -> RankStatus:
    is_waiting = bool(waits_at)
    heartbeat = RankHeartbeat(rank, "node", 1, 1, 1, step, phase, where=waits_at or where, is_waiting=is_waiting)
    return RankStatus(rank, heartbeat)


APART = [
    [status(0, BETWEEN_STEPS), status(1, "lockstep", GATHER)],
    [status(0, BETWEEN_STEPS, GATHER), status(1, BETWEEN_STEPS)],
    [status(0, BETWEEN_STEPS, GATHER), status(1, BETWEEN_STEPS, "groups.py:9 barrier")],
]
TOGETHER = [
    [status(0, BETWEEN_STEPS), status(1, BETWEEN_STEPS)],
    [status(0, BETWEEN_STEPS, GATHER), status(1, BETWEEN_STEPS, GATHER)],
    [status(0, "execute"), status(1, "lockstep", GATHER)],
    [status(0, "loading the model"), status(1, "loading the model", GATHER)],
    [status(0, BETWEEN_STEPS, GATHER), RankStatus(1, None)],
]


@pytest.mark.parametrize("statuses", APART)
def test_diverged_ranks_are_reported_once_after_the_limit(statuses: list[RankStatus]):
    mismatch = CallMismatch(LIMIT_S)
    assert [mismatch.look(now_s, statuses) for now_s in (0.0, 9.9, 10.0, 11.0, 500.0)] == [None, None, 10.0, None, None]


@pytest.mark.parametrize("statuses", TOGETHER)
def test_ranks_working_or_waiting_together_are_not_reported(statuses: list[RankStatus]):
    mismatch = CallMismatch(LIMIT_S)
    assert [mismatch.look(now_s, statuses) for now_s in (0.0, 10.0, 500.0)] == [None] * 3


def test_divergence_limit_restarts_when_a_rank_moves():
    """A rank that only works does not move."""
    mismatch = CallMismatch(LIMIT_S)
    waits = status(1, "lockstep", GATHER)
    assert mismatch.look(0.0, [status(0, BETWEEN_STEPS), waits]) is None
    # The line that a program is in says nothing.
    assert mismatch.look(9.0, [status(0, BETWEEN_STEPS, where="script.py:2 g"), waits]) is None
    assert mismatch.look(10.0, [status(0, BETWEEN_STEPS), waits]) == 10.0
    # As an idle server's ranks do, whose steps are empty.
    for step in (8, 9, 10):
        waits = status(1, "lockstep", GATHER, step=step)
        assert mismatch.look(10.0 * step, [status(0, BETWEEN_STEPS, step=step), waits]) is None
    assert mismatch.look(110.0, [status(0, BETWEEN_STEPS, step=10), waits]) == 10.0


@pytest.mark.parametrize(("rank", "num_said"), [(0, 1), (1, 0)])
def test_watchdog_of_rank_0_logs_diverged_ranks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, rank: int, num_said: int
):
    own = Watchdog(Watched(rank, (0, 1), 3 * LIMIT_S), lambda: HeartbeatStore(MadeUpStore(), "watch"))
    own._exchange.is_connected = True
    monkeypatch.setattr(own._exchange, "statuses", lambda: APART[0])
    monkeypatch.setattr(call_mismatch.logger, "propagate", True)
    monkeypatch.setattr(own._main, "look", lambda: None)
    now_s = iter((0.0, LIMIT_S, 2 * LIMIT_S))
    monkeypatch.setattr(own._clock, "tick", lambda: next(now_s))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            own._look()
    assert len(caplog.records) == num_said
    for record in caplog.records:
        first, *lines = record.getMessage().splitlines()
        assert first.startswith("ranks wait for others that are between steps, for 10.0 s now")
        assert ["works at script.py:1 f" in lines[0], "waits for others at channel.py:50 gather" in lines[1]] == [
            True
        ] * 2
