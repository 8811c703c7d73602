"""Checks that a scheduler's queues, sequence states and cache agree: a read-only walk over everything, for tests."""

from kv_cache.cache_manager import CacheManager
from kv_cache.state_slots import StateSlots
from spmd_worker.replica.scheduler.adapter_registry import AdapterRegistry
from spmd_worker.replica.scheduler.policy import service_order
from spmd_worker.replica.scheduler.queues import Queues
from spmd_worker.replica.sequence.sequence import SequenceStatus


def check_integrity(queues: Queues, cache: CacheManager, max_num_seqs: int, num_swapped: int) -> None:
    """Raise AssertionError, with the values, at a contradiction."""
    running = queues.running
    loading = [sequence for waits in queues.loading.values() for sequence in waits]
    waiting = [*queues.waiting, *loading, *queues.held]
    sequences = [sequence for group in queues.groups.values() for sequence in group.sequences]
    cache.check_integrity([each.table for each in sequences], [each.host_table for each in sequences])
    expected = sorted((each for each in sequences if each.status is SequenceStatus.RUNNING), key=service_order)
    assert expected == running, ([each.key for each in expected], [each.key for each in running])
    assert len(running) <= max_num_seqs, (len(running), max_num_seqs)
    for sequence in running:
        num_ahead = sequence.num_computed_tokens - sequence.num_tokens
        assert num_ahead <= (len(sequence.output_token_ids) < sequence.num_outputs_ahead), sequence.key
        # The last computed token may be computed again; if it is to be, it is counted as not computed already.
        first = sequence.num_computed_tokens - (not sequence.repeats_last)
        num_unseen = cache.groups.num_unseen(max(first, 0), cache.block_size)
        num_dropped = sequence.table.num_dropped
        assert num_dropped <= num_unseen, f"{sequence.key} dropped {num_dropped} blocks and sees all after {num_unseen}"
    for sequence in waiting:
        is_swapped = sequence.status is SequenceStatus.SWAPPED
        num_computed, host_table = sequence.num_computed_tokens, sequence.host_table
        assert not sequence.table.block_ids, f"{sequence.key} waits and holds blocks"
        assert is_swapped == bool(host_table.block_ids), f"{sequence.key} is {sequence.status.value}: {host_table}"
        assert is_swapped == bool(num_computed), f"{sequence.key} waits with {num_computed} computed tokens"
    num_unfinished = sum(each.status is not SequenceStatus.FINISHED for each in sequences)
    assert len(running) + len(waiting) == num_unfinished, (len(running), len(waiting), num_unfinished)
    assert num_swapped == sum(each.status is SequenceStatus.SWAPPED for each in waiting), num_swapped


def check_states(queues: Queues, slots: StateSlots) -> None:
    """Raise AssertionError unless each running sequence owns a slot, each swapped one a host slot, and no other any."""
    sequences = [sequence for group in queues.groups.values() for sequence in group.sequences]
    for sequence in sequences:
        has_slots = (sequence.state_slot is not None, sequence.host_state_slot is not None)
        status = sequence.status
        expected = (status is SequenceStatus.RUNNING, status is SequenceStatus.SWAPPED)
        assert has_slots == expected, f"{sequence.key} is {status.value}, has slots on device and host: {has_slots}"
        # Accepted drafts are outputs, and follow a given one; the next is still to be computed.
        num_lagging, num_outputs = sequence.num_lagging_tokens, len(sequence.output_token_ids)
        may_lag = any(has_slots) and sequence.num_uncomputed_tokens == 1
        most = max(num_outputs - 2, 0) if may_lag else 0
        assert 0 <= num_lagging <= most, f"{sequence.key} lags by {num_lagging}, not 0 to {most}"
    owned = [each.state_slot for each in sequences if each.state_slot is not None]
    slots.check_integrity(owned, [each.host_state_slot for each in sequences if each.host_state_slot is not None])


def check_adapters(queues: Queues, adapters: AdapterRegistry, max_loras: int) -> None:
    """Raise AssertionError unless the adapter of every request is loaded, and few run at once."""
    assert len(adapters.digests) <= adapters.max_adapters, adapters.entries
    used = [group.request.adapter for group in queues.groups.values() if group.request.adapter]
    assert all(map(adapters.has, used)), (used, adapters.digests)
    running = dict.fromkeys(sequence.request.adapter for sequence in queues.running)
    running.pop(0, None)
    assert len(running) <= max_loras, (list(running), max_loras)
