"""Who is where, since when, and who is to blame, told from the ranks' heartbeats.

Pure functions of what is known: the same heartbeats give the same words, while the ranks end and years later. Knows
nothing about how heartbeats travel, or clocks.
"""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from spmd_worker.errors import SpmdError
from spmd_worker.liveness.heartbeat import Failure, FailureKind, RankHeartbeat

SILENT_AFTER_S: Final = 2.5
"""Once something has failed, a rank not heard of for longer has a share in it: the living speak every second."""

GATHER_S: Final = 0.3
"""How long after an alarm the heartbeats need to show what the ranks say of themselves."""

STALL_S: Final = 1.0
"""How long until whoever does not move has noticed: limits are counted from different moments."""

SETTLE_S: Final = 3.0
"""How long until a cause must show, where only effects are seen: longer than it takes to be silent."""

# Torch's own classes, by name because this floor is torch-free, and the texts of gloo and NCCL.
_SECONDARY_CLASSES_OF_TORCH: Final = ("DistBackendError", "DistNetworkError", "DistStoreError")
_SECONDARY_TEXTS: Final = (
    *("gloo", "NCCL"),
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe"),
)
_MAX_TEXT: Final = 2000

# What gloo puts around its errors, which is of no use to anybody here.
_SOURCE_LINE: Final = re.compile(r"\[/[^\]\s]*gloo[^\]\s]*:\d+\] ")
_COMMON_ADVICE: Final = ". This is typically caused by"


