"""Waiting in tests: until something is so, with a limit that only what is broken reaches.

The one file of tests that compares a clock (tests/architecture/test_clocks_in_tests.py). A limit is at least twenty
times what the wait takes on a quiet machine: it says that something hangs, not that it was slow.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic, sleep

LIMIT_S = 120.0


class NotInTime(AssertionError):
    """What was waited for did not come."""


def wait_until(is_so: Callable[[], object], limit_s: float = LIMIT_S, poll_s: float = 0.01) -> None:
    """Wait until `is_so` returns true. Raises NotInTime after `limit_s`."""
    deadline_s = monotonic() + limit_s
    while not is_so():
        if monotonic() > deadline_s:
            raise NotInTime(f"not so after {limit_s} s: {is_so}")
        sleep(poll_s)


@contextmanager
def at_least(seconds: float) -> Iterator[None]:
    """What is done takes at least so long: what waits for a timeout does not give up before it.

    Being late is no failure, so this cannot fail by chance.
    """
    began_s = monotonic()
    yield
    took_s = monotonic() - began_s
    assert took_s >= seconds, f"took {took_s:.3f} s, which is less than {seconds} s"
