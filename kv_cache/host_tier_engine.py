"""Host tier, moving half: a connector that keeps evicted prefix blocks in host memory and loads them again.

`host_tier.py` decides which blocks are kept, and where.
"""

from collections.abc import Iterable, Sequence

from kv_cache.block import BlockId
from kv_cache.cache_engine import CacheEngine
from kv_cache.host_memory import new_host_memory


class HostTierEngine:
    """Implements `TransferEngine`: a transfer is finished, in the order of the device's work, when its calls return.

    So `finished` is true at once on this rank; the blocks are used when every rank has reported it.
    """

    def __init__(self, cache_engine: CacheEngine, num_slots: int) -> None:
        """Allocate host memory for `num_slots` blocks of an allocated cache; it is freed with this object."""
        self._memories = [new_host_memory(each, num_slots) for each in cache_engine.tensors]
        self._num_slots = num_slots
        self._finished: list[int] = []

    @property
    def num_host_bytes(self) -> int:
        """Host memory in use; on CUDA 0 before the first block moves there."""
        return sum(each.num_bytes for each in self._memories)

    def store(self, number: int, pairs: Sequence[tuple[BlockId, int]]) -> None:
        """Store (`TransferEngine.store`). Raises ValueError, before anything moves, for a slot that does not exist."""
        self._check(slot for _, slot in pairs)
        for memory in self._memories:
            memory.move_out(pairs)

    def load(self, number: int, pairs: Sequence[tuple[int, BlockId]]) -> None:
        """Load (`TransferEngine.load`). Raises ValueError, before anything moves, for a slot that does not exist."""
        self._check(slot for slot, _ in pairs)
        for memory in self._memories:
            memory.move_in(pairs)
        if number:
            self._finished.append(number)

    def finished(self) -> tuple[int, ...]:
        finished, self._finished = tuple(self._finished), []
        return finished

    def _check(self, slots: Iterable[int]) -> None:
        for slot in slots:
            if not 0 <= slot < self._num_slots:
                raise ValueError(f"slot {slot} of the host tier does not exist, there are {self._num_slots}")
