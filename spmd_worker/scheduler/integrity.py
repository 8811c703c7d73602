"""Whether a scheduler's queues, its sequences' states and its cache agree: a walk over everything, for tests and
checks.

Knows sequences and blocks. Changes nothing.
"""

from collections.abc import Mapping

from kv_cache.cache_manager import CacheManager
from spmd_worker.scheduler.policy import WaitingQueue, service_order
from spmd_worker.sequence.request import RequestId
from spmd_worker.sequence.sequence import Sequence, SequenceGroup, SequenceStatus


def check_integrity(
    groups: Mapping[RequestId, SequenceGroup],
    running: list[Sequence],
    waiting: WaitingQueue,
    cache: CacheManager,
    max_num_seqs: int,
) -> None:
    """Raise AssertionError, with the values, where something contradicts something else."""
    sequences = [sequence for group in groups.values() for sequence in group.sequences]
    cache.check_integrity(sequence.table for sequence in sequences)
    expected = sorted((each for each in sequences if each.status is SequenceStatus.RUNNING), key=service_order)
    assert expected == running, ([each.key for each in expected], [each.key for each in running])
    assert len(running) <= max_num_seqs, (len(running), max_num_seqs)
    for sequence in running:
        assert sequence.num_computed_tokens <= sequence.num_tokens, sequence.key
    for sequence in waiting:
        assert not sequence.table.block_ids, f"{sequence.key} waits and holds blocks"
        assert sequence.num_computed_tokens == 0, f"{sequence.key} waits with computed tokens"
