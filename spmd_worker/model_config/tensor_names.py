"""Tensor names in a model folder, for settings that config.json leaves to them. Reads no data.

Faults of a file are reported when it is loaded.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from spmd_worker.base import files

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
"""Weight files of a model folder: a single file, or several with this index."""
STATE_FILE: Final = "sharded_state.json"
"""Describes the files of a sharded state, which has neither."""
_LENGTH_BYTES: Final = 8
_MAX_HEADER_BYTES: Final = 100_000_000


def tensor_names(model_folder: Path) -> tuple[str, ...]:
    """Names in `model.safetensors`, or without it those in the index, in their order. Empty if there is neither or it
    is unreadable.
    """
    single, index = model_folder / SINGLE_FILE, model_folder / INDEX_FILE
    try:
        if single.is_file():
            return tuple(name for name in _header(single) if name != "__metadata__")
        if index.is_file():
            names = files.parse_json_object(files.read_regular_file(index)).get("weight_map")
            return tuple(names) if isinstance(names, Mapping) else ()
    except (OSError, ValueError, RecursionError):
        pass
    return ()


def tensor_shapes(model_folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors in `model.safetensors`, or without it in the files of the index, by name. Empty if one of
    the files is unreadable.
    """
    single, index = model_folder / SINGLE_FILE, model_folder / INDEX_FILE
    try:
        names = [SINGLE_FILE]
        if not single.is_file():
            weight_map = files.parse_json_object(files.read_regular_file(index)).get("weight_map")
            names = sorted(set(weight_map.values())) if isinstance(weight_map, dict) else []
        paths = [model_folder / name for name in names if files.is_plain_name(name)]
        # A FIFO would block its reader.
        entries = [entry for path in paths if path.is_file() for entry in _header(path).items()]
        return {name: tuple(entry["shape"]) for name, entry in entries if name != "__metadata__"}
    except (OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError):
        return {}


def state_names(model_folder: Path) -> tuple[str, ...]:
    """Names of parameters in the files of a sharded state; empty for other folders."""
    if not (model_folder / STATE_FILE).is_file():
        return ()
    try:
        headers = [_header(each) for each in sorted(model_folder.glob("*.safetensors"))]
    except (OSError, ValueError, RecursionError):
        return ()
    return tuple([name for header in headers for name in header])


def _header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        return files.parse_json_object(file.read(length)) if length <= _MAX_HEADER_BYTES else {}
