"""A time limit for actions that may hang: a disk that does not answer, a stopped terminal."""

import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


def within(limit_s: float, action: Callable[[], Result]) -> Result | None:
    """Run `action` in its own thread and wait `limit_s` at most. None when it was late, or raised."""
    results: list[Result] = []
    thread = threading.Thread(target=lambda: results.append(action()), name="spmd-bounded", daemon=True)
    thread.start()
    thread.join(limit_s)
    return results[0] if results else None
