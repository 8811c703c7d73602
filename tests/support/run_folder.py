"""A folder that the processes of one test run share, for what takes long to make and is never changed."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

VARIABLE = "TESTS_RUN_FOLDER"


def made_once(name: str, make: Callable[[Path], object]) -> Path:
    """The folder of this name, made by the first process that asks for it; the others wait meanwhile."""
    root = Path(os.environ[VARIABLE])
    folder = root / name
    with open(root / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            unfinished = root / f"{name}.unfinished"
            make(unfinished)
            unfinished.rename(folder)
    return folder
