"""Python's collection of garbage in a program that runs for long."""

import contextlib
import gc
import threading
from collections.abc import Iterator
from typing import Final

_held: Final = threading.Event()


def hold_collections() -> None:
    """For a program of ours, first of all: no garbage is looked for until `resume_collections`. Modules are hundreds of
    thousands of objects and no garbage; looking among them again and again is a fifth of the time of their imports.

    Not for a caller's process. Where collections are off already they stay so.
    """
    if gc.isenabled():
        gc.disable()
        _held.set()


def resume_collections() -> None:
    """After the imports: collections go on, and pass over what is there by now. Without effect where none are held."""
    if _held.is_set():
        _held.clear()
        gc.freeze()
        gc.enable()


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
