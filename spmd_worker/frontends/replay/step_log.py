"""The stream of step messages as a file: the messages' own bytes, framed with length and checksum.

    8 bytes    magic
    frame      the header, a JSON object
    frame ...  one message each, in order

    frame      4 bytes marker, 4 bytes length of the payload, 4 bytes CRC-32 of length and payload, payload

Integers are unsigned and little-endian.

The marker lets a reader find the next good frame after damage, and so distinguish a torn tail, which a killed run
leaves and which costs only the last steps, from damage in the middle, after which nothing can be trusted. Knows nothing
about the content of messages (`codec.py`); nothing in the file is ever unpickled.
"""

import json
import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final, NamedTuple
from zlib import crc32

from spmd_worker.base.errors import StepLogError
from spmd_worker.base.files import JsonError, begin_own_file, open_regular_file, parse_json_object

STEP_LOG_NAME: Final = "steps.log"
"""File in a run directory, with job.step_log=true."""
FORMAT_VERSION: Final = 6
_MAGIC: Final = b"SPMDLOG\n"
_MARKER: Final = b"\xf5STP"
_HEAD: Final = struct.Struct("<4sII")
_LENGTH: Final = struct.Struct("<I")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLogHeader:
    """Everything outside the messages that a replay needs. Two runs of the same job have equal headers: no clock.

    `model_path` is absolute. The ranks agreed on `num_blocks` and `num_host_blocks`; the offload tier has
    `num_tier_blocks`. Admission leaves `watermark_blocks_per_sequence` free; `block_copy_tokens` is the price of
    swapping a block in tokens computed. `max_model_len` is resolved, in tokens; `device` ("cpu", "cuda"), `dtype` and
    `quantization` are those of the computation. `code` and `tokenizer` are fingerprints, so that a replay can report
    changes since; `tokenizer` is None for a folder without one. `runner`, `pooling_type` and `classifier_from_token`
    decide whether rows generate or are pooled, and how. With `num_steps_ahead` of 1 a step was decided before the ids
    of the one before it were read.
    """

    code: str
    model_path: str
    load_format: str
    device: str
    dtype: str
    quantization: str | None
    tokenizer: str | None
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_chunked_prefill: bool
    num_blocks: int
    block_size: int
    watermark_blocks_per_sequence: int
    num_host_blocks: int
    num_tier_blocks: int
    enable_prefix_caching: bool
    preemption_mode: str
    block_copy_tokens: float
    seed: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    runner: str = "auto"
    pooling_type: str | None = None
    classifier_from_token: tuple[str, ...] | None = None
    num_steps_ahead: int = 0
    format_version: int = FORMAT_VERSION

    @property
    def num_in_flight(self) -> int:
        """Steps that were in flight at once: a message has the ids of the step this many before it."""
        return self.pipeline_parallel_size + self.num_steps_ahead


class StepLogWriter:
    """Writes header and messages; a reader sees every message whose `write` has returned.

    Each frame is handed to the operating system at once, in one write (a few microseconds): a rank that is killed at
    any moment loses only the frame it was writing. Only `close` waits for the disk, so a machine that loses power may
    lose the last seconds. OSError (a full disk) is the caller's to handle.
    """

    def __init__(self, path: Path, header: StepLogHeader) -> None:
        """Begins the file, replacing an existing one."""
        self.path = Path(path)
        self._stream: BinaryIO = begin_own_file(self.path)
        self._write_all(_MAGIC + _frame(_header_bytes(header)))

    def write(self, payload: bytes) -> None:
        """Write one message, encoded by `codec.Encoder`."""
        self._write_all(_frame(payload))

    def close(self) -> None:
        """Returns when the disk has everything. Idempotent."""
        if self._stream.closed:
            return
        try:
            os.fsync(self._stream.fileno())
        finally:
            self._stream.close()

    def __enter__(self) -> "StepLogWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write_all(self, data: bytes) -> None:
        """Write all data: an unbuffered write may be partial (a disk that fills up); the rest follows, or OSError."""
        rest = memoryview(data)
        while rest:
            rest = rest[self._stream.write(rest) :]


@dataclass(frozen=True, slots=True)
class StepLog:
    """A log that was checked from end to end. `torn_tail` describes a lost end, None for a complete log."""

    path: Path
    header: StepLogHeader
    num_messages: int
    torn_tail: str | None

    def messages(self) -> Iterator[bytes]:
        """The payloads in order, read as they are asked for; may be called again."""
        with open_regular_file(self.path) as stream:
            stream.seek(len(_MAGIC))
            _read_payload(self.path, stream)
            for _ in range(self.num_messages):
                yield _read_payload(self.path, stream)


