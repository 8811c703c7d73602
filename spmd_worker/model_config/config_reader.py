"""Typed look-ups in a config.json: invalid values are ModelConfigErrors that name file, key, value and rule.

Null and absent are the same, unless a family has a default. Knows nothing of the keys' meaning.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from spmd_worker.base.errors import ModelConfigError

MOST: Final = 2**31 - 1
_MOST_LAYERS: Final = 1_024
"""A config.json is data from anywhere: a count that no model has must not become a list of that length."""
_LEAST_AMOUNT: Final = 1e-12
_MOST_AMOUNT: Final = 1e12
_MOST_SHOWN: Final = 80


@dataclass(frozen=True, slots=True)
class ConfigReader:
    """Contents of `path`, which is used in errors alone. `spelled` maps our keys to the file's, where they differ."""

    config: Mapping[str, Any]
    path: Path
    spelled: Mapping[str, str] = field(default_factory=dict)

    def get(self, key: str, default: Any = None) -> Any:
        """The raw value; `default` for null and missing keys."""
        value = self.config.get(self.spelled.get(key, key))
        return default if value is None else value

    def count(self, key: str, default: int | None = None) -> int:
        """An integer, 1 or more."""
        most = _MOST_LAYERS if key == "num_hidden_layers" else MOST
        return whole_number(self.get(key, default), self.where(key), 1, most)

    def number(self, key: str, default: float | None = None) -> float:
        """A number above 0, in a range that float32 can compute with."""
        return positive_number(self.get(key, default), self.where(key))

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise ModelConfigError(f"{self.where(key)}={shown(value)} must be true or false")
        return value

    def where(self, key: str) -> str:
        """File and key, for an error."""
        return f"{self.path}: {self.key(key)}"

    def key(self, key: str) -> str:
        """The file's name of one of our keys."""
        return self.spelled.get(key) or key


def shown(value: Any) -> str:
    """A value of an untrusted file for an error, on one line, cut if it is long."""
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def whole_number(value: Any, where: str, least: int, most: int) -> int:
    """`value`. Raises ModelConfigError."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ModelConfigError(f"{where}={shown(value)} must be a whole number from {least} to {most}")
    return value


def positive_number(value: Any, where: str) -> float:
    """`value` as a float. Raises ModelConfigError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not _LEAST_AMOUNT <= value <= _MOST_AMOUNT:
        raise ModelConfigError(f"{where}={shown(value)} must be a number from {_LEAST_AMOUNT:g} to {_MOST_AMOUNT:g}")
    return float(value)
