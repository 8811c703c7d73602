"""Failure diagnosis: from the ranks' heartbeats, the status of every rank and the rank that is the cause.

Pure functions, without clocks: the same heartbeats give the same diagnosis, on every rank and later from the files.
"""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from spmd_worker.base.errors import SpmdError
from spmd_worker.base.files import describe_os_error
from spmd_worker.base.liveness.heartbeat import Failure, FailureKind, RankHeartbeat

SILENT_AFTER_S: Final = 2.5
"""Age of the last heartbeat from which a rank is silent after a failure: living ranks send one every second."""

GATHER_S: Final = 0.3
"""Delay after an alarm until the heartbeats have the failures that ranks know of themselves."""

STALL_S: Final = 1.0
"""Delay until every stalled rank has noticed that it is: limits are counted from different moments."""

SETTLE_S: Final = 3.0
"""Time to wait for a primary failure where only secondary ones are seen: longer than it takes to be silent."""

STATUS_HEADING: Final = "rank status at the last heartbeats:"

# Torch's own classes, by name because this package is torch-free, and the texts of gloo and NCCL.
_SECONDARY_CLASSES_OF_TORCH: Final = ("DistBackendError", "DistNetworkError", "DistStoreError")
_SECONDARY_TEXTS: Final = (
    *("gloo", "NCCL"),
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe"),
)
_MAX_TEXT: Final = 2000
_MAX_REMARK: Final = 160

# Gloo's prefix and advice, which help no user.
_SOURCE_LINE: Final = re.compile(r"\[/[^\]\s]*gloo[^\]\s]*:\d+\] ")
_COMMON_ADVICE: Final = ". This is typically caused by"


@dataclass(frozen=True, slots=True)
class RankStatus:
    """Status of a rank: its last heartbeat, its age, and whether the rank's process is known to be gone.

    `last_heartbeat` is None for a rank that has sent none.
    """

    rank: int
    last_heartbeat: RankHeartbeat | None
    heard_ago_s: float = 0.0
    is_gone: bool = False

    @property
    def failure(self) -> Failure | None:
        return self.last_heartbeat.failure if self.last_heartbeat is not None else None

    @property
    def failure_kind(self) -> FailureKind | None:
        return self.failure.kind if self.failure is not None else None

    @property
    def is_running(self) -> bool:
        """Whether the rank has sent a heartbeat, and none that it has ended."""
        return self.last_heartbeat is not None and not self.last_heartbeat.has_ended

    @property
    def is_silent(self) -> bool:
        """Whether the last heartbeat is too old for a healthy rank."""
        return self.is_running and self.heard_ago_s > SILENT_AFTER_S

    @property
    def is_living(self) -> bool:
        """Whether the rank can be expected to report."""
        return self.is_running and not self.is_gone and not self.is_silent


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The ranks that are the cause, and the reason in one sentence. `is_explained`: rank 0 prints the reason, without
    the rank status.
    """

    ranks: tuple[int, ...]
    text: str
    exit_code: int = 1
    is_explained: bool = False
    is_silence: bool = False


def diagnose(statuses: Sequence[RankStatus], elapsed_s: float) -> Diagnosis | None:
    """The first explanation that applies, `elapsed_s` seconds after the alarm; None while a better one may come.

    Ordered from cause to effect: a rank's own failure; a process that is gone without one; a silent rank; a main thread
    that makes no progress; a rank that left; secondary failures; a signal from outside.
    """
    if elapsed_s < GATHER_S:
        return None
    for kind in (FailureKind.EXPLAINED, FailureKind.PRIMARY, FailureKind.ORPHANED):
        found = _first(statuses, kind)
        if found is not None:
            rank, failure = found
            return Diagnosis((rank,), failure.text, failure.exit_code, is_explained=kind is FailureKind.EXPLAINED)
    gone = [each for each in statuses if each.is_gone and each.failure is None]
    if gone:
        reason = "the process ended without reporting an error, as one that was killed or ran out of memory"
        return Diagnosis(_ranks(gone), f"{_are(gone)} gone: {_last_seen(gone[0])}; {reason}")
    return _diagnose_quiet(statuses, elapsed_s) if elapsed_s >= STALL_S else None


def _diagnose_quiet(statuses: Sequence[RankStatus], elapsed_s: float) -> Diagnosis | None:
    silent = [each for each in statuses if each.is_silent and not (each.is_gone or _explains_its_end(each))]
    if silent:
        return Diagnosis(_ranks(silent), f"{_are(silent)} silent: {_last_seen(silent[0])}", is_silence=True)
    stalled = [each for each in statuses if each.failure_kind is FailureKind.STALLED]
    at_work = [each for each in stalled if each.last_heartbeat and not each.last_heartbeat.is_waiting]
    if at_work:
        return _diagnose_stalled(at_work, "stuck")
    return _diagnose_by_effects(statuses, stalled) if elapsed_s >= SETTLE_S else None


def _diagnose_by_effects(statuses: Sequence[RankStatus], stalled: list[RankStatus]) -> Diagnosis | None:
    """Diagnosis without a primary failure."""
    unknown = [each for each in statuses if each.last_heartbeat is None]
    if unknown:
        text = f"{_are(unknown)} silent: no heartbeat since the start"
        return Diagnosis(_ranks(unknown), text, is_silence=True)
    signalled = [each for each in statuses if each.failure_kind is FailureKind.SIGNALLED]
    gone = [each for each in signalled if each.is_gone]
    if gone:
        # It stayed as long as a signalled rank does. Once it was gone, others lost it, and the launcher ends them.
        return _diagnose_signalled(gone)
    secondary = _first(statuses, FailureKind.SECONDARY)
    if stalled or secondary is not None:
        # A rank that closed its engine did so on purpose: one that left without `close` comes first.
        unclosed = [each for each in statuses if each.failure_kind is FailureKind.LEFT]
        if unclosed and unclosed[0].failure is not None:
            return Diagnosis(_ranks(unclosed), f"{unclosed[0].failure.text}; {_last_seen(unclosed[0])}")
        ended = [each for each in statuses if each.failure is None and not each.is_running]
        if ended:
            has = "has" if len(ended) == 1 else "have"
            text = f"{_names(ended)} {has} ended while others went on: {_last_seen(ended[0])}"
            return Diagnosis(_ranks(ended), text)
        busy = [each for each in statuses if each.is_living and each.last_heartbeat and _is_busy(each.last_heartbeat)]
        if busy:
            return _diagnose_stalled(busy, "busy while others waited for too long")
    if stalled:
        return _diagnose_stalled(stalled, "waiting for another rank, or for each other")
    if secondary is not None:
        return Diagnosis((secondary[0],), secondary[1].text)
    if not signalled:
        return None
    if len(signalled) == sum(each.is_running for each in statuses):
        name = _signal_of(signalled[0].failure)
        return Diagnosis(_ranks(signalled), f"every rank received {name}: the launcher or the machine ended the job")
    return _diagnose_signalled(signalled)


def _diagnose_signalled(signalled: list[RankStatus]) -> Diagnosis:
    """Diagnosis of a signal from elsewhere than the job's launcher."""
    name = _signal_of(signalled[0].failure)
    return Diagnosis(_ranks(signalled), f"{_names(signalled)} received {name} from outside the job")


