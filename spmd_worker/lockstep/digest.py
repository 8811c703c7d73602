"""The digest that the replicas compare: blake2b over the canonical integers of every step so far.

Knows the records of a step. Knows nothing about how they are coded for the wire, so that two replicas can compare what
they decided before anything was sent.
"""

import struct
from collections.abc import Sequence
from hashlib import blake2b
from itertools import chain
from typing import Final

from spmd_worker.sequence.events import (
    Abort,
    Admit,
    Close,
    EndRound,
    EndWorkerEvent,
    Event,
    FinishTransfers,
    ResetPrefixCache,
    SetWeightVersion,
    WorkerEvent,
)
from spmd_worker.sequence.metadata import SequenceData, SequenceGroupMetadata, SequenceGroupMetadataDelta
from spmd_worker.sequence.request import Request
from spmd_worker.sequence.sampling_params import SAMPLING_KEYS
from spmd_worker.sequence.step import StepPlan

NUM_DIGEST_BYTES: Final = 16
_PERSON: Final = b"spmd-lockstep-2"
_DOUBLE: Final = struct.Struct("<d")
_SNAPSHOT: Final = 0
_DELTA: Final = 1
_NONE: Final = 0
_INTEGER: Final = 1
_FLOAT: Final = 2
_TEXT: Final = 3
_TUPLE: Final = 4


class ChainedDigest:
    """Equal now means equal ever since: each digest covers the one before it and the canonical record of its step.

    The record is made of little-endian integers of fixed width, the bits of doubles, and texts' UTF-8 bytes. It can be
    read from the left in one way only: a list or text is preceded by its length, a value of a union by its kind. So two
    steps that differ in any field have different records.
    """

    def __init__(self, start: bytes = bytes(NUM_DIGEST_BYTES)) -> None:
        self.value = start

    def update(self, step: int, events: Sequence[Event], plan: StepPlan, sampled_token_ids: Sequence[int]) -> bytes:
        """Take in one step and return the new digest, which `value` also holds."""
        record = _Canonical()
        record.integers((step, len(events)))
        for event in events:
            _add_event(record, event)
        record.counted(sampled_token_ids)
        _add_plan(record, plan)
        digest = blake2b(self.value, digest_size=NUM_DIGEST_BYTES, person=_PERSON)
        digest.update(record.data)
        self.value = digest.digest()
        return self.value


class _Canonical:
    """Collects integers as 8 bytes each (16 where they may need 65 bits, as a seed may), doubles and texts."""

    __slots__ = ("data",)

    def __init__(self) -> None:
        self.data = bytearray()

    def integers(self, values: Sequence[int]) -> None:
        self.data += struct.pack(f"<{len(values)}q", *values)

    def counted(self, values: Sequence[int]) -> None:
        self.integers((len(values),))
        self.integers(values)

    def wide(self, value: int) -> None:
        self.data += value.to_bytes(16, "little", signed=True)

    def double(self, value: float) -> None:
        self.data += _DOUBLE.pack(value)

    def text(self, value: str) -> None:
        encoded = value.encode("utf-8", "surrogatepass")
        self.integers((len(encoded),))
        self.data += encoded


def _add_event(record: _Canonical, event: Event) -> None:
    if isinstance(event, Admit):
        record.integers((1,))
        _add_request(record, event.request)
    elif isinstance(event, Abort):
        record.integers((2, event.request_id))
    elif isinstance(event, Close):
        record.integers((3,))
    elif isinstance(event, ResetPrefixCache):
        record.integers((4,))
    elif isinstance(event, SetWeightVersion):
        record.integers((5, event.version))
    elif isinstance(event, EndRound):
        record.integers((7,))
    elif isinstance(event, WorkerEvent):
        record.integers((8, event.number))
        record.text(event.name)
        record.integers((len(event.payload),))
        record.data += event.payload
    elif isinstance(event, EndWorkerEvent):
        record.integers((9, event.number))
        record.text(event.problem)
    else:
        assert isinstance(event, FinishTransfers), event
        record.integers((6,))
        record.counted(event.numbers)


def _add_request(record: _Canonical, request: Request) -> None:
    record.integers((request.request_id,))
    record.counted(request.prompt_token_ids)
    record.wide(request.stream)
    for name in SAMPLING_KEYS:
        _add_value(record, getattr(request.sampling, name))


def _add_value(record: _Canonical, value: object) -> None:
    """A sampling parameter: its type, then its value, so that no two values of any types look alike."""
    if value is None:
        record.data.append(_NONE)
    elif isinstance(value, int):
        record.data.append(_INTEGER)
        record.wide(value)
    elif isinstance(value, float):
        record.data.append(_FLOAT)
        record.double(value)
    elif isinstance(value, str):
        record.data.append(_TEXT)
        record.text(value)
    else:
        assert isinstance(value, tuple), value
        record.data.append(_TUPLE)
        record.integers((len(value),))
        for item in value:
            _add_value(record, item)


def _add_plan(record: _Canonical, plan: StepPlan) -> None:
    operations = plan.block_ops
    moves = (operations.swap_in, operations.swap_out, operations.copy, operations.store, operations.load)
    for pairs in (plan.finished_sequences, *moves):
        record.counted(list(chain.from_iterable(pairs)))
    record.integers((operations.transfer,))
    record.counted(plan.finished_request_ids)
    record.integers((plan.step, plan.num_tokens))
    record.counted(list(chain.from_iterable(plan.continuing)))
    record.counted(plan.continuing_token_ids)
    record.counted(list(chain.from_iterable(plan.continuing_blocks)))
    record.counted([_SNAPSHOT if isinstance(group, SequenceGroupMetadata) else _DELTA for group in plan.groups])
    _add_deltas(record, [group for group in plan.groups if isinstance(group, SequenceGroupMetadataDelta)])
    for group in plan.groups:
        if isinstance(group, SequenceGroupMetadata):
            _add_request(record, group.request)
            record.integers((len(group.sequences),))
            for data in group.sequences:
                _add_data(record, data)


def _add_deltas(record: _Canonical, groups: list[SequenceGroupMetadataDelta]) -> None:
    """Column by column, which says as much as row by row and is faster."""
    rows = [data for group in groups for data in group.sequences]
    record.counted([group.request_id for group in groups])
    record.counted([len(group.sequences) for group in groups])
    record.counted([data.sample_index for data in rows])
    record.counted([data.num_kept_blocks for data in rows])
    record.counted([data.num_computed_tokens for data in rows])
    record.counted([data.num_scheduled_tokens for data in rows])
    record.counted([data.num_samples for data in rows])
    for lists in ([data.appended_token_ids for data in rows], [data.appended_block_ids for data in rows]):
        record.counted(list(map(len, lists)))
        record.integers(list(chain.from_iterable(lists)))


def _add_data(record: _Canonical, data: SequenceData) -> None:
    record.integers((data.sample_index, data.num_computed_tokens, data.num_scheduled_tokens, data.num_samples))
    record.counted(data.output_token_ids)
    record.counted(data.block_ids)
