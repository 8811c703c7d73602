"""Faults of one rank of a job: a script for torchrun that runs `launch.py` with an injected fault.

    faults.py FAULT VICTIM MOMENT FOLDER ARGUMENT...

Faults from outside strike MOMENT seconds after the victim began to be watched; those of the code, in step 5 + 40 *
MOMENT. With ", unwatched" after FAULT no rank has a watchdog. The time of the strike, on the system's monotonic clock,
is left in FOLDER/struck. Knows the runtime's insides, which it breaks; nothing of what the tests expect.
"""

import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import launch
from spmd_worker.base.liveness.watchdog import Watchdog
from spmd_worker.base.metrics.step_stats import StepStatsWriter
from spmd_worker.worker.runner.model_runner import ModelRunner
from spmd_worker.worker.worker import Worker

SURE_S = 2.5
"""A fault waits until every rank is watched: imports end at different times."""


def has_heard_all(watchdog: Watchdog) -> bool:
    """Whether every rank has a heartbeat, or there is no watchdog."""
    exchange = watchdog._exchange
    return not exchange._thread.is_alive() or all(each.last_heartbeat is not None for each in exchange.statuses())


class Strike:
    """One fault in the victim's process."""

    def __init__(self, moment: float, folder: Path) -> None:
        self.moment, self.folder = moment, folder
        self.step = 5 + int(40 * moment)

    def note(self) -> None:
        path = self.folder / "struck"
        if not path.exists():
            path.write_text(str(time.monotonic()))

    def send(self, number: signal.Signals) -> None:
        """Send a signal to this process, from a thread of its own."""
        right = Watchdog.start

        def send_later(watchdog: Watchdog) -> None:
            time.sleep(self.moment)
            while self.moment >= SURE_S and not has_heard_all(watchdog):
                # And then they have a moment to hear this one.
                time.sleep(1)
            self.note()
            os.kill(os.getpid(), number)

        def start(watchdog: Watchdog) -> None:
            right(watchdog)
            threading.Thread(target=send_later, args=(watchdog,), daemon=True).start()

        Watchdog.start = start

    def before(self, owner: type, name: str, act: Callable[[], None], step_of: Callable[..., int | None]) -> None:
        """`act` runs instead of a method's call, from the step of the strike on; in every call without a step."""
        right = getattr(owner, name)

        def call(*arguments: Any) -> Any:
            step = step_of(*arguments)
            if step is None or step >= self.step:
                self.note()
                act()
            return right(*arguments)

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
    elif fault == "hang in forward":
        strike.before(ModelRunner, "forward", lambda: time.sleep(600), _step_of_forward)
    elif fault == "endless loop in forward":
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
    if int(os.environ["RANK"]) == int(victim):
        plant(fault, Strike(float(moment), Path(folder)))
    return launch.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
