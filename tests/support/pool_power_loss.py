"""Objects of a pool on a disk that loses power at any moment. See power_loss.py.

    LD_PRELOAD=recorded_io.so python tests/support/pool_power_loss.py FOLDER [BROKEN]

Creates objects in a folder, one of them by a worker that is killed before it syncs the folder. Of every state that a
crash may leave: an object is complete or missing, one whose create had returned is there, and a log has no holes.
BROKEN leaves out a kind of sync: `files`, `folders`, or the `first` of a folder in each create. Prints a line of JSON.
"""

import ctypes
import json
import random
import sys
from contextlib import nullcontext
from itertools import chain, repeat
from pathlib import Path
from unittest import mock

from power_loss import Disk, Tree, crashes, read_recording, snapshot

from spmd_worker.frontends.batch.pool import posix_store

LOG = [f"ranges/00000000{suffix}" for suffix in ("", ".0002", ".0003", ".0004")]
OBJECTS = {
    "ranges/00000000": b"allocated\n",
    "parts/00000000.0002.a.1": b"answer\n" * 1500,
    "ranges/00000000.0002": b"part\n",
    "ranges/00000000.0003": b"lease\n",
    "ranges/00000000.0004": b"handback\n",
}
KILLED_WRITER = "ranges/00000000.0003"
SYNC_FOLDER = posix_store.sync_folder


def faults(tree: Tree, returned: list[str]) -> list[str]:
    """What a crash state breaks."""
    found = [f"{name} is incomplete" for name, data in OBJECTS.items() if tree.get(name) not in (None, data)]
    found += [f"{name} is lost" for name in returned if name not in tree]
    entries = [name in tree for name in LOG]
    found += [f"the log has a hole: {entries}"] if entries != sorted(entries, reverse=True) else []
    part_is_lost = "ranges/00000000.0002" in tree and "parts/00000000.0002.a.1" not in tree
    return [*found, *(["an entry names a part that is lost"] if part_is_lost else [])]


def main(folder: Path, broken: str) -> None:
    library = ctypes.CDLL(None)
    posix_store.open_folder(folder)
    store, disk, chance = posix_store.PosixStore(folder), Disk(snapshot(folder)), random.Random(1)
    num_states, troubles, returned = 0, dict[str, None](), list[str]()
    for name, data in OBJECTS.items():
        log = folder.with_name("recording")
        has_folder_sync = name != KILLED_WRITER and broken != "folders"
        assert library.recorded_io_start(str(folder).encode(), str(log).encode()) == 0
        patches = {} if has_folder_sync else {"sync_folder": mock.Mock()}
        patches |= {"sync_stream": mock.Mock()} if broken == "files" else {}
        if broken == "first" and has_folder_sync:
            patches["sync_folder"] = mock.Mock(side_effect=chain([None], repeat(mock.DEFAULT)), wraps=SYNC_FOLDER)
        with mock.patch.multiple(posix_store, **patches) if patches else nullcontext():
            assert store.create(name, data)
        library.recorded_io_stop()
        for operation in read_recording(log.read_bytes(), folder):
            disk.apply(operation)
            for _, tree in crashes(disk, chance, 3):
                num_states += 1
                troubles.update(dict.fromkeys(faults(tree, returned)))
        returned += [] if name == KILLED_WRITER else [name]
        # Whoever wrote an entry after it has made it certain too.
        returned += [KILLED_WRITER] if name == LOG[-1] else []
    for _, tree in crashes(disk, chance, 3):
        troubles.update(dict.fromkeys(faults(tree, returned)))
    print(json.dumps({"states": num_states, "troubles": list(troubles)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:] or [""])
