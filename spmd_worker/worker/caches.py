"""The paged cache of one worker, its recurrent states and its host tier, allocated and released together, and its half
of a connector.
"""

from collections.abc import Callable

import torch

from kv_cache.block_memory import CacheBlocks
from kv_cache.block_ops import BlockOps
from kv_cache.cache_engine import CacheEngine
from kv_cache.connectors.interface import BlockMemory, WorkerHalf
from kv_cache.host_tier_engine import HostTierEngine
from kv_cache.state_ops import NO_STATE_OPS, StateOps


class WorkerCaches:
    """Wraps an allocated cache engine; a block has `block_bytes` bytes on this rank."""

    def __init__(self, engine: CacheEngine, block_bytes: int, device: torch.device) -> None:
        self.engine = engine
        self._block_bytes, self._is_on_cpu = block_bytes, device.type == "cpu"
        self._tier: HostTierEngine | None = None
        self._num_tier_slots = 0
        self._connector: WorkerHalf | None = None

    @property
    def num_device_bytes(self) -> int:
        states = self.engine.states
        return self.engine.num_device_blocks * self._block_bytes + (0 if states is None else states.num_device_bytes)

    @property
    def num_host_bytes(self) -> int:
        """Bytes of host memory that `allocate` takes; on CUDA none until the first block or state moves there."""
        states = self.engine.states
        of_states = 0 if states is None else states.num_host_slots * states.spec.slot_bytes
        return (of_states + (self.engine.num_host_blocks + self._num_tier_slots) * self._block_bytes) * self._is_on_cpu

    @property
    def held_host_bytes(self) -> int:
        """Bytes of host memory that are allocated now."""
        parts = (self.engine, self.engine.states, self._tier)
        return sum(each.num_host_bytes for each in parts if each is not None)

    def add_tier(self, num_slots: int) -> None:
        """Allocate host memory for `num_slots` evicted prefix blocks; called once."""
        self._num_tier_slots = num_slots
        self._tier = HostTierEngine(self.engine, num_slots)

    def connect(self, new_half: Callable[[BlockMemory], WorkerHalf]) -> None:
        """Make this worker's half of a connector; called once. Raises ConnectorError."""
        self._connector = new_half(CacheBlocks(self.engine))

    def disconnect(self) -> None:
        """Close this worker's half of the connector, if it has one. Idempotent."""
        connector, self._connector = self._connector, None
        if connector is not None:
            connector.close()

    def allocate(self) -> None:
        """Allocate everything again, after `release`."""
        self.engine.allocate()
        if self._num_tier_slots:
            self._tier = HostTierEngine(self.engine, self._num_tier_slots)

    def release(self) -> None:
        """Free everything, with its contents."""
        self._tier = None
        self.engine.release()

    def move(self, block_ops: BlockOps, state_ops: StateOps = NO_STATE_OPS) -> None:
        """Everything that comes before the forward pass."""
        if not state_ops.is_empty:
            assert self.engine.states is not None, "the model has no states"
            self.engine.states.execute(state_ops)
        if self._tier is not None:
            self._tier.store(block_ops.transfer, block_ops.store)
        self.engine.execute(block_ops)
        if self._tier is not None:
            self._tier.load(block_ops.transfer, block_ops.load)
        if self._connector is not None and (block_ops.fetch or block_ops.save):
            self._connector.load(block_ops.transfer, block_ops.fetch)

    def save(self, block_ops: BlockOps) -> None:
        """Everything that comes after the forward pass."""
        if self._connector is not None and (block_ops.fetch or block_ops.save):
            self._connector.save(block_ops.transfer, block_ops.save)

    def take_finished_transfers(self) -> tuple[int, ...]:
        """Ids of the transfers that finished since the last call; negative if a load failed."""
        halves = [each for each in (self._tier, self._connector) if each is not None]
        return tuple(number for each in halves for number in each.finished())
