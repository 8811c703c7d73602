"""Python's garbage collection in long-running programs."""

import contextlib
import gc
import threading
from collections.abc import Iterator
from typing import Final

_held: Final = threading.Event()


def hold_collections() -> None:
    """Disable collections until `resume_collections`, first in our programs: modules are hundreds of thousands of
    objects without garbage, and collections would take a fifth of their import time. Not for a caller's process. Has no
    effect if collections are disabled already.
    """
    if gc.isenabled():
        gc.disable()
        _held.set()


def resume_collections() -> None:
    """Enable collections after the imports; they ignore the objects that exist now. No effect if none are held."""
    if _held.is_set():
        _held.clear()
        gc.freeze()
        gc.enable()


def has_frozen_objects() -> bool:
    """Python counts all of them to answer: a tenth of a second for two million."""
    return gc.get_freeze_count() > 0


@contextlib.contextmanager
def settled_objects() -> Iterator[None]:
    """Context in which full collections ignore the objects that survived the first one: modules and the engine, which
    would take 0.07 s every few hundred rows. It waits for that first collection and triggers none. Has no effect in a
    caller's process with frozen objects, because these could not be distinguished afterwards.
    """
    if has_frozen_objects():
        yield
        return

    def settle(phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and info["generation"] == 2:
            # The garbage has just been freed.
            gc.freeze()
            gc.callbacks.remove(settle)

    gc.callbacks.append(settle)
    try:
        yield
    finally:
        if settle in gc.callbacks:
            gc.callbacks.remove(settle)
        else:
            # The caller's process continues.
            gc.unfreeze()
