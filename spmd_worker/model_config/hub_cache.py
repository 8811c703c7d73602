"""Location of a model on this machine: a folder, or a snapshot in the local cache of the Hugging Face hub.

The cache's layout is huggingface_hub's: `models--ORG--NAME/refs/REVISION` holds a commit, `snapshots/COMMIT` its files.
Reads files and the environment; needs neither huggingface_hub nor a network.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from spmd_worker.base.errors import ModelConfigError
from spmd_worker.base.files import JsonError, parse_json_object, read_regular_file
from spmd_worker.model_config.sentence_folder import POOLING_FILES, module_folders
from spmd_worker.model_config.tensor_names import INDEX_FILE, SINGLE_FILE, STATE_FILE

_NAME: Final = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_REVISION: Final = re.compile(r"\w[\w./-]*")
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_MAX_NAME: Final = 96
_MAX_INDEX_BYTES: Final = 100_000_000


@dataclass(frozen=True, slots=True)
class ModelLocation:
    """The folder `path` of a model, its name for people, and the commit if it is a snapshot of the hub."""

    path: str
    name: str
    commit: str | None = None

    @property
    def folder(self) -> Path:
        return Path(self.path)


def is_hub_name(path: str) -> bool:
    """Whether this may be a name on the hub: ORG/NAME."""
    has_runs = ".." in path or "--" in path
    return _NAME.fullmatch(path) is not None and not has_runs and len(path) <= _MAX_NAME


def check_revision(revision: str) -> None:
    """Raise ModelConfigError for an invalid branch, tag or commit: it becomes a part of a path."""
    if _REVISION.fullmatch(revision) is None or ".." in revision:
        raise ModelConfigError(f"model.revision={revision!r} must be a branch, a tag or a commit of the hub")


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """The hub's cache, as huggingface_hub finds it: HF_HUB_CACHE, else `hub` in HF_HOME. Raises ModelConfigError if it
    is in the home folder of a user who has none.
    """
    for key in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if environment.get(key):
            return _expanded(environment[key])
    general = environment.get("XDG_CACHE_HOME") or "~/.cache"
    return _expanded(environment.get("HF_HOME") or f"{general}/huggingface") / "hub"


def _expanded(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ModelConfigError(
            f"the hub's cache is {path}, and this user has no home folder (HOME is not set, and the system knows no "
            f"other): set HF_HOME to a folder for models of the hub, or give model.path a folder"
        ) from None


def repository_folder(cache: Path, name: str) -> Path:
    """Cache folder of a name on the hub."""
    return cache / f"models--{name.replace('/', '--')}"


def find_snapshot(cache: Path, name: str, revision: str) -> ModelLocation | None:
    """The snapshot of `revision`; None if the cache has none."""
    repository = repository_folder(cache, name)
    commit = revision if _COMMIT.fullmatch(revision) else _read_ref(repository / "refs" / revision)
    folder = repository / "snapshots" / (commit or "")
    return ModelLocation(str(folder), name, commit) if commit is not None and folder.is_dir() else None


def missing_file(folder: Path, *, needs_weights: bool) -> str | None:
    """A file that a snapshot lacks, because its download was interrupted or partial; None for none."""
    if not (folder / "config.json").is_file():
        return "config.json"
    missing = _missing_weights(folder) if needs_weights else None
    return missing or _missing_in_modules(folder, needs_weights=needs_weights)


def unknown_files(cache: Path, snapshot: ModelLocation) -> list[str]:
    """Pooling files that the snapshot lacks and that are not recorded as absent on the hub: an earlier download may
    have left them out.
    """
    modules = POOLING_FILES[0]
    if not (snapshot.folder / modules).is_file() and absence_note(cache, snapshot, modules).is_file():
        return []
    lacking = [name for name in POOLING_FILES if not (snapshot.folder / name).is_file()]
    return [name for name in lacking if not absence_note(cache, snapshot, name).is_file()]


def absence_note(cache: Path, snapshot: ModelLocation, name: str) -> Path:
    """The empty file by which huggingface_hub records that the hub's commit has no file of this name."""
    assert snapshot.commit is not None, snapshot
    return repository_folder(cache, snapshot.name) / ".no_exist" / snapshot.commit / name


def _missing_weights(folder: Path) -> str | None:
    if (folder / SINGLE_FILE).is_file():
        return None
    index = folder / INDEX_FILE
    if not index.is_file() and (folder / STATE_FILE).is_file():
        return next((name for name in _state_files(folder / STATE_FILE) if not (folder / name).is_file()), None)
    if not index.is_file():
        return f"{SINGLE_FILE} or {INDEX_FILE}"
    try:
        weight_map = parse_json_object(read_regular_file(index, _MAX_INDEX_BYTES)).get("weight_map")
    except (JsonError, OSError):
        return INDEX_FILE
    files = weight_map.values() if isinstance(weight_map, dict) else []
    wanted = sorted(dict.fromkeys(str(file) for file in files))
    return next((file for file in wanted if not (folder / file).is_file()), None)


def _state_files(path: Path) -> list[str]:
    """Names of a sharded state's files; none if it is damaged, which reading it reports."""
    try:
        files = parse_json_object(read_regular_file(path, _MAX_INDEX_BYTES))["files"]
        return [str(each["name"]) for of_rank in files for each in of_rank]
    except (JsonError, OSError, KeyError, TypeError):
        return []


def _missing_in_modules(folder: Path, *, needs_weights: bool) -> str | None:
    try:
        with_settings, with_weights = module_folders(folder, "Pooling", "Dense"), module_folders(folder, "Dense")
    except ModelConfigError:
        return None  # reading the file reports its fault
    for name in with_settings:
        if not (folder / name / "config.json").is_file():
            return f"{name}/config.json"
    for name in with_weights if needs_weights else ():
        missing = _missing_weights(folder / name)
        if missing is not None:
            return f"{name}/{missing}"
    return None


def _read_ref(path: Path) -> str | None:
    try:
        text = read_regular_file(path, 1000).decode("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return text if _COMMIT.fullmatch(text) else None
