"""Arguments of calls that save a model: where to, which file names, how large. Checked before any rank writes."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from spmd_worker.base.config.plain_values import shown
from spmd_worker.base.urls import without_credentials

DEFAULT_SIZE: Final = "5GB"
"""Maximum size of a checkpoint's files, transformers' own."""
_URL: Final = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://")
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]I?)?B", re.IGNORECASE)
_ENCRYPTED: Final = ("encryption_keyfile", "encryption")
_OF_STORES: Final = ("s3_access_key_id", "s3_secret_access_key", "s3_endpoint")


def saved_folder(path: object, key: str = "path") -> Path:
    """The folder to save to. Raises TypeError for anything but a path, ValueError for a URL or no path."""
    if not isinstance(path, str | Path):
        raise TypeError(f"{key} is a {type(path).__name__}: give a folder")
    text = str(path)
    if _URL.match(text):
        raise ValueError(
            f"{key}={without_credentials(text)} is a URL, and files are written to file systems alone: save to a local "
            f"folder and upload that, or mount the store"
        )
    if text in ("", "."):
        raise ValueError(f"{key}={text!r} must be a folder to make")
    try:
        folder = Path(text).expanduser()
        is_name = b"\0" not in os.fsencode(folder)
    except (RuntimeError, UnicodeEncodeError):
        # A user who is not known, or lone surrogates.
        is_name = False
    if not is_name:
        raise ValueError(f"{key}={text!r} cannot be the name of a folder: give another")
    return folder


def size_in_bytes(max_size: object) -> int | None:
    """Maximum bytes of a file: a number, or text such as "5GB" (10^9) and "512MiB" (2^20); None: no limit. Raises
    TypeError or ValueError.
    """
    if max_size is None:
        return None
    if isinstance(max_size, bool) or not isinstance(max_size, int | str):
        raise TypeError(f'max_size is a {type(max_size).__name__}: give bytes, text such as "5GB", or leave it out')
    if isinstance(max_size, str):
        found = _SIZE.fullmatch(max_size.strip())
        if found is None:
            raise ValueError(f'max_size={max_size!r} must be bytes, or text such as "5GB" or "512MiB"')
        unit = (found[2] or "").upper()
        base = 1024 if unit.endswith("I") else 1000
        number = float(found[1]) * base ** ("KMGT".index(unit[0]) + 1 if unit else 0)
        if not number < 2**63:
            raise ValueError(f"max_size={max_size[:40]!r} is above {2**63 - 1} bytes: leave it out for no limit")
        max_size = int(number)
    if max_size < 1:
        raise ValueError(f"max_size={max_size} must be at least 1 byte: leave it out for files without a limit")
    return max_size


def tensorizer_folder(tensorizer_config: object) -> Path:
    """The folder of a `TensorizerConfig`, a dict of its fields or their JSON: `tensorizer_dir`, or that of the file
    `tensorizer_uri`. Raises TypeError or ValueError, also for encryption and object stores.
    """
    config = json.loads(tensorizer_config) if isinstance(tensorizer_config, str) else tensorizer_config
    fields: Mapping[str, Any] = config if isinstance(config, Mapping) else getattr(config, "__dict__", {})
    for key in _ENCRYPTED:
        if fields.get(key):
            raise ValueError(f"{key} is set, and nothing is encrypted here: leave it out, and encrypt the saved folder")
    folder, uri = fields.get("tensorizer_dir"), fields.get("tensorizer_uri")
    if not folder and not uri:
        # Values may be keys of a store.
        given = shown(sorted(fields)) if fields else shown(config)
        raise ValueError(f"tensorizer_config with {given} needs tensorizer_dir, or tensorizer_uri, a file in it")
    path = saved_folder(folder or uri, "tensorizer_dir" if folder else "tensorizer_uri")
    for key in _OF_STORES:
        if fields.get(key):
            raise ValueError(f"{key} is set, and files are written to file systems alone: leave it out")
    return path if folder or not path.suffix else path.parent
