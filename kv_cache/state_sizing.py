"""Number of state slots that a rank's memory holds: of running sequences, of snapshots, and of the host."""

from collections import Counter
from dataclasses import dataclass
from typing import Final

from kv_cache.cache_sizing import StateSizing, format_bytes
from kv_cache.cache_spec import CacheSpec, StateLayer

TOKENS_A_SEQUENCE: Final = 2048
"""Tokens of keys and values that the default number of sequences leaves for each."""
_SNAPSHOTS_A_SEQUENCE: Final = 2
_SNAPSHOT_SHARE: Final = 4
"""Snapshots take by default at most one part in this many of the memory that the sequences' slots leave."""
_HOST_SHARE: Final = 2
"""Host slots take at most one part in this many of the swap space."""
_UNLIMITED: Final = 2**31
"""Slots without bytes, of a stage without states, fit in any number."""


@dataclass(frozen=True, slots=True)
class StateNeed:
    """Wanted numbers of a run: those set by hand, None for as many as fit and help; then at most `most_seqs` sequences,
    and no snapshots unless `has_snapshots`. `num_blocks` is `cache.num_blocks`: with it, numbers set by hand are used
    as they are, as it is itself.
    """

    num_seqs: int | None
    most_seqs: int
    num_snapshots: int | None
    has_snapshots: bool
    max_model_len: int
    num_blocks: int | None = None

    @property
    def is_given(self) -> bool:
        """Whether nothing depends on the memory."""
        has_all = self.num_snapshots is not None or not self.has_snapshots
        return self.num_blocks is not None and self.num_seqs is not None and has_all

    def blocks_bytes(self, spec: CacheSpec) -> int:
        """Bytes that the states must leave: those of the given blocks, else of the longest sequence."""
        if self.num_blocks:
            return self.num_blocks * spec.row_block_bytes
        return spec.groups.num_blocks(self.max_model_len, spec.block_size) * spec.block_bytes


def size_states(spec: CacheSpec, need: StateNeed, left_bytes: int, *, swap_space_bytes: int = 0) -> StateSizing:
    """Slots within `left_bytes`, the memory of states and blocks together. Raises ValueError, with the largest number
    that fits, for sequences or snapshots that do not fit. A need that is given needs no memory.
    """
    free_bytes = max(left_bytes - need.blocks_bytes(spec), 0)
    num_fitting = free_bytes // spec.slot_bytes if spec.slot_bytes else _UNLIMITED
    num_seqs = _num_seqs(spec, need, left_bytes, num_fitting)
    num_snapshots = _num_snapshots(spec, need, left_bytes, num_seqs, num_fitting - num_seqs)
    num_host_fitting = max(swap_space_bytes, 0) // _HOST_SHARE // spec.slot_bytes if spec.slot_bytes else _UNLIMITED
    num_host_slots = min(num_host_fitting, num_seqs) if swap_space_bytes > 0 else 0
    note = _describe(spec, num_seqs, num_snapshots)
    return StateSizing(num_seqs, num_snapshots, num_host_slots, spec.slot_bytes, note)


def _num_seqs(spec: CacheSpec, need: StateNeed, left_bytes: int, num_fitting: int) -> int:
    num_seqs = need.num_seqs
    if num_seqs is None:
        sequence_bytes = spec.slot_bytes
        if need.num_blocks is None:
            sequence_bytes += TOKENS_A_SEQUENCE * spec.row_block_bytes // spec.block_size
        num_useful = left_bytes // sequence_bytes if sequence_bytes else _UNLIMITED
        num_seqs = max(1, min(need.most_seqs, num_useful, num_fitting))
    if num_seqs <= num_fitting or need.num_blocks is not None:
        return num_seqs
    wanted = "a running sequence" if need.num_seqs is None else f"scheduler.max_num_seqs={num_seqs}"
    way_out = f"lower it to at most {num_fitting}" if num_fitting else "use more memory (cache.gpu_memory_utilization)"
    beside = f"a sequence of model.max_model_len tokens takes {format_bytes(need.blocks_bytes(spec))}"
    beside = f" and blocks, of which {beside}" if spec.block_bytes else ""
    raise ValueError(
        f"{wanted} needs recurrent states of {format_bytes(num_seqs * spec.slot_bytes)}, "
        f"{format_bytes(spec.slot_bytes)} a sequence, but {format_bytes(max(left_bytes, 0))} are left for states"
        f"{beside}: {way_out}{'' if need.num_seqs is None or not num_fitting else ', or leave it out to use what fits'}"
    )


