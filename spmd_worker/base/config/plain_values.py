"""Plain values: numbers and texts of other types (enumerations, numpy's and torch's scalars) converted to Python's own.

Stored, sent and compared values are exactly `int`, `float`, `bool` or `str`: a subclass may compare slowly (`in range`
walks through all numbers for one), print differently, and has no wire format. Imports neither numpy nor torch.
"""

import operator
import os
from numbers import Real
from pathlib import PurePath
from typing import Any

from spmd_worker.base.errors import ConfigError
from spmd_worker.base.remote_names import is_remote, shown_name
from spmd_worker.base.urls import shortened

_MAX_SHOWN = 80


def plain_int(value: Any) -> int | None:
    """An integer; None for anything else, true and false too."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or not hasattr(value, "__index__") or _is_of_truth_values(value):
        return None
    try:
        # Of arrays, only those without dimensions count as numbers.
        return None if getattr(value, "ndim", 0) else operator.index(value)
    except Exception:  # foreign code: an array of floats, a tensor without data
        return None


def plain_float(value: Any) -> float | None:
    """A real number, finite or not; None for anything else, true and false too. An integer beyond all floats is
    infinite.
    """
    if type(value) is float:
        return value
    if isinstance(value, bool) or _is_of_truth_values(value):
        return None
    try:
        if isinstance(value, Real):
            return float(value)
        is_scalar = hasattr(value, "dtype") and getattr(value, "ndim", 1) == 0
        number = value.item() if is_scalar else None
        return float(number) if isinstance(number, int | float) else None
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")
    except Exception:  # foreign code
        return None


def plain_bool(value: Any) -> bool | None:
    """True or false; None for anything else, 0 and 1 too."""
    if isinstance(value, bool):
        return value
    try:
        return bool(value) if _is_of_truth_values(value) and not getattr(value, "ndim", 0) else None
    except Exception:  # foreign code
        return None


def required_bool(name: str, value: Any) -> bool:
    """The flag of a call. Raises TypeError for anything but true or false."""
    if (flag := plain_bool(value)) is None:
        raise TypeError(f"{name} is a {type(value).__name__}: give True or False")
    return flag


def plain_text(value: Any) -> str | None:
    """Text; None for anything else. An enumeration's member gives its value, not its name."""
    if type(value) is str:
        return value
    return str.__str__(value) if isinstance(value, str) else None


def plain_folder(path: str) -> str:
    """A folder's path as all that compares folders has it: `~` is the home, and no slash is needless. Raises
    ConfigError for a remote name with a user or query, which may be secret.
    """
    if is_remote(path):
        if shown_name(path) != path:
            raise ConfigError(
                f"{shown_name(path)} has a user or query, and folders of adapters are shown and recorded: leave it "
                f"out, and give credentials as the store's library finds them"
            )
        return path.rstrip("/")
    return str(PurePath(os.path.expanduser(path)))


def sendable_text(name: str, text: str) -> str:
    """`text`. Raises ValueError for text that cannot be sent to other ranks: half of a surrogate pair has no UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"{name}={shown(text)} contains a lone surrogate, which UTF-8 cannot encode") from None
    return text


def asks(value: Any) -> bool:
    """Whether a value that may request nothing requests something: a value without a truth value does."""
    try:
        return bool(value)
    except Exception:  # foreign code: an array of several numbers, a tensor without data
        return True


def shown(value: Any, most: int = _MAX_SHOWN) -> str:
    """A value in a message, cut to `most` characters, without users and queries of URLs."""
    try:
        text = repr(value)
    except Exception:  # foreign code, and numbers with thousands of digits
        text = f"<{type(value).__name__}>"
    return shortened(text, most)


def _is_of_truth_values(value: Any) -> bool:
    """Whether it is one of an array library's truth values."""
    return "bool" in str(getattr(value, "dtype", ""))
