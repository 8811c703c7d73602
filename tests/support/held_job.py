"""A job that stands still at one moment of its life, so that a kill meets it there: a script for torchrun.

    held_job.py MOMENT NUMBER RANK FOLDER ARGUMENT...

When rank RANK comes to MOMENT for the NUMBER-th time it leaves the file FOLDER/held and does nothing more in its main
thread; its watchdog goes on. `none` holds nobody, `unwatched` holds rank RANK as in `rows` with a process that nothing
ends. The rest is launch.py's.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spmd_worker.base.process import end_with_launcher

if __name__ == "__main__":
    # As launch.py does, first of all.
    end_with_launcher()

import launch
from spmd_worker.base import files
from spmd_worker.base.liveness.heartbeat import Heartbeat
from spmd_worker.base.liveness.watchdog import Watchdog
from spmd_worker.frontends.batch import open_job
from spmd_worker.frontends.batch.output_file import OutputFile
from spmd_worker.frontends.batch.run_dir.journal import RowJournal

HOLD_S = 600.0
PHASES = {"joining": "joining the other ranks", "loading": "loading the model", "rows": "execute"}
"""Moments that are the beginning of a phase of a rank."""


class Hold:
    """Counts how often the moment came."""

    def __init__(self, number: int, folder: Path) -> None:
        self._left, self._folder = number, folder

    def __call__(self, *_: object) -> None:
        self._left -= 1
        if self._left == 0:
            (self._folder / "held").touch()
            time.sleep(HOLD_S)


def before(owner: Any, name: str, hold: Callable[..., None]) -> None:
    right = getattr(owner, name)

    def call(*arguments: Any, **named: Any) -> Any:
        hold(*arguments)
        return right(*arguments, **named)

    setattr(owner, name, call)


def after(owner: Any, name: str, hold: Callable[..., None]) -> None:
    right = getattr(owner, name)

    def call(*arguments: Any, **named: Any) -> Any:
        result = right(*arguments, **named)
        hold(*arguments)
        return result

    setattr(owner, name, call)


def plant(moment: str, hold: Hold) -> None:
    if moment in PHASES or moment == "unwatched":
        wanted = PHASES.get(moment, PHASES["rows"])
        before(Heartbeat, "enter", lambda heartbeat, phase, step=None: phase == wanted and hold())
    elif moment == "commit":
        before(RowJournal, "_write_pending", hold)
    elif moment == "merge":
        before(OutputFile, "write", hold)
    elif moment == "rename":
        # Of the manifest, of the output, of what is said of it.
        before(files.os, "replace", hold)
    elif moment == "renamed":
        after(files, "sync_folder", hold)
    elif moment == "end":
        before(open_job, "end_manifest", hold)
    else:
        assert moment == "ended", moment
        before(open_job, "remove_journal", hold)


def main() -> int:
    moment, number, rank, folder, *arguments = sys.argv[1:]
    if moment == "unwatched":
        Watchdog.start = Watchdog.stop = lambda watchdog: None
        Watchdog.fail = Watchdog.signalled = lambda watchdog, *arguments: None
    if moment != "none" and os.environ["RANK"] == rank:
        plant(moment, Hold(int(number), Path(folder)))
    return launch.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
