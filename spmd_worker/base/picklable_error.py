"""Exceptions that another process may get: pools of processes and Ray pickle what a call has raised."""

from typing import Any


class PicklableError(Exception):
    """An exception that pickle restores with its message and attributes, whatever arguments its constructor has."""

    def __reduce__(self) -> tuple[Any, ...]:
        # An OSError keeps its file's name outside `args`.
        named = (self.filename,) if isinstance(self, OSError) and self.filename is not None else ()
        return _restored, (type(self), (*self.args, *named)), self.__dict__ or None


def _restored(kind: type[PicklableError], args: tuple[Any, ...]) -> PicklableError:
    error = kind.__new__(kind, *args)
    if isinstance(error, OSError):
        OSError.__init__(error, *args)
    return error
