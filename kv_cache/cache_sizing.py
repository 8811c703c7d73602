"""Number of cache blocks that a rank's memory holds, with the reason as text. Ranks agree on the minimum elsewhere."""

from dataclasses import dataclass
from typing import Final

from kv_cache.cache_spec import CacheSpec
from kv_cache.layer_groups import ONE_GROUP, LayerGroups

_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


@dataclass(frozen=True, slots=True)
class MemoryMeasurement:
    """A device's memory and its use before the cache, in bytes.

    `activation_bytes` is the peak of the biggest step, `activation_note` the way it was measured; `non_torch_bytes` are
    outside the framework's allocator (libraries, graphs, communication buffers).
    """

    total_bytes: int
    weights_bytes: int
    activation_bytes: int
    non_torch_bytes: int
    activation_note: str = ""

    def left_bytes(self, memory_utilization: float) -> int:
        """Bytes that this share of the memory leaves for the cache; negative if the rest takes more."""
        used_bytes = self.weights_bytes + self.activation_bytes + self.non_torch_bytes
        return int(self.total_bytes * memory_utilization) - used_bytes


@dataclass(frozen=True, slots=True)
class StateSizing:
    """Slots of recurrent states on one rank: of running sequences, of snapshots, of the host; `note` is their text."""

    num_seqs: int
    num_snapshots: int
    num_host_slots: int = 0
    slot_bytes: int = 0
    note: str = ""

    @property
    def num_slots(self) -> int:
        """Slots of the device."""
        return self.num_seqs + self.num_snapshots

    @property
    def device_bytes(self) -> int:
        return self.num_slots * self.slot_bytes

    @property
    def host_bytes(self) -> int:
        return self.num_host_slots * self.slot_bytes


NO_STATES: Final = StateSizing(0, 0)
"""Sizing of a model without states."""


NO_BLOCKS: Final = "no cache blocks, because no layer has attention: memory does not limit the length of a sequence"


@dataclass(frozen=True, slots=True)
class CacheSizing:
    """Block numbers of one rank, and slots if the model has states. `reason`: a line for each memory, and indented
    under it the shares and the limit.
    """

    num_device_blocks: int
    num_host_blocks: int
    reason: str
    states: StateSizing = NO_STATES


@dataclass(frozen=True, slots=True)
class CacheNeed:
    """Maximum that the cache must hold: `max_num_seqs` sequences of `max_model_len` tokens, behind `num_before`
    positions of an encoder's input.
    """

    max_num_seqs: int
    max_model_len: int
    num_before: int = 0

    def num_blocks(self, block_size: int, groups: LayerGroups = ONE_GROUP) -> int:
        """Most blocks that are ever in use at once, of all groups of layers."""
        return self.max_num_seqs * groups.num_blocks(self.num_before + self.max_model_len, block_size)

    def __str__(self) -> str:
        return (
            f"{self.max_num_seqs} sequences (scheduler.max_num_seqs) of {self.max_model_len} tokens "
            f"(model.max_model_len){_behind(self.num_before)}"
        )


def size_cache(
    spec: CacheSpec,
    measurement: MemoryMeasurement | None,
    need: CacheNeed,
    *,
    num_blocks: int | None,
    memory_utilization: float,
    swap_space_bytes: int,
    is_swap_space_on_device: bool,
    states: StateSizing = NO_STATES,
) -> CacheSizing:
    """Size the cache of one rank.

    `num_blocks`, of all groups each, is used as given. Without it: `memory_utilization` of the memory less weights,
    activations and the rest, from 0 (see `check_cache_holds_one_sequence`) to what `need` can use. `swap_space_bytes`
    is this rank's own, and `need` caps it too; if it is part of the measured memory (`is_swap_space_on_device`: the
    CPU) the cache gets that much less. `states` take their memory before blocks do, on the device and on the host.
    """
    num_host_blocks = num_swap_blocks(spec, swap_space_bytes - states.host_bytes, need)
    if num_blocks is not None:
        num_device_blocks, lines = num_blocks * spec.groups.num_groups, ["set by cache.num_blocks"]
    else:
        assert measurement is not None, "without cache.num_blocks the number of blocks needs a measurement"
        swap_bytes = num_host_blocks * spec.block_bytes + states.host_bytes if is_swap_space_on_device else 0
        num_device_blocks, lines = _profiled_blocks(spec, measurement, need, memory_utilization, swap_bytes, states)
    each = f"{format_bytes(spec.block_bytes)} each{spec.in_fp8}"
    header = f"cache on the device: {_describe_blocks(num_device_blocks, spec)}, {each}"
    swap = f"swap space on the host: {_describe_blocks(num_host_blocks, spec)}"
    swap_lines = [f"limited by need: {need} use at most {num_host_blocks} blocks"]
    if num_host_blocks < need.num_blocks(spec.block_size, spec.groups):
        swap_lines = ["set by cache.swap_space_gib"] if swap_space_bytes else []
    if num_blocks is not None and states.note:
        lines.append(f"states {states.note}")
    if states.num_host_slots:
        swap_lines.insert(0, f"{states.num_host_slots} states, {format_bytes(states.host_bytes)}, besides")
    indented = [[f"  {line}" for line in each] for each in (lines, swap_lines)]
    reason = "\n".join([header, *indented[0], swap, *indented[1]])
    return CacheSizing(num_device_blocks, num_host_blocks, reason, states)


