"""The store of a pool in a folder: an object is created once, complete or not there, however its writer ends."""

import errno
import json
import os
import sys
from pathlib import Path
from shutil import copyfile, rmtree
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import preloaded
import pytest
import ranks
from forked_child import in_child
from killed_writer import KILLED, FileCalls, calls_on_files

from spmd_worker.base.errors import ConfigError, PoolError
from spmd_worker.frontends.batch.pool.posix_store import PosixStore, open_folder

NAME = "ranges/00000000"


@pytest.fixture
def store(tmp_path: Path) -> PosixStore:
    return open_folder(tmp_path / "pool")


def test_object_is_created_once(store: PosixStore):
    assert store.read(NAME) is None
    assert store.create(NAME, b"first")
    assert not store.create(NAME, b"second")
    assert store.read(NAME) == b"first"
    store.delete(NAME)
    store.delete(NAME)
    assert store.read(NAME) is None


def test_listing_has_objects_of_the_prefix_alone(store: PosixStore):
    assert store.list("ranges/") == []
    for name in ("ranges/00000001.0002", "ranges/00000001", "ranges/00000010", "done/00000001"):
        assert store.create(name, b"data")
    folder = store.folder / "ranges"
    (folder / "00000001.d").mkdir()
    (folder / "00000001.link").symlink_to("00000001")
    (folder / ".nfs0000000100000001").write_bytes(b"")
    listed = store.list("ranges/0000000")
    assert [(each.name, each.num_bytes) for each in listed] == [("ranges/00000001", 4), ("ranges/00000001.0002", 4)]


def test_touch_replaces_and_sets_the_time(store: PosixStore):
    store.touch("workers/a.beat", b"1")
    os.utime(store.folder / "workers" / "a.beat", (1.0, 1.0))
    assert [each.time_s for each in store.list("workers/")] == [1.0]
    store.touch("workers/a.beat", b"23")
    listed = store.list("workers/")
    assert [each.num_bytes for each in listed] == [2]
    assert 1.0 < listed[0].time_s <= store.now_s("clock/b")
    (store.folder / "workers" / "foreign").symlink_to("a.beat")
    assert len(store.list("workers/")) == 1


def check_race(folder: Path, num_races: int) -> None:
    """Two processes create the same names at the same time: each is one's, complete."""
    store = open_folder(folder)

    def race(name: str) -> None:
        wins = [number for number in range(num_races) if store.create(f"parts/{number}", name.encode() * 1000)]
        store.touch(f"workers/{name}", " ".join(map(str, wins)).encode())

    first = os.fork()
    if first == 0:
        try:
            race("one")
        finally:
            os._exit(0)
    assert in_child(lambda: race("two")) == 0
    os.waitpid(first, 0)
    wins = {name: [int(number) for number in (store.read(f"workers/{name}") or b"").split()] for name in ("one", "two")}
    assert sorted(wins["one"] + wins["two"]) == list(range(num_races))
    for name, numbers in wins.items():
        assert all(store.read(f"parts/{number}") == name.encode() * 1000 for number in numbers)
    assert list((folder / "tmp").iterdir()) == []


@pytest.mark.guarantee("An object of a pool is created once")
@pytest.mark.parametrize("num_races", [25, pytest.param(1000, marks=pytest.mark.stress)])
def test_two_processes_race_for_every_name(num_races: int, tmp_path: Path):
    check_race(tmp_path / "disk", num_races)
    with TemporaryDirectory(dir="/dev/shm") as folder:
        check_race(Path(folder), num_races)


@pytest.mark.control("An object of a pool is created once")
def test_race_check_detects_names_that_are_replaced(tmp_path: Path, control: Any):
    def link(source: Path, target: Path, **_: Any) -> None:
        if target.name[0] == "." and target.exists():
            raise FileExistsError
        copyfile(source, target)

    with mock.patch.object(os, "link", link), control():
        check_race(tmp_path, 25)


