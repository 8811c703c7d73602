"""Nobody waits for what hangs."""

import threading

import pytest

from spmd_worker.base.liveness.bounded import within


def test_what_is_done_in_time_is_returned():
    assert within(10.0, lambda: 7) == 7


def test_what_hangs_is_left_alone():
    may_go = threading.Event()
    # A thread that joins it waits for ever.
    assert within(0.05, may_go.wait) is None
    may_go.set()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_raises_is_as_good_as_late():
    assert within(10.0, lambda: 1 // 0) is None
