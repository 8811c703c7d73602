"""Faults of one rank of a job: a script for torchrun that runs `launch.py` with an injected fault.

    faults.py FAULT VICTIM MOMENT FOLDER ARGUMENT...

Faults from outside strike MOMENT seconds after the victim began to be watched; those of the code, in step 5 + 40 *
MOMENT. FOLDER/heard.rankN is there once rank N has a heartbeat of every rank; the time of the strike, on the system's
monotonic clock, is left in FOLDER/struck. After FAULT may come

    , unwatched     no rank has a watchdog
    , limit SECONDS that is the timeout of the rank that is to notice, from the strike on: however slow the machine is,
                    nobody is late before
    , rank 0 last   rank 0 does not end before the others have their diagnosis

Knows the runtime's insides, which it breaks; nothing of what the tests expect.
"""

import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import launch
from spmd_worker.base.liveness import watchdog as watchdog_module
from spmd_worker.base.liveness.watchdog import Watchdog
from spmd_worker.base.metrics.step_stats import StepStatsWriter
from spmd_worker.worker.runner.model_runner import ModelRunner
from spmd_worker.worker.worker import Worker

SURE_S = 1.0
"""A fault at this moment or later waits until every rank has heard of every other: imports end at different times."""
POLL_S = 0.05
HANG = "hang in forward"
LOOP = "endless loop in forward"


def has_heard_all(watchdog: Watchdog) -> bool:
    """Whether every rank has a heartbeat, or there is no watchdog."""
    exchange = watchdog._exchange
    return not exchange._thread.is_alive() or all(each.last_heartbeat is not None for each in exchange.statuses())


def after_start(act: Callable[[Watchdog], None]) -> None:
    """`act` runs in a thread of its own once this rank is watched."""
    right = Watchdog.start

    def start(watchdog: Watchdog) -> None:
        right(watchdog)
        threading.Thread(target=act, args=(watchdog,), daemon=True).start()

    Watchdog.start = start


def heard_file(folder: Path, rank: int) -> Path:
    return folder / f"heard.rank{rank}"


def note_heard(folder: Path) -> None:
    def note(watchdog: Watchdog) -> None:
        while not has_heard_all(watchdog):
            time.sleep(POLL_S)
        heard_file(folder, watchdog.watched.rank).touch()

    after_start(note)


def limit_after_strike(fault: str, victim: int, folder: Path, limit_s: float) -> None:
    """Only the rank that is to notice: the victim that it hangs, others the rest."""
    if (int(os.environ["RANK"]) == victim) != (fault == HANG):
        return

    def is_over(watchdog: Watchdog) -> bool:
        if not (folder / "struck").exists():
            return False
        # A rank counts as busy once it has been in its phase for longer than it takes to be silent.
        heartbeats = [each.last_heartbeat for each in watchdog._exchange.statuses() if each.rank == victim]
        return fault != LOOP or any(each is not None and each.phase_age_s > limit_s for each in heartbeats)

    def shorten(watchdog: Watchdog) -> None:
        while not is_over(watchdog):
            time.sleep(POLL_S)
        watchdog.watched = watchdog._main._watched = replace(watchdog.watched, timeout_s=limit_s)

    after_start(shorten)


def end_last(run_dir: Path) -> None:
    """This rank's watchdog ends its process once all others have their record."""
    right = watchdog_module.exit_now

    def exit_last(code: int) -> None:
        others = [rank for rank in range(int(os.environ["WORLD_SIZE"])) if rank != int(os.environ["RANK"])]
        while not all((run_dir / f"error.rank{rank}.json").exists() for rank in others):
            time.sleep(POLL_S)
        right(code)

    watchdog_module.exit_now = exit_last


class Strike:
    """One fault in the victim's process."""

    def __init__(self, moment: float, folder: Path) -> None:
        self.moment, self.folder = moment, folder
        self.step = 5 + int(40 * moment)

    def note(self) -> None:
        path = self.folder / "struck"
        if not path.exists():
            path.write_text(str(time.monotonic()))

    def make_sure(self) -> None:
        """Wait until every rank has heard of every other, unless the moment may be any."""
        heard = [heard_file(self.folder, rank) for rank in range(int(os.environ["WORLD_SIZE"]))]
        while self.moment >= SURE_S and not all(path.exists() for path in heard):
            time.sleep(POLL_S)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to this process, from a thread of its own."""

        def send_later(watchdog: Watchdog) -> None:
            time.sleep(self.moment)
            self.make_sure()
            self.note()
            os.kill(os.getpid(), number)

        after_start(send_later)

    def before(self, owner: type, name: str, act: Callable[[], None], step_of: Callable[..., int | None]) -> None:
        """`act` runs instead of a method's call, from the step of the strike on; in every call without a step."""
        right = getattr(owner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            step = step_of(*arguments)
            if step is None or step >= self.step:
                if step is not None:
                    self.make_sure()
                self.note()
                act()
            return right(*arguments, **options)

        setattr(owner, name, call)


def _raise(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


def _step_of_forward(runner: ModelRunner, step: int, *given: object) -> int:
    return step


def _no_step(*arguments: object) -> None:
    return None


def _compute_for_ever() -> None:
    while True:
        continue


def blind() -> None:
    """Nobody watches, tells or ends."""
    Watchdog.start = Watchdog.stop = lambda watchdog: None
    Watchdog.fail = Watchdog.signalled = lambda watchdog, *arguments: None
    Watchdog.leave = lambda watchdog, exit_code: sys.exit(exit_code)


def plant(fault: str, strike: Strike) -> None:
    steps = [0]

    def next_step(*arguments: object) -> int:
        steps[0] += 1
        return steps[0]

    if fault in ("SIGKILL", "SIGSTOP", "SIGTERM"):
        strike.send(signal.Signals[fault])
    elif fault == "exception in forward":
        strike.before(ModelRunner, "forward", _raise(ValueError("planted")), _step_of_forward)
    elif fault == HANG:
        strike.before(ModelRunner, "forward", lambda: time.sleep(600), _step_of_forward)
    elif fault == LOOP:
        strike.before(ModelRunner, "forward", _compute_for_ever, _step_of_forward)
    elif fault == "exception while loading":
        # Half of the time of a kind that loading does not expect.
        error = ValueError("planted") if int(1000 * strike.moment) % 2 else KeyError("planted")
        strike.before(Worker, "load_model", _raise(error), _no_step)
    elif fault == "exit in the sampler":
        strike.before(ModelRunner, "sample", lambda: os._exit(3), next_step)
    elif fault == "full disk":
        error = OSError(errno.ENOSPC, "No space left on device")
        strike.before(StepStatsWriter, "write", _raise(error), next_step)
    else:
        raise AssertionError(fault)


def main() -> int:
    words, victim, moment, folder, *arguments = sys.argv[1:]
    fault, _, how = words.partition(", ")
    if how == "unwatched":
        blind()
    elif how == "rank 0 last" and os.environ["RANK"] == "0":
        end_last(Path(folder) / "run")
    elif how.startswith("limit "):
        limit_after_strike(fault, int(victim), Path(folder), float(how.removeprefix("limit ")))
    note_heard(Path(folder))
    if int(os.environ["RANK"]) == int(victim):
        plant(fault, Strike(float(moment), Path(folder)))
    return launch.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