def _signal_of(failure: Failure | None) -> str:
    """Name of the signal that a rank received: SIGTERM unless its exit code is of another."""
    code = 0 if failure is None else failure.exit_code
    others = (each.name for each in (signal.SIGUSR1, signal.SIGHUP) if code == 128 + each)
    return next(others, "SIGTERM")


def _diagnose_stalled(stalled: list[RankStatus], what: str) -> Diagnosis:
    """Diagnosis of the ranks that are furthest behind: the others may wait for them."""
    step = min(each.last_heartbeat.step for each in stalled if each.last_heartbeat)
    behind = [each for each in stalled if each.last_heartbeat and each.last_heartbeat.step == step]
    last_heartbeat = behind[0].last_heartbeat
    assert last_heartbeat is not None, "a stalled rank has a heartbeat"
    where = f", at {last_heartbeat.where}" if last_heartbeat.where else ""
    text = f"{_are(behind)} {what}: {_at(last_heartbeat)}, for {last_heartbeat.phase_age_s:.1f} s{where}"
    return Diagnosis(_ranks(behind), text)


def status_lines(statuses: Sequence[RankStatus]) -> list[str]:
    """Rank status, one line a rank: step, phase, age of the last heartbeat, what the rank does or why it ends."""
    heartbeats = [each.last_heartbeat for each in statuses if each.last_heartbeat is not None]
    rank_width = max(len(str(each.rank)) for each in statuses)
    step_width = max((len(str(heartbeat.step)) for heartbeat in heartbeats), default=1)
    phase_width = max((len(heartbeat.phase) for heartbeat in heartbeats), default=1)
    ago_width = max(len(f"{each.heard_ago_s:.1f}") for each in statuses)
    lines = []
    for each in statuses:
        name, heartbeat = f"rank {each.rank:>{rank_width}}", each.last_heartbeat
        if heartbeat is None:
            lines.append(f"{name}  no heartbeat yet")
            continue
        seen = f"step {heartbeat.step:>{step_width}}  {heartbeat.phase:<{phase_width}}"
        lines.append(f"{name}  {seen}  {each.heard_ago_s:>{ago_width}.1f} s ago  {_remark(each, heartbeat)}".rstrip())
    return lines


