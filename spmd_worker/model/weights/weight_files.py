"""Files that a checkpoint is read from: `model.safetensors`, those that the index names, or GGUF. Others count for
nothing.

Needs no torch, so that a job is identified before it is imported.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from spmd_worker.base.errors import CheckpointError
from spmd_worker.base.files import JsonError, is_plain_name, parse_json_object, read_regular_file
from spmd_worker.model.weights.safetensors_header import MAX_HEADER_BYTES
from spmd_worker.model_config.gguf.files import linked_files
from spmd_worker.model_config.gguf.header import is_gguf
from spmd_worker.model_config.tensor_names import INDEX_FILE, SINGLE_FILE, STATE_FILE

_PICKLE_SUFFIXES: Final = (".bin", ".pt", ".pth")


def all_weight_files(folder: Path, inside: Sequence[str] = ()) -> list[Path]:
    """Files of `folder` and of the folders `inside` it. Raises CheckpointError."""
    if linked := linked_files(folder):
        return linked
    folders = [folder / each for each in ("", *inside)]
    return [path for each in folders for path in weight_files(each, read_weight_map(each))]


def read_weight_map(folder: Path) -> Mapping[str, str] | None:
    """Name of the file of each tensor by the index; None if `model.safetensors` is read, as in transformers, which
    reads no index beside it. Raises CheckpointError for neither, or an invalid index.
    """
    if (folder / SINGLE_FILE).is_file():
        return None
    if not (folder / INDEX_FILE).is_file():
        raise CheckpointError(_nothing_found(folder))
    return _read_index(folder / INDEX_FILE)


def weight_files(folder: Path, weight_map: Mapping[str, str] | None) -> list[Path]:
    """Files of a folder with this `read_weight_map`. Raises CheckpointError for a missing one."""
    if weight_map is None:
        return [folder / SINGLE_FILE]
    paths = [folder / name for name in sorted(dict.fromkeys(weight_map.values()))]
    for path in paths:
        if not path.is_file():
            raise CheckpointError(f"{folder / INDEX_FILE}: names {path.name}, which is not there: download it again")
    return paths


def check_local_files(folder: Path) -> None:
    """Raise CheckpointError for a folder with some of the files that its index names, and not all. One without any is
    planned for: `plan=true` needs config.json alone.
    """
    if not (folder / SINGLE_FILE).is_file() and (folder / INDEX_FILE).is_file():
        weight_map = _read_index(folder / INDEX_FILE)
        if any((folder / each).is_file() for each in set(weight_map.values())):
            weight_files(folder, weight_map)


def _read_index(path: Path) -> Mapping[str, str]:
    try:
        text = read_regular_file(path, MAX_HEADER_BYTES)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    try:
        weight_map = parse_json_object(text).get("weight_map")
    except JsonError as error:
        raise CheckpointError(f"{path}: the index {error}") from None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: weight_map must be an object that maps tensor names to file names")
    for name, file_name in weight_map.items():
        # A plain name is of a file directly in the folder, which may be a symlink, as in the HF cache.
        is_plain = isinstance(file_name, str) and is_plain_name(file_name) and not file_name.startswith(".")
        if not is_plain or not file_name.endswith(".safetensors"):
            raise CheckpointError(
                f"{path}: tensor {name!r}: {file_name!r} must be the plain name of a .safetensors file next to it"
            )
    return weight_map


def _nothing_found(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder}: is not a folder: a checkpoint is a folder with {SINGLE_FILE} or {INDEX_FILE}"
    if (folder / STATE_FILE).is_file():
        return (
            f"{folder}: holds a sharded state, not a checkpoint of the hub's names (save_checkpoint): set "
            f"model.load_format=sharded_state to start with it"
        )
    pickles = sorted(entry.name for entry in folder.iterdir() if entry.suffix in _PICKLE_SUFFIXES)
    if pickles:
        return (
            f"{folder}: has weights only in {', '.join(pickles[:3])}: pickles are rejected because reading one can run "
            "code: convert them to safetensors (save_pretrained of a recent transformers does), or take those of a "
            "pull request on the hub (model.revision=refs/pr/N), which many models have"
        )
    if any(map(is_gguf, folder.iterdir())):
        return f"{folder}: has weights only as GGUF, which is read as a model: give model.path its file"
    found = sorted(entry.name for entry in folder.iterdir() if entry.suffix == ".safetensors")
    others = f"; it has {', '.join(found[:3])} without an index" if found else ""
    return f"{folder}: has neither {SINGLE_FILE} nor {INDEX_FILE}{others}"
