"""Connector through shared memory: one engine computes prompts, another one on the same machine answers them.

    prefill   cache.connector=kv_cache.connectors.shared_memory:connect cache.connector_options={name:a,role:producer}
    decode    cache.connector=kv_cache.connectors.shared_memory:connect cache.connector_options={name:a,role:consumer}

Both engines have the same model, options and layout. Every producing rank has a segment (`segment.py`), NAME.R.N for
rank N of replica R; a consuming rank reads those of its own number. What a consumer does not find, it computes.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from kv_cache.block import BlockHash, BlockId
from kv_cache.connectors.interface import BlockMemory, ConnectorContext, ConnectorError
from kv_cache.connectors.options import check_names, gib_bytes, plain_name
from kv_cache.connectors.segment import FOLDER, Producer, Segment

logger = logging.getLogger(__name__)

_OPTIONS: Final = {
    "name": "a name that both engines give",
    "role": "producer or consumer",
    "gib": "a producer's shared memory a rank in GiB, 1 by default",
}
_ROLES: Final = ("producer", "consumer")
_PREFIX: Final = "spmd-kv-"


def connect(context: ConnectorContext) -> "SharedMemoryConnector":
    """Raises ConnectorError for invalid options."""
    name, role, limit_bytes = check_options(context.options)
    return SharedMemoryConnector(context, name, limit_bytes, saves=role == "producer")


def check_options(options: Mapping[str, str]) -> tuple[str, str, int]:
    """Name, role and limit in bytes. Raises ConnectorError for invalid options."""
    check_names(options, _OPTIONS)
    name, role = plain_name(options, "name"), plain_name(options, "role")
    if role not in _ROLES:
        raise ConnectorError(f"role={role!r} is not one of {', '.join(_ROLES)}")
    return name, role, gib_bytes(options, "1")


class SharedMemoryConnector:
    """Implements `KVConnector`."""

    def __init__(self, context: ConnectorContext, name: str, limit_bytes: int, *, saves: bool) -> None:
        self.saves = saves
        self._context, self._name, self._limit_bytes = context, name, limit_bytes

    def scheduler_half(self) -> "SegmentFinder":
        ranks = [Segments(self._name, rank, self._context) for rank in range(self._context.num_ranks)]
        if not self.saves:
            for segments in ranks:
                segments.check()
        return SegmentFinder(ranks)

    def worker_half(self, memory: BlockMemory) -> "SegmentMover":
        segments = Segments(self._name, self._context.rank, self._context)
        if not self.saves:
            return SegmentMover(segments, memory, None)
        path = FOLDER / f"{_PREFIX}{self._name}.{self._context.replica}.{self._context.rank}"
        return SegmentMover(segments, memory, Producer(path, self._context, memory.block_bytes, self._limit_bytes))


class Segments:
    """The segments of one rank number, of all replicas of the producer, as they come and go."""

    def __init__(self, name: str, rank: int, context: ConnectorContext) -> None:
        self._pattern = re.compile(rf"{re.escape(_PREFIX + name)}\.\d+\.{rank}")
        self._name, self._rank, self._context = name, rank, context
        self._open: dict[Path, Segment] = {}
        self._has_warned = False

    def check(self) -> None:
        """Raise ConnectorError, if there is no segment or one has other blocks."""
        if not self._paths():
            raise ConnectorError(
                f"there is no segment {FOLDER}/{_PREFIX}{self._name}.*.{self._rank}: start the engine with "
                f"role=producer, name={self._name} and the same layout on this machine first"
            )
        for path in self._paths():
            self._open[path] = Segment(path, self._context)

    def refresh(self) -> list[Segment]:
        """The segments that there are now. One that cannot be used is left out, with a warning."""
        paths = self._paths()
        for path in list(self._open):
            if paths.get(path) != self._open[path].inode:
                self._open.pop(path).close()
        for path in paths:
            if path not in self._open:
                try:
                    self._open[path] = Segment(path, self._context)
                except (OSError, ValueError) as error:
                    if not self._has_warned:
                        self._has_warned = True
                        logger.warning("shared memory is not used: %s", error)
        return list(self._open.values())

    def close(self) -> None:
        for segment in self._open.values():
            segment.close()
        self._open.clear()

    def _paths(self) -> dict[Path, int]:
        """Path -> inode."""
        found: dict[Path, int] = {}
        for path in sorted(FOLDER.glob(f"{_PREFIX}*")):
            if self._pattern.fullmatch(path.name):
                try:
                    found[path] = path.stat().st_ino
                except FileNotFoundError:
                    continue
        return found


class SegmentFinder:
    """Implements `SchedulerHalf`."""

    def __init__(self, ranks: Sequence[Segments]) -> None:
        self._ranks = ranks

    def find(self, hashes: Sequence[BlockHash]) -> int:
        ranks = [each.refresh() for each in self._ranks]
        for index, name in enumerate(hashes):
            if not all(any(segment.has(name) for segment in segments) for segments in ranks):
                return index
        return len(hashes)

    def close(self) -> None:
        for segments in self._ranks:
            segments.close()


class SegmentMover:
    """Implements `WorkerHalf`: a transfer is finished when its calls return."""

    def __init__(self, segments: Segments, memory: BlockMemory, producer: Producer | None) -> None:
        self._segments, self._memory, self._producer = segments, memory, producer
        self._finished: list[int] = []
        self._has_failed = False

    def load(self, number: int, blocks: Sequence[tuple[BlockHash, BlockId]]) -> None:
        segments = self._segments.refresh() if blocks else []
        contents: list[bytearray] = []
        for name, _ in blocks:
            content = next(filter(None, (segment.read(name) for segment in segments)), None)
            if content is None:
                # The oldest are replaced: no fault.
                logger.info(
                    "block %s has left shared memory since it was found: what was to be loaded is computed", name.hex()
                )
                self._has_failed = True
                return
            contents.append(content)
        self._memory.write([block_id for _, block_id in blocks], contents)

    def save(self, number: int, blocks: Sequence[tuple[BlockId, BlockHash]]) -> None:
        if self._producer is not None:
            contents = self._memory.read([block_id for block_id, _ in blocks])
            for (_, name), content in zip(blocks, contents, strict=True):
                self._producer.write(name, content)
        self._finished.append(-number if self._has_failed else number)
        self._has_failed = False

    def finished(self) -> tuple[int, ...]:
        finished, self._finished = tuple(self._finished), []
        return finished

    def close(self) -> None:
        self._segments.close()
        if self._producer is not None:
            self._producer.close()
