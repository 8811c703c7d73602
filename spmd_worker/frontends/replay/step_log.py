"""The stream of step messages as a file: the messages' own bytes, framed with length and checksum.

    8 bytes    magic
    frame      the header, a JSON object
    frame ...  one message each, in order

    frame      4 bytes marker, 4 bytes length of the payload, 4 bytes CRC-32 of length and payload, payload

Integers are unsigned and little-endian.

The marker lets a reader find the next good frame after damage, and so distinguish a torn tail, which a killed run
leaves, from damage in the middle. Nothing in the file is ever unpickled.
"""

import json
import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from itertools import count
from pathlib import Path
from types import UnionType
from typing import Any, BinaryIO, Final, get_args, get_origin, get_type_hints
from zlib import crc32

from kv_cache.layer_groups import LayerGroups
from spmd_worker.base.config.speculation import SpeculativeConfig
from spmd_worker.base.errors import ConfigError, StepLogError
from spmd_worker.base.files import JsonError, NamedErrors, create_job_file, open_regular_file, parse_json_object
from spmd_worker.replica.scheduler.media_rows import NO_MEDIA, MediaRowLimits
from spmd_worker.replica.sequence.events import AddAdapter, AddPromptAdapter

STEP_LOG_NAME: Final = "steps.log"
"""File in a run directory, with job.step_log=true."""
FORMAT_VERSION: Final = 14
_MAGIC: Final = b"SPMDLOG\n"
_MARKER: Final = b"\xf5STP"
_HEAD: Final = struct.Struct("<4sII")
_LENGTH: Final = struct.Struct("<I")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLogHeader:
    """Everything outside the messages that a replay needs. Two runs of the same job have equal headers.

    `model_path` is absolute. The ranks agreed on `num_blocks` and `num_host_blocks`; the offload tier has
    `num_tier_blocks`. Admission leaves `watermark_blocks_per_sequence` free; `block_copy_tokens` is the cost of
    swapping a block, in computed tokens. `max_model_len` is resolved, in tokens; `device` is "cpu" or "cuda". `code`
    and `tokenizer` are fingerprints, to report changes since the run; `tokenizer` is None for a folder without one.
    `runner`, `pooling_type` and `classifier_from_token` decide whether rows generate or are pooled, and how. With
    `num_steps_ahead` of 1 a step is planned before the ids of the previous step are read; `keeps_histories`: see
    `SchedulerLimits`. `max_loras` is 0 in a run without adapters; those that were loaded at the start, with ids from 1
    on, are known by the digests of their contents. `lora_merge` is the folder of the adapter that was merged into the
    weights, absolute. `connector_saves` is `KVConnector.saves`, None without a connector. A model with recurrent states
    has `num_state_slots` on the device and `num_host_state_slots` in swap space; `slot_copy_tokens` is the cost of
    swapping a state, `snapshot_interval`, `verify_hits` and `verify_steps` are as in `SchedulerLimits`. A model that
    takes images keeps `num_media_rows` rows, and has the limits of `MediaRowLimits`; so does an encoder-decoder model,
    whose inputs have at most `max_encoder_len`. `num_full_groups`, `num_window_groups` and `windows` are those of
    `LayerGroups`. Row-parallel sums have `num_leaves`; `row_sums` are how the run added them, in words. `speculation`:
    the resolved `SpeculativeConfig` as JSON, None without drafts; `num_lookahead_tokens` is as in `SchedulerLimits`.
    `weight_files` are those of the model and `weight_digests` their `sampled_digests`: what a run began with.
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
    classifier_from_token: tuple[str, str] | None = None
    num_steps_ahead: int = 0
    keeps_histories: bool = False
    max_prompt_adapters: int = 0
    lora_merge: str | None = None
    max_loras: int = 0
    max_lora_rank: int = 0
    max_cpu_loras: int = 0
    adapter_names: tuple[str, ...] = ()
    adapter_paths: tuple[str, ...] = ()
    adapter_digests: tuple[int, ...] = ()
    prompt_adapter_names: tuple[str, ...] = ()
    prompt_adapter_paths: tuple[str, ...] = ()
    prompt_adapter_digests: tuple[int, ...] = ()
    prompt_adapter_num_tokens: tuple[int, ...] = ()
    connector_saves: bool | None = None
    num_state_slots: int = 0
    num_host_state_slots: int = 0
    slot_copy_tokens: float = 0.0
    snapshot_interval: int = 0
    num_media_rows: int = 0
    max_encode_patches: int = 0
    sees_whole_image: bool = False
    max_encoder_len: int = 0
    verify_hits: int = 0
    verify_steps: int = 0
    num_full_groups: int = 1
    num_window_groups: int = 0
    windows: tuple[int, ...] = ()
    num_leaves: int = 1
    row_sums: str = ""
    speculation: str | None = None
    num_lookahead_tokens: int = 0
    cache_dtype: str = "auto"
    weight_files: tuple[str, ...] = ()
    weight_digests: tuple[str, ...] = ()
    format_version: int = FORMAT_VERSION

    @property
    def adapters(self) -> list[AddAdapter]:
        """LoRA adapters that were loaded at the start."""
        columns = zip(count(1), self.adapter_names, self.adapter_paths, self.adapter_digests)
        return [AddAdapter(*each) for each in columns]

    @property
    def prompt_adapters(self) -> list[AddPromptAdapter]:
        """Prompt adapters that were loaded at the start."""
        given = zip(self.prompt_adapter_names, self.prompt_adapter_paths, self.prompt_adapter_digests)
        both = zip(count(1), given, self.prompt_adapter_num_tokens)
        return [AddPromptAdapter(int_id, *each, (), num_tokens) for int_id, each, num_tokens in both]

    @property
    def speculative_config(self) -> SpeculativeConfig | None:
        """Options of speculative decoding. Raises StepLogError for those of another version."""
        if self.speculation is None:
            return None
        try:
            return SpeculativeConfig(**json.loads(self.speculation))
        except (TypeError, ValueError, ConfigError) as error:
            raise StepLogError(f"the header's speculation is not one of this version: {error}") from None

    @property
    def media(self) -> MediaRowLimits:
        """Limits of images in prompts."""
        if not self.num_media_rows:
            return NO_MEDIA
        limits = (self.max_num_batched_tokens, self.enable_chunked_prefill)
        given = (self.num_media_rows, self.max_encode_patches, self.tensor_parallel_size, self.sees_whole_image)
        return MediaRowLimits(*given, *limits)

    @property
    def groups(self) -> LayerGroups:
        """Groups of layers with block tables of their own."""
        num_step_tokens = self.max_num_batched_tokens if self.windows else 0
        return LayerGroups(self.num_full_groups, self.num_window_groups, self.windows, num_step_tokens)

    @property
    def num_in_flight(self) -> int:
        """Steps that were in flight at once: a message has the ids of the step this many before it."""
        return self.pipeline_parallel_size + self.num_steps_ahead


class StepLogWriter:
    """Writes header and messages, each in one write (a few microseconds): a reader sees a message once `write` has
    returned, and a killed rank loses only the frame it was writing. Only `close` waits for the disk, so a power failure
    may lose the last seconds. Raises OSError.
    """

    def __init__(self, path: Path, header: StepLogHeader) -> None:
        self.path = path
        self._stream: BinaryIO = create_job_file(path)
        self._write_all(_MAGIC + _frame(json.dumps(header_to_json(header)).encode("ascii")))

    def write(self, payload: bytes) -> None:
        self._write_all(_frame(payload))

    def close(self) -> None:
        """Close the file, once it is on the disk. Idempotent."""
        if not self._stream.closed:
            with self._stream:
                os.fsync(self._stream.fileno())

    def __enter__(self) -> "StepLogWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write_all(self, data: bytes) -> None:
        # An unbuffered write may be partial, on a disk that fills up.
        rest = memoryview(data)
        with NamedErrors(self.path):
            while rest:
                rest = rest[self._stream.write(rest) :]


@dataclass(frozen=True, slots=True)
class StepLog:
    """A checked log. `torn_tail` describes a lost end, None for a complete log."""

    path: Path
    header: StepLogHeader
    num_messages: int
    torn_tail: str | None

    def messages(self) -> Iterator[bytes]:
        """The payloads in order, read lazily; may be called again."""
        with open_regular_file(self.path) as stream:
            stream.seek(len(_MAGIC))
            _read_payload(self.path, stream)
            for _ in range(self.num_messages):
                yield _read_payload(self.path, stream)


def read_step_log(path: Path) -> StepLog:
    """Check and open a log, which may be growing; a damaged tail is reported and the rest used. Raises StepLogError for
    damage before a good frame, for other files and other versions of the format, and OSError.
    """
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
    wrong = wrong or [name for name in names if not _has_type(value[name], _KINDS[name])]
    if wrong:
        raise StepLogError(f"the header's {wrong[0]} is missing, unknown or of another type: {value.get(wrong[0])!r}")
    made: dict[str, Any] = {name: tuple(each) if isinstance(each, list) else each for name, each in value.items()}
    return StepLogHeader(**made)


_KINDS: Final = get_type_hints(StepLogHeader)


def _has_type(value: object, kind: Any) -> bool:
    """Whether a JSON value has the type of a header's field, a list for a tuple."""
    if isinstance(kind, UnionType):
        return any(_has_type(value, each) for each in get_args(kind))
    if get_origin(kind) is tuple:
        first, last = get_args(kind)
        if not isinstance(value, list) or (last is not Ellipsis and len(value) != 2):
            return False
        return all(type(item) is first for item in value)
    return type(value) is kind


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
        raise StepLogError(f"{path} is not a step log: it does not begin with {_MAGIC!r}")
    frame = _good_frame(data, len(_MAGIC))
    if frame is None:
        raise StepLogError(f"{path}: the header at byte {len(_MAGIC)} is damaged or truncated")
    try:
        header = header_from_json(parse_json_object(data[frame]))
    except JsonError as error:
        raise StepLogError(f"{path}: the header {error}") from None
    except ValueError as error:
        raise StepLogError(f"{path}: {error}") from None
    num_messages, end = 0, frame.stop
    while (frame := _good_frame(data, end)) is not None:
        num_messages, end = num_messages + 1, frame.stop
    return StepLog(path, header, num_messages, _torn_tail(path, data, end, num_messages))


def _good_frame(data: mmap.mmap, offset: int) -> slice | None:
    """The payload of an intact frame at `offset`."""
    start = offset + _HEAD.size
    if start > len(data):
        return None
    marker, length, checksum = _HEAD.unpack_from(data, offset)
    end = start + length
    if marker != _MARKER or end > len(data):
        return None
    is_intact = crc32(data[start:end], crc32(_LENGTH.pack(length))) == checksum
    return slice(start, end) if is_intact else None


def _torn_tail(path: Path, data: mmap.mmap, end: int, num_messages: int) -> str | None:
    """Description of the bytes after the last good frame. Raises StepLogError if a good frame follows."""
    if end == len(data):
        return None
    found = data.find(_MARKER, end + 1)
    while found >= 0:
        if _good_frame(data, found) is not None:
            raise StepLogError(
                f"{path} is damaged at byte {end}, after {num_messages} messages: intact messages follow at byte "
                f"{found}, so this is not a torn tail; copy the file again, or truncate it at byte {end}"
            )
        found = data.find(_MARKER, found + 1)
    return f"the last {len(data) - end} bytes, from byte {end} on, are not a complete message: the run ended there"
