"""Heartbeat of a rank: its step and phase, and the record of it that the other ranks read.

The main thread notes when it enters a step or a phase; the watchdog's thread finds the rest: the line that the main
thread is in, and whether it waits there for other ranks.
"""

import gc
import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from types import FrameType
from typing import Any, Final, NamedTuple, TypeVar

STARTING: Final = "starting"
BETWEEN_STEPS: Final = "between steps"
"""Phase outside every call of the engine. It has no limit: standard input may keep a job waiting for hours, and so may
the program that calls an engine.
"""
CLOSING: Final = "closing"

_NUM_FRAMES: Final = 12
WAITING_MARK: Final = "WAITS_FOR_RANKS"
"""Name of a module-level constant: a main thread that is in a function of such a module waits for other ranks."""

_WAITING_PACKAGE_OF_TORCH: Final = "torch.distributed"
_OWN_PACKAGES: Final = (__name__.partition(".")[0], "kv_cache")

_COLLECTS_AT_ALLOCATIONS: Final = sys.version_info < (3, 12)
"""Later interpreters collect garbage only between two bytecodes."""

_looks = threading.RLock()
# A process that is forked during a look would wait for its end for ever, and collect no garbage.
os.register_at_fork(before=_looks.acquire, after_in_parent=_looks.release, after_in_child=_looks.release)


class Moment(NamedTuple):
    """Step and phase of the main thread. A new object each time it moves: the same object twice means no progress."""

    step: int
    phase: str


class Heartbeat:
    """Step and phase of this rank's main thread, which sets them. Any thread may read `now`."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = Moment(0, STARTING)

    def enter(self, phase: str, step: int | None = None) -> None:
        """The main thread enters `phase`, in the same step or in `step`. One assignment: readers need no lock."""
        self.now = Moment(self.now.step if step is None else step, phase)

    def tick(self) -> None:
        """The main thread has made progress in its phase."""
        self.now = Moment(*self.now)


class FailureKind(StrEnum):
    """Kinds of reasons for which a rank ends."""

    PRIMARY = "primary"
    """Something failed on this rank."""
    SECONDARY = "secondary"
    """Something failed here because another rank did."""
    STALLED = "stalled"
    """The main thread has made no progress for as long as any rank may wait."""
    ORPHANED = "orphaned"
    """The launcher's process has ended before this one."""
    SIGNALLED = "signalled"
    """A signal from outside asks this rank to end."""
    LEFT = "left"
    """It has ended, or its engine was deleted, without `close`: no failure of its own, but the end of ranks that wait
    for it.
    """
    EXPLAINED = "explained"
    """Every rank knows the reason, and rank 0 prints it: a wrong setting, replicas that diverged."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The reason why a rank ends. `text` is a sentence that names the rank; `order` counts the failures of all ranks as
    they reached the store, from 1, and is 0 where there is none.
    """

    kind: FailureKind
    text: str
    exit_code: int = 1
    order: int = 0


@dataclass(frozen=True, slots=True)
class RankHeartbeat:
    """A rank's published state. `phase_age_s` is the time it had been in its phase; `where` is the line of code.

    `node`, `pid` and `start_time` identify its process, and no other, on the same node.
    """

    rank: int
    node: str
    pid: int
    start_time: int
    count: int
    step: int
    phase: str
    phase_age_s: float = 0.0
    where: str = ""
    is_waiting: bool = False
    has_ended: bool = False
    failure: Failure | None = None

    def pack(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @staticmethod
    def unpack(payload: bytes | str) -> "RankHeartbeat":
        """The heartbeat of bytes from the store. Raises ValueError for invalid ones."""
        return RankHeartbeat.from_plain(json.loads(payload))

    @staticmethod
    def from_plain(value: Any) -> "RankHeartbeat":
        """The heartbeat of JSON values. Raises ValueError for invalid ones."""
        try:
            failure = value["failure"]
            if failure is not None:
                failure = _checked(Failure(**{**failure, "kind": FailureKind(failure["kind"])}))
            return _checked(RankHeartbeat(**{**value, "failure": failure}))
        except (KeyError, TypeError) as error:
            raise ValueError(f"this is not a heartbeat: {error}") from None


_Record = TypeVar("_Record", Failure, RankHeartbeat)
_PLAIN: Final[dict[Any, tuple[type, ...]]] = {int: (int,), float: (int, float), str: (str,), bool: (bool,)}


def _checked(record: _Record) -> _Record:
    """The record. Raises TypeError where a field that is a number, text or truth value is of another type, or beyond 64
    bits.
    """
    for spec in fields(record):
        kinds, value = _PLAIN.get(spec.type), getattr(record, spec.name)
        if kinds is None:
            continue
        is_of_kind = isinstance(value, kinds) and (spec.type is bool or not isinstance(value, bool))
        if not is_of_kind or (isinstance(value, int | float) and not abs(value) < 1 << 63):
            raise TypeError(f"{spec.name} must be {spec.type.__name__ if isinstance(spec.type, type) else spec.type}")
    return record


def location_of(thread_id: int) -> tuple[str, bool]:
    """The line a thread is in, as `file:line function`, and whether it waits there for other ranks.

    The line is the innermost of this package's, else the innermost.
    """
    frames: list[FrameType] = []
    with _not_collecting():
        frame = sys._current_frames().get(thread_id)
        while frame is not None and len(frames) < _NUM_FRAMES:
            frames.append(frame)
            # May allocate an object: a garbage collection there could let the thread run meanwhile.
            frame = frame.f_back
    if not frames:
        return "", False
    is_waiting = any(_waits_for_ranks(frame) for frame in frames)
    shown = next((frame for frame in frames if _module_of(frame).partition(".")[0] in _OWN_PACKAGES), frames[0])
    return f"{os.path.basename(shown.f_code.co_filename)}:{shown.f_lineno} {shown.f_code.co_name}", is_waiting


@contextmanager
def _not_collecting() -> Iterator[None]:
    """No garbage collection while frames of other threads are read.

    Before 3.12 the garbage collector may run at any allocation, within `sys._current_frames` too, under a lock that a
    starting thread needs while it holds the interpreter, which the collector needs: a deadlock (fixed in 3.11.9,
    https://github.com/python/cpython/issues/106883).
    """
    if not _COLLECTS_AT_ALLOCATIONS:
        yield
        return
    with _looks:
        collects = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collects:
                gc.enable()


def _waits_for_ranks(frame: FrameType) -> bool:
    return WAITING_MARK in frame.f_globals or f"{_module_of(frame)}.".startswith(f"{_WAITING_PACKAGE_OF_TORCH}.")


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