def _remark(status: RankStatus, heartbeat: RankHeartbeat) -> str:
    failure = heartbeat.failure
    if failure is not None and _explains_its_end(status):
        own = f"rank {status.rank} "
        is_of_itself = failure.text.startswith(own) or failure.kind is not FailureKind.SECONDARY
        text = failure.text.removeprefix(own) if is_of_itself else f"leaves: {failure.text}"
        line = text.strip().partition("\n")[0]
        return line if len(line) <= _MAX_REMARK else f"{line[: _MAX_REMARK - 3]}..."
    if status.is_gone:
        return "gone" if failure is None else f"received {_signal_of(failure)}, gone"
    if heartbeat.has_ended:
        return "has ended"
    if status.is_silent:
        return f"silent for {status.heard_ago_s:.1f} s"
    if failure is not None:
        return f"received {_signal_of(failure)}"
    where = f" at {heartbeat.where}" if heartbeat.where else ""
    doing = "waits for others" if heartbeat.is_waiting else "works"
    since = f", {heartbeat.phase_age_s:.1f} s in this phase" if heartbeat.phase_age_s >= 1 else ""
    return f"{doing}{where}{since}"


def explained_exit_code(error: BaseException) -> int | None:
    """Exit code of an error that every rank knows, and that explains itself: replicas that diverged, a wrong setting, a
    job that failed, Ctrl-C. None for any other.
    """
    if isinstance(error, SpmdError):
        return error.exit_code if error.is_known_to_all else None
    return 1 if isinstance(error, KeyboardInterrupt) else None


def is_secondary(error: BaseException) -> bool:
    """Whether an exception is the effect of another rank's failure rather than a failure of this one."""
    if isinstance(error, SpmdError):
        return error.is_secondary
    if type(error).__name__ in _SECONDARY_CLASSES_OF_TORCH or isinstance(error, ConnectionError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _SECONDARY_TEXTS)


def describe(error: BaseException, rank: int, step: int, phase: str) -> str:
    """A sentence that names rank, exception and step; an error that already names its rank is unchanged."""
    whole = describe_os_error(error) if isinstance(error, OSError) else str(error)
    text = _SOURCE_LINE.sub("", whole[:_MAX_TEXT]).partition(_COMMON_ADVICE)[0]
    if isinstance(error, SpmdError) and error.names_rank:
        return text
    where = f"at step {step}" if step else f"while {phase}"
    return f"rank {rank} raised {type(error).__name__} {where}: {text}"


def _explains_its_end(status: RankStatus) -> bool:
    return status.failure_kind not in (None, FailureKind.SIGNALLED)


def _first(statuses: Sequence[RankStatus], kind: FailureKind) -> tuple[int, Failure] | None:
    """The first failure of this kind, with its rank. Of secondary ones, those that name another rank precede."""
    failures = [(each.rank, each.failure) for each in statuses if each.failure and each.failure.kind is kind]

    def precedence(pair: tuple[int, Failure]) -> tuple[bool, int, int]:
        rank, failure = pair
        is_of_itself = kind is FailureKind.SECONDARY and failure.text.startswith(f"rank {rank} ")
        return is_of_itself, failure.order or len(statuses) + 1, rank

    return min(failures, key=precedence, default=None)


def _ranks(statuses: Sequence[RankStatus]) -> tuple[int, ...]:
    return tuple(each.rank for each in statuses)


def _names(statuses: Sequence[RankStatus]) -> str:
    return f"{'rank' if len(statuses) == 1 else 'ranks'} {', '.join(str(each.rank) for each in statuses)}"


def _are(statuses: Sequence[RankStatus]) -> str:
    return f"{_names(statuses)} {'is' if len(statuses) == 1 else 'are'}"


def _at(last_heartbeat: RankHeartbeat) -> str:
    return f"step {last_heartbeat.step}, phase {last_heartbeat.phase}"


def _last_seen(status: RankStatus) -> str:
    assert status.last_heartbeat is not None, "a rank without a heartbeat was not seen"
    return f"last seen in {_at(status.last_heartbeat)}, {status.heard_ago_s:.1f} s ago"


def _is_busy(last_heartbeat: RankHeartbeat) -> bool:
    """Whether a rank that has not failed has been computing in one phase since before the alarm."""
    return (
        last_heartbeat.failure is None and not last_heartbeat.is_waiting and last_heartbeat.phase_age_s > SETTLE_S + 1
    )
