"""Interface of a KV connector: prefix blocks that live outside this engine, in files or in another engine.

`cache.connector=package.module:factory` names a function of a `ConnectorContext` that returns a `KVConnector`. Every
process of an engine calls it, because a connector has two halves, as in vLLM (KVConnectorBase_V1). If its module has a
function `check_options` of the options, it is called before weights are loaded, and raises ValueError for invalid ones.

    SchedulerHalf    on rank 0 of a replica alone: says which blocks exist outside
    WorkerHalf       on every rank: moves this rank's part of the blocks' bytes

What rank 0 finds enters the replicas as an event (`FoundBlocks`), so every rank decides alike and a log replays it. A
block is loaded everywhere or nowhere: a transfer counts when every rank has finished it, and has failed if it failed on
one, and then the rows compute what they wanted to load. So a half may look at files, clocks and other processes, and
must only never give wrong bytes. Blocks are named by `block_hash.py`; names cover tokens, weight updates and adapters,
and `ConnectorContext.identity` everything else that the bytes depend on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

from kv_cache.block import BlockHash, BlockId


class ConnectorError(ValueError):
    """A connector that cannot work here: options, other weights, another layout. The text says why, and the way out."""


@dataclass(frozen=True, slots=True)
class ConnectorContext:
    """Purpose and place of a connector. `options` are `cache.connector_options`. `identity` describes, by topic, all
    that a block's bytes depend on besides its name: weights, layout, dtype, kernels; the same on every rank. `rank` is
    this one's among the `num_ranks` of a replica, each of which has its own part of every block. Replicas have the same
    blocks, bit for bit.
    """

    options: Mapping[str, str]
    identity: Mapping[str, str]
    rank: int
    num_ranks: int
    replica: int = 0

    @property
    def key(self) -> str:
        """32 hexadecimal digits that stand for `identity`."""
        digest = blake2b(digest_size=16, person=b"spmd-kv-identity")
        for topic in sorted(self.identity):
            for text in (topic, self.identity[topic]):
                encoded = text.encode("utf-8", "surrogatepass")
                digest.update(len(encoded).to_bytes(8, "little") + encoded)
        return digest.hexdigest()


class BlockMemory(Protocol):
    """This rank's blocks, as bytes in the layout of its attention backend."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block on this rank, all layers."""

    def read(self, block_ids: Sequence[BlockId]) -> list[memoryview]:
        """The blocks' bytes as they are now; valid until the next step."""

    def write(self, block_ids: Sequence[BlockId], contents: Sequence[bytes | bytearray | memoryview]) -> None:
        """Replace the blocks' bytes."""


class SchedulerHalf(Protocol):
    """Finds blocks outside."""

    def find(self, hashes: Sequence[BlockHash]) -> int:
        """Number of leading blocks that exist outside, with the parts of all ranks. May be wrong later."""

    def close(self) -> None:
        """The engine ends. Idempotent."""


class WorkerHalf(Protocol):
    """Moves this rank's parts. Of each transfer `load` and then `save` are called, once each, where either list may be
    empty. Calls return when the bytes are moved, or begin what `finished` reports later.
    """

    def load(self, number: int, blocks: Sequence[tuple[BlockHash, BlockId]]) -> None:
        """The blocks are neither read nor written by others before the transfer has finished."""

    def save(self, number: int, blocks: Sequence[tuple[BlockId, BlockHash]]) -> None:
        """Called after the forward pass that completed the blocks. Their bytes are those that they have now. What
        cannot be saved is left out, with a warning.
        """

    def finished(self) -> tuple[int, ...]:
        """Numbers of the transfers that this rank has finished since the last call; negative if a load failed, or, in
        one without loads, if a save was left out: none of its blocks count as loaded or saved then.
        """

    def close(self) -> None:
        """The worker ends, after its last step. Idempotent."""


class KVConnector(Protocol):
    """A connector in one process of an engine."""

    @property
    def saves(self) -> bool:
        """Whether blocks are saved: the same on every rank."""

    def scheduler_half(self) -> SchedulerHalf:
        """Called once, before the halves of the workers. Raises ConnectorError."""

    def worker_half(self, memory: BlockMemory) -> WorkerHalf:
        """Called once on every rank. Raises ConnectorError."""
