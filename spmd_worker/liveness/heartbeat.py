"""What a rank is doing, and the record of it that the other ranks read.

The main thread says when it enters a step or a phase; everything else is found out beside it, by the watchdog's thread:
in which line it is, and whether it waits there for other ranks. Knows this process. Knows nothing about who reads it or
what follows from it.
"""

import gc
import json
import os
import sys
import threading
from dataclasses import asdict, dataclass
from enum import StrEnum
from types import FrameType
from typing import Any, Final, NamedTuple

STARTING: Final = "starting"
BETWEEN_STEPS: Final = "between steps"
"""Outside every call of the engine. No limit holds here: standard input may let a job wait for hours, and so may
whoever calls an engine.
"""
CLOSING: Final = "closing"

_NUM_FRAMES: Final = 12
WAITING_MARK: Final = "WAITS_FOR_RANKS"
"""The name of a module-level constant: a main thread that is in a function of such a module waits for other ranks."""

_WAITING_PACKAGE_OF_TORCH: Final = "torch.distributed"
_OWN_PACKAGES: Final = (__name__.partition(".")[0], "kv_cache")

_HOLDS_LOCK_WHILE_COLLECTING: Final = sys.version_info < (3, 12)
_looks = threading.Lock()


class Moment(NamedTuple):
    """Where the main thread is. A new one each time it moves: whoever sees the same object twice saw no progress."""

    step: int
    phase: str


class Heartbeat:
    """This rank's main thread, as far as it says. Any thread may read `now`."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = Moment(0, STARTING)

    def enter(self, phase: str, step: int | None = None) -> None:
        """The main thread goes on to `phase`, in the same step or in `step`. One assignment: readers need no lock."""
        self.now = Moment(self.now.step if step is None else step, phase)


class FailureKind(StrEnum):
    """What a rank has to say of its end."""

    PRIMARY = "own"
    """Something failed here."""
    SECONDARY = "echo"
    """Something failed because another rank did."""
    STALLED = "stalled"
    """The main thread has not moved for as long as any rank may wait."""
    ORPHANED = "orphaned"
    """The launcher's process has ended before this one."""
    SIGNALLED = "told"
    """Somebody outside wants this rank to end."""
    LEFT = "left"
    """It has ended, or its engine was deleted, without `close`: well for itself, and the end of those who wait for it.
    """
    EXPLAINED = "said"
    """It has been, or is being, said on the terminal, and every rank knows: a wrong setting, replicas that diverged."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a rank ends. `text` is a whole sentence that names the rank; `order` counts the failures of all ranks as they
    reached the store, from 1, and is 0 where there is none.
    """

    kind: FailureKind
    text: str
    exit_code: int = 1
    order: int = 0


@dataclass(frozen=True, slots=True)
class RankHeartbeat:
    """A rank, as it published itself. `phase_age_s` is how long it had been in its phase; `where` is the line of code.

    `node`, `pid` and `start_time` find its process again, and no other, on the same node.
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
        """For the store."""
        return json.dumps(self.as_plain(), separators=(",", ":")).encode()

    def as_plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @staticmethod
    def unpack(payload: bytes | str) -> "RankHeartbeat":
        """From the store. Raises ValueError for anything else."""
        return RankHeartbeat.from_plain(json.loads(payload))

    @staticmethod
    def from_plain(value: Any) -> "RankHeartbeat":
        """From JSON. Raises ValueError for anything else."""
        try:
            failure = value["failure"]
            if failure is not None:
                failure = Failure(**{**failure, "kind": FailureKind(failure["kind"])})
            return RankHeartbeat(**{**value, "failure": failure})
        except (KeyError, TypeError) as error:
            raise ValueError(f"this is no heartbeat: {error}") from None


def stand_of(thread_id: int) -> tuple[str, bool]:
    """The line a thread is in, as `file:line function`, and whether it waits there for other ranks.

    The line is the innermost of this package's, else the innermost.
    """
    innermost = current_frames().get(thread_id)
    frames: list[FrameType] = []
    frame = innermost
    while frame is not None and len(frames) < _NUM_FRAMES:
        frames.append(frame)
        frame = frame.f_back
    if not frames:
        return "", False
    is_waiting = any(_waits_for_ranks(frame) for frame in frames)
    shown = next((frame for frame in frames if _module_of(frame).partition(".")[0] in _OWN_PACKAGES), frames[0])
    return f"{os.path.basename(shown.f_code.co_filename)}:{shown.f_lineno} {shown.f_code.co_name}", is_waiting


def current_frames() -> dict[int, FrameType]:
    """The innermost frame of every thread, by its id: Python has no other way to look at a thread from outside. Copies
    nothing and stops nobody.

    Before 3.12 garbage is collected wherever memory is asked for, in here too, under a lock that a starting thread
    wants while it keeps the interpreter from whoever collects: both would wait for ever (fixed in 3.11.9,
    https://github.com/python/cpython/issues/106883). So nothing is collected meanwhile.
    """
    if not _HOLDS_LOCK_WHILE_COLLECTING:
        return sys._current_frames()
    with _looks:
        collects = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()
        finally:
            if collects:
                gc.enable()


def _waits_for_ranks(frame: FrameType) -> bool:
    return WAITING_MARK in frame.f_globals or f"{_module_of(frame)}.".startswith(f"{_WAITING_PACKAGE_OF_TORCH}.")


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
