"""Recurrent states that lag behind accepted drafts catch up before a pause keeps their sequences.

Weights may change in the pause. The saved inputs of drafts would go through the new ones, where the states of other
tokens went through the old: so each sequence that lags computes its next token first, without drafts.
"""

from kv_cache.cache_manager import CacheManager
from spmd_worker.replica.scheduler.allocator import Allocator
from spmd_worker.replica.scheduler.queues import Queues
from spmd_worker.replica.scheduler.updates import Decision, Decisions
from spmd_worker.replica.sequence.sequence import Sequence, SequenceStatus


def lagging(queues: Queues) -> list[Sequence]:
    """Sequences whose states lag, running or swapped out."""
    return [each for each in (*queues.running, *queues.waiting) if each.num_lagging_tokens]


def catch_up(queues: Queues, cache: CacheManager, allocator: Allocator) -> Decisions:
    """Decide a step of the sequences that lag, and of no others. One that is swapped out, or has no block for its
    token, is recomputed later.
    """
    decisions, sequences = Decisions(), lagging(queues)
    if sequences:
        allocator.make_snapshots(queues.running)
    for sequence in sequences:
        first = sequence.num_computed_tokens
        if sequence.status is SequenceStatus.SWAPPED:
            allocator.drop_swapped(sequence)
        elif cache.can_extend(sequence.table, first, first + 1):
            change = allocator.extend(sequence, 1)
            decisions.others.append(Decision(sequence, first, 1, sequence.num_samples, change))
        else:
            queues.running.remove(sequence)
            allocator.preempt(sequence, queues.group_of(sequence), may_swap=False)
            queues.waiting.reinsert(sequence)
    decisions.others.sort(key=lambda each: each.sequence.key)
    return decisions
