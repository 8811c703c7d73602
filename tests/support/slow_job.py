"""A job that lives until it is struck: a script for torchrun.

    slow_job.py NUMBER FOLDER ARGUMENT...

From its NUMBER-th step on a rank waits in each for a moment, unless the file FOLDER/struck is there: a test that looks
at how far the job is, and strikes, meets it alive however late it looks. The rest is launch.py's.
"""

import sys
import time
from itertools import count
from pathlib import Path

import launch
from spmd_worker.base.liveness import signals
from spmd_worker.frontends.batch.row_runner import RowRunner

PAUSE_S = 0.3
PATIENCE_S = 120.0
"""Time to save rows, and to end after Ctrl-C: those of a job are seconds, which a busy disk may take for a sync."""


def main() -> int:
    number, folder, *arguments = sys.argv[1:]
    struck, step, numbers = Path(folder) / "struck", RowRunner.step, count(1)

    def step_slowly(self: RowRunner) -> object:
        if next(numbers) >= int(number) and not struck.exists():
            time.sleep(PAUSE_S)
        return step(self)

    RowRunner.step = step_slowly
    for name in ("_INTERRUPTED_S", "_LEAVE_S"):
        setattr(signals, name, PATIENCE_S)
    return launch.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
