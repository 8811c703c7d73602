"""Digest of a checkpoint's contents: read once, and again when a file has changed, however it was dated."""

import os
from pathlib import Path

import pytest

from spmd_worker.model.weights import content_digest as module
from spmd_worker.model.weights.content_digest import content_digest


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two files, which count as settled, and a cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "_SETTLED_NS", -1)
    made = tmp_path / "model"
    (made / "dense").mkdir(parents=True)
    (made / "a.safetensors").write_bytes(b"aaaa")
    (made / "dense" / "b.safetensors").write_bytes(b"bbbb")
    return made


def num_kept(folder: Path) -> int:
    return len(list((folder.parent / "cache" / "spmd-worker" / "weights").glob("*.json")))


def test_files_are_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch):
    first = content_digest(folder, ("dense",))
    assert (len(first), num_kept(folder)) == (32, 2)
    monkeypatch.setattr(module, "open", None, raising=False)
    assert content_digest(folder, ("dense",)) == first
    assert content_digest(folder) != first


def test_changed_file_with_old_times_is_read_again(folder: Path):
    path, first = folder / "a.safetensors", content_digest(folder)
    status = path.stat()
    path.write_bytes(b"aaab")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    changed = content_digest(folder)
    assert changed != first
    path.write_bytes(b"aaaa")
    assert content_digest(folder) == first
    path.rename(folder / "c.safetensors")
    assert content_digest(folder) not in (first, changed)


def test_new_file_is_not_kept(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """It could change within the same tick of the file system's clock."""
    monkeypatch.setattr(module, "_SETTLED_NS", 10**18)
    assert content_digest(folder) == content_digest(folder)
    assert num_kept(folder) == 0


@pytest.mark.parametrize("record", ["", "[]", '{"status": 3, "digest": 4}', '{"status": []}'])
def test_damaged_record_is_ignored(folder: Path, record: str):
    first = content_digest(folder)
    (path,) = (folder.parent / "cache" / "spmd-worker" / "weights").iterdir()
    path.write_text(record)
    assert content_digest(folder) == first


def test_cache_folder_that_cannot_be_written_costs_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch):
    first = content_digest(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "a.safetensors"))
    assert content_digest(folder) == first
