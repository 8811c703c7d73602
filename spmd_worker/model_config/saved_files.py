"""Files of a model folder that a saved model needs beside its weights: configuration, tokenizer, modules for pooling.

`config.json` stays as it is unless the saved weights have another dtype, or are no longer quantised.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from spmd_worker.base.errors import SaveError
from spmd_worker.base.files import parse_json_object, read_regular_file
from spmd_worker.base.staged_folder import copy_durably, write_durably
from spmd_worker.model_config.hub import PROCESSOR_FILES, TOKENIZER_FILES
from spmd_worker.model_config.model_config import model_config_of
from spmd_worker.model_config.quantization import QUANTIZATION_KEYS
from spmd_worker.model_config.sentence_folder import module_folders, pooling_files
from spmd_worker.model_config.tensor_names import INDEX_FILE, STATE_FILE

CONFIG_FILE: Final = "config.json"
_OF_SETTINGS: Final = ("generation_config.json", *PROCESSOR_FILES, *TOKENIZER_FILES)
_OF_WEIGHTS: Final = ("*.safetensors", "*.safetensors.index.json", STATE_FILE)
_DTYPE_KEYS: Final = ("dtype", "torch_dtype")
_TIE: Final = "tie_word_embeddings"


def copy_model_files(source: Path, copy: Path, dtype: str, *, is_tied: bool) -> None:
    """Copy all but the weights into the folder `copy`, for weights of `dtype`; files are on the disk when this returns.
    `is_tied`: the head is the embedding. Raises OSError, and SaveError for an unreadable configuration.
    """
    names = sorted(dict.fromkeys(_names(source)))
    for folder in sorted(dict.fromkeys(str(Path(name).parent) for name in names)):
        (copy / folder).mkdir(parents=True, exist_ok=True)
    for name in names:
        copy_durably(source / name, copy / name)
    text = _saved_config(read_regular_file(source / CONFIG_FILE), dtype)
    # The names in the files, which a sharded state lacks, may say whether the head is tied.
    config = _parsed(text)
    if model_config_of(_parsed(text), source / CONFIG_FILE).has_tied_embeddings != is_tied:
        for each in _configs(config):
            each[_TIE] = is_tied
        text = _encoded(config)
    write_durably(copy / CONFIG_FILE, text)


def check_own_files(folder: Path, weights: Iterable[str]) -> None:
    """Raise SaveError for a file that is none of a saved model's, which has `weights` in the folder itself."""
    own = {*_names(folder), *weights, CONFIG_FILE, INDEX_FILE, STATE_FILE}
    for path in sorted(folder.rglob("*")):
        if (path.is_symlink() or not path.is_dir()) and str(path.relative_to(folder)) not in own:
            raise SaveError(f"{path} would be removed: give another folder, or move the file first")


def _names(folder: Path) -> Iterable[str]:
    """Names below the folder."""
    paths = [path for pattern in _OF_SETTINGS for path in folder.glob(pattern)]
    paths += pooling_files(folder)
    for name in module_folders(folder):
        # Weights of dense layers have files of their own.
        paths += [path for pattern in _OF_WEIGHTS for path in (folder / name).glob(pattern) if name]
    return [str(path.relative_to(folder)) for path in paths if path.is_file() and path.suffix != ".py"]


def _saved_config(text: bytes, dtype: str) -> bytes:
    config = _parsed(text)
    configs, is_changed = _configs(config), False
    for each in configs:
        for key in QUANTIZATION_KEYS:
            is_changed |= each.pop(key, None) is not None
        for key in _DTYPE_KEYS:
            if each.get(key) not in (None, dtype):
                each[key], is_changed = dtype, True
    has_dtype = any(each.get(key) is not None for each in configs for key in _DTYPE_KEYS)
    if not has_dtype and dtype != "float32":
        config[_DTYPE_KEYS[0]], is_changed = dtype, True
    return _encoded(config) if is_changed else text


def _configs(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The configuration, and those of its parts with text."""
    found = [config]
    for key in ("thinker_config", "text_config"):
        part = found[-1].get(key)
        found += [part] if isinstance(part, dict) else []
    return found


def _parsed(text: bytes) -> dict[str, Any]:
    return parse_json_object(text, allows_nan=True)


def _encoded(config: dict[str, Any]) -> bytes:
    return (json.dumps(config, indent=2) + "\n").encode()
