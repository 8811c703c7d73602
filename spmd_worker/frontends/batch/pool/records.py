"""Records of a pool: names of its objects, their JSON, and strict parsing.

job.json               what every world must have equal
input.index            index of the input
ranges/00000012        range 12: its rows and its first holder. Numbers are dense: 13 exists only after 12
ranges/00000012.0002   entry 2 of its log: lease, part or handback. All compete for the next number
parts/00000012.0002.WORKER.7   lines and records of finished rows, if an entry names it
done/00000012          the parts of a range that is done; only a summary of its log
workers/ID.json .beat .end     who, heartbeat with counts, how it ended
merged/merge.0001      log of the merge: lease, handback or end
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final

from spmd_worker.base.errors import PoolError
from spmd_worker.base.files import JsonError, parse_json_object

JOB_NAME: Final = "job.json"
INPUT_INDEX_NAME: Final = "input.index"
OUTPUT_NAME: Final = "output.json"
"""Name of the pool in the manifest of an output in parts: the same for all worlds, and for no other pool."""
RANGES, PARTS, DONE, WORKERS, MERGED, CLOCK = FOLDERS = ("ranges", "parts", "done", "workers", "merged", "clock")
WORLDS: Final = "worlds"
"""Folder of the worlds' run directories, which are no objects of the pool."""
MERGE_LOG: Final = f"{MERGED}/merge"
BLOCK_RANGES: Final = 1000
"""Ranges are listed in blocks of this many: those whose number begins with the same digits."""
MAX_WORKER_CHARACTERS: Final = 100
REPLACED: Final = "end the worlds of the pool before, and start those of the new one"
_FORMAT_VERSION: Final = 1
_DIGEST_BYTES: Final = 16
_WORKER: Final = re.compile(rf"[A-Za-z0-9_-]{{1,{MAX_WORKER_CHARACTERS}}}")
_RANGE_NAME: Final = re.compile(rf"(?:ranges|done|parts)/(\d{{8,}})(?:\.(\d{{4,}})(?:\.{_WORKER.pattern}\.\d+)?)?")
_WORKER_NAME: Final = re.compile(rf"{WORKERS}/({_WORKER.pattern})\.(json|beat|end)")

Spans = tuple[tuple[int, int], ...]
"""Rows as sorted, disjoint [start, stop)."""


@dataclass(frozen=True, slots=True)
class PoolJob:
    """The job of a pool, equal for every worker. `answers` has everything that bytes of the output depend on."""

    answers: Mapping[str, Any]
    num_rows: int
    output: str
    lease_s: float
    lease_rows: int

    def to_bytes(self) -> bytes:
        return _to_bytes({"format_version": _FORMAT_VERSION, **_fields(self), "lease_s": float(self.lease_s)})

    @staticmethod
    def from_bytes(data: bytes) -> "PoolJob":
        """Raises PoolError."""
        types = {"format_version": int, "answers": dict, "num_rows": int, "output": str, "lease_s": float}
        fields = _parse(JOB_NAME, data, {**types, "lease_rows": int})
        if fields.pop("format_version") != _FORMAT_VERSION:
            raise PoolError(f"{JOB_NAME} is not of format {_FORMAT_VERSION}: give job.pool another folder")
        return PoolJob(**fields)

    def values(self) -> dict[str, Any]:
        """Everything that must be equal, by key. As JSON: a tuple equals the list that was read."""
        values = {"number of rows": self.num_rows, "job.output": self.output, "job.lease_s": float(self.lease_s)}
        found: dict[str, Any] = json.loads(_to_bytes({**self.answers, **values, "job.lease_rows": self.lease_rows}))
        return found


@dataclass(frozen=True, slots=True)
class RangeRecord:
    """Entry 1 of a range's log: rows [start, stop) are allocated, and leased by `worker`."""

    start: int
    stop: int
    worker: str
    nonce: int

    def to_bytes(self) -> bytes:
        return _to_bytes(_fields(self))

    @staticmethod
    def from_bytes(name: str, data: bytes) -> "RangeRecord":
        """Raises PoolError."""
        record = RangeRecord(**_parse(name, data, {"start": int, "stop": int, "worker": str, "nonce": int}))
        if not 0 <= record.start < record.stop:
            raise PoolError(f"{name} is damaged (rows {record.start} to {record.stop}): {_WAY_OUT}")
        return record


@dataclass(frozen=True, slots=True)
class Part:
    """An object with finished rows of one range; `digest` is of its bytes."""

    name: str
    spans: Spans
    num_bytes: int
    digest: str

    @staticmethod
    def from_json(name: str, value: Any) -> "Part":
        """Raises PoolError."""
        fields = _checked(name, value, {"name": str, "spans": list, "num_bytes": int, "digest": str})
        is_pair = [type(span) is list and list(map(type, span)) == [int, int] for span in fields["spans"]]
        if not all(is_pair):
            raise PoolError(f"{name} is damaged (its spans are not pairs of rows): {_WAY_OUT}")
        return Part(fields["name"], tuple((a, b) for a, b in fields["spans"]), fields["num_bytes"], fields["digest"])


