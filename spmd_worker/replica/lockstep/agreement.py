"""Compares every rank's inputs at the start, as canonical JSON: configuration, code, model, prompts."""

import json
from collections.abc import Mapping
from typing import Any, Final

from spmd_worker.base.errors import RanksDisagreeError

_MAX_VALUE_CHARACTERS: Final = 80
_MISSING: Final = object()
"""In place of a key that one of two mappings does not have; null is a value."""


def canonical(value: Any) -> bytes:
    """JSON with sorted keys and no spaces: the same bytes for equal values on every rank."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode("ascii")


def check_equal(subject: str, payloads: list[bytes], way_out: str = "start every rank with the same") -> None:
    """`payloads` are `canonical` texts in rank order. Raises RanksDisagreeError naming the first difference."""
    for rank, payload in enumerate(payloads):
        if payload != payloads[0]:
            difference = first_difference(json.loads(payloads[0]), json.loads(payload), rank)
            raise RanksDisagreeError(f"ranks were given different {subject}: {difference}; {way_out}")


def first_difference(first: Any, other: Any, rank: int, path: str = "") -> str:
    """Path of the first difference of two JSON values as texts (1, 1.0 and true are three values), and both values."""
    if isinstance(first, Mapping) and isinstance(other, Mapping):
        for key in sorted({**first, **other}):
            one, two = first.get(key, _MISSING), other.get(key, _MISSING)
            if _text(one) != _text(two):
                return first_difference(one, two, rank, f"{path}.{key}" if path else str(key))
    if isinstance(first, list) and isinstance(other, list):
        for index, (one, two) in enumerate(zip(first, other)):
            if _text(one) != _text(two):
                return first_difference(one, two, rank, f"{path}[{index}]")
        return f"{path or 'value'} has {len(first)} entries on rank 0, {len(other)} on rank {rank}"
    return f"{path or 'value'} is {_short(first)} on rank 0, {_short(other)} on rank {rank}"


def _text(value: Any) -> str:
    return "missing" if value is _MISSING else canonical(value).decode("ascii")


def _short(value: Any) -> str:
    text = _text(value)
    return text if len(text) <= _MAX_VALUE_CHARACTERS else f"{text[:_MAX_VALUE_CHARACTERS]}..."
