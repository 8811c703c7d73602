"""Files of model folders and adapters that are there and cannot be read: the error names the key."""

import errno
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spmd_worker.base.config.schema import ModelOptions, RunConfig, SpeculativeConfig
from spmd_worker.base.errors import ConfigError, ModelConfigError
from spmd_worker.model_config.unreadable_files import unreadable_file
from spmd_worker.resolved import resolve_run

DEMO = Path("scripts/demo/model")
CHANGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "dangling": (lambda path: path.symlink_to("nothing"), " is a link to a file that does not exist: copy the file"),
    "loop": (lambda path: path.symlink_to(path.name), ": Too many levels of symbolic links: replace it"),
    "folder": (Path.mkdir, " is not a regular file: replace it"),
    "fifo": (os.mkfifo, " is not a regular file: replace it"),
}


def changed(folder: Path, name: str, change: str) -> tuple[Path, str]:
    """The folder with another thing under the name of a file, and the fault."""
    path = folder / name
    path.unlink(missing_ok=True)
    make, words = CHANGES[change]
    make(path)
    return folder, f"{path}{words}"


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json", "1_Pooling/config.json"])
def test_unreadable_model_file_is_named_with_key(tmp_path: Path, name: str, change: str):
    """Regression: without these files the model ran, and answered differently."""
    shutil.copytree(DEMO, tmp_path / "model")
    (tmp_path / "model" / "1_Pooling").mkdir()
    (tmp_path / "model" / "modules.json").write_text('[{"path": "1_Pooling"}]')
    folder, fault = changed(tmp_path / "model", name, change)
    for key, config in (
        ("model.path", RunConfig(model=ModelOptions(path=str(folder)))),
        (
            "speculative_config.model",
            RunConfig(
                model=ModelOptions(path=str(DEMO)),
                speculative_config=SpeculativeConfig("draft_model", 2, model=str(folder)),
            ),
        ),
    ):
        with pytest.raises(ModelConfigError) as error_result:
            resolve_run(config, "cpu")
        assert str(error_result.value).startswith(f"{key}={folder} cannot be read: {fault}")
        assert str(error_result.value).endswith(", or give another folder")


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_unreadable_adapter_file_is_named_with_key(tmp_path: Path, name: str, change: str):
    folder, fault = changed(tmp_path, name, change)
    for key, given in (
        ("adapters.a", {"adapters": {"a": str(folder)}}),
        ("prompt_adapters.a", {"prompt_adapters": {"a": str(folder)}}),
        ("lora_merge", {"lora_merge": str(folder)}),
    ):
        with pytest.raises(ConfigError) as error_result:
            resolve_run(RunConfig(model=ModelOptions(path=str(DEMO), **given)), "cpu")
        assert str(error_result.value).startswith(f"model.{key}={folder} cannot be read: {fault}")


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors"])
def test_pointer_of_git_lfs_is_named(tmp_path: Path, name: str):
    """Large files alone, which hubs store so: others are read once, by whom they are for."""
    folder = shutil.copytree(DEMO, tmp_path / "model")
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    words = f"model.path={folder} cannot be read: {folder / name} is a pointer of Git LFS, not the file itself: run"
    with pytest.raises(ModelConfigError, match=re.escape(words)):
        resolve_run(RunConfig(model=ModelOptions(path=str(folder))), "cpu")


def test_folder_without_permission_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The superuser, who may run the tests, reads everything."""
    (tmp_path / "config.json").write_text("{}")

    def denied(*given: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    # A folder may be entered that cannot be listed.
    monkeypatch.setattr(os, "listdir", denied)
    assert unreadable_file(tmp_path, ("config.json", "*.json")) is None
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    fault = unreadable_file(tmp_path, ("config.json", "*.json"))
    assert fault == f"{tmp_path / 'config.json'}: Permission denied: let this user read it"
    monkeypatch.undo()
    assert unreadable_file(tmp_path / "nothing", ("*",)) is None


def test_other_names_are_no_fault(tmp_path: Path):
    """Folders of tokenizers inside, copies of weights, and weights beside the one file that is read."""
    shutil.copytree(DEMO, tmp_path / "model")
    (tmp_path / "model" / "tokenizer").mkdir()
    for name in ("consolidated.safetensors", "model-00001-of-00002.safetensors", "notes.json"):
        (tmp_path / "model" / name).symlink_to("nothing")
    assert resolve_run(RunConfig(model=ModelOptions(path=str(tmp_path / "model"))), "cpu").tokenizer is not None
