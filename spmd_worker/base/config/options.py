"""Option records: one for each key of the schema, next to its type and its default, and the checks that follow from it.

Everything else that names options is generated from these records: `--help`, the keywords of `LLM`, the reference
pages.
"""

import dataclasses
import functools
import math
import os
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from spmd_worker.base.config.plain_values import plain_bool, plain_float, plain_int, plain_text, shown
from spmd_worker.base.errors import ConfigError

_Value = TypeVar("_Value")

_RECORD: Final = "option"
_MAX_SHOWN: Final = 500


@dataclass(frozen=True, slots=True)
class Option:
    """Record of a key. `meaning` is one sentence for people, in Markdown.

    `keyword` is the key's name in `LLM(...)`: "" is the field's own, None is none. With `is_vllms` that keyword is
    vLLM's too; `vllm_names` are other names of vLLM's for it. `vllm_values` maps values of vLLM's to ours, and
    `accepts` is the annotation of the keyword in `LLM`, if it is not the field's type. An `is_open` keyword is None
    unless it is given: the run derives it from others.

    `choices`, `least` and `most` are the rules of its values. `--help` prints `is_common` keys, `--help=all` the rest.
    `is_path` keys hold a path as the shell gives it.
    """

    meaning: str
    keyword: str | None = ""
    is_vllms: bool = False
    vllm_names: tuple[str, ...] = ()
    vllm_values: Mapping[Any, Any] = field(default_factory=dict)
    accepts: Any = None
    is_open: bool = False
    choices: tuple[str, ...] = ()
    least: float | None = None
    most: float | None = None
    is_common: bool = False
    is_path: bool = False


@dataclass(frozen=True, slots=True)
class Key:
    """A key of a run. `group` is empty for a top key, `hint` its field's annotation."""

    group: str
    field: str
    hint: Any
    default: Any
    option: Option

    @property
    def name(self) -> str:
        return f"{self.group}.{self.field}" if self.group else self.field

    @property
    def keyword(self) -> str | None:
        """Name in `LLM(...)`, where there is one."""
        return self.field if self.option.keyword == "" else self.option.keyword


def option(default: _Value, meaning: str, **record: Any) -> _Value:
    """A field of the schema: `record` are fields of Option."""
    return field(default=default, metadata={_RECORD: Option(meaning, **record)})


def vllm_option(default: _Value, meaning: str, **record: Any) -> _Value:
    """A field of the schema whose keyword in `LLM(...)` is vLLM's too."""
    return option(default, meaning, is_vllms=True, **record)


def command_option(default: _Value, meaning: str, **record: Any) -> _Value:
    """A field of the schema that `LLM(...)` has no keyword for."""
    return option(default, meaning, keyword=None, **record)


def groups_of(run: type) -> dict[str, type]:
    """Group -> the dataclass of its keys, in the order of declaration. `run` is the dataclass of a run."""
    hints = _hints_of(run)
    return {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint) and isinstance(hint, type)}


def keys_of(run: type) -> dict[str, Key]:
    """Dotted key -> its record, in the order of declaration, top keys last."""
    groups = groups_of(run)
    found = []
    for group, kind in (*groups.items(), ("", run)):
        hints = _hints_of(kind)
        for spec in dataclasses.fields(kind):
            if group or spec.name not in groups:
                assert _RECORD in spec.metadata, f"{kind.__name__}.{spec.name} has no record: write option(...)"
                found.append(Key(group, spec.name, hints[spec.name], spec.default, spec.metadata[_RECORD]))
    return {key.name: key for key in found}


