"""A rank's part of the verification of prefix-cache hits: what was found, and what was computed again, byte by byte."""

from typing import Final

from kv_cache.byte_comparison import ByteDifference, differing_blocks, differing_states
from kv_cache.cache_engine import CacheEngine
from spmd_worker.base.errors import CacheMismatchError
from spmd_worker.replica.mirror.mirror import Mirror, MirroredSequence
from spmd_worker.replica.sequence.hit_comparison import UNKNOWN_WRITER, CachedCopy
from spmd_worker.replica.sequence.step import StepPlan

_MAX_TOKEN_IDS: Final = 8
"""A message lists up to this many."""


class HitComparer:
    """Compares the cache of one rank, whose stage begins with layer `first_layer` of the model."""

    def __init__(self, engine: CacheEngine, mirror: Mirror, rank: int, first_layer: int) -> None:
        self._engine, self._mirror, self._rank, self._first_layer = engine, mirror, rank, first_layer

    def compare(self, plan: StepPlan) -> None:
        """Compare all hits that a step computes again, after its forward pass. Raises CacheMismatchError naming the
        first block or snapshot that differs.
        """
        for each in plan.hit_comparisons:
            sequence = self._mirror.held(each.key)
            for group in range(self._num_groups):
                copies = [copy for copy in each.blocks if copy.block_index % self._num_groups == group]
                blocks = [(copy.number, sequence.block_ids[copy.block_index]) for copy in copies]
                difference = differing_blocks(self._engine, blocks, group) if blocks else None
                if difference is not None:
                    copy = copies[difference.pair]
                    of_tokens = copy._replace(block_index=copy.block_index // self._num_groups)
                    raise self._error(plan.step, sequence, f"block {copy.number}", of_tokens, difference)
            if each.states:
                states = [(copy.number, sequence.state_slot) for copy in each.states]
                difference = differing_states(self._engine, states)
                if difference is not None:
                    copy = each.states[difference.pair]
                    what = f"the snapshot in state slot {copy.number}"
                    raise self._error(plan.step, sequence, what, copy, difference)

    @property
    def _num_groups(self) -> int:
        return self._engine.spec.groups.num_groups

    def _error(
        self, step: int, sequence: MirroredSequence, what: str, copy: CachedCopy, difference: ByteDifference
    ) -> CacheMismatchError:
        writer = f"request {copy.writer}"
        if copy.writer == UNKNOWN_WRITER:
            writer = "a request that is not known any more"
        place = f"element {list(difference.element)} of the {difference.part} of layer"
        return CacheMismatchError(
            f"rank {self._rank}, step {step}: {what} of the prefix cache, with the name {copy.name.hex()} and "
            f"{self._tokens(sequence, copy.block_index)}, written by {writer}, differs from what request "
            f"{sequence.request.request_id} has computed again: {place} {self._first_layer + difference.layer} is "
            f"{difference.first!r} in the cache and {difference.second!r} computed again. Memory has changed, or "
            f"weights without llm.set_weight_version, or what was computed depended on other rows: run again with "
            f"cache.enable_prefix_caching=false and compare the answers"
        )

    def _tokens(self, sequence: MirroredSequence, index: int) -> str:
        size = self._mirror.block_size
        shown = ", ".join(map(str, sequence.token_ids(index * size, (index + 1) * size)[:_MAX_TOKEN_IDS]))
        more = f" and {size - _MAX_TOKEN_IDS} more" if size > _MAX_TOKEN_IDS else ""
        return f"the token ids {shown}{more} at positions {index * size} to {(index + 1) * size - 1}"
