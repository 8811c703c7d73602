"""Exceptions that another process may get: pools of processes and Ray pickle what a call has raised."""

from typing import Any


class PicklableError(Exception):
    """An exception that pickle restores with its message and attributes, whatever arguments its constructor has."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), self.args), self.__dict__ or None


def _restored(kind: type[PicklableError], args: tuple[object, ...]) -> PicklableError:
    return kind.__new__(kind, *args)
