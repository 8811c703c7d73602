"""The first difference of two ranks' records of a step, or of the requests that they were given, as text."""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Final, NamedTuple

from spmd_worker.base.errors import RanksDisagreeError
from spmd_worker.replica.lockstep.wire.message import StepMessage
from spmd_worker.replica.sequence.events import Admit, Event
from spmd_worker.replica.sequence.step import StepPlan

_MAX_VALUE_CHARACTERS: Final = 120


@dataclass(frozen=True, slots=True)
class Record:
    """Everything that the digest of a step covers; the ids and masks are those of the step before."""

    plan: StepPlan
    events: tuple[Event, ...]
    sampled_token_ids: tuple[int, ...]
    num_sampled_ids: tuple[int, ...] = ()
    mask_checksums: tuple[int, ...] = ()


def record_of(message: StepMessage) -> Record:
    """Record of a message's step."""
    sampled = (message.sampled_token_ids, message.num_sampled_ids, message.mask_checksums)
    return Record(message.plan, message.events, *sampled)


def first_difference(mine: Record, theirs: Record, my_rank: int, their_rank: int) -> str | None:
    """A text such as "groups[5].block_ids[3]: 17 on rank 0, 21 on rank 2"; None if the records are equal.

    Causes come before effects: the step number, the events, the masks, the sampled ids, then the plan. Names are as in
    the records, without `plan.`, and without `sequences[0].` in groups that list one sequence on both ranks. If two
    lists of different lengths differ before the shorter ends, the lengths follow in brackets.
    """
    difference = (
        _walk("step", mine.plan.step, theirs.plan.step)
        or _walk("events", mine.events, theirs.events)
        or _walk("mask_checksums", mine.mask_checksums, theirs.mask_checksums)
        or _walk("num_sampled_ids", mine.num_sampled_ids, theirs.num_sampled_ids)
        or _walk("sampled_token_ids", mine.sampled_token_ids, theirs.sampled_token_ids)
        # Before `num_tokens`, which counts them.
        or _walk("continuing", mine.plan.continuing, theirs.plan.continuing)
        or _walk("", mine.plan, theirs.plan)
    )
    if difference is None:
        return None
    text = f"{difference.path}: {difference.mine} on rank {my_rank}, {difference.theirs} on rank {their_rank}"
    if difference.lengths is None:
        return text
    path, my_length, their_length = difference.lengths
    return f"{text} ({path}: {my_length} entries on rank {my_rank}, {their_length} on rank {their_rank})"


def check_requests(leaders: Iterable[Event], own: Iterable[Event], rank: int) -> None:
    """Raise RanksDisagreeError, naming the request and the first difference, unless rank 0 admits in the same step
    every request that this rank was given: what runs is rank 0's. Neither streams are compared, because only rank 0
    counts what it is given alone, nor aborts: finalizers of ranks abort when they run.
    """
    requests = {event.request.request_id: event.request for event in leaders if isinstance(event, Admit)}
    for event in own:
        if not isinstance(event, Admit):
            continue
        number, leader = event.request.request_id, requests.get(event.request.request_id)
        if leader is None:
            difference = f"request {number} was added on rank {rank}, not on rank 0"
        else:
            own_request = replace(event.request, stream=leader.stream)
            # A walk takes some twenty times as long as a comparison.
            found = None if own_request == leader else _walk("", leader, own_request)
            if found is None:
                continue
            # Fields by the caller's names.
            name = found.path.removeprefix("sampling.")
            difference = f"{name} of request {number} is {found.mine} on rank 0, {found.theirs} on rank {rank}"
        raise RanksDisagreeError(
            f"ranks were given different requests: {difference}; make the same calls of add_request before the same "
            f"step on every rank, or on rank 0 alone while the others follow"
        )


class _Difference(NamedTuple):
    """`lengths` is the innermost list around `path` with different lengths: its path and both lengths."""

    path: str
    mine: str
    theirs: str
    lengths: tuple[str, int, int] | None = None


def _walk(path: str, mine: object, theirs: object) -> _Difference | None:
    if type(mine) is not type(theirs):
        return _Difference(path, _kind_or_value(mine), _kind_or_value(theirs))
    if is_dataclass(mine):
        return _walk_fields(path, [spec.name for spec in fields(mine)], mine, theirs)
    if isinstance(mine, tuple):
        assert isinstance(theirs, tuple), type(theirs)
        names = getattr(mine, "_fields", None)
        return _walk_entries(path, mine, theirs) if names is None else _walk_fields(path, list(names), mine, theirs)
    return None if _is_same(mine, theirs) else _Difference(path, _shown(mine), _shown(theirs))


def _walk_fields(path: str, names: list[str], mine: object, theirs: object) -> _Difference | None:
    for name in names:
        my_value, their_value = getattr(mine, name), getattr(theirs, name)
        if name == "sequences" and len(my_value) == len(their_value) == 1:
            # A group's only sequence has the group's path.
            difference = _walk(path, my_value[0], their_value[0])
        else:
            difference = _walk(f"{path}.{name}" if path else name, my_value, their_value)
        if difference is not None:
            return difference
    return None


def _walk_entries(path: str, mine: Sequence[object], theirs: Sequence[object]) -> _Difference | None:
    lengths = None if len(mine) == len(theirs) else (path, len(mine), len(theirs))
    for index, (my_entry, their_entry) in enumerate(zip(mine, theirs)):
        difference = _walk(f"{path}[{index}]", my_entry, their_entry)
        if difference is not None:
            return difference._replace(lengths=difference.lengths or lengths)
    if lengths is None:
        return None
    return _Difference(path, f"{len(mine)} entries", str(len(theirs)))


def _is_same(mine: object, theirs: object) -> bool:
    """Equality bit for bit: -0.0 and 0.0 have different digests."""
    if isinstance(mine, float) and isinstance(theirs, float):
        return struct.pack("<d", mine) == struct.pack("<d", theirs)
    return mine == theirs


def _kind_or_value(value: object) -> str:
    return type(value).__name__ if is_dataclass(value) else _shown(value)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_VALUE_CHARACTERS else f"{text[:_MAX_VALUE_CHARACTERS]}..."
