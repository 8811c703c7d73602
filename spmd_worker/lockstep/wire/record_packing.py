"""Requests, sampling parameters, events and snapshots as bytes.

Fields of `SamplingParams` travel by number and only where they differ from the default, bit for bit: a number, once
given, keeps its meaning within a version of the layout. Knows nothing of the message around them.
"""

import struct
from collections.abc import Callable
from dataclasses import fields
from typing import Any, Final

from kv_cache.block import BlockId
from spmd_worker.lockstep.wire.message import MessageError
from spmd_worker.lockstep.wire.packing import ByteReader, ByteWriter
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
from spmd_worker.sequence.metadata import SequenceData, SequenceGroupMetadata
from spmd_worker.sequence.request import Request, RequestId
from spmd_worker.sequence.sampling_params import SamplingParams

_ADMIT: Final = 1
_ABORT: Final = 2
_CLOSE: Final = 3
_RESET_PREFIX_CACHE: Final = 4
_SET_WEIGHT_VERSION: Final = 5
_FINISH_TRANSFERS: Final = 6
_END_ROUND: Final = 7
_WORKER_EVENT: Final = 8
_END_WORKER_EVENT: Final = 9

_Write = Callable[[ByteWriter, Any], None]
_Read = Callable[[ByteReader], Any]


def _write_optional(writer: ByteWriter, value: int | None) -> None:
    writer.byte(0 if value is None else 1)
    if value is not None:
        writer.signed(value)


def _read_optional(reader: ByteReader) -> int | None:
    return reader.signed() if _read_flag(reader) else None


def _read_flag(reader: ByteReader) -> bool:
    value = reader.byte()
    if value > 1:
        raise MessageError(f"a flag is {value}")
    return value == 1


def _write_texts(writer: ByteWriter, values: tuple[str, ...]) -> None:
    writer.unsigned(len(values))
    for value in values:
        writer.text(value)


def _read_texts(reader: ByteReader) -> tuple[str, ...]:
    return tuple(reader.text() for _ in range(reader.count()))


def _write_biases(writer: ByteWriter, values: tuple[tuple[int, float], ...]) -> None:
    writer.unsigned(len(values))
    for token_id, bias in values:
        writer.unsigned(token_id)
        writer.double(bias)


def _read_biases(reader: ByteReader) -> tuple[tuple[int, float], ...]:
    return tuple((reader.unsigned(), reader.double()) for _ in range(reader.count()))


_INTEGER: Final[tuple[_Write, _Read]] = (ByteWriter.signed, ByteReader.signed)
_OPTIONAL: Final[tuple[_Write, _Read]] = (_write_optional, _read_optional)
_DOUBLE: Final[tuple[_Write, _Read]] = (ByteWriter.double, ByteReader.double)
_FLAG: Final[tuple[_Write, _Read]] = (ByteWriter.byte, _read_flag)

SAMPLING_LAYOUT: Final[dict[int, tuple[str, tuple[_Write, _Read]]]] = {
    1: ("n", _INTEGER),
    2: ("temperature", _DOUBLE),
    3: ("top_p", _DOUBLE),
    4: ("top_k", _INTEGER),
    5: ("min_p", _DOUBLE),
    6: ("seed", _OPTIONAL),
    7: ("max_tokens", _OPTIONAL),
    8: ("min_tokens", _INTEGER),
    9: ("stop", (_write_texts, _read_texts)),
    10: ("stop_token_ids", (ByteWriter.counted, ByteReader.counted)),
    11: ("include_stop_str_in_output", _FLAG),
    12: ("ignore_eos", _FLAG),
    13: ("logprobs", _OPTIONAL),
    14: ("prompt_logprobs", _OPTIONAL),
    15: ("presence_penalty", _DOUBLE),
    16: ("frequency_penalty", _DOUBLE),
    17: ("repetition_penalty", _DOUBLE),
    18: ("logit_bias", (_write_biases, _read_biases)),
    19: ("detokenize", _FLAG),
    20: ("skip_special_tokens", _FLAG),
    21: ("best_of", _OPTIONAL),
}
"""Number on the wire -> field and its form. A field of SamplingParams missing here would be lost: a test looks."""

_SAMPLING_DEFAULTS: Final[dict[str, Any]] = {spec.name: spec.default for spec in fields(SamplingParams)}


def write_sampling(writer: ByteWriter, sampling: SamplingParams) -> None:
    """How many fields differ from their defaults, and each of these with its number."""
    changed = [
        (number, write, getattr(sampling, name))
        for number, (name, (write, _)) in SAMPLING_LAYOUT.items()
        if not _is_same(getattr(sampling, name), _SAMPLING_DEFAULTS[name])
    ]
    writer.unsigned(len(changed))
    for number, write, value in changed:
        writer.byte(number)
        write(writer, value)


