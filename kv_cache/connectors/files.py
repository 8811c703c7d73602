"""Connector to files: prefix blocks that outlive the job, shared by all jobs with the same model and layout.

    cache.connector=kv_cache.connectors.files:connect cache.connector_options={folder:/data/kv,gib:20}

Every rank writes its parts (`block_files.py`); a block is found when rank 0 sees the parts of all ranks, so all ranks
need the same folder. A part that a rank then cannot read makes all ranks compute the blocks of that step's transfer.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from kv_cache.block import BlockHash, BlockId
from kv_cache.connectors.block_files import BlockFiles, SizeLimit, is_disk_full, touch
from kv_cache.connectors.interface import BlockMemory, ConnectorContext, ConnectorError
from kv_cache.connectors.options import check_names, gib_bytes, given_text

logger = logging.getLogger(__name__)

_OPTIONS: Final = {
    "folder": "where the files are, the same for all ranks",
    "gib": "limit of the folder's size in GiB, 10 by default",
}


def connect(context: ConnectorContext) -> "FileConnector":
    """Raises ConnectorError for invalid options."""
    folder, limit_bytes = check_options(context.options)
    return FileConnector(context, folder, limit_bytes)


def check_options(options: Mapping[str, str]) -> tuple[Path, int]:
    """Folder and its limit in bytes. Raises ConnectorError for invalid options, and a folder that cannot be made; one
    that exists may be read-only, to be loaded from. OSError if it cannot be looked at.
    """
    check_names(options, _OPTIONS)
    folder, limit_bytes = Path(given_text(options, "folder")).expanduser().absolute(), gib_bytes(options, "10")
    nearest = next(each for each in (folder, *folder.parents) if each.exists())
    if not (nearest.is_dir() and (nearest == folder or os.access(nearest, os.W_OK | os.X_OK))):
        raise ConnectorError(
            f"folder={folder} cannot be written ({nearest} is no folder that you may write to): choose another folder"
        )
    return folder, limit_bytes


class FileConnector:
    """Implements `KVConnector`."""

    saves = True

    def __init__(self, context: ConnectorContext, folder: Path, limit_bytes: int) -> None:
        self._context, self._folder, self._limit_bytes = context, folder, limit_bytes
        self._files = BlockFiles(folder, context)

    def scheduler_half(self) -> "FileFinder":
        self._files.create()
        return FileFinder(self._files, self._context.num_ranks)

    def worker_half(self, memory: BlockMemory) -> "FileMover":
        if not self._files.about.exists():
            raise ConnectorError(
                f"rank {self._context.rank} does not see {self._files.about}, which rank 0 has made: choose a folder "
                f"that all ranks share"
            )
        context = self._context
        return FileMover(
            self._files, SizeLimit(self._folder, self._limit_bytes, context.rank, context.num_ranks), memory
        )


class FileFinder:
    """Implements `SchedulerHalf`."""

    def __init__(self, files: BlockFiles, num_ranks: int) -> None:
        self._files, self._ranks = files, range(num_ranks)

    def find(self, hashes: Sequence[BlockHash]) -> int:
        for index, name in enumerate(hashes):
            if not all(os.path.exists(self._files.path(name, rank)) for rank in self._ranks):
                return index
        return len(hashes)

    def close(self) -> None:
        """Nothing is open."""


class FileMover:
    """Implements `WorkerHalf`: a transfer is finished when its calls return."""

    def __init__(self, files: BlockFiles, limit: SizeLimit, memory: BlockMemory) -> None:
        self._files, self._limit, self._memory = files, limit, memory
        self._finished: list[int] = []
        self._has_failed = self._has_loads = self._is_full = self._has_warned = False

    def load(self, number: int, blocks: Sequence[tuple[BlockHash, BlockId]]) -> None:
        self._has_loads = bool(blocks)
        contents: list[bytearray] = []
        for name, _ in blocks:
            content = self._files.read(name, self._memory.block_bytes)
            if content is None:
                self._has_failed = True
                return
            contents.append(content)
        self._memory.write([block_id for _, block_id in blocks], contents)
        # The beginning of a prefix is used last, so it stays longest.
        for name, _ in reversed(blocks):
            touch(self._files.path(name))

    def save(self, number: int, blocks: Sequence[tuple[BlockId, BlockHash]]) -> None:
        contents = self._memory.read([block_id for block_id, _ in blocks])
        for (_, name), content in reversed(list(zip(blocks, contents, strict=True))):
            is_saved = False
            if not self._is_full:
                try:
                    self._limit.add(self._files.write(name, content))
                    is_saved = True
                except OSError as error:
                    self._warn(name, error)
            # With loads, which would be computed again, it is better to have a block looked for in vain later.
            self._has_failed |= not (is_saved or self._has_loads)
        self._finished.append(-number if self._has_failed else number)
        self._has_failed = False

    def finished(self) -> tuple[int, ...]:
        finished, self._finished = tuple(self._finished), []
        return finished

    def close(self) -> None:
        """Nothing is open."""

    def _warn(self, name: BlockHash, error: OSError) -> None:
        self._is_full = is_disk_full(error)
        if self._is_full or not self._has_warned:
            self._has_warned = True
            end = "no more blocks are saved by this job" if self._is_full else "this is said once"
            logger.warning("%s cannot be written (%s): %s", self._files.path(name), error.strerror, end)
