"""Folders that are replaced completely or not at all: built under a temporary name, synced, renamed in one call.

A process that is killed at any time leaves the old folder or the new one under the name. What it leaves under the
temporary name is removed by the next writer, who finds it unlocked.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from spmd_worker.base.errors import SaveError
from spmd_worker.base.files import make_folder_durably, partial_path, sync_folder

_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2
_COPY_BYTES: Final = 8 * 1024 * 1024


@dataclass(slots=True)
class StagedFolder:
    """A folder at `path` that is to become `target`. `stage_folder` makes it; end it by `commit` or `abandon`."""

    path: Path
    target: Path
    _lock: int

    def commit(self) -> None:
        """Sync the folders and rename. The files must be synced. Raises OSError with the target unchanged, and
        SaveError if another process holds it, or if it is replaced, but perhaps not durably.
        """
        for folder, _, _ in os.walk(self.path):
            sync_folder(Path(folder))
        is_replaced = _has_entries(self.target)
        with contextlib.ExitStack() as stack:
            if is_replaced:
                # The temporary name is that of the old folder until this is removed: no writer may take it before.
                stack.callback(os.close, _lock_folder(self.target))
                exchange(self.path, self.target)
            else:
                # Over an empty folder, too.
                os.rename(self.path, self.target)
            try:
                sync_folder(self.target.parent)
            except OSError as error:
                raise SaveError(f"{self.target} is complete, but may be lost with a loss of power: {error}") from error
            finally:
                if is_replaced:
                    shutil.rmtree(self.path, ignore_errors=True)
                self._unlock()

    def abandon(self) -> None:
        """Remove the folder, if it was not renamed. Idempotent."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            self._unlock()

    def _unlock(self) -> None:
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)


def stage_folder(target: Path, check_replaceable: Callable[[Path], None]) -> StagedFolder:
    """An empty folder beside `target`, whose missing parents are made. `check_replaceable` raises SaveError unless a
    target that has entries may be removed.

    Raises OSError, and SaveError for a target that is no folder, cannot be replaced in one call, or is being written.
    """
    target = Path(os.path.realpath(target))
    if target.exists() and not target.is_dir():
        raise SaveError(f"{target} is not a folder: give a folder")
    has_entries = _has_entries(target)
    if has_entries:
        check_replaceable(target)
    make_folder_durably(target.parent)
    path = partial_path(target)
    lock = _locked(path)
    try:
        for entry in sorted(path.iterdir()):
            # A killed writer has left them.
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        if has_entries:
            _check_exchange(path, target)
    except BaseException:
        StagedFolder(path, target, lock).abandon()
        raise
    return StagedFolder(path, target, lock)


def exchange(one: Path, other: Path) -> None:
    """Exchange the names of two folders in one call (renameat2 of Linux). Raises OSError."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        raise OSError(errno.ENOSYS, "the C library has no renameat2", str(other))
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(other))


def copy_durably(source: Path, copy: Path) -> None:
    """Copy the contents of a file into a new one, which is on the disk when this returns. Raises OSError."""
    with open(source, "rb") as stream, new_file(copy) as descriptor:
        while block := stream.read(_COPY_BYTES):
            write_all(descriptor, memoryview(block))


def write_durably(path: Path, data: bytes) -> None:
    """Write a new file, which is on the disk when this returns. Raises OSError."""
    with new_file(path) as descriptor:
        write_all(descriptor, memoryview(data))


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[int]:
    """Descriptor of a new file, which is synced at the end of the block. Raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        yield descriptor
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: memoryview) -> None:
    """Write all bytes: one call may write less. Raises OSError."""
    while data:
        data = data[os.write(descriptor, data) :]


def _has_entries(path: Path) -> bool:
    return path.is_dir() and any(path.iterdir())


def _locked(path: Path) -> int:
    """Descriptor of the folder, which is made, with a lock that ends with this process. Raises SaveError if another
    process holds it.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(path)
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        raise SaveError(f"{path} is in the way, where the new folder is built: remove it, or give another path")
    descriptor = _lock_folder(path)
    try:
        # Another writer may have renamed or removed it since it was opened.
        is_same = os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        is_same = False
    if not is_same:
        os.close(descriptor)
        raise _is_being_written(path)
    return descriptor


def _lock_folder(path: Path) -> int:
    """Descriptor of an existing folder, locked where the file system has locks. Raises SaveError if another holds it,
    or has just removed it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise _is_being_written(path) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise _is_being_written(path) from None
    except OSError:
        # A file system without locks.
        pass
    return descriptor


def _is_being_written(path: Path) -> SaveError:
    return SaveError(f"{path} is being written by another process: wait for it, or give another path")


def _check_exchange(path: Path, target: Path) -> None:
    """Raise SaveError if this file system cannot exchange folders: found out before anything is written."""
    first, second = path / "first", path / "second"
    for each in (first, second):
        os.mkdir(each)
    try:
        exchange(first, second)
    except OSError as error:
        raise SaveError(
            f"{target} cannot be replaced in one step on this file system ({error.strerror}): give another path, or "
            f"remove it first"
        ) from None
    finally:
        for each in (first, second):
            os.rmdir(each)
