"""A pool's store in a folder of a POSIX file system, local or shared.

An object is written to a temporary file and then linked to its name: link(2) is atomic and fails if the name exists, on
NFS too. docs/internals/pools.md has what a file system must give, and mount options.
"""

import contextlib
import errno
import os
import secrets
import stat
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from spmd_worker.base.errors import ConfigError, PoolError
from spmd_worker.base.files import is_plain_name, make_folder_durably, sync_folder, sync_stream
from spmd_worker.frontends.batch.pool.records import (
    FOLDERS,
    INPUT_INDEX_NAME,
    JOB_NAME,
    OUTPUT_NAME,
    REPLACED,
    WORKERS,
    WORLDS,
)
from spmd_worker.frontends.batch.pool.store import Listed

_TEMPORARY: Final = "tmp"
"""Folder of files that are not complete. A killed writer leaves its file, which means nothing."""
_STALE_S: Final = 24 * 3600.0
"""Age from which a temporary file has no writer."""
_NO_LINKS: Final = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV)
"""Errors of link(2) on a file system without hard links between folders."""


class PosixStore:
    """Implements `PoolStore`. The folder must exist: `open_folder`. With `is_held` nothing is written into another
    folder that got its name later: PoolError, where a missing one is an OSError.
    """

    def __init__(self, folder: Path, *, is_held: bool = False) -> None:
        self.folder = folder
        # Open, so that no other folder gets its number.
        self._held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) if is_held else None
        if self._held is not None:
            weakref.finalize(self, os.close, self._held)

    def create(self, name: str, data: bytes) -> bool:
        path = self._path(name)
        with temporary_file(self.folder, data, is_durable=True) as temporary:
            self._check_folder()
            make_folder_durably(path.parent)
            # Entries before this one, whose writers may have been killed before they synced: after a power loss there
            # must be no entry without those that it was built on.
            sync_folder(path.parent)
            try:
                os.link(temporary, path)
                is_created = True
            except FileExistsError:
                is_created = False
            # Of an existing name too: an earlier try may not have come this far.
            sync_folder(path.parent)
        return is_created

    def read(self, name: str) -> bytes | None:
        path = self._path(name)
        try:
            with open(_open(path), "rb") as stream:
                return stream.read()
        except IsADirectoryError as error:
            raise IsADirectoryError(error.errno, error.strerror, str(path)) from None
        except FileNotFoundError:
            return None

    def list(self, prefix: str) -> list[Listed]:
        folder, _, beginning = prefix.rpartition("/")
        try:
            with os.scandir(self._path(folder)) as entries:
                found = [entry for entry in entries if entry.name.startswith(beginning) and _is_name(entry.name)]
        except FileNotFoundError:
            return []
        # Only times of heartbeats decide anything, and other objects never change.
        listed = _listed_now if folder == WORKERS else _listed
        objects = (listed(f"{folder}/{entry.name}", entry) for entry in sorted(found, key=lambda entry: entry.name))
        return [each for each in objects if each is not None]

    def touch(self, name: str, data: bytes) -> None:
        path = self._path(name)
        with temporary_file(self.folder, data, is_durable=False) as temporary:
            self._check_folder()
            path.parent.mkdir(parents=True, exist_ok=True)
            os.replace(temporary, path)

    def now_s(self, own: str) -> float:
        self.touch(own, b"")
        descriptor = _open(self._path(own))
        try:
            return os.fstat(descriptor).st_mtime_ns / 1e9
        finally:
            os.close(descriptor)

    def delete(self, name: str) -> None:
        self._path(name).unlink(missing_ok=True)

    def _check_folder(self) -> None:
        """Called once the temporary file exists: if the folder is replaced later, that file is not in the new one."""
        if self._held is not None and not os.path.samestat(os.fstat(self._held), os.stat(self.folder)):
            raise PoolError(f"job.pool={self.folder} was removed, and is another folder now: {REPLACED}")

    def _path(self, name: str) -> Path:
        parts = name.split("/")
        assert parts[0] != _TEMPORARY, name
        assert all(map(_is_name, parts)), name
        return self.folder.joinpath(*parts)


def _is_name(name: str) -> bool:
    """Not that of a hidden file: an NFS client keeps a removed file that is open under such a name."""
    return is_plain_name(name) and name[0] != "."


