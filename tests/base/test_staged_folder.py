"""Folders that are replaced completely or not at all, killed and failing at every call."""

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from forked_child import in_child
from killed_writer import KILLED, FileCalls, calls_on_files, full_disk

from spmd_worker.base import staged_folder
from spmd_worker.base.errors import SaveError
from spmd_worker.base.staged_folder import StagedFolder, copy_durably, stage_folder, write_durably

OLD, NEW = {"a": b"old", "b/c": b"older"}, {"a": b"new" * 1000, "d/e": b"newer", "f": b""}
Tree = dict[str, bytes]


def allow(_: Path) -> None:
    pass


def write(target: Path, files: Tree) -> None:
    staged = stage_folder(target, allow)
    try:
        for name, content in files.items():
            if not (folder := (staged.path / name).parent).exists():
                os.mkdir(folder)
            write_durably(staged.path / name, content)
        staged.commit()
    finally:
        staged.abandon()


def read(folder: Path) -> Tree:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def states_after_kills(target: Path, before: Tree | None, num_calls: int = 100) -> list[Tree]:
    """The target's files after a kill in each of the last calls of `write`, each from `before` (None: no folder)."""

    def begin() -> None:
        shutil.rmtree(target, ignore_errors=True)
        if before is not None:
            shutil.rmtree(target.with_name("made"), ignore_errors=True)
            write(target.with_name("made"), before)
            target.with_name("made").rename(target)

    begin()
    with calls_on_files(FileCalls()) as calls:
        write(target, NEW)
    found = []
    for number in range(max(0, len(calls.names) - num_calls), len(calls.names)):
        begin()

        def run(number: int = number) -> None:
            with calls_on_files(FileCalls(number)):
                write(target, NEW)

        assert in_child(run) == KILLED, (number, calls.names)
        found.append(read(target) if target.exists() else {})
    return found


@pytest.mark.gate("None", "before1")
@pytest.mark.guarantee("A killed save leaves the old folder or the new one")
@pytest.mark.parametrize("before", [None, {}, OLD])
def test_kill_at_any_call_leaves_old_or_new(before: Tree | None, tmp_path: Path):
    target = tmp_path / "inside" / "model"
    found = states_after_kills(target, before)
    assert len(found) >= 12
    assert all(each in (before or {}, NEW) for each in found)
    assert found[0] == (before or {})
    # What the last kill has left is no obstacle, and is removed.
    write(target, OLD)
    assert read(target) == OLD
    assert sorted(each.name for each in target.parent.iterdir()) == ["model"]


@pytest.mark.control("A killed save leaves the old folder or the new one")
def test_kill_check_detects_a_replacement_in_two_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, control: Callable
):
    def replace(one: Path, other: Path) -> None:
        shutil.rmtree(other)
        os.rename(one, other)
        one.mkdir()

    monkeypatch.setattr(staged_folder, "exchange", replace)
    monkeypatch.setattr(staged_folder, "_check_exchange", lambda *_: None)
    found = states_after_kills(tmp_path / "model", OLD, num_calls=8)
    with control():
        assert all(each in (OLD, NEW) for each in found)


def test_full_disk_at_any_call_leaves_only_old_folder(tmp_path: Path):
    target = tmp_path / "model"
    write(target, OLD)
    with calls_on_files(FileCalls()) as calls:
        write(target, NEW)
    write(target, OLD)
    probed, last = [number for number, name in enumerate(calls.names) if name == "exchange"]
    # The first is for the parent, which is there.
    for number in range(1, last + 1):
        error = SaveError if number == probed else OSError
        with calls_on_files(FileCalls(number, full_disk)), pytest.raises(error, match="No space left"):
            write(target, NEW)
        assert read(target) == OLD, calls.names[number]
        assert [each.name for each in tmp_path.iterdir()] == ["model"], calls.names[number]


def test_lost_durability_is_said_after_the_rename(tmp_path: Path):
    target = tmp_path / "model"
    with calls_on_files(FileCalls()) as calls:
        write(target, NEW)
    shutil.rmtree(target)
    number = len(calls.names) - 1
    assert calls.names[number - 1 :] == ["rename", "fsync"]
    with calls_on_files(FileCalls(number, full_disk)), pytest.raises(SaveError, match="complete, but may be lost"):
        write(target, NEW)
    assert read(target) == NEW


