"""Driven time passes when all threads wait, and only then."""

import threading

from driven_time import DrivenTime
from waiting import wait_until


def test_driven_time_advances_to_the_earliest_waiter():
    time = DrivenTime()
    seen: list[tuple[str, float]] = []

    def wait_for(name: str, seconds: float) -> None:
        time.advance(seconds)
        seen.append((name, time.now_s))

    threads = [threading.Thread(target=wait_for, args=each) for each in (("late", 7.0), ("early", 3.0))]
    for thread in threads:
        thread.start()
    wait_until(lambda: all(time.takes_part(thread) for thread in threads))
    assert (time.now_s, seen) == (0.0, [])
    time.advance(5.0)
    wait_until(lambda: seen)
    assert (time.now_s, seen) == (5.0, [("early", 3.0)])
    assert time.wait_until(lambda: not any(thread.is_alive() for thread in threads))
    assert (time.now_s, seen) == (7.0, [("early", 3.0), ("late", 7.0)])


def test_driven_wait_ends_at_event_or_limit():
    """An event ends the wait without time passing; the limit ends it without the event."""
    time = DrivenTime()
    clock, event = time.clock(), threading.Event()
    assert not clock.wait(event, 2.0)
    threading.Timer(0.05, event.set).start()
    thread = threading.Thread(target=event.wait)
    thread.start()
    # A thread that is at work, for all that the clock knows, until the event is set.
    time._waiting[thread] = None
    assert clock.wait(event, 1000.0)
    assert (time.now_s, clock.tick()) == (2.0, 1.0)
    thread.join()