def _num_snapshots(spec: CacheSpec, need: StateNeed, left_bytes: int, num_seqs: int, num_fitting: int) -> int:
    """`num_fitting` beside the sequences' slots."""
    if not need.has_snapshots:
        return 0
    if need.num_snapshots is None:
        if not spec.slot_bytes:
            return _SNAPSHOTS_A_SEQUENCE * num_seqs
        given_bytes = 0 if need.num_blocks is None else need.blocks_bytes(spec)
        share = (left_bytes - given_bytes - num_seqs * spec.slot_bytes) // _SNAPSHOT_SHARE // spec.slot_bytes
        return max(0, min(_SNAPSHOTS_A_SEQUENCE * num_seqs, share, num_fitting))
    if need.num_snapshots > num_fitting and need.num_blocks is None:
        raise ValueError(
            f"cache.num_state_snapshots={need.num_snapshots} needs {format_bytes(need.num_snapshots * spec.slot_bytes)}"
            f", {format_bytes(spec.slot_bytes)} each, but {num_fitting} fit beside the states of {num_seqs} sequences: "
            f"lower it, or leave it out to use what fits"
        )
    return need.num_snapshots


def slot_tokens(spec: CacheSpec) -> int:
    """Tokens whose keys and values take as much memory as a slot; 0 if tokens take none."""
    return -(-spec.slot_bytes * spec.block_size // spec.row_block_bytes) if spec.block_bytes else 0


def _describe(spec: CacheSpec, num_seqs: int, num_snapshots: int) -> str:
    """`12.3 GiB: 256 of 49.1 MiB (24 layers of 32 heads of 128 x 128 float32, 3 x 8,192 inputs), 64 snapshots 3.1 GiB;
    a state costs as much as 1,572 tokens`.
    """
    parts = [f"{format_bytes(num_seqs * spec.slot_bytes)}: {num_seqs} of {describe_slot(spec)}"]
    if num_snapshots:
        parts.append(f", {num_snapshots} snapshots {format_bytes(num_snapshots * spec.slot_bytes)}")
    if tokens := slot_tokens(spec):
        parts.append(f"; a state costs as much as {tokens:,} tokens")
    return "".join(parts)


def describe_slot(spec: CacheSpec) -> str:
    """`49.1 MiB (24 layers of 32 heads of 128 x 128 float32, 3 x 8,192 inputs)`, `4 x 8,320 inputs of drafts` behind
    the latter in a run with drafts.
    """
    kinds = Counter(layer for layer in spec.states if layer is not None)
    layers = ", ".join(f"{count} layers of {_describe_layer(layer)}" for layer, count in kinds.items())
    return f"{format_bytes(spec.slot_bytes)} ({layers or 'no layer of this stage'})"


def _describe_inputs(tail: tuple[int, int], saved: tuple[int, int]) -> str:
    inputs = f"{tail[0]} x {tail[1]:,} inputs"
    return f"{inputs}, {saved[0]} x {saved[1]:,} inputs of drafts" if saved[0] else inputs


def _describe_layer(layer: StateLayer) -> str:
    inputs = _describe_inputs(layer.tail, layer.saved)
    if layer.second_tail[0]:
        inputs += f", {_describe_inputs(layer.second_tail, layer.second_saved)}"
    if not layer.state:
        return inputs
    count, *sizes = layer.state
    # The first Mamba has a row of numbers for each channel, others a matrix for each head.
    parts = "heads" if len(sizes) > 1 else "channels"
    return f"{count} {parts} of {' x '.join(map(str, sizes))} float32, {inputs}"
