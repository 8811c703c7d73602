"""Finds the model that `model.path` names, and downloads it from the Hugging Face hub if it is only a name there.

A folder takes precedence over the hub. One rank of a node downloads, under a lock that the kernel releases when it
ends; the others wait while it makes progress, find its files, and fail with its message if it failed.
"""

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from glob import escape
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from spmd_worker.base.config.extras import package_fault
from spmd_worker.base.errors import CheckpointError, ModelConfigError
from spmd_worker.base.files import JsonError, describe_os_error, parse_json_object, read_regular_file, write_json
from spmd_worker.base.metrics.log import SAME_ON_EVERY_RANK
from spmd_worker.base.remote_names import is_remote
from spmd_worker.model_config.gguf.folder import locate_gguf
from spmd_worker.model_config.hub_cache import (
    ModelLocation,
    absence_note,
    cache_folder,
    check_revision,
    find_snapshot,
    is_hub_name,
    missing_file,
    repository_folder,
    unknown_files,
)
from spmd_worker.model_config.late_interaction import ARTIFACT_FILE
from spmd_worker.model_config.quantization import MODELOPT_FILE
from spmd_worker.model_config.remote_model import locate_remote_model
from spmd_worker.model_config.sentence_folder import POOLING_FILES, module_folders
from spmd_worker.model_config.tensor_names import SINGLE_FILE, STATE_FILE
from spmd_worker.model_config.unreadable_files import unreadable_file

logger = logging.getLogger(__name__)

_SETTINGS: Final = ("config.json", "generation_config.json", MODELOPT_FILE, *POOLING_FILES, ARTIFACT_FILE)
_WEIGHTS: Final = ("*.safetensors", "*.safetensors.index.json", STATE_FILE)
_SHARDS: Final = "model-*-of-*.safetensors"
TOKENIZER_FILES: Final = (
    *("tokenizer*", "vocab.json", "merges.txt", "added_tokens.json", "spiece.model", "sentencepiece.bpe.model"),
    *("spm.model", "source.spm", "target.spm", "tekken.json", "tiktoken.model", "*.tiktoken"),
    *("special_tokens_map.json", "chat_template*", "additional_chat_templates/*.jinja"),
)
"""Patterns of a tokenizer's files."""
PROCESSOR_FILES: Final = ("preprocessor_config.json", "processor_config.json")
"""Numbers by which images are prepared."""
_FILES: Final = (*_SETTINGS, *_WEIGHTS, *TOKENIZER_FILES, *PROCESSOR_FILES)
"""Files to fetch: weights as safetensors, configuration, tokenizer, image processor. No code and no pickle."""
_NOT_FETCHED: Final = ("*/*.safetensors*", "tokenizer*/*", "consolidated*")
"""Weights and tokenizers in folders inside, and copies of the weights under other names. Folders of modules are fetched
once they are known.
"""
_POLL_S: Final = 0.2
_PATIENCE_S: Final = 600.0
"""Time limit without a byte more in the cache."""
_ASK_S: Final = 10.0
"""Time limit for the hub's list of files."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A name on the hub, a revision of it, and whether the weights are needed."""

    cache: Path
    name: str
    revision: str
    needs_weights: bool

    def find(self) -> ModelLocation | None:
        """The snapshot, if it is complete."""
        found = find_snapshot(self.cache, self.name, self.revision)
        if found is None or missing_file(found.folder, needs_weights=self.needs_weights) is not None:
            return None
        return found

    def __str__(self) -> str:
        return f"model.path={self.name}" + (f" at model.revision={self.revision}" if self.revision != "main" else "")


def locate_model(path: str, revision: str | None, *, needs_weights: bool = True) -> ModelLocation:
    """`_locate_model`, whose files can be read. Raises ModelConfigError, with the files and folders that were searched,
    or the file that cannot be read.
    """
    try:
        location = _locate_model(path, revision, needs_weights=needs_weights)
    except OSError as error:
        raise ModelConfigError(f"model.path={path} cannot be read: {describe_os_error(error)}") from None
    fault = _unreadable_file(location.folder, needs_weights=needs_weights)
    if fault is not None:
        raise ModelConfigError(f"model.path={path} cannot be read: {fault}, or give another folder")
    return location


def _unreadable_file(folder: Path, *, needs_weights: bool) -> str | None:
    # Beside the one file of weights no other counts; of others, those with the names that shards have.
    weights: tuple[str, ...] = ("*.safetensors.index.json", _SHARDS, STATE_FILE, "*.gguf")
    if os.path.lexists(folder / SINGLE_FILE):
        weights = (SINGLE_FILE,)
    weights = weights if needs_weights else ()
    patterns = (*_SETTINGS, "sentence_*_config.json", *TOKENIZER_FILES, *PROCESSOR_FILES, *weights)
    fault = unreadable_file(folder, patterns, _NOT_FETCHED)
    if fault is not None:
        return fault
    faults = (unreadable_file(folder / each, ("config.json", *weights)) for each in module_folders(folder))
    return next(filter(None, faults), None)