def check_options(record: Any, group: str = "") -> None:
    """Check a record, first in its `__post_init__`: convert each field to its annotated type, and apply its rules."""
    hints = _hints_of(record.__class__)
    for spec in dataclasses.fields(record):
        key, hint = f"{group}.{spec.name}" if group else spec.name, hints[spec.name]
        value = checked_value(key, getattr(record, spec.name), hint)
        if value == {} and spec.default is None:
            # A command line composes mappings from an empty one.
            value = None
        # Frozen, but still under construction.
        object.__setattr__(record, spec.name, value)
        rules = spec.metadata.get(_RECORD)
        if rules is None or value is None:
            continue
        if rules.choices and value not in rules.choices:
            but = ", nor null" if types.NoneType in _alternatives(hint) else ""
            raise ConfigError(f"{key}={value} is not one of {', '.join(rules.choices)}{but}")
        # Written so that NaN fails. Infinity could not be written into a manifest, which is JSON.
        if rules.most is not None and not (rules.least or 0) <= value <= rules.most:
            unit = " seconds" if key.endswith("_s") else ""
            raise ConfigError(f"{key}={command_text(value)} must be from {rules.least or 0} to {rules.most}{unit}")
        if rules.least is not None and not rules.least <= value < math.inf:
            end = "" if value != math.inf else ", and finite"
            raise ConfigError(f"{key}={value} must be {rules.least} or more{end}")


def checked_value(key: str, value: Any, hint: Any) -> Any:
    """`value` as the type of a field's annotation `hint`: int, float, bool, str, list[...], dict[...], a dataclass, or
    `X | None` of these.

    A whole number is anything that Python accepts as an index (numpy's and torch's integers too), a number any real
    one, and neither is true or false. The result is Python's own int or float: ranks compare configurations as text.
    Raises ConfigError with the key, the value and the expected type.
    """
    for kind in _alternatives(hint):
        try:
            return _as_type(value, kind)
        except TypeError:
            continue
        except OverflowError:
            raise ConfigError(f"{key}={shown(value)} must fit 64 bits") from None
    raise ConfigError(f"{key}={shown(value, _MAX_SHOWN)} must be {type_words(hint)}")


def type_words(hint: Any) -> str:
    """A field's annotation, for people."""
    return " or ".join(_TYPE_WORDS.get(kind) or f"a {kind.__name__}" for kind in _alternatives(hint))


def command_text(value: Any) -> str:
    """A value as a command line writes it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(command_text, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{name}: {command_text(each)}' for name, each in value.items())}}}"
    return f"{value:g}" if isinstance(value, float) else str(value)


@functools.cache
def _hints_of(kind: type) -> dict[str, Any]:
    """Annotations of a dataclass, resolved once: that takes longer than checking a record's values."""
    return typing.get_type_hints(kind)


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def _as_type(value: Any, kind: Any) -> Any:
    """Raises TypeError, for an integer that no float can hold too; OverflowError for one of more than 64 bits."""
    if kind in _PLAIN:
        plain = _PLAIN[kind](value)
        if plain is None or (plain in (math.inf, -math.inf) and plain_int(value) is not None):
            raise TypeError
        if kind is int and not -(2**63) <= plain < 2**64:
            raise OverflowError
        return plain
    if typing.get_origin(kind) is list and isinstance(value, list | tuple):
        return [_as_type(each, *typing.get_args(kind)) for each in value]
    if kind == dict[str, str] and isinstance(value, Mapping):
        return {_as_type(name, str): _as_text(each) for name, each in value.items()}
    if typing.get_origin(kind) or not isinstance(value, kind):
        raise TypeError
    return value


def _as_text(value: Any) -> str:
    """A text, or a number, a path, true or false as text. Raises TypeError for anything else."""
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    for kind in (str, bool, int, float):
        plain = _PLAIN[kind](value)
        if plain is not None:
            return command_text(plain)
    raise TypeError


_PLAIN: Final[dict[Any, Any]] = {int: plain_int, float: plain_float, bool: plain_bool, str: plain_text}
_TYPE_WORDS: Final[dict[Any, str]] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    list[int]: "a list of whole numbers, such as [10,8]",
    list[str]: "a list of texts, such as [a,b]",
    dict[str, str]: "texts by name, such as {a: b}",
    types.NoneType: "null",
}
