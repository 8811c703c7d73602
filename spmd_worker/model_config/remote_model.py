"""Downloads remote folders (`s3://bucket/folder`) of models and adapters into a local cache.

    CACHE/remote--NAME--DIGEST/VERSION            the files of one version of the folder: complete, and never changed
    CACHE/remote--NAME--DIGEST/VERSION.partial    a download; its complete files are kept by the next one

CACHE is that of the hub. VERSION is a digest of the files' names, sizes and versions, so that a folder that changes is
downloaded again. One rank of a node downloads; the others wait for the kernel's lock, and find its files.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from spmd_worker.base.errors import ConfigError, ModelConfigError
from spmd_worker.base.files import sync_folder, sync_stream
from spmd_worker.base.metrics.log import SAME_ON_EVERY_RANK
from spmd_worker.base.remote_files import RemoteState, read_range, states_below
from spmd_worker.base.remote_names import RemotePath, shown_name
from spmd_worker.base.remote_store import open_store
from spmd_worker.model_config.hub_cache import ModelLocation, cache_folder
from spmd_worker.model_config.locked_folder import locked, short_digest

logger = logging.getLogger(__name__)

_BLOCK_BYTES: Final = 8 << 20
_MODULES: Final = "modules.json"
_MODULE_FILES: Final = ("*/config.json", "*/*.safetensors", "*/*.safetensors.index.json")
"""Files in the folders of modules, if `modules.json` lists some."""


def locate_remote_model(name: str, patterns: Sequence[str], excluded: Sequence[str]) -> ModelLocation:
    """The local copy of a remote folder's files that match `patterns`, or those of modules. Raises ModelConfigError."""
    name = name.rstrip("/")
    key = f"model.path={shown_name(name)}"
    try:
        wanted = find_remote_files(name, patterns, excluded)
        if "config.json" in wanted:
            return ModelLocation(str(copy_once(name, key, wanted)), _short(name))
    except (OSError, ConfigError) as error:
        raise ModelConfigError(f"{key} cannot be downloaded: {error}") from None
    raise ModelConfigError(f"{key} has no config.json: give the folder of a model")


def find_remote_files(name: str, patterns: Sequence[str], excluded: Sequence[str] = ()) -> dict[str, RemoteState]:
    """States of a remote folder's files that match `patterns`, or those of modules. Raises OSError and ConfigError."""
    states = states_below(name)
    found = [name for name in states if _matches(name, patterns) and not _matches(name, excluded)]
    if _MODULES in found:
        found += [name for name in states if _matches(name, _MODULE_FILES)]
    return {name: states[name] for name in sorted(set(found))}


def _matches(name: str, patterns: Sequence[str]) -> bool:
    # The names become paths in the cache.
    is_safe = not any(part in ("", ".", "..") for part in name.split("/"))
    return is_safe and any(fnmatchcase(name, pattern) for pattern in patterns)


def copy_once(name: str, key: str, wanted: Mapping[str, RemoteState]) -> Path:
    """The local copy of these files of a remote folder; `key` names it in the log. Raises OSError and ConfigError."""
    base = cache_folder() / f"remote--{_short(name)}--{short_digest([shown_name(name)])}"
    folder = base / short_digest([[each, state.num_bytes, state.version] for each, state in wanted.items()])
    if not folder.is_dir():
        base.mkdir(parents=True, exist_ok=True)
        with locked(base / "lock"):
            if not folder.is_dir():
                logger.info("%s: downloading into %s", key, base, extra=SAME_ON_EVERY_RANK)
                _copy(name, wanted, folder)
    return folder


def _short(name: str) -> str:
    """The folder's own name, without a query: it names the model in answers, and the copy."""
    return RemotePath(shown_name(name).partition("?")[0]).name


def _copy(name: str, wanted: Mapping[str, RemoteState], folder: Path) -> None:
    partial = folder.with_name(f"{folder.name}.partial")
    for each, state in wanted.items():
        path = partial / each
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            _copy_file(f"{name}/{each}", state, path)
    for parent, _, _ in os.walk(partial):
        sync_folder(Path(parent))
    os.rename(partial, folder)
    sync_folder(folder.parent)


def _copy_file(name: str, state: RemoteState, path: Path) -> None:
    """Copy a file of this state, whole."""
    store, partial = open_store(name), path.with_name(f"{path.name}.incomplete")
    with open(partial, "wb") as file:
        for start in range(0, state.num_bytes, _BLOCK_BYTES):
            file.write(read_range(store, state, start, min(start + _BLOCK_BYTES, state.num_bytes)))
        sync_stream(file)
    os.replace(partial, path)
