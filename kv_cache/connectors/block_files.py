"""Files of one rank's parts of blocks, one file each, and their size limit.

    FOLDER/KEY/about.json                what the blocks of KEY depend on besides their names, for people
    FOLDER/KEY/ab/NAME.RANK.kv           header, then the part's bytes; `ab` are the first digits of NAME
    FOLDER/KEY/ab/.NAME.RANK.*.new       being written

A file gets its name when it is complete, so a killed job leaves nothing under one. Header and checksum decide whether a
file counts: one that a power failure or a disk fault has changed is deleted, and the block is computed again.
"""

import errno
import itertools
import json
import logging
import os
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Final

from kv_cache.block import BlockHash
from kv_cache.connectors.interface import ConnectorContext, ConnectorError

logger = logging.getLogger(__name__)

_MAGIC: Final = b"SPMDKV01"
_HEADER: Final = struct.Struct("<8sQ16s16s")
"""Magic, bytes after the header, name, checksum."""

_ABANDONED_S: Final = 3600.0
_KEPT_SHARE: Final = 0.9
_SCANS_PER_LIMIT: Final = 16
_SUFFIX: Final = ".kv"
_NEW: Final = ".new"


class BlockFiles:
    """The files of `context`'s identity in `folder`. Several jobs may use them at once."""

    def __init__(self, folder: Path, context: ConnectorContext) -> None:
        self._root, self._key, self._rank = folder / context.key, context.key.encode(), context.rank
        self._identity, self._numbers = context.identity, itertools.count()

    @property
    def about(self) -> Path:
        return self._root / "about.json"

    def create(self) -> None:
        """Make the folder, with its description. Raises ConnectorError if it cannot be written."""
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            if not self.about.exists():
                new = self._root / f".about.{os.getpid()}{_NEW}"
                new.write_text(json.dumps(dict(self._identity), indent=1) + "\n", encoding="utf-8")
                new.replace(self.about)
        except OSError as error:
            raise ConnectorError(f"{self._root} cannot be written ({error}): choose another folder") from None

    def path(self, name: BlockHash, rank: int | None = None) -> Path:
        """The file of a rank's part, by default of this rank's."""
        digits = name.hex()
        return self._root / digits[:2] / f"{digits}.{self._rank if rank is None else rank}{_SUFFIX}"

    def write(self, name: BlockHash, content: memoryview) -> int:
        """Write this rank's part, unless it is there; returns the bytes that were written. Raises OSError."""
        path = self.path(name)
        if path.exists():
            touch(path)
            return 0
        path.parent.mkdir(exist_ok=True)
        new = path.with_name(f".{path.name}.{os.getpid()}.{next(self._numbers)}{_NEW}")
        header = _HEADER.pack(_MAGIC, len(content), name, self._checksum(name, content))
        try:
            with open(new, "xb", buffering=0) as stream:
                for piece in (memoryview(header), content):
                    while piece:
                        piece = piece[stream.write(piece) :]
            new.replace(path)
        except BaseException:
            with suppress(OSError):
                new.unlink()
            raise
        return len(header) + len(content)

    def read(self, name: BlockHash, num_bytes: int) -> bytearray | None:
        """This rank's part, of `num_bytes`; None if it cannot be used, with a warning unless the file is gone. One that
        is damaged is deleted.
        """
        path = self.path(name)
        content = bytearray(num_bytes)
        header = bytearray(_HEADER.size)
        try:
            with open(path, "rb", buffering=0) as stream:
                is_complete = _read_into(stream.fileno(), header) and _read_into(stream.fileno(), content)
                is_complete = is_complete and not stream.read(1)
        except OSError as error:
            # A limit evicts files, of other jobs too: one that is gone is no fault.
            level = logging.INFO if isinstance(error, FileNotFoundError) else logging.WARNING
            logger.log(level, "%s cannot be read (%s): its block is computed", path, error.strerror)
            return None
        expected = _HEADER.pack(_MAGIC, num_bytes, name, self._checksum(name, content))
        if not is_complete or header != expected:
            logger.warning("%s is damaged: it is deleted, and its block is computed", path)
            with suppress(OSError):
                path.unlink()
            return None
        return content

    def _checksum(self, name: BlockHash, content: memoryview | bytearray) -> bytes:
        """Covers the file's place too: one that was copied to another does not count there."""
        digest = blake2b(self._key + name + self._rank.to_bytes(4, "little"), digest_size=16)
        digest.update(content)
        return digest.digest()


class SizeLimit:
    """Keeps the files of a folder, those of other jobs and models too, below a number of bytes: the least recently used
    are deleted first. Rank r of n keeps every n-th part, so the ranks of a job divide the work and the limit.
    """

    def __init__(self, folder: Path, limit_bytes: int, rank: int, num_ranks: int) -> None:
        self._folder, self._limit_bytes = folder, limit_bytes // num_ranks
        self._rank, self._num_ranks = rank, num_ranks
        self._num_bytes = self._num_new_bytes = 0
        self.scan()

    def add(self, num_bytes: int) -> None:
        """This job has written a file."""
        self._num_bytes += num_bytes
        self._num_new_bytes += num_bytes
        if self._num_bytes > self._limit_bytes or self._num_new_bytes > self._limit_bytes // _SCANS_PER_LIMIT:
            self.scan()

    def scan(self) -> None:
        """Count all files, delete abandoned ones, and the oldest if there are too many."""
        found = sorted(self._files())
        self._num_bytes, self._num_new_bytes = sum(num_bytes for _, _, num_bytes in found), 0
        if self._num_bytes <= self._limit_bytes:
            return
        num_deleted = 0
        for _, path, num_bytes in found:
            if self._num_bytes <= _KEPT_SHARE * self._limit_bytes:
                break
            with suppress(OSError):
                os.unlink(path)
            self._num_bytes -= num_bytes
            num_deleted += 1
        logger.info("%d of %d files of blocks in %s are evicted", num_deleted, len(found), self._folder)

    def _files(self) -> Iterator[tuple[int, str, int]]:
        """(time of last use, path, bytes) of the files that this rank keeps."""
        for folder, _, names in os.walk(self._folder):
            for name in names:
                path = os.path.join(folder, name)
                with suppress(OSError, ValueError):
                    if name.endswith(_NEW):
                        if time.time() - os.stat(path).st_mtime > _ABANDONED_S:
                            os.unlink(path)
                    elif name.endswith(_SUFFIX) and int(name.split(".")[1]) % self._num_ranks == self._rank:
                        status = os.stat(path)
                        yield status.st_mtime_ns, path, status.st_size


def touch(path: Path) -> None:
    """Record a use."""
    with suppress(OSError):
        os.utime(path)


def is_disk_full(error: OSError) -> bool:
    """Whether no more bytes fit, on the disk or in the user's share of it."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def _read_into(descriptor: int, memory: bytearray) -> bool:
    """Fill `memory`; False if the file ends before."""
    view = memoryview(memory)
    while view:
        count = os.readv(descriptor, [view])
        if not count:
            return False
        view = view[count:]
    return True