def read_step_log(path: Path) -> StepLog:
    """Check a log, which may be growing, and open it.

    A tail cut anywhere, or damage with no good frame after it, is reported and the rest used. Raises StepLogError for
    damage before a good frame, for other files and other versions of the format, and OSError.
    """
    path = Path(path)
    with open_regular_file(path) as stream:
        if os.fstat(stream.fileno()).st_size == 0:
            raise StepLogError(f"{path} is empty: the run ended before it wrote the header of its step log")
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _check(path, data)


def header_to_json(header: StepLogHeader) -> dict[str, Any]:
    """The header as JSON values, in the order of declaration."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(header).items()}


def header_from_json(value: dict[str, Any]) -> StepLogHeader:
    """The inverse of `header_to_json`. Raises StepLogError for missing and unknown keys and values of another type."""
    if value.get("format_version") != FORMAT_VERSION:
        raise StepLogError(
            f"format version {value.get('format_version')!r}; this code reads version {FORMAT_VERSION}: replay the log "
            f"with the version of the code that wrote it"
        )
    names = [spec.name for spec in fields(StepLogHeader)]
    wrong = [name for name in names if name not in value] + [name for name in value if name not in names]
    wrong = wrong or [name for name in names if not _has_type(name, value[name])]
    if wrong:
        raise StepLogError(f"the header's {wrong[0]} is missing, unknown or of another type: {value.get(wrong[0])!r}")
    made: dict[str, Any] = {name: tuple(each) if isinstance(each, list) else each for name, each in value.items()}
    return StepLogHeader(**made)


class _Frame(NamedTuple):
    """Start and end of the payload of a good frame."""

    start: int
    end: int


def _header_bytes(header: StepLogHeader) -> bytes:
    return json.dumps(header_to_json(header), ensure_ascii=True).encode("ascii")


def _has_type(name: str, value: object) -> bool:
    if name in ("code", "model_path", "load_format", "device", "dtype", "preemption_mode", "runner"):
        return isinstance(value, str)
    if name in ("tokenizer", "quantization", "pooling_type"):
        return value is None or isinstance(value, str)
    if name == "classifier_from_token":
        are_tokens = isinstance(value, list) and len(value) == 2 and all(isinstance(each, str) for each in value)
        return value is None or are_tokens
    if name == "eos_token_ids":
        return isinstance(value, list) and all(type(item) is int for item in value)
    if name == "block_copy_tokens":
        return type(value) is float
    return type(value) is (bool if name.startswith("enable_") else int)


def _frame(payload: bytes) -> bytes:
    length = _LENGTH.pack(len(payload))
    return _HEAD.pack(_MARKER, len(payload), crc32(payload, crc32(length))) + payload


def _read_payload(path: Path, stream: BinaryIO) -> bytes:
    """Read the next frame of a log that `read_step_log` has checked."""
    head = stream.read(_HEAD.size)
    payload = stream.read(_HEAD.unpack(head)[1]) if len(head) == _HEAD.size else b""
    if not head or _frame(payload)[: _HEAD.size] != head:
        raise StepLogError(f"{path} changed while it was read")
    return payload


def _check(path: Path, data: mmap.mmap) -> StepLog:
    if data[: len(_MAGIC)] != _MAGIC:
        raise StepLogError(f"{path} is no step log: it does not begin with {_MAGIC!r}")
    frame = _good_frame(data, len(_MAGIC))
    if frame is None:
        raise StepLogError(f"{path}: the header at byte {len(_MAGIC)} is damaged or cut short")
    try:
        header = header_from_json(parse_json_object(data[frame.start : frame.end]))
    except JsonError as error:
        raise StepLogError(f"{path}: the header {error}") from None
    except ValueError as error:
        raise StepLogError(f"{path}: {error}") from None
    num_messages, end = 0, frame.end
    while (frame := _good_frame(data, end)) is not None:
        num_messages, end = num_messages + 1, frame.end
    return StepLog(path, header, num_messages, _torn_tail(path, data, end, num_messages))


def _good_frame(data: mmap.mmap, offset: int) -> _Frame | None:
    start = offset + _HEAD.size
    if start > len(data):
        return None
    marker, length, checksum = _HEAD.unpack_from(data, offset)
    end = start + length
    if marker != _MARKER or end > len(data):
        return None
    is_whole = crc32(data[start:end], crc32(_LENGTH.pack(length))) == checksum
    return _Frame(start, end) if is_whole else None


def _torn_tail(path: Path, data: mmap.mmap, end: int, num_messages: int) -> str | None:
    """Description of the bytes after the last good frame. Raises StepLogError if a good frame follows."""
    if end == len(data):
        return None
    found = data.find(_MARKER, end + 1)
    while found >= 0:
        if _good_frame(data, found) is not None:
            raise StepLogError(
                f"{path} is damaged at byte {end}, after {num_messages} messages: good ones go on at byte {found}, so "
                f"this is not a torn tail; take the file from where it was copied, or cut it at byte {end}"
            )
        found = data.find(_MARKER, found + 1)
    return f"the last {len(data) - end} bytes, from byte {end} on, are no whole message: the run was cut short there"