def _listed(name: str, entry: "os.DirEntry[str]") -> Listed | None:
    """An object's size and time; None for what is no object, or was removed."""
    try:
        return _from_stat(name, entry.stat(follow_symlinks=False))
    except FileNotFoundError:
        return None


def _listed_now(name: str, entry: "os.DirEntry[str]") -> Listed | None:
    """`_listed`, of an opened file: an NFS client asks the server for attributes when a file is opened, where a stat
    may answer from its cache.
    """
    try:
        descriptor = _open(entry.path)
    except OSError as error:
        # Removed, a symbolic link, a socket.
        if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENXIO):
            return None
        raise
    try:
        return _from_stat(name, os.fstat(descriptor))
    finally:
        os.close(descriptor)


def _from_stat(name: str, found: os.stat_result) -> Listed | None:
    return Listed(name, found.st_size, found.st_mtime_ns / 1e9) if stat.S_ISREG(found.st_mode) else None


@contextmanager
def temporary_file(folder: Path, data: bytes, *, is_durable: bool) -> Iterator[Path]:
    """A complete file in the store's folder, with the server's time; removed in the end. Raises OSError."""
    path = folder / _TEMPORARY / f"{os.getpid()}.{secrets.token_hex(8)}"
    path.parent.mkdir(exist_ok=True)
    try:
        with open(path, "xb") as stream:
            stream.write(data)
            stream.flush()
            # An NFS client may have set a time of its own; without a given time the server sets its.
            os.utime(stream.fileno())
            if is_durable:
                sync_stream(stream)
        yield path
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def open_folder(folder: Path) -> PosixStore:
    """The store in a folder, which is made if it is missing. Raises ConfigError for one that holds something else, that
    cannot be written, or whose file system has no hard links.
    """
    if os.path.lexists(folder) and not folder.is_dir():
        raise ConfigError(f"job.pool={folder} exists and is not a folder: give another")
    try:
        make_folder_durably(folder)
        _check_contents(folder)
        for name in FOLDERS:
            (folder / name).mkdir(exist_ok=True)
        _check_links(folder)
        # In any case: a worker that was killed may have made the folders.
        sync_folder(folder)
        _remove_stale(folder)
    except OSError as error:
        raise ConfigError(
            f"job.pool={folder} cannot be written ({error.strerror}): give a folder that every world can write"
        ) from None
    return PosixStore(folder, is_held=True)


def _check_contents(folder: Path) -> None:
    if (folder / JOB_NAME).exists():
        return
    known = {INPUT_INDEX_NAME, JOB_NAME, OUTPUT_NAME, WORLDS, _TEMPORARY, *FOLDERS}
    foreign = sorted(name for name in os.listdir(folder) if name not in known and name[0] != ".")
    if foreign:
        raise ConfigError(
            f"job.pool={folder} is not a pool: it has {foreign[0]!r} and no {JOB_NAME}: give an empty folder, or one "
            f"that does not exist"
        )


def _check_links(folder: Path) -> None:
    with temporary_file(folder, b"", is_durable=False) as temporary:
        # In another folder, as objects are; hidden, so that nobody lists it.
        probe = folder / FOLDERS[0] / f".{temporary.name}"
        try:
            os.link(temporary, probe)
            os.link(temporary, probe)
        except FileExistsError:
            return
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
        finally:
            with contextlib.suppress(OSError):
                probe.unlink()
    raise ConfigError(
        f"job.pool={folder} is on a file system without hard links between folders: give a folder on another file "
        f"system, or a name in an object store"
    )


def _remove_stale(folder: Path) -> None:
    """Remove temporary files of writers that were killed."""
    with temporary_file(folder, b"", is_durable=False) as temporary, os.scandir(temporary.parent) as entries:
        now_s = temporary.stat().st_mtime
        for entry in entries:
            # Another worker may do the same.
            with contextlib.suppress(FileNotFoundError):
                if now_s - entry.stat(follow_symlinks=False).st_mtime > _STALE_S:
                    os.unlink(entry.path)


def _open(path: Path | str) -> int:
    # O_NONBLOCK: a foreign FIFO must not block.
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
