"""A model folder for a GGUF model, which everything that reads folders takes: made once, in the cache of the hub.

    CACHE/gguf--NAME--DIGEST/VERSION    config.json, generation_config.json, the tokenizer's files, links to the GGUF

VERSION is a digest of the files' sizes, times and numbers, so that a file that changes gets another folder. One rank of
a node makes it; the others wait for the kernel's lock, and find it.
"""

import json
import logging
import os
import shutil
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from spmd_worker.base.errors import ModelConfigError
from spmd_worker.base.files import describe_os_error
from spmd_worker.base.metrics.log import SAME_ON_EVERY_RANK
from spmd_worker.model_config.gguf.files import gguf_files, link_name
from spmd_worker.model_config.gguf.model import GgufModel, read_gguf_model
from spmd_worker.model_config.gguf.settings import config_of, generation_config_of
from spmd_worker.model_config.gguf.tokenizer_json import tokenizer_files, tokenizer_settings
from spmd_worker.model_config.hub_cache import ModelLocation, cache_folder
from spmd_worker.model_config.locked_folder import locked, short_digest

logger = logging.getLogger(__name__)

_FORMAT: Final = 4
"""Counts changes of what is made of a file."""
_TOKENIZER_FILE: Final = "tokenizer.json"
_TOKENIZER_SETTINGS: Final = "tokenizer_config.json"


def locate_gguf(path: str, tokenizer_patterns: Sequence[str]) -> ModelLocation | None:
    """The folder made of the GGUF model that `path` names; None if it names none. A folder's own tokenizer.json, with
    the files of these patterns beside it, takes the place of the one of the metadata. Raises ModelConfigError.
    """
    given = Path(path)
    files = [each.absolute() for each in gguf_files(given)]
    if not files:
        return None
    beside = _tokenizer_beside(given, tokenizer_patterns)
    try:
        states = [[each.name, *_state(each)] for each in (*files, *beside)]
    except OSError as error:
        raise ModelConfigError(f"model.path={path} cannot be read: {describe_os_error(error)}") from None
    base = cache_folder() / f"gguf--{files[0].stem[:80]}--{short_digest([str(each) for each in files])}"
    folder = base / short_digest([_FORMAT, states])
    try:
        if not folder.is_dir():
            base.mkdir(parents=True, exist_ok=True)
            with locked(base / "lock"):
                if not folder.is_dir():
                    logger.info("%s: makes a model folder of it, %s", path, folder, extra=SAME_ON_EVERY_RANK)
                    _make(folder, files, beside)
    except OSError as error:
        raise ModelConfigError(
            f"model.path={path}: its model folder cannot be made in the cache of the hub: {describe_os_error(error)}: "
            f"set HF_HUB_CACHE to a folder that can be written"
        ) from None
    return ModelLocation(str(folder), given.name if given.is_dir() else given.stem)


def _state(path: Path) -> tuple[int, ...]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns, found.st_dev, found.st_ino


def _tokenizer_beside(folder: Path, patterns: Sequence[str]) -> list[Path]:
    """Files of the tokenizer in a folder that has a tokenizer.json; [] for a file."""
    if not (folder / _TOKENIZER_FILE).is_file():
        return []
    found = sorted(each for each in folder.iterdir() if any(fnmatchcase(each.name, pattern) for pattern in patterns))
    return [each for each in found if each.is_file()]


def _make(folder: Path, files: Sequence[Path], beside: Sequence[Path]) -> None:
    """Make the folder of these files. Raises ModelConfigError and OSError."""
    model = read_gguf_model(files)
    _check_parts(model)
    contents = {each.name: each.read_bytes() for each in beside} or tokenizer_files(model)
    if _TOKENIZER_SETTINGS not in contents:
        contents = tokenizer_settings(model) | contents
    contents |= {"config.json": _encoded(config_of(model))}
    contents |= {"generation_config.json": _encoded(generation_config_of(model))}
    # Locks may not reach beyond a node.
    partial = folder.with_name(f"{folder.name}.{os.uname().nodename}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    for name, content in contents.items():
        (partial / name).parent.mkdir(exist_ok=True)
        (partial / name).write_bytes(content)
    for number, each in enumerate(files):
        (partial / link_name(number, len(files))).symlink_to(each)
    try:
        os.rename(partial, folder)
    except OSError:
        # Another node may have made it.
        if not folder.is_dir():
            raise
        shutil.rmtree(partial)


def _check_parts(model: GgufModel) -> None:
    """Raise ModelConfigError unless the files are the parts of one model, all of them and in their order."""
    count = len(model.headers)
    for number, header in enumerate(model.headers):
        found = header.metadata.get("split.no", 0), header.metadata.get("split.count", 1)
        if found not in ((number, count), (0, 0) if count == 1 else None):
            raise ModelConfigError(
                f"{header.path}: is part {found[0]!r} of {found[1]!r} by split.no and split.count, and part {number} "
                f"of {count} by its name: download all parts, and keep their names"
            )


def _encoded(values: dict[str, object]) -> bytes:
    return (json.dumps(values, indent=2) + "\n").encode()
