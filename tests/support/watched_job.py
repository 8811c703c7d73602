"""A job that notes the images it encodes and its memory: a script for torchrun.

    watched_job.py FOLDER ARGUMENT...

After each plan a rank appends to FOLDER/watched.RANK a line of JSON: its process, the resident bytes of itself and of
its children, the names of the images that the plan had encoded. The rest is launch.py's.
"""

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from spmd_worker.base.process import end_with_launcher

if __name__ == "__main__":
    # As launch.py does, first of all.
    end_with_launcher()

import launch
from spmd_worker.worker.runner.media_store import MediaStore

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident_bytes(process: int | str) -> int:
    """0 for a process that has ended."""
    with suppress(OSError):
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * PAGE_BYTES
    return 0


def children() -> list[str]:
    """Processes that any thread of this one has started."""
    found: list[str] = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            found += (task / "children").read_text().split()
    return found


def main() -> int:
    folder, *arguments = sys.argv[1:]
    target = os.open(Path(folder) / f"watched.{os.environ['RANK']}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    apply = MediaStore.apply

    def watched(store: MediaStore, plan: Any, request_of: Any) -> None:
        names = [request_of(each.request_id).media[each.index].media_id.hex() for each in plan.encode]
        apply(store, plan, request_of)
        line = [os.getpid(), resident_bytes("self"), sum(map(resident_bytes, children())), names]
        os.write(target, f"{json.dumps(line)}\n".encode())

    MediaStore.apply = watched  # type: ignore[method-assign]  # this process ends with the job
    return launch.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