@dataclass(frozen=True, slots=True)
class RankStatus:
    """What is known of a rank: its last heartbeat, how long ago it came, and whether its process is known to be gone.

    `beat` is None for a rank that was never heard of.
    """

    rank: int
    last_heartbeat: RankHeartbeat | None
    heard_ago_s: float = 0.0
    is_gone: bool = False

    @property
    def failure(self) -> Failure | None:
        """What the rank said of its end."""
        return self.last_heartbeat.failure if self.last_heartbeat is not None else None

    @property
    def is_silent(self) -> bool:
        """Whether nothing was heard for so long that the rank cannot be well."""
        return (
            self.last_heartbeat is not None and not self.last_heartbeat.has_ended and self.heard_ago_s > SILENT_AFTER_S
        )

    @property
    def is_living(self) -> bool:
        """Whether the rank can be counted on to say something."""
        is_there = self.last_heartbeat is not None and not self.last_heartbeat.has_ended
        return is_there and not self.is_gone and not self.is_silent


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Who is to blame and why, in one sentence. `is_explained` is for what needs no rank status."""

    ranks: tuple[int, ...]
    text: str
    exit_code: int = 1
    is_explained: bool = False
    is_silence: bool = False


def diagnose(statuses: Sequence[RankStatus], elapsed_s: float) -> Diagnosis | None:
    """The first explanation that fits, `elapsed_s` seconds after the alarm; None while a better one may come.

    From cause to effect: what a rank says of itself; a process that went without a word; one that is silent; a main
    thread that does not move; what ranks say of each other; a signal from outside.
    """
    if elapsed_s < GATHER_S:
        return None
    said = _first(statuses, FailureKind.EXPLAINED)
    if said is not None:
        return Diagnosis((said[0],), said[1].text, said[1].exit_code, is_explained=True)
    own = _first(statuses, FailureKind.PRIMARY)
    if own is not None:
        return Diagnosis((own[0],), own[1].text, own[1].exit_code)
    orphaned = _first(statuses, FailureKind.ORPHANED)
    if orphaned is not None:
        return Diagnosis((orphaned[0],), orphaned[1].text)
    gone = [each for each in statuses if each.is_gone and not _explains_its_end(each.failure)]
    if gone:
        return Diagnosis(_ranks(gone), f"{_are(gone)} gone: {_last_seen(gone[0])}; {_WITHOUT_A_WORD}")
    return _diagnose_quiet(statuses, elapsed_s) if elapsed_s >= STALL_S else None


_WITHOUT_A_WORD: Final = "the process ended without a word, as one that is killed or has no memory left"


def _diagnose_quiet(statuses: Sequence[RankStatus], elapsed_s: float) -> Diagnosis | None:
    silent = [each for each in statuses if each.is_silent and not _explains_its_end(each.failure)]
    if silent:
        return Diagnosis(_ranks(silent), f"{_are(silent)} silent: {_last_seen(silent[0])}", is_silence=True)
    stalled = [each for each in statuses if each.failure and each.failure.kind is FailureKind.STALLED]
    at_work = [each for each in stalled if each.last_heartbeat and not each.last_heartbeat.is_waiting]
    if at_work:
        return _diagnose_stalled(at_work, "stuck")
    return _diagnose_by_effects(statuses, stalled) if elapsed_s >= SETTLE_S else None


def _diagnose_by_effects(statuses: Sequence[RankStatus], stalled: list[RankStatus]) -> Diagnosis | None:
    """No cause has shown itself."""
    unknown = [each for each in statuses if each.last_heartbeat is None]
    if unknown:
        text = f"{_are(unknown)} silent: never heard of since the start"
        return Diagnosis(_ranks(unknown), text, is_silence=True)
    echo = _first(statuses, FailureKind.SECONDARY)
    ended = [each for each in statuses if _has_left(each)]
    if ended and (stalled or echo is not None):
        return _diagnose_left(ended)
    busy = [each for each in statuses if each.is_living and each.last_heartbeat and _is_busy(each.last_heartbeat)]
    if busy and (stalled or echo is not None):
        return _diagnose_stalled(busy, "busy while others waited for too long")
    if stalled:
        return _diagnose_stalled(stalled, "waiting for another rank, or for each other")
    if echo is not None:
        return Diagnosis((echo[0],), echo[1].text)
    told = [each for each in statuses if each.failure and each.failure.kind is FailureKind.SIGNALLED]
    if told and len(told) == len(
        [each for each in statuses if each.last_heartbeat and not each.last_heartbeat.has_ended]
    ):
        by = _signal_of(told[0].failure)
        return Diagnosis(_ranks(told), f"every rank was told to end ({by}): the launcher or the machine ended the job")
    if not told:
        return None
    return Diagnosis(_ranks(told), f"{_were(told)} told to end ({_signal_of(told[0].failure)}) from outside the job")


def _has_left(status: RankStatus) -> bool:
    """Whether a rank has ended for no failure: those that wait for it wait in vain."""
    if status.failure is not None:
        return status.failure.kind is FailureKind.LEFT
    return status.last_heartbeat is not None and status.last_heartbeat.has_ended


def _diagnose_left(ended: list[RankStatus]) -> Diagnosis:
    """A rank that left without `close` first: one that closed its engine did so on purpose."""
    unclosed = [each for each in ended if each.failure is not None]
    if unclosed and unclosed[0].failure is not None:
        return Diagnosis(_ranks(unclosed), f"{unclosed[0].failure.text}; {_last_seen(unclosed[0])}")
    has = "has" if len(ended) == 1 else "have"
    return Diagnosis(_ranks(ended), f"{_names(ended)} {has} ended while others went on: {_last_seen(ended[0])}")


def _signal_of(failure: Failure | None) -> str:
    """Of a rank that was told to end: SIGTERM where its exit code says nothing else."""
    code = 0 if failure is None else failure.exit_code
    return "SIGUSR1" if code == 128 + signal.SIGUSR1 else "SIGTERM"


def _diagnose_stalled(stalled: list[RankStatus], what: str) -> Diagnosis:
    """Whoever is furthest behind: others may wait for it."""
    step = min(each.last_heartbeat.step for each in stalled if each.last_heartbeat)
    behind = [each for each in stalled if each.last_heartbeat and each.last_heartbeat.step == step]
    last_heartbeat = behind[0].last_heartbeat
    assert last_heartbeat is not None, "the stalled have said so"
    place = f", at {last_heartbeat.where}" if last_heartbeat.where else ""
    text = f"{_are(behind)} {what}: {_at(last_heartbeat)}, for {last_heartbeat.phase_age_s:.1f} s{place}"
    return Diagnosis(_ranks(behind), text)


def status_lines(statuses: Sequence[RankStatus]) -> list[str]:
    """One line a rank: step, phase, when it was last heard of, and what there is to say of it."""
    rank_width = max(len(str(each.rank)) for each in statuses)
    heartbeats = [each.last_heartbeat for each in statuses if each.last_heartbeat is not None]
    step_width = max((len(str(last_heartbeat.step)) for last_heartbeat in heartbeats), default=1)
    phase_width = max((len(last_heartbeat.phase) for last_heartbeat in heartbeats), default=1)
    ago_width = max(len(f"{each.heard_ago_s:.1f}") for each in statuses)
    lines = []
    for each in statuses:
        name = f"rank {each.rank:>{rank_width}}"
        if each.last_heartbeat is None:
            lines.append(f"{name}  never heard of")
            continue
        seen = f"step {each.last_heartbeat.step:>{step_width}}  {each.last_heartbeat.phase:<{phase_width}}"
        lines.append(
            f"{name}  {seen}  {each.heard_ago_s:>{ago_width}.1f} s ago  {_remark(each, each.last_heartbeat)}".rstrip()
        )
    return lines


def _remark(status: RankStatus, last_heartbeat: RankHeartbeat) -> str:
    if last_heartbeat.failure is not None and _explains_its_end(last_heartbeat.failure):
        own = f"rank {status.rank} "
        is_of_itself = (
            last_heartbeat.failure.text.startswith(own) or last_heartbeat.failure.kind is not FailureKind.SECONDARY
        )
        return _first_line(
            last_heartbeat.failure.text.removeprefix(own) if is_of_itself else f"leaves: {last_heartbeat.failure.text}"
        )
    if status.is_gone:
        return "gone"
    if last_heartbeat.has_ended:
        return "has ended"
    if status.is_silent:
        return f"silent for {status.heard_ago_s:.1f} s"
    if last_heartbeat.failure is not None:
        return f"was told to end ({_signal_of(last_heartbeat.failure)})"
    place = f" at {last_heartbeat.where}" if last_heartbeat.where else ""
    doing = "waits for others" if last_heartbeat.is_waiting else "works"
    since = f", {last_heartbeat.phase_age_s:.1f} s in this phase" if last_heartbeat.phase_age_s >= 1 else ""
    return f"{doing}{place}{since}"


def explained_exit_code(error: BaseException) -> int | None:
    """The exit code of an error that every rank knows, and that explains itself: replicas that diverged, a wrong
    setting, a job that failed as a whole, Ctrl-C. None for any other.
    """
    if isinstance(error, SpmdError):
        return error.exit_code if error.is_known_to_all else None
    return 1 if isinstance(error, KeyboardInterrupt) else None


def is_secondary(error: BaseException) -> bool:
    """Whether an exception tells of another rank's end rather than of a fault of this one."""
    if isinstance(error, SpmdError):
        return error.is_secondary
    if type(error).__name__ in _SECONDARY_CLASSES_OF_TORCH or isinstance(error, ConnectionError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _SECONDARY_TEXTS)