def _locate_model(path: str, revision: str | None, *, needs_weights: bool) -> ModelLocation:
    """The folder `path`, a copy of it if it is remote, one made of GGUF, or the snapshot of the hub's model of that
    name at `revision` (main). Missing files are downloaded, unless HF_HUB_OFFLINE is set; a snapshot that lacks nothing
    but possible pooling files is used if the hub cannot be reached. Raises ModelConfigError and OSError.
    """
    if is_remote(path):
        return locate_remote_model(path, _FILES if needs_weights else _SETTINGS, _NOT_FETCHED)
    of_gguf = locate_gguf(path, TOKENIZER_FILES)
    if of_gguf is not None:
        return of_gguf
    folder = Path(path)
    if folder.is_dir() or not is_hub_name(path):
        if revision is not None:
            logger.info("model.revision=%s is of no effect: model.path=%s is a folder", revision, path)
        return ModelLocation(path, folder.name)
    check_revision(revision or "main")
    wanted = _Wanted(cache_folder(), path, revision or "main", needs_weights)
    found = wanted.find()
    if found is not None and (_is_offline() or not unknown_files(wanted.cache, found)):
        return found
    if _is_offline():
        raise ModelConfigError(_not_found(wanted, "HF_HUB_OFFLINE is set, so nothing is downloaded"))
    try:
        return _download_once(wanted)
    except ModelConfigError as error:
        found = wanted.find()
        if found is None:
            raise
        message = "%s; the cached model is used: set HF_HUB_OFFLINE=1 if there is no network"
        logger.warning(message, error, extra=SAME_ON_EVERY_RANK)
        return found


def cached_folder(path: str | Path) -> Path:
    """The folder `path`, one made of GGUF, or the snapshot of main of the hub's model of that name in the local cache;
    nothing is downloaded. Raises CheckpointError for a name of which the cache has no complete snapshot.
    """
    folder, name = Path(path), str(path)
    try:
        of_gguf = locate_gguf(name, TOKENIZER_FILES)
    except ModelConfigError as error:
        raise CheckpointError(str(error)) from None
    if of_gguf is not None:
        return of_gguf.folder
    if folder.is_dir() or not is_hub_name(name):
        return folder
    found = _Wanted(cache_folder(), name, "main", needs_weights=True).find()
    if found is None:
        raise CheckpointError(
            f"{path}: is not a folder, and {cache_folder()} has no complete snapshot of a model of that name: give a "
            f"folder, or download it before (hf download {path})"
        )
    return found.folder


def _is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def _not_found(wanted: _Wanted, why: str) -> str:
    found = wanted.find()
    if found is not None:
        names = " and ".join(unknown_files(wanted.cache, found))
        return f"{wanted}: {found.folder} has no {names}, and the hub may have them: {why}"
    found = find_snapshot(wanted.cache, wanted.name, wanted.revision)
    folder = repository_folder(wanted.cache, wanted.name)
    if found is not None:
        lacks = f"{found.folder} lacks {missing_file(found.folder, needs_weights=wanted.needs_weights)}"
    elif folder.is_dir():
        lacks = f"{folder} has no snapshot of {wanted.revision}"
    else:
        lacks = f"there is no {folder}"
    revision = f" --revision {wanted.revision}" if wanted.revision != "main" else ""
    return (
        f"{wanted} is not a folder, and not in the local cache of the hub: {lacks}; {why}: give a folder, or download "
        f"it on a machine with a network (hf download {wanted.name}{revision}) and set HF_HOME or HF_HUB_CACHE to that "
        f"cache"
    )