def read_sampling(reader: ByteReader) -> SamplingParams:
    """Raises MessageError for an unknown field and for parameters that SamplingParams refuses."""
    values: dict[str, Any] = {}
    for _ in range(reader.count()):
        number = reader.byte()
        if number not in SAMPLING_LAYOUT:
            raise MessageError(f"no sampling parameter has number {number}")
        name, (_, read) = SAMPLING_LAYOUT[number]
        if name in values:
            raise MessageError(f"sampling parameter {name} is given twice")
        values[name] = read(reader)
    try:
        return SamplingParams(**values)
    except ValueError as error:
        raise MessageError(f"sampling parameters are refused: {error}") from error


def _is_same(value: object, default: object) -> bool:
    """Equality that tells -0.0 from 0.0, as the digest does."""
    if isinstance(value, float) and isinstance(default, float):
        return struct.pack("<d", value) == struct.pack("<d", default)
    return value == default


def write_request(writer: ByteWriter, request: Request) -> None:
    """At most 4 bytes a prompt token for ids below 2**32, 20 bytes, and the sampling parameters."""
    writer.signed(request.request_id)
    writer.counted(request.prompt_token_ids)
    writer.fixed_64(request.stream)
    write_sampling(writer, request.sampling)


def read_request(reader: ByteReader) -> Request:
    """The inverse of `write_request`."""
    request_id = RequestId(reader.integer_64())
    prompt_token_ids = reader.counted()
    stream = reader.fixed_64()
    return Request(request_id, prompt_token_ids, read_sampling(reader), stream)


def write_event(writer: ByteWriter, event: Event) -> None:
    """A kind and what belongs to it."""
    if isinstance(event, Admit):
        writer.byte(_ADMIT)
        write_request(writer, event.request)
    elif isinstance(event, Abort):
        writer.byte(_ABORT)
        writer.signed(event.request_id)
    elif isinstance(event, Close):
        writer.byte(_CLOSE)
    elif isinstance(event, EndRound):
        writer.byte(_END_ROUND)
    elif isinstance(event, ResetPrefixCache):
        writer.byte(_RESET_PREFIX_CACHE)
    elif isinstance(event, SetWeightVersion):
        writer.byte(_SET_WEIGHT_VERSION)
        writer.signed(event.version)
    elif isinstance(event, WorkerEvent):
        writer.byte(_WORKER_EVENT)
        writer.signed(event.number)
        writer.text(event.name)
        writer.blob(event.payload)
    elif isinstance(event, EndWorkerEvent):
        writer.byte(_END_WORKER_EVENT)
        writer.signed(event.number)
        writer.text(event.problem)
    else:
        assert isinstance(event, FinishTransfers), event
        writer.byte(_FINISH_TRANSFERS)
        writer.counted(event.numbers)


def read_event(reader: ByteReader) -> Event:
    """The inverse of `write_event`."""
    kind = reader.byte()
    if kind == _ADMIT:
        return Admit(read_request(reader))
    if kind == _ABORT:
        return Abort(RequestId(reader.integer_64()))
    if kind == _CLOSE:
        return Close()
    if kind == _END_ROUND:
        return EndRound()
    if kind == _RESET_PREFIX_CACHE:
        return ResetPrefixCache()
    if kind == _SET_WEIGHT_VERSION:
        return SetWeightVersion(reader.integer_64())
    if kind == _FINISH_TRANSFERS:
        return FinishTransfers(reader.counted())
    if kind == _WORKER_EVENT:
        return WorkerEvent(reader.integer_64(), reader.text(), reader.blob())
    if kind == _END_WORKER_EVENT:
        return EndWorkerEvent(reader.integer_64(), reader.text())
    raise MessageError(f"no event has kind {kind}")


def write_snapshot(writer: ByteWriter, group: SequenceGroupMetadata) -> None:
    """The request and its listed sequences, whole."""
    write_request(writer, group.request)
    writer.unsigned(len(group.sequences))
    for data in group.sequences:
        if data.num_samples < 0:
            raise MessageError(f"a number of samples is {data.num_samples}")
        writer.counted(data.output_token_ids)
        writer.counted(data.block_ids)
        for value in (data.sample_index, data.num_computed_tokens, data.num_scheduled_tokens, data.num_samples):
            writer.signed(value)


def read_snapshot(reader: ByteReader) -> SequenceGroupMetadata:
    """The inverse of `write_snapshot`."""
    request = read_request(reader)
    return SequenceGroupMetadata(request, tuple(_read_data(reader) for _ in range(reader.count())))


def _read_data(reader: ByteReader) -> SequenceData:
    output_token_ids = reader.counted()
    block_ids = tuple(map(BlockId, reader.counted()))
    sample_index, num_computed_tokens, num_scheduled_tokens, num_samples = [reader.integer_64() for _ in range(4)]
    if num_samples < 0:
        raise MessageError(f"a number of samples is {num_samples}")
    return SequenceData(
        sample_index, output_token_ids, block_ids, num_computed_tokens, num_scheduled_tokens, num_samples
    )
