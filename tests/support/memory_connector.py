"""A connector of a user's: blocks in a dictionary of this process."""

from collections.abc import Sequence
from itertools import takewhile

from kv_cache.block import BlockHash, BlockId
from kv_cache.connectors.interface import BlockMemory, ConnectorContext, ConnectorError

BLOCKS: dict[tuple[str, bytes], bytes] = {}


class MemoryConnector:
    """All three parts in one, because one process has them."""

    saves = True

    def __init__(self, context: ConnectorContext) -> None:
        if context.options:
            raise ConnectorError(f"it takes no options: {dict(context.options)}")
        self._key = context.key
        self._finished: list[int] = []

    def scheduler_half(self) -> "MemoryConnector":
        return self

    def worker_half(self, memory: BlockMemory) -> "MemoryConnector":
        self._memory = memory
        return self

    def find(self, hashes: Sequence[BlockHash]) -> int:
        return len(list(takewhile(lambda name: (self._key, name) in BLOCKS, hashes)))

    def load(self, number: int, blocks: Sequence[tuple[BlockHash, BlockId]]) -> None:
        self._memory.write([block_id for _, block_id in blocks], [BLOCKS[self._key, name] for name, _ in blocks])

    def save(self, number: int, blocks: Sequence[tuple[BlockId, BlockHash]]) -> None:
        contents = self._memory.read([block_id for block_id, _ in blocks])
        BLOCKS.update({(self._key, name): bytes(each) for (_, name), each in zip(blocks, contents, strict=True)})
        self._finished.append(number)

    def finished(self) -> tuple[int, ...]:
        finished, self._finished = tuple(self._finished), []
        return finished

    def close(self) -> None:
        pass