def _download_once(wanted: _Wanted) -> ModelLocation:
    try:
        hub: Any = import_module("huggingface_hub")
    except ImportError as error:
        reason, way_out = package_fault("huggingface_hub", "hub", error)
        why = f"huggingface_hub, which downloads, {reason} ({way_out})"
        raise ModelConfigError(_not_found(wanted, why)) from None
    folder = repository_folder(wanted.cache / ".locks", wanted.name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelConfigError(_not_found(wanted, f"the cache cannot be written: {error}")) from None
    with _locked(folder / "spmd-worker.lock", wanted):
        found = wanted.find()
        if found is not None and not unknown_files(wanted.cache, found):
            return found
        note = folder / "spmd-worker.failed.json"
        earlier = _read_failure(note, wanted)
        if earlier is not None:
            raise ModelConfigError(earlier)
        try:
            _download(wanted, hub)
        except Exception as error:  # any error of the hub, its transfers and the disk is every rank's
            reason = " ".join(str(error).split()).removesuffix(".")
            message = _not_found(wanted, f"the download failed: {type(error).__name__}: {reason}")
            with contextlib.suppress(OSError):
                write_json(note, {"launch": _launch(), "wanted": repr(wanted), "message": message})
            raise ModelConfigError(message) from error
        note.unlink(missing_ok=True)
        found = wanted.find()
        if found is None:
            raise ModelConfigError(
                _not_found(
                    wanted, "the hub has no such file: weights must be safetensors, or a GGUF that is given as a file"
                )
            )
        return found


def _download(wanted: _Wanted, hub: Any) -> None:
    if wanted.find() is None:
        patterns = _FILES if wanted.needs_weights else _SETTINGS
        _fetch(wanted, hub, wanted.revision, patterns, ignore_patterns=list(_NOT_FETCHED))
    found = find_snapshot(wanted.cache, wanted.name, wanted.revision)
    if found is None:
        return
    # From here on by commit: the revision may have moved on.
    _fetch_unknown(wanted, hub, found)
    if missing_file(found.folder, needs_weights=wanted.needs_weights) is not None:
        _fetch_modules(wanted, hub, found)


def _fetch_unknown(wanted: _Wanted, hub: Any, found: ModelLocation) -> None:
    """Fetch the hub's pooling files; missing ones are recorded, so that the hub is asked once."""
    unknown = unknown_files(wanted.cache, found)
    if not unknown:
        return
    siblings = hub.model_info(wanted.name, revision=found.commit, timeout=_ASK_S).siblings
    if not siblings:
        return  # a hub that does not list its files
    names = [each.rfilename for each in siblings]
    if any(name in names for name in unknown):
        _fetch(wanted, hub, found.commit, [name for name in unknown if name in names])
    for name in unknown:
        if name not in names:
            note = absence_note(wanted.cache, found, name)
            with contextlib.suppress(OSError):
                note.parent.mkdir(parents=True, exist_ok=True)
                note.touch()


def _fetch_modules(wanted: _Wanted, hub: Any, found: ModelLocation) -> None:
    """Fetch the folders that `modules.json` lists: settings, and weights of layers that have some."""
    patterns = [f"{escape(name)}/config.json" for name in module_folders(found.folder)]
    if wanted.needs_weights:
        patterns += [
            f"{escape(name)}/{weights}" for name in module_folders(found.folder, "Dense") for weights in _WEIGHTS
        ]
    if patterns:
        _fetch(wanted, hub, found.commit, patterns)


def _fetch(wanted: _Wanted, hub: Any, revision: str | None, patterns: Sequence[str], **options: Any) -> None:
    logger.info("%s: downloading into %s", wanted, wanted.cache)
    hub.snapshot_download(
        wanted.name, revision=revision, cache_dir=str(wanted.cache), allow_patterns=list(patterns), **options
    )


@contextlib.contextmanager
def _locked(path: Path, wanted: _Wanted) -> Iterator[None]:
    """One process of this machine at a time. Raises ModelConfigError if another holds the lock and fetches nothing."""
    try:
        file = path.open("a")
    except OSError as error:
        raise ModelConfigError(_not_found(wanted, f"the cache cannot be locked: {error}")) from None
    with file:
        before, since = -1, time.monotonic()
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                fetched = _num_bytes(repository_folder(wanted.cache, wanted.name) / "blobs")
                if fetched != before:
                    before, since = fetched, time.monotonic()
                if time.monotonic() - since > _PATIENCE_S:
                    why = f"another process holds {path} and has fetched nothing for {_PATIENCE_S:g} s"
                    raise ModelConfigError(_not_found(wanted, why)) from None
                time.sleep(_POLL_S)
            except OSError as error:  # a file system without locks
                raise ModelConfigError(_not_found(wanted, f"the cache cannot be locked: {error}")) from None
        yield


def _num_bytes(folder: Path) -> int:
    total = 0
    for path in folder.glob("*"):
        with contextlib.suppress(OSError):
            total += path.stat().st_size
    return total


def _launch() -> list[str]:
    """Equal on the ranks of one launch on this node, and different between launches; [] for a single process."""
    variables = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
    is_alone = os.environ.get("LOCAL_WORLD_SIZE", "1") == "1"
    return [] if is_alone else [str(os.getppid()), *(os.environ.get(name, "") for name in variables)]


def _read_failure(note: Path, wanted: _Wanted) -> str | None:
    """Error of another rank of this launch that wanted the same."""
    try:
        value = parse_json_object(read_regular_file(note, 1 << 20))
    except (JsonError, OSError):
        return None
    message, launch = value.get("message"), _launch()
    is_same = value.get("launch") == launch and value.get("wanted") == repr(wanted)
    return message if launch and is_same and isinstance(message, str) else None
