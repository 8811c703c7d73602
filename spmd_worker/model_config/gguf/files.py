"""Files of a GGUF model: one, or the parts of a split one, `NAME-00001-of-0000N.gguf`."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from spmd_worker.base.errors import ModelConfigError
from spmd_worker.model_config.gguf.header import SUFFIX, is_gguf
from spmd_worker.model_config.tensor_names import STATE_FILE

_PART: Final = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})(?i:(\.gguf))")
_NO_MODEL: Final = ("mmproj", "imatrix")
"""Parts of names of files beside a model: towers for images, and statistics of quantisation."""
_ON_HUB: Final = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?::[\w.-]+|/[\w./-]+(?i:\.gguf))")
"""vLLM's names of one quantisation on the hub, `ORG/NAME:TYPE` and `ORG/NAME/FILE.gguf`."""
_LINK: Final = "linked"
_SHOWN: Final = 20


def gguf_files(path: Path) -> list[Path]:
    """Files of the GGUF model that `path` names: a file, all parts of it, or a folder's only model. [] for a folder
    with safetensors, which take precedence, for one that `folder.py` has made, and for another path. Raises
    ModelConfigError for a missing part, a folder with several models, and a missing file that may be on the hub.
    """
    if (on_hub := _ON_HUB.fullmatch(str(path))) is not None and not path.exists():
        raise ModelConfigError(
            f"model.path={path} is no file or folder, and GGUF is not downloaded from the hub: download one file "
            f"(hf download {on_hub[1]} FILE.gguf --local-dir models), and give model.path that"
        )
    if is_gguf(path) and not path.is_dir():
        return _parts(path)
    if not path.is_dir() or linked_files(path):
        return []
    found = sorted(each for each in path.iterdir() if is_gguf(each))
    found = [each for each in found if not any(word in each.name.lower() for word in _NO_MODEL)]
    if not found or (path / STATE_FILE).exists() or any(path.glob("*.safetensors")):
        return []
    models = {_name(each): each for each in reversed(found)}
    if len(models) > 1:
        names = sorted(each.name for each in models.values())
        more = f" and {len(names) - _SHOWN} others" if len(names) > _SHOWN else ""
        raise ModelConfigError(
            f"model.path={path} has {len(models)} GGUF models, {', '.join(names[:_SHOWN])}{more}: give model.path the "
            f"file of one"
        )
    return _parts(found[0])


def linked_files(folder: Path) -> list[Path]:
    """Weight files of a folder that `folder.py` has made; [] for others."""
    return sorted(folder.glob(f"{_LINK}-*-of-*{SUFFIX}"))


def target(file: Path) -> Path:
    """The file that a link of `linked_files` names; a copy in its place itself."""
    return file.parent / file.readlink() if file.is_symlink() else file


def link_name(number: int, count: int) -> str:
    """Name of the link to part `number`, counted from 0, of `count`."""
    return f"{_LINK}-{number + 1:05d}-of-{count:05d}{SUFFIX}"


def _name(path: Path) -> str:
    part = _PART.fullmatch(path.name)
    return path.name if part is None else f"{part[1]}{part[3]}"


def _parts(path: Path) -> list[Path]:
    part = _PART.fullmatch(path.name)
    if part is None:
        return [path]
    name, count, end = part[1], int(part[3]), f"-of-{part[3]}{part[4]}"
    paths: Sequence[Path] = [path.with_name(f"{name}-{number:05d}{end}") for number in range(1, count + 1)]
    if not paths:
        raise ModelConfigError(f"{path} is a part of 0 by its name: give it the name that it was downloaded by")
    missing = next((each for each in paths if not each.exists()), None)
    if missing is not None:
        raise ModelConfigError(f"{path} is a part of {count}, and {missing} does not exist: download all parts")
    return list(paths)
