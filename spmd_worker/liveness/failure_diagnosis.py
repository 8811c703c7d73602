"""Who is where, since when, and who is to blame, told from the ranks' heartbeats.

Pure functions of what is known: the same heartbeats give the same words, while the ranks end and years later. Knows
nothing about how heartbeats travel, or clocks.
"""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from spmd_worker.liveness.heartbeat import Beat, Failure, FailureKind

SILENT_AFTER_S: Final = 2.5
"""Once something has failed, a rank not heard of for longer has a share in it: the living speak every second."""

GATHER_S: Final = 0.3
"""How long after an alarm the heartbeats need to show what the ranks say of themselves."""

STALL_S: Final = 1.0
"""How long until whoever does not move has noticed: limits are counted from different moments."""

SETTLE_S: Final = 3.0
"""How long until a cause must show, where only effects are seen: longer than it takes to be silent."""

# By name: these classes live in rooms that know of this one.
_ECHOES: Final = ("AbortedError", "DistBackendError", "DistNetworkError", "DistStoreError", "RankFailedError")
_ECHO_WORDS: Final = (
    *("gloo", "NCCL", "shared memory: "),
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe"),
)
_SAID: Final = {
    **dict.fromkeys(("ReplicaDivergedError", "LostMessageError", "RanksDisagreeError"), 70),
    **dict.fromkeys(("ConfigError", "ModelConfigError", "JobError"), 1),
}
_MAX_TEXT: Final = 2000

# What gloo puts around its errors, which is of no use to anybody here.
_SOURCE_LINE: Final = re.compile(r"\[/[^\]\s]*gloo[^\]\s]*:\d+\] ")
_COMMON_ADVICE: Final = ". This is typically caused by"


@dataclass(frozen=True, slots=True)
class Standing:
    """What is known of a rank: its last heartbeat, how long ago it came, and whether its process is known to be gone.

    `beat` is None for a rank that was never heard of.
    """

    rank: int
    beat: Beat | None
    heard_ago_s: float = 0.0
    is_gone: bool = False

    @property
    def failure(self) -> Failure | None:
        """What the rank said of its end."""
        return self.beat.failure if self.beat is not None else None

    @property
    def is_silent(self) -> bool:
        """Whether nothing was heard for so long that the rank cannot be well."""
        return self.beat is not None and not self.beat.has_ended and self.heard_ago_s > SILENT_AFTER_S

    @property
    def is_living(self) -> bool:
        """Whether the rank can be counted on to say something."""
        is_there = self.beat is not None and not self.beat.has_ended
        return is_there and not self.is_gone and not self.is_silent


@dataclass(frozen=True, slots=True)
class Verdict:
    """Who is to blame and why, in one sentence. `is_said` is for what needs no roll-call."""

    ranks: tuple[int, ...]
    text: str
    exit_code: int = 1
    is_said: bool = False
    is_silence: bool = False


def judge(standings: Sequence[Standing], elapsed_s: float) -> Verdict | None:
    """The first explanation that fits, `elapsed_s` seconds after the alarm; None while a better one may come.

    From cause to effect: what a rank says of itself; a process that went without a word; one that is silent; a main
    thread that does not move; what ranks say of each other; a signal from outside.
    """
    if elapsed_s < GATHER_S:
        return None
    said = _first(standings, FailureKind.SAID)
    if said is not None:
        return Verdict((said[0],), said[1].text, said[1].exit_code, is_said=True)
    own = _first(standings, FailureKind.OWN)
    if own is not None:
        return Verdict((own[0],), own[1].text, own[1].exit_code)
    orphaned = _first(standings, FailureKind.ORPHANED)
    if orphaned is not None:
        return Verdict((orphaned[0],), orphaned[1].text)
    gone = [each for each in standings if each.is_gone and not _explains_its_end(each.failure)]
    if gone:
        return Verdict(_ranks(gone), f"{_are(gone)} gone: {_last_seen(gone[0])}; {_WITHOUT_A_WORD}")
    return _judge_the_quiet(standings, elapsed_s) if elapsed_s >= STALL_S else None