@dataclass(frozen=True, slots=True)
class Merged:
    """The output of a merge."""

    lines: int
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of a log after its first lease. `kind` is lease, part (with `part`), handback or end (with `merged`)."""

    kind: str
    worker: str
    nonce: int
    part: Part | None = None
    merged: Merged | None = None

    def to_bytes(self) -> bytes:
        return _to_bytes({name: value for name, value in _fields(self).items() if value is not None})

    @staticmethod
    def from_bytes(name: str, data: bytes) -> "Entry":
        """Raises PoolError."""
        value = _object(name, data)
        kind = value.get("kind")
        payload = {"lease": None, "handback": None, "part": "part", "end": "merged"}.get(str(kind), "kind")
        extra = {} if payload in (None, "kind") else {str(payload): dict}
        fields = _checked(name, value, {"kind": str, "worker": str, "nonce": int, **extra})
        if payload == "kind":
            raise PoolError(f"{name} is damaged (kind {kind!r}): {_WAY_OUT}")
        if "part" in fields:
            fields["part"] = Part.from_json(name, fields["part"])
        if "merged" in fields:
            fields["merged"] = Merged(**_checked(name, fields["merged"], {"lines": int, "bytes": int, "sha256": str}))
        return Entry(**fields)


@dataclass(frozen=True, slots=True)
class DoneRecord:
    """A range that is done, and its parts in the order of its log."""

    start: int
    stop: int
    parts: tuple[Part, ...]

    def to_bytes(self) -> bytes:
        return _to_bytes(_fields(self))

    @staticmethod
    def from_bytes(name: str, data: bytes) -> "DoneRecord":
        """Raises PoolError."""
        fields = _parse(name, data, {"start": int, "stop": int, "parts": list})
        parts = tuple(Part.from_json(name, part) for part in fields["parts"])
        return DoneRecord(fields["start"], fields["stop"], parts)


def check_worker(worker: str) -> str:
    """A worker's id, which is a part of names. Raises ValueError."""
    if not _WORKER.fullmatch(worker):
        raise ValueError(f"worker {worker!r} must have 1 to {MAX_WORKER_CHARACTERS} letters, digits, - or _")
    return worker


def range_name(number: int) -> str:
    """Name of entry 1 of a range's log; those of later entries begin with it."""
    return f"{RANGES}/{number:08}"


def done_name(number: int) -> str:
    """Name of the summary of a range that is done."""
    return f"{DONE}/{number:08}"


def part_name(entry_name: str, worker: str, nonce: int) -> str:
    """Name of the part of an entry. Unique: a part is never replaced, and one that no entry names is garbage."""
    return f"{PARTS}/{entry_name.rpartition('/')[2]}.{worker}.{nonce}"


def worker_of(part: Part) -> str:
    """The worker in a part's name. Raises PoolError for no such name."""
    words = part.name.split(".")
    if number_and_entry(part.name) is None or len(words) != 4:
        raise PoolError(f"{part.name!r} is no name of a part: {_WAY_OUT}")
    return words[2]


def block_prefix(folder: str, block: int) -> str:
    """Prefix of the names in `folder` of the ranges of a block."""
    return f"{folder}/{block:05}"


def number_and_entry(name: str) -> tuple[int, int] | None:
    """(range, entry) of an object in ranges/, done/ or parts/; None for a foreign file."""
    found = _RANGE_NAME.fullmatch(name)
    return None if found is None else (int(found[1]), int(found[2] or 1))


def worker_and_kind(name: str) -> tuple[str, str] | None:
    """(worker, json | beat | end) of an object in workers/; None for a foreign file."""
    found = _WORKER_NAME.fullmatch(name)
    return None if found is None else (found[1], found[2])


def worker_name(worker: str, kind: str) -> str:
    """Name of a worker's record of a kind: json, beat or end."""
    return f"{WORKERS}/{worker}.{kind}"


def digest_of(data: bytes) -> str:
    """Digest of a part's bytes."""
    return blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()


def free_record(value: Mapping[str, Any]) -> bytes:
    """A record without fixed keys: who a worker is, its counts, how it ended."""
    return _to_bytes(value)


def read_free_record(data: bytes | None) -> dict[str, Any]:
    """A record without fixed keys; empty for a missing or torn one, which is only for display."""
    try:
        return parse_json_object(data or b"{}")
    except JsonError:
        return {}


_ENCODER: Final = json.JSONEncoder(sort_keys=True, allow_nan=False, default=lambda record: _fields(record))
_WAY_OUT: Final = "restore the pool's folder from before, or give job.pool another"


def _to_bytes(value: Mapping[str, Any]) -> bytes:
    return (_ENCODER.encode(value) + "\n").encode("ascii")


def _fields(record: Any) -> dict[str, Any]:
    """Names and values of a record's fields; `asdict` would copy the values."""
    return {name: getattr(record, name) for name in record.__slots__}


def _object(name: str, data: bytes) -> dict[str, Any]:
    try:
        return parse_json_object(data)
    except JsonError as error:
        raise PoolError(f"{name} of the pool {error}: {_WAY_OUT}") from None


def _parse(name: str, data: bytes, types: Mapping[str, type]) -> dict[str, Any]:
    return _checked(name, _object(name, data), types)


def _checked(name: str, value: Any, types: Mapping[str, type]) -> dict[str, Any]:
    """The fields of an object that has exactly those keys and types. Raises PoolError naming the first that differs."""
    if type(value) is not dict:
        raise PoolError(f"{name} is damaged (not an object where one must be): {_WAY_OUT}")
    for key in dict.fromkeys((*types, *value)):
        if key not in types:
            raise PoolError(f"{name} is damaged, or of another version (it has {key!r}): {_WAY_OUT}")
        if key not in value or type(value[key]) is not types[key]:
            raise PoolError(f"{name} is damaged ({key!r} must be of type {types[key].__name__}): {_WAY_OUT}")
        if types[key] is int and value[key] < 0:
            raise PoolError(f"{name} is damaged ({key!r} is {value[key]}): {_WAY_OUT}")
    return value
