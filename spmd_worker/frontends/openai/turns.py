"""Encoding in turns: a generator that pauses between the texts of a body, so that a thread can serve other bodies."""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Generic, TypeVar

_Result = TypeVar("_Result")

Turns = Generator[None, None, _Result]
"""Pauses where another body may be encoded, and returns the result."""


@dataclass(frozen=True, slots=True)
class Ended(Generic[_Result]):
    """The result of all turns."""

    result: _Result


def take_turn(turns: Turns[_Result], num_texts: int) -> Ended[_Result] | None:
    """Continue for `num_texts` texts; None if there is more to do. Raises what encoding does."""
    try:
        for _ in range(num_texts):
            next(turns)
    except StopIteration as end:
        return Ended(end.value)
    return None


def result_of(turns: Turns[_Result]) -> _Result:
    """All turns without a pause."""
    while (ended := take_turn(turns, 1)) is None:
        pass
    return ended.result


def at_once(call: Callable[[], _Result]) -> Turns[_Result]:
    """One turn."""
    yield from ()
    return call()