_WITHOUT_A_WORD: Final = "the process ended without a word, as one that is killed or has no memory left"


def _judge_the_quiet(standings: Sequence[Standing], elapsed_s: float) -> Verdict | None:
    silent = [each for each in standings if each.is_silent and not _explains_its_end(each.failure)]
    if silent:
        return Verdict(_ranks(silent), f"{_are(silent)} silent: {_last_seen(silent[0])}", is_silence=True)
    stalled = [each for each in standings if each.failure and each.failure.kind is FailureKind.STALLED]
    at_work = [each for each in stalled if each.beat and not each.beat.is_waiting]
    if at_work:
        return _judge_the_stalled(at_work, "stuck")
    return _judge_by_effects(standings, stalled) if elapsed_s >= SETTLE_S else None


def _judge_by_effects(standings: Sequence[Standing], stalled: list[Standing]) -> Verdict | None:
    """No cause has shown itself."""
    unknown = [each for each in standings if each.beat is None]
    if unknown:
        text = f"{_are(unknown)} silent: never heard of since the start"
        return Verdict(_ranks(unknown), text, is_silence=True)
    echo = _first(standings, FailureKind.ECHO)
    busy = [each for each in standings if each.is_living and each.beat and _is_busy(each.beat)]
    if busy and (stalled or echo is not None):
        return _judge_the_stalled(busy, "busy while others waited for too long")
    if stalled:
        return _judge_the_stalled(stalled, "waiting for another rank, or for each other")
    if echo is not None:
        return Verdict((echo[0],), echo[1].text)
    told = [each for each in standings if each.failure and each.failure.kind is FailureKind.TOLD]
    if told and len(told) == len([each for each in standings if each.beat and not each.beat.has_ended]):
        by = _signal_of(told[0].failure)
        return Verdict(_ranks(told), f"every rank was told to end ({by}): the launcher or the machine ended the job")
    if not told:
        return None
    return Verdict(_ranks(told), f"{_were(told)} told to end ({_signal_of(told[0].failure)}) from outside the job")


def _signal_of(failure: Failure | None) -> str:
    """Of a rank that was told to end: SIGTERM where its exit code says nothing else."""
    code = 0 if failure is None else failure.exit_code
    return "SIGUSR1" if code == 128 + signal.SIGUSR1 else "SIGTERM"


def _judge_the_stalled(stalled: list[Standing], what: str) -> Verdict:
    """Whoever is furthest behind: others may wait for it."""
    step = min(each.beat.step for each in stalled if each.beat)
    behind = [each for each in stalled if each.beat and each.beat.step == step]
    beat = behind[0].beat
    assert beat is not None, "the stalled have said so"
    place = f", at {beat.where}" if beat.where else ""
    text = f"{_are(behind)} {what}: {_at(beat)}, for {beat.phase_age_s:.1f} s{place}"
    return Verdict(_ranks(behind), text)


def roll_call(standings: Sequence[Standing]) -> list[str]:
    """One line a rank: step, phase, when it was last heard of, and what there is to say of it."""
    rank_width = max(len(str(each.rank)) for each in standings)
    beats = [each.beat for each in standings if each.beat is not None]
    step_width = max((len(str(beat.step)) for beat in beats), default=1)
    phase_width = max((len(beat.phase) for beat in beats), default=1)
    ago_width = max(len(f"{each.heard_ago_s:.1f}") for each in standings)
    lines = []
    for each in standings:
        name = f"rank {each.rank:>{rank_width}}"
        if each.beat is None:
            lines.append(f"{name}  never heard of")
            continue
        seen = f"step {each.beat.step:>{step_width}}  {each.beat.phase:<{phase_width}}"
        lines.append(f"{name}  {seen}  {each.heard_ago_s:>{ago_width}.1f} s ago  {_remark(each, each.beat)}".rstrip())
    return lines


