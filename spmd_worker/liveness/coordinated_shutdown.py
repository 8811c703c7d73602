"""How ranks end together once there was an alarm: a verdict, one roll-call, whoever is to blame first.

Every rank reads the same heartbeats, and so comes to the same verdict by itself. Knows the bulletin. Knows nothing
about what this rank did.
"""

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NoReturn

from spmd_worker.liveness.bounded import within
from spmd_worker.liveness.failure_diagnosis import SETTLE_S, Standing, Verdict, judge, roll_call
from spmd_worker.liveness.heartbeat import Beat, born_at, parent_of, processes_of_rank
from spmd_worker.liveness.heartbeat_store import Bulletin
from spmd_worker.liveness.stall_clock import WatchClock

logger = logging.getLogger(__name__)

TICK_S: Final = 0.05
SPEAK_S: Final = 1.0
"""How long rank 0 has the word, before whoever lives may take it."""

LEAVE_S: Final = 2.0
"""How long after the verdict the main thread may take to get out by itself, and whoever is to blame to leave first."""

_TERMINAL_S: Final = 1.0
"""A terminal that is held, or a pipe that nobody reads, takes nothing."""

MOST_S: Final = SETTLE_S + SPEAK_S + 3 * LEAVE_S
"""All of it together."""


class Ending:
    """One rank's part in it. `stop` is set when there is nothing left to end, `wake` when there is news."""

    def __init__(
        self,
        rank: int,
        exits: bool,
        bulletin: Bulletin,
        clock: WatchClock,
        stop: threading.Event,
        wake: threading.Event,
    ) -> None:
        self._rank, self._exits, self._bulletin, self._clock = rank, exits, bulletin, clock
        self._stop, self._wake = stop, wake

    def find_verdict(self, look: Callable[[], object]) -> tuple[Verdict, list[Standing]] | None:
        """Wait for one; `look` is called each time before the ranks are looked at. None when the rank ended
        meanwhile, or nothing is wrong.
        """
        started_s = self._clock.tick()
        while not self._stop.is_set():
            elapsed_s = self._clock.tick() - started_s
            look()
            standings = self._bulletin.standings()
            # Alone, nothing better can come.
            verdict = judge(standings, SETTLE_S if self._bulletin.is_private else elapsed_s)
            if verdict is not None:
                return verdict, standings
            if elapsed_s > SETTLE_S:
                return None
            self._wake.wait(TICK_S)
            self._wake.clear()
        return None

    def speak(self, verdict: Verdict, standings: Sequence[Standing]) -> None:
        """Exactly one rank does: rank 0, or the first that lives, or after a while whoever asks first. Returns when it
        was done.
        """
        speaker = next((each.rank for each in standings if self._may_speak(each)), self._rank)
        has_asked = False
        started_s = self._clock.tick()
        while self._bulletin.is_shared and not self._bulletin.is_speaker:
            waited_s = self._clock.tick() - started_s
            if self._bulletin.is_reported or waited_s > SPEAK_S + LEAVE_S:
                return
            if not has_asked and (speaker == self._rank or waited_s > SPEAK_S):
                has_asked = True
                self._bulletin.ask_to_speak()
            if self._stop.wait(TICK_S):
                return
        if self._bulletin.is_speaker or speaker == self._rank:
            self._say(verdict, standings)
            self._bulletin.has_spoken()
            self._wait_until_reported()

    def _wait_until_reported(self) -> None:
        """The others wait for the word, and this process may end any moment."""
        started_s = self._clock.tick()
        while self._bulletin.is_shared and not self._bulletin.is_reported and self._clock.tick() - started_s < SPEAK_S:
            if self._stop.wait(TICK_S):
                return

    def _may_speak(self, standing: Standing) -> bool:
        """Without a board nobody hears that another has spoken: then somebody on each node does."""
        if standing.beat is None:
            return not self._bulletin.is_connected
        return standing.is_living and (self._bulletin.is_shared or standing.beat.node == self._bulletin.node)

    def wait_for_main(self, verdict: Verdict, is_out: Callable[[], bool]) -> None:
        """Give the main thread time, and whoever is to blame: the launcher's summary begins with who leaves first."""
        # Time for the main thread of a rank that waits to be heard whether rank 0 says it.
        patience_s = 3 * LEAVE_S if verdict.is_said else LEAVE_S
        started_s = self._clock.tick()
        while not is_out() and self._clock.tick() - started_s < patience_s:
            if self._stop.wait(TICK_S):
                return

    def _say(self, verdict: Verdict, standings: Sequence[Standing]) -> None:
        lines = "\n".join(f"  {line}" for line in roll_call(standings))
        if not self._exits:
            logger.error("%s; the ranks when they were last heard of:\n%s", verdict.text, lines)
            return
        # In one piece: the ranks share a terminal.
        text = f"the ranks when they were last heard of:\n{lines}\nerror: {verdict.text}\n"
        within(_TERMINAL_S, partial(_write, text))


def end_silent(standings: Sequence[Standing], verdict: Verdict, own_rank: int) -> None:
    """A stopped process does not react to the launcher's SIGTERM, and would keep the job from ending for half a minute.

    Only processes on this node that the same launcher started: the very one that spoke, or, of a rank that never did,
    the one that was started as that rank.
    """
    own = next(each.beat for each in standings if each.rank == own_rank)
    assert own is not None, "this rank knows itself"
    # Where the system does not tell, or a process has gone meanwhile.
    with contextlib.suppress(OSError):
        for each in standings:
            if each.rank in verdict.ranks and each.rank != own_rank:
                for pid in _siblings(each, own):
                    os.kill(pid, signal.SIGKILL)


def _siblings(standing: Standing, own: Beat) -> list[int]:
    """The processes of a rank, if they have the same parent as this one."""
    launcher, beat = parent_of(own.pid), standing.beat
    if launcher is None:
        return []
    if beat is None:
        return processes_of_rank(launcher, standing.rank)
    is_near = bool(own.node) and beat.node == own.node
    return [beat.pid] if is_near and born_at(beat.pid) == beat.born and parent_of(beat.pid) == launcher else []


def exit_now(code: int) -> NoReturn:
    """The interpreter's own way out waits for threads, and native code for ranks that are gone."""
    within(_TERMINAL_S, _flush)
    os._exit(code)


def _write(text: str) -> None:
    """The terminal may be gone."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
