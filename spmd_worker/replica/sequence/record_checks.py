"""Checks the types and ranges of a record's fields on construction, by their annotations.

Scalars are checked completely; a tuple only for being one: its entries are checked where they are used, not once per
token and step. `replica/lockstep/wire/record_codec.py` derives the bytes of a record from the same annotations.
"""

import types
from collections.abc import Mapping
from dataclasses import Field, fields
from functools import cache
from typing import Annotated, Any, Final, Union, get_args, get_origin, get_type_hints

INT64: Final = range(-(2**63), 2**63)
"""Range of an `int` in a record."""

INT65: Final = range(-(2**63), 2**64)
"""Range of an `Integer65`."""

Integer65 = Annotated[int, INT65]
"""A random seed or stream: 64 bits, signed or unsigned."""

NOT_SENT: Final[Mapping[str, bool]] = {"is_sent": False}
"""Metadata of a dataclass field that is local: sent to no rank, in no digest and no log."""


def sent_fields(record: Any) -> list["Field[Any]"]:
    """Fields of a dataclass that are sent to other ranks, in the order of declaration."""
    return [spec for spec in fields(record) if spec.metadata.get("is_sent", True)]


def check_fields(record: Any) -> None:
    """Check a dataclass in its `__post_init__`. Raises ValueError naming record, field, value and rule."""
    kind: Any = type(record)
    for name, kinds, allowed in _rules(kind):
        value = getattr(record, name)
        if type(value) not in kinds:
            names = " or ".join([each.__name__ for each in kinds])
            raise ValueError(f"{kind.__name__}.{name}={value!r} must be of type {names}")
        if type(value) is int and value not in allowed:
            raise ValueError(f"{kind.__name__}.{name}={value} must be from {allowed[0]} to {allowed[-1]}")


class CheckedRecord:
    """Base of a dataclass whose fields are checked on construction (`check_fields`)."""

    __slots__ = ()

    def __post_init__(self) -> None:
        check_fields(self)


def check_num_ids(name: str, num_ids: tuple[int, ...], token_ids: tuple[int, ...]) -> None:
    """Check that `num_ids`, if not empty, divide up `token_ids`. Raises ValueError naming the field."""
    if num_ids and (min(num_ids) < 0 or sum(num_ids) != len(token_ids)):
        raise ValueError(f"{name} shares out {sum(num_ids)} ids, from {min(num_ids)} each on, of {len(token_ids)}")


@cache
def _rules(record: Any) -> tuple[tuple[str, tuple[type, ...], range], ...]:
    hints = get_type_hints(record, include_extras=True)
    return tuple([(spec.name, *_rule(hints[spec.name])) for spec in fields(record)])


def _rule(hint: Any) -> tuple[tuple[type, ...], range]:
    """Types that a field may have, and the range of its integers."""
    origin = get_origin(hint)
    if origin in (types.UnionType, Union):
        rules = [_rule(option) for option in get_args(hint)]
        wide = [allowed for _, allowed in rules if allowed is not INT64]
        return tuple([kind for kinds, _ in rules for kind in kinds]), wide[0] if wide else INT64
    if origin is Annotated:
        base, allowed = get_args(hint)
        return (base,), allowed
    return (getattr(hint, "__supertype__", None) or origin or hint,), INT64
