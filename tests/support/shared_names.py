"""Names in /dev/shm by the processes that use them: those of other processes on the machine come and go."""

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

FOLDER = Path("/dev/shm")


def shared_names(pids: Iterable[int]) -> set[str]:
    """Names that these processes have open or mapped, or that contain the id of one, as libraries name theirs."""
    found = set()
    for pid in pids:
        found |= {name for name in os.listdir(FOLDER) if str(pid) in re.findall("[0-9]+", name)}
        # The process may end meanwhile.
        with suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
            found |= set(re.findall(rf"{FOLDER}/([^/\n]+?)(?: \(deleted\))?$", maps, re.MULTILINE))
        with suppress(OSError):
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    target = Path(os.readlink(link))
                    found |= {target.relative_to(FOLDER).parts[0]} if FOLDER in target.parents else set()
    return found


def living_pids() -> list[int]:
    return [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]
