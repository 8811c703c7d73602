"""Seconds of a worker's start by part, for one line of the log."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class StartTimes:
    """Call `part` around each part. Time between parts, in which ranks wait for each other, is listed as `other`."""

    def __init__(self, now_s: Callable[[], float] = time.perf_counter) -> None:
        self._now_s, self._began_s = now_s, now_s()
        self.seconds: dict[str, float] = {}
        self._notes: dict[str, str] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A part that contains no other; parts of the same name are added up."""
        began_s = self._now_s()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + self._now_s() - began_s

    def move(self, seconds: float, source: str, target: str) -> None:
        """Count some seconds of one part as another."""
        self.seconds[source] -= seconds
        self.seconds[target] = self.seconds.get(target, 0.0) + seconds

    def note(self, name: str, words: str) -> None:
        """Text after a part's seconds, in parentheses."""
        self._notes[name] = words

    def __str__(self) -> str:
        """`8.3 s: device 0.4, weights 3.1 (16.1 GB at 5.2 GB/s), other 0.1`, in the order of their beginnings."""
        total_s = self._now_s() - self._began_s
        parts = {**self.seconds, "other": total_s - sum(self.seconds.values())}
        words = [
            f"{name} {seconds:.2f}{f' ({self._notes[name]})' if name in self._notes else ''}"
            for name, seconds in parts.items()
        ]
        return f"{total_s:.2f} s: {', '.join(words)}"
