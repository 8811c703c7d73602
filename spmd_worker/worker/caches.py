"""The paged cache of one worker and its host tier: allocated, moved in and dropped together."""

import torch

from kv_cache.block_ops import BlockOps
from kv_cache.cache_engine import CacheEngine
from kv_cache.host_tier_engine import HostTierEngine


class WorkerCaches:
    """Around an allocated cache whose blocks have `block_bytes` bytes on this rank."""

    def __init__(self, engine: CacheEngine, block_bytes: int, device: torch.device) -> None:
        self.engine = engine
        self._block_bytes, self._is_on_cpu = block_bytes, device.type == "cpu"
        self._tier: HostTierEngine | None = None
        self._num_tier_slots = 0

    @property
    def num_device_bytes(self) -> int:
        """Bytes on the device."""
        return self.engine.num_device_blocks * self._block_bytes

    @property
    def num_host_bytes(self) -> int:
        """Bytes of host memory that `allocate` takes: on CUDA none before the first block moves there."""
        return (self.engine.num_host_blocks + self._num_tier_slots) * self._block_bytes * self._is_on_cpu

    @property
    def held_host_bytes(self) -> int:
        """Bytes of host memory that are taken now."""
        return self.engine.num_host_bytes + (0 if self._tier is None else self._tier.num_host_bytes)

    def add_tier(self, num_slots: int) -> None:
        """Take host memory for `num_slots` evicted prefix blocks; once."""
        self._num_tier_slots = num_slots
        self._tier = HostTierEngine(self.engine, num_slots)

    def allocate(self) -> None:
        """Make all again, after `release`."""
        self.engine.allocate()
        if self._num_tier_slots:
            self._tier = HostTierEngine(self.engine, self._num_tier_slots)

    def release(self) -> None:
        """Drop all with what it holds."""
        self._tier = None
        self.engine.release()

    def move(self, block_ops: BlockOps) -> None:
        """One step's moves, before its forward pass."""
        if self._tier is not None:
            self._tier.store(block_ops.transfer, block_ops.store)
        self.engine.execute(block_ops)
        if self._tier is not None:
            self._tier.load(block_ops.transfer, block_ops.load)

    def take_finished_transfers(self) -> tuple[int, ...]:
        """Numbers of the tier's transfers that finished since the last call."""
        return () if self._tier is None else self._tier.finished()
