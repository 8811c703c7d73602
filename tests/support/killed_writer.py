"""Calls that change files, in their order: counted, or the n-th of them ended by a kill or by an error.

    with calls_on_files(FileCalls()) as calls: ...               # calls.names
    with calls_on_files(FileCalls(number, kill)): ...            # in a forked child: nothing after it runs

A write that is ended has done half of its work. Only calls of this process's Python code are seen.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from spmd_worker.base import staged_folder

KILLED = 9
_NAMES = ("write", "fsync", "fdatasync", "mkdir", "rename", "replace", "link", "unlink", "rmdir")


def kill() -> None:
    """No handler and no `finally` runs."""
    os._exit(KILLED)


def full_disk() -> None:
    raise OSError(28, "No space left on device")


@dataclass
class FileCalls:
    """`end` is called in place of call `number`, from 0; never if it is negative."""

    number: int = -1
    end: Callable[[], None] = kill
    names: list[str] = field(default_factory=list)

    def before(self, name: str) -> bool:
        """Whether this is the call to end."""
        self.names.append(name)
        return len(self.names) - 1 == self.number


@contextmanager
def calls_on_files(calls: FileCalls) -> Iterator[FileCalls]:
    real_write = os.write

    def write(descriptor: int, data: Any) -> int:
        if calls.before("write"):
            real_write(descriptor, memoryview(data)[: len(data) // 2])
            calls.end()
        return real_write(descriptor, data)

    def wrapped(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if calls.before(name):
                calls.end()
            return real(*args, **kwargs)

        return call

    with (
        mock.patch.object(os, "write", write),
        mock.patch.object(staged_folder, "exchange", wrapped("exchange", staged_folder.exchange)),
    ):
        patches = [mock.patch.object(os, name, wrapped(name, getattr(os, name))) for name in _NAMES[1:]]
        for patch in patches:
            patch.start()
        try:
            yield calls
        finally:
            for patch in reversed(patches):
                patch.stop()
