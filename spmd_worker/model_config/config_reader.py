"""Typed look-ups in a JSON file of a model folder. Errors are ModelConfigErrors with file, key, value and rule.

Knows nothing of the keys' meaning.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from spmd_worker.base.config.plain_values import shown
from spmd_worker.base.errors import ModelConfigError

MAX_INT: Final = 2**31 - 1
MAX_LAYERS: Final = 1_024
"""A config.json is data from anywhere: a count that no model has must not become a list of that length."""
MIN_NUMBER: Final = 1e-12
MAX_NUMBER: Final = 1e12
_MAX_KEY: Final = 80


@dataclass(frozen=True, slots=True)
class ConfigReader:
    """Contents of `path`, which is used in errors alone. `file_keys` maps our keys to the file's, where they differ.

    Null and missing keys are the same unless `has_null_values`. `section` is the dotted path of a nested object;
    `way_out` ends the errors of `choice`.
    """

    config: Mapping[str, Any]
    path: Path
    file_keys: Mapping[str, str] = field(default_factory=dict)
    section: str = ""
    way_out: str = ""
    has_null_values: bool = False

    def get(self, key: str, default: Any = None) -> Any:
        """The raw value; `default` for a missing key."""
        value = self.config.get(self.file_keys.get(key, key), default)
        return default if value is None and not self.has_null_values else value

    def count(self, key: str, default: int | None = None) -> int:
        """An integer, 1 or more."""
        most = MAX_LAYERS if key == "num_hidden_layers" else MAX_INT
        return checked_integer(self.get(key, default), self.where(key), 1, most)

    def number(self, key: str, default: float | None = None) -> float:
        """A number above 0, in a range that float32 can compute with."""
        return checked_number(self.get(key, default), self.where(key))

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "must be true or false")
        return value

    def amounts(self, key: str, count: int) -> tuple[float, ...] | None:
        """A list of `count` numbers above 0, or 0 for null and 0; None if the key is missing."""
        values = self.get(key)
        if values is None:
            return None
        if not isinstance(values, list) or len(values) != count:
            raise self.error(key, f"must list {count} numbers, one for each layer")
        is_none = [each is None or (each == 0 and not isinstance(each, bool)) for each in values]
        return tuple(
            0.0 if none else checked_number(each, self.where(key)) for each, none in zip(values, is_none, strict=True)
        )

    def choice(self, key: str, known: Sequence[Any], default: Any = None) -> Any:
        """One of `known`."""
        value = self.get(key, default)
        # 4.0 and True are equal to integers in Python.
        if not any(value == each and type(value) is type(each) for each in known):
            words = [str(each).lower() if isinstance(each, bool) else str(each) for each in known if each is not None]
            raise self.error(key, f"is not supported, only {' or '.join(words)}{self.way_out}")
        return value

    def object(self, key: str) -> "ConfigReader":
        """The nested object; empty if it is missing or null."""
        value = self.get(key)
        if not isinstance(value, Mapping | None):
            raise self.error(key, "must be an object")
        is_plain = key.isprintable() and len(key) < _MAX_KEY
        return replace(self, config=value or {}, section=f"{self.section}{key if is_plain else shown(key)}.")

    def kinds(self, key: str, num_layers: int, known: Sequence[str]) -> list[str]:
        """A list of one of `known` for each layer."""
        listed = self.get(key)
        if not isinstance(listed, list) or len(listed) != num_layers or any(each not in known for each in listed):
            raise self.error(key, f"must list {num_layers} of {', '.join(known)}")
        return listed

    def bits(self, key: str, num_layers: int, default: Any = None) -> list[int]:
        """A list of 0 or 1 for each layer."""
        listed = self.get(key, default)
        if not isinstance(listed, list) or len(listed) != num_layers or not all(map(is_bit, listed)):
            raise self.error(key, f"must list {num_layers} of 0 and 1")
        return listed

    def error(self, key: str, rule: str) -> ModelConfigError:
        """An error about the key's value."""
        return ModelConfigError(f"{self.where(key)}={shown(self.get(key))} {rule}")

    def where(self, key: str) -> str:
        """File and key, for an error."""
        return f"{self.path}: {self.section}{self.key(key)}"

    def key(self, key: str) -> str:
        """The file's name of one of our keys."""
        return self.file_keys.get(key) or key


def is_bit(value: Any) -> bool:
    """Whether it is the integer 0 or 1, to which False and 1.0 are equal in Python."""
    return type(value) is int and value in (0, 1)


def checked_integer(value: Any, where: str, least: int, most: int) -> int:
    """`value`, an integer of a range. Raises ModelConfigError."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ModelConfigError(f"{where}={shown(value)} must be a whole number from {least} to {most}")
    return value


def checked_number(value: Any, where: str) -> float:
    """`value` as a float above 0, in a range that float32 can compute with. Raises ModelConfigError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not MIN_NUMBER <= value <= MAX_NUMBER:
        raise ModelConfigError(f"{where}={shown(value)} must be a number from {MIN_NUMBER:g} to {MAX_NUMBER:g}")
    return float(value)
