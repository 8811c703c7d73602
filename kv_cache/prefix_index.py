"""Prefix index of one memory: block hash -> block."""

from collections.abc import Iterable, Sequence

from kv_cache.block import BlockHash, BlockId


class PrefixIndex:
    """One block for a hash and one hash for a block: of several blocks with the same contents, the first."""

    def __init__(self) -> None:
        self._blocks: dict[BlockHash, BlockId] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def find(self, block_hash: BlockHash) -> BlockId | None:
        return self._blocks.get(block_hash)

    def find_chain(self, hashes: Sequence[BlockHash]) -> list[BlockId]:
        """The blocks of the leading hashes, up to the first that is not found."""
        found: list[BlockId] = []
        get = self._blocks.get
        for block_hash in hashes:
            block_id = get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def insert(self, block_hash: BlockHash, block_id: BlockId) -> bool:
        """Whether the hash was new; else the older block keeps it."""
        return self._blocks.setdefault(block_hash, block_id) == block_id

    def remove(self, block_hash: BlockHash) -> None:
        """Remove the hash of a block that loses its contents."""
        del self._blocks[block_hash]

    def clear(self) -> list[BlockId]:
        """Remove every hash; returns the blocks that had one."""
        blocks = list(self._blocks.values())
        self._blocks.clear()
        return blocks

    def check_integrity(self, named: Iterable[tuple[BlockHash, BlockId]]) -> None:
        """Raise AssertionError unless `named`, all blocks that have a hash, is what the index holds."""
        num_named = 0
        for block_hash, block_id in named:
            found = self._blocks.get(block_hash)
            assert found == block_id, f"block {block_id} carries a name that the index gives to block {found}"
            num_named += 1
        assert num_named == len(self._blocks), (
            f"the index holds {len(self._blocks)} names, {num_named} blocks carry one"
        )
