"""Python's collection of garbage in a program that runs for long."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def settled_objects() -> Iterator[None]:
    """While it lasts, full collections pass over what had outlived the first of them: modules and the engine, of which
    each would take 0.07 s to look at, every few hundred rows. Waits for that first one, and asks for none.

    A caller's process that has frozen objects itself keeps just those: which they are cannot be told apart afterwards.
    """
    if gc.get_freeze_count():
        yield
        return

    def settle(phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and info["generation"] == 2:
            # What was garbage has just gone.
            gc.freeze()
            gc.callbacks.remove(settle)

    gc.callbacks.append(settle)
    try:
        yield
    finally:
        if settle in gc.callbacks:
            gc.callbacks.remove(settle)
        else:
            # A caller's process goes on.
            gc.unfreeze()