def _remark(standing: Standing, beat: Beat) -> str:
    if beat.failure is not None and _explains_its_end(beat.failure):
        own = f"rank {standing.rank} "
        is_of_itself = beat.failure.text.startswith(own) or beat.failure.kind is not FailureKind.ECHO
        return _first_line(beat.failure.text.removeprefix(own) if is_of_itself else f"leaves: {beat.failure.text}")
    if standing.is_gone:
        return "gone"
    if beat.has_ended:
        return "has ended"
    if standing.is_silent:
        return f"silent for {standing.heard_ago_s:.1f} s"
    if beat.failure is not None:
        return f"was told to end ({_signal_of(beat.failure)})"
    place = f" at {beat.where}" if beat.where else ""
    doing = "waits for others" if beat.is_waiting else "works"
    since = f", {beat.phase_age_s:.1f} s in this phase" if beat.phase_age_s >= 1 else ""
    return f"{doing}{place}{since}"


def said_exit_code(error: BaseException) -> int | None:
    """The exit code of an error that is said in another way, and that explains itself: replicas that diverged, a wrong
    setting, a job that failed as a whole, Ctrl-C. None for any other.
    """
    return 1 if isinstance(error, KeyboardInterrupt) else _SAID.get(type(error).__name__)


def is_echo(error: BaseException) -> bool:
    """Whether an exception tells of another rank's end rather than of a fault of this one."""
    if type(error).__name__ in _ECHOES or isinstance(error, ConnectionError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _ECHO_WORDS)


def describe(error: BaseException, rank: int, step: int, phase: str) -> str:
    """A sentence that names rank, exception and step; an error that names its rank already is left as it is."""
    text = _SOURCE_LINE.sub("", str(error)[:_MAX_TEXT]).partition(_COMMON_ADVICE)[0]
    if type(error).__name__ in ("RankFailedError", "AbortedError"):
        return text
    where = f"at step {step}" if step else f"while {phase}"
    return f"rank {rank} raised {type(error).__name__} {where}: {text}"


def _explains_its_end(failure: Failure | None) -> bool:
    return failure is not None and failure.kind is not FailureKind.TOLD


def _first(standings: Sequence[Standing], kind: FailureKind) -> tuple[int, Failure] | None:
    """The failure of this kind that came first, with its rank; before it one that names another rank than its own."""
    failures = [(each.rank, each.failure) for each in standings if each.failure and each.failure.kind is kind]

    def place(pair: tuple[int, Failure]) -> tuple[bool, int, int]:
        rank, failure = pair
        is_of_itself = kind is FailureKind.ECHO and failure.text.startswith(f"rank {rank} ")
        return is_of_itself, failure.order or len(standings) + 1, rank

    return min(failures, key=place, default=None)


def _ranks(standings: Sequence[Standing]) -> tuple[int, ...]:
    return tuple(each.rank for each in standings)


def _names(standings: Sequence[Standing]) -> str:
    return f"{'rank' if len(standings) == 1 else 'ranks'} {', '.join(str(each.rank) for each in standings)}"


def _are(standings: Sequence[Standing]) -> str:
    return f"{_names(standings)} {'is' if len(standings) == 1 else 'are'}"


def _were(standings: Sequence[Standing]) -> str:
    return f"{_names(standings)} {'was' if len(standings) == 1 else 'were'}"


def _at(beat: Beat) -> str:
    return f"step {beat.step}, phase {beat.phase}"


def _last_seen(standing: Standing) -> str:
    assert standing.beat is not None, "a rank that was never heard of was not seen"
    return f"last seen in {_at(standing.beat)}, {standing.heard_ago_s:.1f} s ago"


def _is_busy(beat: Beat) -> bool:
    """Whether a rank that has not failed has been at work in one phase since before the alarm."""
    return beat.failure is None and not beat.is_waiting and beat.phase_age_s > SETTLE_S + 1


def _first_line(text: str) -> str:
    line = text.strip().partition("\n")[0]
    return line if len(line) <= 160 else f"{line[:157]}..."