def test_everything_is_synced_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    synced, real, names = [], os.fsync, []
    monkeypatch.setattr(os, "fsync", lambda each: synced.append(os.readlink(f"/proc/self/fd/{each}")) or real(each))
    rename = os.rename
    monkeypatch.setattr(os, "rename", lambda *paths: names.extend(synced) or rename(*paths))
    write(tmp_path / "model", NEW)
    partial = tmp_path / "model.partial"
    assert {str(partial), str(partial / "d"), *(str(partial / name) for name in NEW)} <= {*names}
    assert synced[-1] == str(tmp_path)


def test_second_writer_is_refused_while_one_writes(tmp_path: Path):
    staged = stage_folder(tmp_path / "model", allow)
    with pytest.raises(SaveError, match="is being written by another process"):
        stage_folder(tmp_path / "model", allow)
    staged.abandon()
    write(tmp_path / "model", NEW)


def test_second_writer_is_refused_while_old_folder_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    target, refused = tmp_path / "model", []
    write(target, OLD)

    def remove(path: Path, *, ignore_errors: bool) -> None:
        # The old folder has the temporary name now: files that another writer put there would be removed with it.
        with pytest.raises(SaveError, match="is being written by another process"):
            stage_folder(target, allow)
        refused.append(path)
        real(path, ignore_errors=ignore_errors)

    real = shutil.rmtree
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", remove)
        write(target, NEW)
    assert refused == [tmp_path / "model.partial"]
    write(target, OLD)
    assert read(target) == OLD


@pytest.mark.parametrize("ends", ["commit", "abandon"])
def test_folder_that_its_writer_ends_is_not_taken(ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first = stage_folder(tmp_path / "model", allow)
    write_durably(first.path / "a", b"x")
    real = fcntl.flock

    def flock(descriptor: int, flags: int) -> None:
        # The first writer ends between the second one's opening of the folder and its lock.
        monkeypatch.undo()
        getattr(first, ends)()
        real(descriptor, flags)

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(SaveError, match="is being written by another process"):
        stage_folder(tmp_path / "model", allow)
    assert [each.name for each in tmp_path.iterdir()] == (["model"] if ends == "commit" else [])
    write(tmp_path / "model", NEW)


@pytest.mark.parametrize("kind", ["file", "link to a file", "partial file"])
def test_anything_but_a_folder_is_refused(kind: str, tmp_path: Path):
    path = tmp_path / ("model.partial" if kind == "partial file" else "model" if kind == "file" else "other")
    path.write_text("mine")
    if kind == "link to a file":
        (tmp_path / "model").symlink_to(path)
    with pytest.raises(SaveError, match=r"is not a folder|is in the way"):
        stage_folder(tmp_path / "model", allow)
    assert path.read_text() == "mine"


def test_link_to_a_folder_stays_a_link(tmp_path: Path):
    write(tmp_path / "real", OLD)
    (tmp_path / "model").symlink_to(tmp_path / "real")
    write(tmp_path / "model", NEW)
    assert (tmp_path / "model").is_symlink()
    assert read(tmp_path / "real") == NEW


def test_file_system_without_exchange_is_said_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def exchange(*_: Path) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(staged_folder, "exchange", exchange)
    write(tmp_path / "model", NEW)
    with pytest.raises(SaveError, match="cannot be replaced in one step on this file system"):
        write(tmp_path / "model", OLD)
    assert read(tmp_path / "model") == NEW


def test_copy_has_the_bytes_of_its_source(tmp_path: Path):
    (tmp_path / "a").write_bytes(bytes(range(256)) * 999)
    copy_durably(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == (tmp_path / "a").read_bytes()
    with pytest.raises(FileExistsError):
        copy_durably(tmp_path / "a", tmp_path / "b")


def test_abandoned_folder_is_removed_once(tmp_path: Path):
    staged: StagedFolder = stage_folder(tmp_path / "model", allow)
    write_durably(staged.path / "a", b"x")
    staged.abandon()
    staged.abandon()
    assert list(tmp_path.iterdir()) == []
