"""Typed look-ups in a config.json: what is wrong is a ModelConfigError that names file, key, value and rule.

Null and absent are the same, but where a family has a default. Knows nothing of what keys mean.
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
    """The content of `path`, which is only named in errors. `spelled` has the file's own words for keys, where they
    differ.
    """

    config: Mapping[str, Any]
    path: Path
    spelled: Mapping[str, str] = field(default_factory=dict)

    def get(self, key: str, default: Any = None) -> Any:
        """The value as it is; `default` for null and what is not there."""
        value = self.config.get(self.spelled.get(key, key))
        return default if value is None else value

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number, 1 or more."""
        most = _MOST_LAYERS if key == "num_hidden_layers" else MOST
        return whole_number(self.get(key, default), self.where(key), 1, most)

    def number(self, key: str, default: float | None = None) -> float:
        """A number above 0, neither too small nor too large to be computed with in float32."""
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
        """The file's word for a key of ours."""
        return self.spelled.get(key) or key


def shown(value: Any) -> str:
    """A value of somebody else's file for an error, on one line: the beginning of one that is long."""
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
