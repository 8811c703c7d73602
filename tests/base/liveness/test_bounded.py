"""Nobody waits for what hangs."""

import threading

import pytest

from spmd_worker.base.liveness.bounded import within


def test_bounded_call_returns_its_result():
    assert within(10.0, lambda: 7) == 7


def test_bounded_call_abandons_a_hanging_action():
    may_go = threading.Event()
    # A thread that joins it waits for ever.
    assert within(0.05, may_go.wait) is None
    may_go.set()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_bounded_call_returns_none_when_action_raises():
    assert within(10.0, lambda: 1 // 0) is None
