"""Step messages as bytes and back.

A message is coded against those before it, if the last one's step is the step before: decoding sequences continue with
their sampled token and cost only that token, once. So both sides keep the plans whose samples are outstanding
(`Encoder`, `Decoder`): one per step in flight (`num_in_flight`); a message's ids belong to the oldest. Messages must be
decoded in order, each once, and a log is readable from its first message on. A message without predecessor is coded
alone (`encode_message`, `decode_message`).

    byte            version
    byte            flags: bit 0, coded against the message before; bit 1, there are checksums of masks
    signed          step
    4 bytes         checksum of the message before, if bit 0; else of the layout of the records
    blob            digest
    counted ...     sampled token ids, and their number per sequence (empty if each has one)
    counted         checksums of masks, if bit 1
    records         events, and the plan without its step and the continuing sequences: see `record_codec.py`
    continuing      see `continuing_packing.py`
    4 bytes         CRC-32 of everything before

A reader rejects trailing bytes, invalid values, and messages whose records have other fields than its own: the layout
follows from the records, so no list of them is maintained.
"""

import struct
from dataclasses import dataclass
from typing import Final
from zlib import crc32

from spmd_worker.replica.lockstep.wire.continuing_packing import Keys, read_continuing, write_continuing
from spmd_worker.replica.lockstep.wire.message import MessageError, StepMessage
from spmd_worker.replica.lockstep.wire.packing import ByteReader, ByteWriter
from spmd_worker.replica.lockstep.wire.record_codec import RecordCodec, codec_of
from spmd_worker.replica.sequence.events import Event
from spmd_worker.replica.sequence.record_checks import check_num_ids
from spmd_worker.replica.sequence.sampled import SampledIds, num_sampling, sampling_keys
from spmd_worker.replica.sequence.step import StepPlan

VERSION: Final = 4
_HAS_BASE: Final = 1
_HAS_MASKS: Final = 2
_CHECKSUM: Final = struct.Struct("<I")
_MAX_DIGEST_BYTES: Final = 64
# Coded by hand: against the ids in the same message a continuing sequence costs no byte, in columns 5 or more.
_CONTINUING: Final = ("continuing", "continuing_token_ids", "continuing_num_ids", "continuing_blocks")
_EVENTS: Final = codec_of(tuple[Event, ...])
_PLAN: Final = RecordCodec(StepPlan, without=("step", *_CONTINUING))
_LAYOUT: Final = _CHECKSUM.pack(crc32(f"{_EVENTS.layout}; {_PLAN.layout}".encode()))


@dataclass(frozen=True, slots=True)
class _Base:
    """The message before, and the plans with outstanding samples, oldest first; its own is the last."""

    checksum: bytes
    plans: tuple[StepPlan, ...]

    @property
    def next_step(self) -> int:
        return self.plans[-1].step + 1


class Encoder:
    """Encodes the messages of one run, in order."""

    def __init__(self, num_in_flight: int = 1) -> None:
        self._num_in_flight = num_in_flight
        self._base: _Base | None = None

    def encode(self, message: StepMessage) -> bytes:
        """Bytes of the run's next message. Raises MessageError, without a change, for values outside the layout."""
        base = self._base if self._base is not None and self._base.next_step == message.step else None
        writer = ByteWriter()
        _write_head(writer, message, base)
        _PLAN.write(writer, (message.plan,))
        last_keys = _last_keys(base, message.sampled, self._num_in_flight)
        write_continuing(writer, message.plan, last_keys, message.sampled)
        checksum = _CHECKSUM.pack(crc32(writer.data))
        self._base = _next_base(base, checksum, message.plan, self._num_in_flight)
        return bytes(writer.data + checksum)


