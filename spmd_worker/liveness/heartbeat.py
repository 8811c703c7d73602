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
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple

STARTING: Final = "starting"
BETWEEN_STEPS: Final = "between steps"
"""Outside every call of the engine. No limit holds here: standard input may let a job wait for hours, and so may
whoever calls an engine.
"""
CLOSING: Final = "closing"

_NUM_FRAMES: Final = 12
_WAITING_PLACES: Final = (
    "/torch/distributed/",
    "/spmd_worker/lockstep/transport/step_channel.py",
    "/spmd_worker/lockstep/transport/channel.py",
    "/spmd_worker/data_parallel/round.py",
    "/spmd_worker/batch/shared_job.py",
    "/spmd_worker/distributed/shared_memory.py",
)
_OWN_PLACES: Final = ("/spmd_worker/", "/kv_cache/")

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

    `node`, `pid` and `born` find its process again, and no other, on the same node.
    """

    rank: int
    node: str
    pid: int
    born: int
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


def node_name() -> str:
    """The same for processes that see each other's process ids, and for no others."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def born_at(pid: int) -> int | None:
    """When the process began, in the kernel's ticks; None for one that has ended, as a zombie too.

    Raises OSError where it cannot be told, as when this process has too many files open.
    """
    fields = _stat_of(str(pid))
    return None if fields is None or fields[0] in ("Z", "X") else int(fields[19])


def parent_of(pid: int) -> int | None:
    """The process id of the parent; None for a process that is not there. Raises OSError as `born_at` does."""
    fields = _stat_of(str(pid))
    return None if fields is None else int(fields[1])


def cpu_seconds_of(native_id: int) -> float | None:
    """What a thread of this process has computed so far; None where the system does not say."""
    try:
        fields = _stat_of(f"self/task/{native_id}")
    except OSError:
        return None
    return None if fields is None else (int(fields[11]) + int(fields[12])) / _TICKS_A_SECOND


_TICKS_A_SECOND: Final = os.sysconf("SC_CLK_TCK")


def _stat_of(place: str) -> list[str] | None:
    """The fields of `/proc/PLACE/stat` from the state on; None for a process or thread that is not there."""
    try:
        text = Path(f"/proc/{place}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name, in parentheses, may hold anything.
    return text.rpartition(")")[2].split()


def processes_of_rank(launcher: int, rank: int) -> list[int]:
    """Processes that `launcher`, a process id, started on this node as that rank of this job, whatever became of them
    since. Raises OSError as `born_at` does.
    """
    # A shell may have started ranks of several jobs.
    shared = [f"{name}={os.environ[name]}" for name in ("MASTER_ADDR", "MASTER_PORT") if name in os.environ]
    wanted = {f"RANK={rank}".encode(), *map(os.fsencode, shared)}
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        if parent_of(pid) == launcher:
            try:
                variables = (folder / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            found += [pid] if wanted.issubset(variables) else []
    return found


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
    is_waiting = any(_is_within(frame, _WAITING_PLACES) for frame in frames)
    shown = next((frame for frame in frames if _is_within(frame, _OWN_PLACES)), frames[0])
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


def _is_within(frame: FrameType, places: tuple[str, ...]) -> bool:
    return any(place in frame.f_code.co_filename for place in places)
