"""Makes an allocator with what its limits ask for: recurrent states, and the verification of prefix-cache hits."""

from kv_cache.cache_manager import CacheManager
from kv_cache.state_slots import StateSlots
from spmd_worker.replica.scheduler.allocator import Allocator
from spmd_worker.replica.scheduler.counters import SchedulerCounters
from spmd_worker.replica.scheduler.hit_verifier import HitVerifier
from spmd_worker.replica.scheduler.planner import SchedulerLimits
from spmd_worker.replica.scheduler.sequence_states import SequenceStates


def new_allocator(
    limits: SchedulerLimits, cache: CacheManager, slots: StateSlots | None, counters: SchedulerCounters
) -> Allocator:
    """`slots` of a model with recurrent states, whose hits are verified only if prompts may be cut where one ends."""
    is_caching, is_chunked = limits.enable_prefix_caching, limits.enable_chunked_prefill
    states = verifier = None
    if limits.verify_hits and is_caching and (slots is None or is_chunked):
        verifier = HitVerifier(limits.verify_hits, cache, slots, counters)
    if slots is not None:
        writers = None if verifier is None else verifier.state_writers
        given = (slots, counters, cache.block_size, limits.snapshot_interval)
        states = SequenceStates(*given, ends_chunks=is_caching and is_chunked, writers=writers)
    given_limits = (cache, limits.preemption, counters)
    return Allocator(*given_limits, enable_prefix_caching=is_caching, states=states, verifier=verifier)