class Decoder:
    """Decodes the messages of one run, in order and each once, with the `num_in_flight` they were encoded with."""

    def __init__(self, num_in_flight: int = 1) -> None:
        self._num_in_flight = num_in_flight
        self._base: _Base | None = None

    def decode(self, data: bytes) -> StepMessage:
        """The next message. Raises MessageError, without a change, unless these are exactly its bytes."""
        reader = ByteReader(data, _checked_end(data))
        step, base, has_masks = self._read_head(reader)
        digest = reader.blob()
        if len(digest) > _MAX_DIGEST_BYTES:
            raise MessageError(f"a digest of {len(digest)} bytes")
        sampled = SampledIds(reader.counted(), reader.counted())
        mask_checksums = reader.counted() if has_masks else ()
        if has_masks and not mask_checksums:
            raise MessageError("checksums of masks are announced and missing")
        (events,) = _EVENTS.read(reader, 1)
        values = _PLAN.read_fields(reader)
        try:
            check_num_ids("num_sampled_ids", sampled.num_ids, sampled.token_ids)
        except ValueError as error:
            raise MessageError(str(error)) from None
        last_keys = _last_keys(base, sampled, self._num_in_flight)
        values |= zip(_CONTINUING, read_continuing(reader, last_keys, sampled))
        plan = StepPlan(step, **values)
        if reader.num_left:
            raise MessageError(f"{reader.num_left} bytes left over")
        self._base = _next_base(base, data[-_CHECKSUM.size :], plan, self._num_in_flight)
        return StepMessage(step, events, plan, sampled.token_ids, digest, sampled.num_ids, mask_checksums)

    def _read_head(self, reader: ByteReader) -> tuple[int, _Base | None, bool]:
        """The step, the message before if this one is coded against it, and whether checksums of masks follow."""
        version, flags, step = reader.byte(), reader.byte(), reader.integer_64()
        if version != VERSION:
            raise MessageError(f"layout version {version}, this code reads version {VERSION}")
        if flags & ~(_HAS_BASE | _HAS_MASKS):
            raise MessageError(f"unknown flags {flags:#x}")
        has_masks = bool(flags & _HAS_MASKS)
        checksum = reader.take(_CHECKSUM.size)
        if not flags & _HAS_BASE:
            if checksum != _LAYOUT:
                raise MessageError("the records have other fields: another version of this code wrote the message")
            return step, None, has_masks
        if self._base is None:
            raise MessageError(f"message of step {step} is coded against step {step - 1}, which was not read")
        if step != self._base.next_step:
            raise MessageError(f"message of step {step} where {self._base.next_step} comes next")
        if checksum != self._base.checksum:
            raise MessageError(f"message of step {step} is coded against another message of step {step - 1}")
        return step, self._base, has_masks


def encode_message(message: StepMessage) -> bytes:
    """The bytes of a message coded alone."""
    return Encoder().encode(message)


def decode_message(data: bytes) -> StepMessage:
    """The message that was encoded alone. Raises MessageError for any other bytes."""
    return Decoder().decode(data)


def _last_keys(base: _Base | None, sampled: SampledIds, num_in_flight: int) -> Keys:
    """Keys of the sampled ids that a message carries; empty if the messages before do not define them.

    Empty also if the plan samples for another number of sequences: a plan that claims any number of samples in a few
    bytes costs nothing.
    """
    if base is None or len(base.plans) != num_in_flight or num_sampling(base.plans[0]) != sampled.num_sequences:
        return ()
    return sampling_keys(base.plans[0])


def _next_base(base: _Base | None, checksum: bytes, plan: StepPlan, num_in_flight: int) -> _Base:
    return _Base(checksum, (plan,) if base is None else (*base.plans, plan)[-num_in_flight:])


def _checked_end(data: bytes) -> int:
    """Start of the checksum. Raises MessageError if it does not match."""
    end = len(data) - _CHECKSUM.size
    if end < 1:
        raise MessageError(f"{len(data)} bytes are too few for a message")
    if data[end:] != _CHECKSUM.pack(crc32(memoryview(data)[:end])):
        raise MessageError("checksum does not match: the message was damaged or cut short")
    return end


def _write_head(writer: ByteWriter, message: StepMessage, base: _Base | None) -> None:
    if len(message.digest) > _MAX_DIGEST_BYTES:
        raise MessageError(f"a digest of {len(message.digest)} bytes")
    writer.byte(VERSION)
    writer.byte((0 if base is None else _HAS_BASE) | (_HAS_MASKS if message.mask_checksums else 0))
    writer.signed(message.step)
    writer.data += _LAYOUT if base is None else base.checksum
    writer.blob(message.digest)
    writer.counted(message.sampled_token_ids)
    writer.counted(message.num_sampled_ids)
    if message.mask_checksums:
        writer.counted(message.mask_checksums)
    _EVENTS.write(writer, (message.events,))
