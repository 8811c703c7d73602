"""A rank's part of the verification of prefix-cache hits: what was found, and what was computed again, byte by byte."""

from collections.abc import Callable, Sequence

from kv_cache.byte_comparison import ByteDifference, Pair, differing_blocks, differing_states
from kv_cache.cache_engine import CacheEngine
from spmd_worker.base.errors import CacheMismatchError
from spmd_worker.replica.mirror.mirror import Mirror, MirroredSequence
from spmd_worker.replica.sequence.hit_comparison import UNKNOWN_WRITER, CachedCopy
from spmd_worker.replica.sequence.step import StepPlan

_MAX_TOKEN_IDS = 8
"""A message lists up to this many."""

_Find = Callable[[CacheEngine, Sequence[Pair]], ByteDifference | None]


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
            blocks = [(copy.number, sequence.block_ids[copy.index]) for copy in each.blocks]
            self._compare("block", plan.step, sequence, each.blocks, blocks, differing_blocks)
            states = [(copy.number, sequence.state_slot) for copy in each.states]
            self._compare("state in slot", plan.step, sequence, each.states, states, differing_states)

    def _compare(
        self,
        noun: str,
        step: int,
        sequence: MirroredSequence,
        copies: Sequence[CachedCopy],
        pairs: Sequence[Pair],
        find: _Find,
    ) -> None:
        found = find(self._engine, pairs) if pairs else None
        if found is None:
            return
        copy, request_id = copies[found.index], sequence.request.request_id
        writer = "a request that is not known any more" if copy.writer == UNKNOWN_WRITER else f"request {copy.writer}"
        raise CacheMismatchError(
            f"rank {self._rank}, step {step}: {noun} {copy.number} of the prefix cache, {self._contents(copy, sequence)}, "
            f"written by {writer}, differs from what request {request_id} computed again: element "
            f"{list(found.element)} of the {found.part} of layer {self._first_layer + found.layer} is {found.first!r} "
            f"in the cache and {found.second!r} computed again. Either memory has changed since, or what was computed "
            f"depended on other rows: run again with cache.enable_prefix_caching=false and compare the answers"
        )

    def _contents(self, copy: CachedCopy, sequence: MirroredSequence) -> str:
        """The name and the tokens of a cached copy: those of a block, or the last ones that a state covers."""
        size = self._mirror.block_size
        is_state = copy.index * size == sequence.num_computed_tokens + sequence.num_scheduled_tokens
        index = copy.index - is_state
        token_ids = sequence.token_ids(index * size, (index + 1) * size)
        shown = ", ".join(map(str, token_ids[:_MAX_TOKEN_IDS]))
        more = f" and {size - _MAX_TOKEN_IDS} more" if size > _MAX_TOKEN_IDS else ""
        return f"with the name {copy.name.hex()} and the token ids {shown}{more} from position {index * size} on"
