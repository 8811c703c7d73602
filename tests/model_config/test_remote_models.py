"""Model folders in S3: downloaded once, whole, and again when they change."""

import os
from pathlib import Path

import pytest
from ranks import REPOSITORY

from spmd_worker.base.errors import ModelConfigError
from spmd_worker.base.remote_files import replace_remote
from spmd_worker.model_config import remote_model
from spmd_worker.model_config.hub import locate_model

MODEL = REPOSITORY / "scripts" / "demo" / "model"


@pytest.fixture
def remote(s3, tmp_path, monkeypatch):
    """A model's folder in S3, with files that are not needed, and an empty cache."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    for path in MODEL.iterdir():
        replace_remote(f"{s3.bucket}/models/tiny/{path.name}", path.read_bytes())
    for name in ("pytorch_model.bin", "onnx/model.safetensors", "1_Dense/config.json", "run.py"):
        replace_remote(f"{s3.bucket}/models/tiny/{name}", b"{}")
    s3.requests.clear()
    return f"{s3.bucket}/models/tiny"


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def downloads(s3) -> list[str]:
    return [
        path.rpartition("/")[2].rstrip("?") for method, path in s3.requests if method == "GET" and "list" not in path
    ]


@pytest.mark.guarantee("A remote model is never half a model")
def test_remote_model_is_the_folder_downloaded_once(s3, remote):
    s3.fault = lambda number, method, path: ("throttle", "reset", None, None)[number % 4]
    found = locate_model(remote, None)
    assert found.name == "tiny"
    assert files_in(found.folder) == files_in(MODEL)
    s3.requests.clear()
    assert locate_model(f"{remote}/", None).folder == found.folder
    assert downloads(s3) == []
    settings = locate_model(remote, None, needs_weights=False)
    assert not list(settings.folder.glob("*.safetensors"))


def test_changed_model_is_downloaded_again(s3, remote):
    before = locate_model(remote, None).folder
    replace_remote(f"{remote}/modules.json", b"[]")
    after = locate_model(remote, None).folder
    assert before != after
    assert files_in(before) == files_in(MODEL)
    assert {"1_Dense/config.json", "onnx/model.safetensors"} < set(files_in(after))


def test_interrupted_download_keeps_its_whole_files(s3, remote, monkeypatch):
    class Ended(BaseException):
        pass

    def read_range(store, state, start, stop):
        if store.name.endswith("model.safetensors"):
            raise Ended
        return read(store, state, start, stop)

    read = remote_model.read_range
    monkeypatch.setattr(remote_model, "read_range", read_range)
    with pytest.raises(Ended):
        locate_model(remote, None)
    monkeypatch.setattr(remote_model, "read_range", read)
    s3.requests.clear()
    assert files_in(locate_model(remote, None).folder) == files_in(MODEL)
    assert "config.json" not in downloads(s3)
    assert "model.safetensors" in downloads(s3)


@pytest.mark.control("A remote model is never half a model")
def test_model_check_detects_files_written_in_place(s3, remote, monkeypatch):
    monkeypatch.setattr(os, "replace", lambda partial, path: Path(path).write_bytes(Path(partial).read_bytes()[:10]))
    assert files_in(locate_model(remote, None).folder) != files_in(MODEL)


def test_unusable_remote_models_are_rejected(s3, remote):
    with pytest.raises(ModelConfigError, match=r"has no config.json"):
        locate_model(f"{s3.bucket}/models", None)
    s3.fault = lambda number, method, path: "throttle"
    with pytest.raises(ModelConfigError, match=r"cannot be downloaded.*after 10 tries"):
        locate_model(remote, None)
