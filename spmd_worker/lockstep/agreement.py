"""Comparing what each rank was given, before anything depends on it: configuration, code, model, prompts.

Values are canonical JSON, so equal text means equal values. Knows nothing about how the texts travelled.
"""

import json
from collections.abc import Mapping
from typing import Any

from spmd_worker.lockstep.errors import RanksDisagreeError


def canonical(value: Any) -> bytes:
    """JSON with sorted keys and no spaces: the same bytes for equal values on every rank."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode("ascii")


def check_equal(subject: str, payloads: list[bytes]) -> None:
    """`payloads` are `canonical` texts in rank order. Raises RanksDisagreeError naming the first difference."""
    for rank, payload in enumerate(payloads):
        if payload != payloads[0]:
            difference = first_difference(json.loads(payloads[0]), json.loads(payload), rank)
            raise RanksDisagreeError(
                f"ranks were given different {subject}: {difference}; start every rank with the same"
            )


def first_difference(first: Any, other: Any, rank: int, path: str = "") -> str:
    """The first place where two JSON values differ, with both values."""
    if isinstance(first, Mapping) and isinstance(other, Mapping):
        for key in sorted({**first, **other}):
            if first.get(key) != other.get(key):
                return first_difference(first.get(key), other.get(key), rank, f"{path}.{key}" if path else str(key))
    if isinstance(first, list) and isinstance(other, list):
        for index, (one, two) in enumerate(zip(first, other)):
            if one != two:
                return first_difference(one, two, rank, f"{path}[{index}]")
        return f"{path} has {len(first)} entries on rank 0, {len(other)} on rank {rank}"
    return f"{path or 'value'} is {_short(first)} on rank 0, {_short(other)} on rank {rank}"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=True)
    return text if len(text) <= 80 else text[:77] + "..."
