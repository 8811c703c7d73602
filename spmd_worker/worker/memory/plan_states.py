"""Text of the recurrent states in a memory plan."""

from collections.abc import Sequence

from kv_cache.cache_sizing import NO_STATES, StateSizing, format_bytes


def fewest_states(states: Sequence[StateSizing]) -> StateSizing:
    """Slots of every rank: the minimum of each number, with bytes and text of the rank with the largest states."""
    if not states or not max(each.num_seqs for each in states):
        return NO_STATES
    largest = max(states, key=lambda each: each.slot_bytes)
    return StateSizing(
        min(each.num_seqs for each in states),
        min(each.num_snapshots for each in states),
        min(each.num_host_slots for each in states),
        largest.slot_bytes,
        largest.note,
    )


def describe_states(states: StateSizing, weights_bytes: int) -> list[str]:
    """Memory of the states, and what a decode step moves of them beside the weights; nothing for a model without."""
    if not states.num_seqs:
        return []
    moved = format_bytes(2 * states.num_seqs * states.slot_bytes)
    return [
        f"states     {states.note}",
        f"traffic    a decode step of {states.num_seqs:,} sequences reads and writes {moved} of states beside "
        f"{format_bytes(weights_bytes)} of weights",
    ]


def describe_states_alone(states: StateSizing, reason: str, weights_bytes: int) -> list[str]:
    """Lines of the cache of a model without attention, from `CacheSizing.reason`."""
    first, *others = [line.strip() for line in reason.splitlines()]
    return [
        f"blocks     {first}",
        f"sequences  {states.num_seqs:,} of any length fit at once in each replica",
        *describe_states(states, weights_bytes),
        *(f"{'why' if index == 0 else '':<11}{line}" for index, line in enumerate(others)),
    ]