@pytest.mark.guarantee("An object of a pool is created once")
def test_kill_at_any_call_leaves_all_or_nothing(store: PosixStore):
    store.create("parts/first", b"")
    outcomes: list[bytes | None] = []

    def create() -> None:
        store.create(f"parts/{len(outcomes)}", b"data" * 100)

    with calls_on_files(FileCalls(0)) as calls:
        while in_child(create) == KILLED:
            name = f"parts/{len(outcomes)}"
            outcomes.append(store.read(name))
            calls.number = -1
            assert store.create(name, b"other") == (outcomes[-1] is None)
            calls.number, calls.names = len(outcomes), []
    assert outcomes.index(b"data" * 100) >= 2
    assert outcomes[-1] == b"data" * 100
    left = list((store.folder / "tmp").iterdir())
    assert left
    for path in left:
        os.utime(path, (1.0, 1.0))
    open_folder(store.folder)
    assert list((store.folder / "tmp").iterdir()) == []


def test_folder_without_hard_links_is_refused(tmp_path: Path):
    fault = OSError(errno.EPERM, "Operation not permitted")
    with mock.patch.object(os, "link", side_effect=fault), pytest.raises(ConfigError, match="without hard links"):
        open_folder(tmp_path / "pool")


def test_folder_that_cannot_be_written_is_refused(tmp_path: Path):
    fault = OSError(errno.EROFS, "Read-only file system")
    match = f"job.pool={tmp_path} cannot be written .Read-only file system.: give a folder"
    with mock.patch.object(os, "link", side_effect=fault), pytest.raises(ConfigError, match=match):
        open_folder(tmp_path)
    with pytest.raises(ConfigError, match="cannot be written"):
        open_folder(Path("/proc/pool"))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"job\.pool=\S+ exists and is not a folder: give another"):
        open_folder(tmp_path / "file")


def test_folder_with_other_files_is_refused(tmp_path: Path):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(ConfigError, match=r"is not a pool: it has 'thesis.tex' and no job.json: give an empty folder"):
        open_folder(tmp_path)
    (tmp_path / "job.json").write_text("")
    open_folder(tmp_path)


@pytest.mark.guarantee("An object of a pool is created once", is_control_inside=True)
def test_power_loss_leaves_complete_objects_and_logs(tmp_path: Path):
    library = preloaded.build("recorded_io", tmp_path)

    def run(broken: str) -> dict[str, Any]:
        folder = tmp_path / f"machine {broken}" / "pool"
        folder.parent.mkdir()
        # A fresh interpreter: what is preloaded is loaded when a program starts.
        command = [sys.executable, str(ranks.SUPPORT / "pool_power_loss.py"), str(folder), broken]
        path = os.pathsep.join(ranks.IMPORT_PATH)
        done = ranks.run_command(command, 600.0, {"LD_PRELOAD": str(library), "PYTHONPATH": path}).checked()
        return json.loads(done.stdout)

    found = run("")
    assert found["troubles"] == []
    assert found["states"] > 200
    assert "parts/00000000.0002.a.1 is incomplete" in run("files")["troubles"]
    assert "ranges/00000000 is lost" in run("folders")["troubles"]
    assert run("first")["troubles"] == ["the log has a hole: [True, True, False, True]"]


def test_folder_that_was_replaced_is_left_alone(tmp_path: Path):
    """Regression: writes that were repeated while a pool was removed came into the next pool of its name."""
    folder = tmp_path / "pool"
    store = open_folder(folder)
    rmtree(folder)
    for write in (store.create, store.touch):
        with pytest.raises(FileNotFoundError):
            write("ranges/00000001", b"old")
    open_folder(folder)
    for write in (store.create, store.touch):
        with pytest.raises(PoolError, match="was removed, and is another folder now: end the worlds"):
            write("ranges/00000001", b"old")
    assert [each.name for each in open_folder(folder).list("ranges/")] == []
