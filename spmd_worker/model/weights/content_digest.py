"""Digest of the contents of a checkpoint's files, kept in the user's cache folder: only the first run reads the files.

    $XDG_CACHE_HOME/spmd-worker/weights/<digest of the path>.json    {"status": [...], "digest": ...}

A kept digest counts while device, inode, size, and times of change of the file are the same. The last of these is the
file system's own, which no program sets.
"""

import json
import logging
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Final

from spmd_worker.model_config.gguf.files import linked_files

logger = logging.getLogger(__name__)

_NUM_READERS: Final = 4
_PIECE_BYTES: Final = 2**22
_SETTLED_NS: Final = 2 * 10**9
"""Age at which a file cannot be changed any more without a new time of change."""


def content_digest(folder: Path, inside: Sequence[str] = ()) -> str:
    """Hexadecimal digest of names and bytes of the safetensors files of `folder` and those `inside` it, or of the GGUF
    that it was made of. Raises OSError for files that cannot be read.
    """
    paths = [path for each in ("", *inside) for path in sorted((folder / each).glob("*.safetensors"))]
    paths += linked_files(folder)
    with ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="spmd-digest") as readers:
        digests = list(readers.map(_file_digest, paths))
    names = [str(path.relative_to(folder)) for path in paths]
    return blake2b(json.dumps([names, digests]).encode(), digest_size=16).hexdigest()


def _file_digest(path: Path) -> str:
    record = _record_path(path)
    status = list(file_status(path))
    if record is not None:
        with suppress(OSError, ValueError, TypeError, KeyError):
            kept = json.loads(record.read_text(encoding="utf-8"))
            if kept["status"] == status and isinstance(kept["digest"], str):
                return kept["digest"]
    started = time.perf_counter()
    digest = blake2b(digest_size=16)
    with open(path, "rb", buffering=0) as stream:
        while piece := stream.read(_PIECE_BYTES):
            digest.update(piece)
    logger.info("digest of %s: %d bytes in %.2f s", path, status[2], time.perf_counter() - started)
    if record is not None and is_settled(status) and list(file_status(path)) == status:
        _write(record, {"status": status, "digest": digest.hexdigest()})
    return digest.hexdigest()


def file_status(path: Path) -> tuple[int, ...]:
    """Device, inode, size and times of change of a file, in nanoseconds. Raises OSError."""
    found = path.stat()
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def is_settled(status: Sequence[int]) -> bool:
    """True if a file of this `file_status` is so old that another change would give it another one."""
    return time.time_ns() - max(status[3:]) > _SETTLED_NS


def _record_path(path: Path) -> Path | None:
    """None for a user without a home folder."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # By the XDG specification a relative path is ignored.
    root = base if os.path.isabs(base) else os.path.expanduser("~/.cache")
    name = blake2b(os.fsencode(path.resolve()), digest_size=16).hexdigest()
    return Path(root, "spmd-worker", "weights", f"{name}.json") if os.path.isabs(root) else None


def _write(record: Path, value: dict[str, object]) -> None:
    """Replace the record at once; without it the next run reads the file again."""
    new = record.with_name(f"{record.name}.{os.getpid()}")
    try:
        record.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(json.dumps(value), encoding="utf-8")
        new.replace(record)
    except OSError as error:
        logger.debug("%s is not kept: %s", record, error)
