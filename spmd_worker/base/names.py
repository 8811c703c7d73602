"""Suggestions for misspelled names: the nearest attribute or keyword that exists."""

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any, Final, TypeVar

_Class = TypeVar("_Class", bound=type)
_NEAR: Final = 0.7
"""Threshold of difflib's ratio: less is another word."""
_NO_WORDS: Mapping[str, str] = {}


def hint(name: str, known: Iterable[str], words: Mapping[str, str] = _NO_WORDS) -> str:
    """End of an error about an unknown name: its entry in `words`, else the nearest known name; empty where nothing is
    near.
    """
    if name in words:
        return f": {words[name]}"
    public = [each for each in known if not each.startswith("_")]
    nearest = [] if name.startswith("_") else difflib.get_close_matches(name, public, n=1, cutoff=_NEAR)
    return f": did you mean {nearest[0]}?" if nearest else ""


def counted(number: int, noun: str) -> str:
    """Such as "1 row" and "2,000 rows"."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def with_keyword_hints(words: Mapping[str, Mapping[str, str]] = {}) -> Callable[[_Class], _Class]:
    """Class decorator: a call of a public method, or of the class, with an unknown keyword is a TypeError that names
    the nearest. `words`, by method and keyword, replace that hint.
    """

    def decorate(cls: _Class) -> _Class:
        for name, member in list(vars(cls).items()):
            hints = words.get(name, _NO_WORDS)
            if name.startswith("_") and name != "__init__":
                continue
            if isinstance(member, classmethod | staticmethod):
                setattr(cls, name, type(member)(_with_hints(member.__func__, cls, hints)))
            elif inspect.isfunction(member):
                setattr(cls, name, _with_hints(member, cls, hints))
        return cls

    return decorate


def _with_hints(function: Callable[..., Any], cls: type, words: Mapping[str, str]) -> Callable[..., Any]:
    parameters = inspect.signature(function).parameters
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        return function
    known = [name for name in parameters if name not in ("self", "cls")]
    end = "" if function.__name__ == "__init__" else f".{function.__name__}"

    @wraps(function)
    def called(*given: Any, **named: Any) -> Any:
        try:
            return function(*given, **named)
        except TypeError:
            unknown = [name for name in named if name not in parameters]
            if not unknown:
                raise
            # An inherited method is called by the name of the object's class.
            kind = type(given[0]) if given and isinstance(given[0], cls) else cls
            label = f"{kind.__name__}{end}"
            raise TypeError(f"{label} has no keyword {unknown[0]}{hint(unknown[0], known, words)}") from None

    return called
