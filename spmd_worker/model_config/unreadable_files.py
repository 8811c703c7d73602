"""Files of a folder that are there and cannot be read: one that is missing may be optional, one of these is a fault.

A file whose target was removed or not copied is a link that leads nowhere. Passed over like a missing file, it would
change answers: a model without its generation_config.json or chat template runs. A clone without Git LFS has pointers
of a few lines in place of large files (https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md).
"""

import errno
import os
import stat
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

_MISSING = (errno.ENOENT, errno.ENOTDIR)
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
"""Beginning of a pointer of Git LFS."""
_MAX_POINTER_BYTES = 1023
_LARGE_JSON = "tokenizer.json"
"""The one of JSON files that hubs store by Git LFS."""


def unreadable_file(folder: Path, patterns: Sequence[str], ignored: Sequence[str] = ()) -> str | None:
    """The first fault of `folder` or of its files with a name of these patterns, by name: the path, the reason and
    ways out, to which a caller adds its own. None if all can be read, and for what is not there or not a folder.
    """
    try:
        names = sorted(os.listdir(folder))
    except PermissionError:
        # Files of a folder that cannot be listed may be opened by name.
        names = [each for each in patterns if "*" not in each]
    except OSError as error:
        return None if error.errno in _MISSING else _fault(folder, error)
    for name in names:
        if any(fnmatchcase(name, each) for each in patterns) and not any(fnmatchcase(name, each) for each in ignored):
            fault = _fault_of_file(folder / name)
            if fault is not None:
                return fault
    return None


def _fault_of_file(path: Path) -> str | None:
    try:
        status = path.stat()
        # Others are not opened: who reads a file reads it once.
        is_large = path.suffix != ".json" or path.name == _LARGE_JSON
        is_small = stat.S_ISREG(status.st_mode) and status.st_size <= _MAX_POINTER_BYTES
        is_pointer = is_large and is_small and path.read_bytes().startswith(LFS_POINTER)
    except OSError as error:
        if error.errno == errno.ENOENT:
            # Else it was removed since it was listed.
            way_out = "copy the file again, remove the link"
            return f"{path} is a link to a file that does not exist: {way_out}" if path.is_symlink() else None
        return _fault(path, error)
    mode = status.st_mode
    # `tokenizer` may be a folder, tokenizer.json may not.
    if not (stat.S_ISREG(mode) or (stat.S_ISDIR(mode) and not path.suffix)):
        return f"{path} is not a regular file: replace it, remove it"
    if not os.access(path, os.R_OK, effective_ids=os.access in os.supports_effective_ids):
        return _fault(path, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))
    if is_pointer:
        return f"{path} is a pointer of Git LFS, not the file itself: run `git lfs pull` in the folder"
    return None


def _fault(path: Path, error: OSError) -> str:
    way_out = "let this user read it" if error.errno in (errno.EACCES, errno.EPERM) else "replace it, remove it"
    return f"{path}: {error.strerror}: {way_out}"