def size_without_blocks(measurement: MemoryMeasurement, memory_utilization: float, states: StateSizing) -> CacheSizing:
    """Sizes of a model without attention: its cache is its states. Nothing is swapped out, as nothing lacks blocks."""
    lines = [f"  {line}" for line in _memory_lines(measurement, memory_utilization, 0, states)]
    return CacheSizing(0, 0, "\n".join([NO_BLOCKS, *lines]), states)


def num_swap_blocks(spec: CacheSpec, swap_space_bytes: int, need: CacheNeed) -> int:
    """Number of host blocks: no more than are ever swapped out at once."""
    if swap_space_bytes <= 0:
        return 0
    return min(num_fitting(swap_space_bytes, spec, need), need.num_blocks(spec.block_size, spec.groups))


def num_fitting(num_bytes: int, spec: CacheSpec, need: CacheNeed) -> int:
    """Number of blocks in `num_bytes`. If no layer keeps keys, a block takes no bytes, and the need decides."""
    return max(0, num_bytes // spec.block_bytes) if spec.block_bytes else need.num_blocks(spec.block_size, spec.groups)


def check_cache_holds_one_sequence(
    num_blocks: int,
    block_size: int,
    max_model_len: int,
    *,
    is_profiled: bool = False,
    has_swap_space_on_device: bool = False,
    groups: LayerGroups = ONE_GROUP,
    num_before: int = 0,
) -> None:
    """Raise ValueError unless the longest allowed sequence fits when it runs alone: else it could never finish.

    `is_profiled`: the number was measured and is not `cache.num_blocks`; `has_swap_space_on_device`: swap space uses
    some of that memory. The error then names other ways out. `num_blocks` are of any of the `groups`. `num_before` is
    as in `CacheNeed`.
    """
    num_groups, num_needed = groups.num_groups, groups.num_blocks(num_before + max_model_len, block_size)
    num_tokens = num_blocks // num_groups * block_size
    if num_blocks >= num_needed:
        return
    of_groups = f" in {num_groups} groups of layers" if num_groups > 1 else ""
    if is_profiled:
        raise ValueError(
            f"memory holds {num_blocks} cache blocks{of_groups}, {num_tokens} tokens, but model.max_model_len is "
            f"{max_model_len}{_behind(num_before)}: raise cache.gpu_memory_utilization or lower model.max_model_len"
            f"{' or cache.swap_space_gib' if has_swap_space_on_device else ''}"
        )
    raise ValueError(
        f"cache.num_blocks={num_blocks // num_groups} holds {num_tokens} tokens but model.max_model_len is "
        f"{max_model_len}{_behind(num_before)}: raise cache.num_blocks to at least {-(-num_needed // num_groups)} or "
        f"lower max_model_len"
    )


def _behind(num_before: int) -> str:
    return f" behind {num_before} positions of an encoder's input (scheduler.max_encoder_len)" if num_before else ""


def format_bytes(num_bytes: int) -> str:
    """`17 B`, `1.5 KiB`, `24.0 MiB`, `-2.0 GiB`: the biggest unit of which there is at least 1."""
    for unit, unit_bytes in _UNITS:
        if abs(num_bytes) >= unit_bytes:
            return f"{num_bytes / unit_bytes:.1f} {unit}"
    return f"{num_bytes} B"


def _profiled_blocks(
    spec: CacheSpec,
    measurement: MemoryMeasurement,
    need: CacheNeed,
    memory_utilization: float,
    swap_bytes: int,
    states: StateSizing,
) -> tuple[int, list[str]]:
    left_bytes = measurement.left_bytes(memory_utilization) - swap_bytes - states.device_bytes
    num_left, num_useful = num_fitting(left_bytes, spec, need), need.num_blocks(spec.block_size, spec.groups)
    lines = [
        *_memory_lines(measurement, memory_utilization, swap_bytes, states),
        f"left for the cache {format_bytes(left_bytes)}: {num_left} blocks",
        f"limited by need: {need} use at most {num_useful} blocks"
        if num_left >= num_useful
        else f"limited by memory: {need} could use {num_useful} blocks",
    ]
    return min(num_left, num_useful), lines


def _memory_lines(
    measurement: MemoryMeasurement, memory_utilization: float, swap_bytes: int, states: StateSizing
) -> list[str]:
    """Shares of the device's memory before the blocks."""
    allowed_bytes = int(measurement.total_bytes * memory_utilization)
    note = f" ({measurement.activation_note})" if measurement.activation_note else ""
    return [
        f"device memory {format_bytes(measurement.total_bytes)}, of which cache.gpu_memory_utilization="
        f"{memory_utilization:g} allows {format_bytes(allowed_bytes)}",
        f"weights {format_bytes(measurement.weights_bytes)}",
        f"activations of the largest step {format_bytes(measurement.activation_bytes)}{note}",
        f"outside the tensors {format_bytes(measurement.non_torch_bytes)}",
        *([f"swap space {format_bytes(swap_bytes)}"] if swap_bytes else []),
        *([f"states {states.note}"] if states.note else []),
    ]


def _describe_blocks(num_blocks: int, spec: CacheSpec) -> str:
    if spec.groups.num_groups > 1:
        return (
            f"{num_blocks} blocks of {spec.block_size} tokens in one of {spec.groups.num_groups} groups of layers "
            f"({format_bytes(num_blocks * spec.block_bytes)})"
        )
    return (
        f"{num_blocks} blocks of {spec.block_size} tokens "
        f"({num_blocks * spec.block_size} tokens, {format_bytes(num_blocks * spec.block_bytes)})"
    )