def describe(error: BaseException, rank: int, step: int, phase: str) -> str:
    """A sentence that names rank, exception and step; an error that names its rank already is left as it is."""
    text = _SOURCE_LINE.sub("", str(error)[:_MAX_TEXT]).partition(_COMMON_ADVICE)[0]
    if isinstance(error, SpmdError) and error.names_rank:
        return text
    where = f"at step {step}" if step else f"while {phase}"
    return f"rank {rank} raised {type(error).__name__} {where}: {text}"


def _explains_its_end(failure: Failure | None) -> bool:
    return failure is not None and failure.kind is not FailureKind.SIGNALLED


def _first(statuses: Sequence[RankStatus], kind: FailureKind) -> tuple[int, Failure] | None:
    """The failure of this kind that came first, with its rank; before it one that names another rank than its own."""
    failures = [(each.rank, each.failure) for each in statuses if each.failure and each.failure.kind is kind]

    def place(pair: tuple[int, Failure]) -> tuple[bool, int, int]:
        rank, failure = pair
        is_of_itself = kind is FailureKind.SECONDARY and failure.text.startswith(f"rank {rank} ")
        return is_of_itself, failure.order or len(statuses) + 1, rank

    return min(failures, key=place, default=None)


def _ranks(statuses: Sequence[RankStatus]) -> tuple[int, ...]:
    return tuple(each.rank for each in statuses)


def _names(statuses: Sequence[RankStatus]) -> str:
    return f"{'rank' if len(statuses) == 1 else 'ranks'} {', '.join(str(each.rank) for each in statuses)}"


def _are(statuses: Sequence[RankStatus]) -> str:
    return f"{_names(statuses)} {'is' if len(statuses) == 1 else 'are'}"


def _were(statuses: Sequence[RankStatus]) -> str:
    return f"{_names(statuses)} {'was' if len(statuses) == 1 else 'were'}"


def _at(last_heartbeat: RankHeartbeat) -> str:
    return f"step {last_heartbeat.step}, phase {last_heartbeat.phase}"


def _last_seen(status: RankStatus) -> str:
    assert status.last_heartbeat is not None, "a rank that was never heard of was not seen"
    return f"last seen in {_at(status.last_heartbeat)}, {status.heard_ago_s:.1f} s ago"


def _is_busy(last_heartbeat: RankHeartbeat) -> bool:
    """Whether a rank that has not failed has been at work in one phase since before the alarm."""
    return (
        last_heartbeat.failure is None and not last_heartbeat.is_waiting and last_heartbeat.phase_age_s > SETTLE_S + 1
    )


def _first_line(text: str) -> str:
    line = text.strip().partition("\n")[0]
    return line if len(line) <= 160 else f"{line[:157]}..."
