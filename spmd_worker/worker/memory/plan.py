"""Memory of a run: swap space and blocks of a rank, for the run itself and for its plan (`plan_text.py`)."""

from dataclasses import replace
from typing import Final

from kv_cache.cache_sizing import (
    NO_STATES,
    CacheNeed,
    CacheSizing,
    MemoryMeasurement,
    StateSizing,
    check_cache_holds_one_sequence,
    format_bytes,
    size_cache,
    size_without_blocks,
)
from kv_cache.cache_spec import CacheSpec
from kv_cache.state_sizing import StateNeed, size_states
from spmd_worker.base.errors import ConfigError
from spmd_worker.ranks.stored_weights import NOTHING_STORED, StoredWeights
from spmd_worker.ranks.topology import stage_of
from spmd_worker.resolved import ResolvedRun
from spmd_worker.worker.memory.draft_memory import draft_layers, draft_weights_bytes
from spmd_worker.worker.memory.estimate import (
    adapter_bytes,
    cache_spec,
    parts_of_entries,
    unquantised_part_bytes,
    weights_bytes,
)
from spmd_worker.worker.memory.media_memory import media_row_bytes, media_row_limits
from spmd_worker.worker.memory.window_groups import group_of_stage, grouping_of

_DEFAULT_SWAP_SPACE_GIB: Final = 4.0
"""Per rank."""

_UNLIMITED_BYTES: Final = 2**60
_ESTIMATE_MARGIN: Final = 2
"""Measured activations were always below this multiple of their estimate."""


def check_cache_setting(resolved: ResolvedRun) -> None:
    """Raise ConfigError if `cache.num_blocks` cannot hold one sequence, or `cache.media_rows_gib` the longest input of
    an encoder; measured sizes are checked later.
    """
    num_blocks, num_rows = resolved.config.cache.num_blocks, resolved.max_encoder_len
    if num_rows and (num_kept := media_row_limits(resolved).num_rows) < num_rows:
        raise ConfigError(
            f"cache.media_rows_gib={resolved.config.cache.media_rows_gib} keeps {num_kept} rows and an encoder's input "
            f"has up to {num_rows} (scheduler.max_encoder_len): raise it to at least "
            f"{-(-num_rows * media_row_bytes(resolved) * 10**6 // 2**30) / 10**6}, or leave it null"
        )
    if num_blocks is not None and not resolved.model_config.is_encoder:
        check_cache_blocks(resolved, num_blocks * grouping_of(resolved).groups.num_groups, 0)


def check_cache_blocks(resolved: ResolvedRun, num_device_blocks: int, num_host_blocks: int) -> None:
    """Raise ConfigError, naming the setting to change, if the cache cannot hold one sequence of `max_model_len`."""
    cache = resolved.config.cache
    if resolved.model_config.is_attention_free:
        return
    try:
        check_cache_holds_one_sequence(
            num_device_blocks,
            cache.block_size,
            resolved.max_model_len,
            is_profiled=cache.num_blocks is None,
            has_swap_space_on_device=resolved.device_type == "cpu" and num_host_blocks > 0,
            groups=grouping_of(resolved).groups,
            num_before=resolved.max_encoder_positions,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None


def quantises_while_loading(resolved: ResolvedRun) -> bool:
    """Whether weights of which a rank has complete rows are quantised while they are read (`WeightStore.fill`)."""
    options, backend = resolved.config.model, resolved.config.executor.device_backend
    is_on_cpu = resolved.device_type == "cpu" and backend != "triton"
    return options.quantization is not None and is_on_cpu and options.load_format != "sharded_state"


def loading_bytes(resolved: ResolvedRun, rank: int, stored: StoredWeights = NOTHING_STORED) -> int:
    """Bytes of a rank's weights while they are loaded, at most."""
    model_config, layout, dtype = resolved.model_config, resolved.layout, resolved.dtype
    quantization = resolved.config.model.quantization if quantises_while_loading(resolved) else None
    num_bytes = weights_bytes(model_config, layout, rank, dtype, resolved.device_type, quantization, stored)
    return num_bytes + (0 if quantization is None else unquantised_part_bytes(model_config, layout, rank, dtype))


def check_memory(
    resolved: ResolvedRun, rank: int, num_local_ranks: int, total_bytes: int, stored: StoredWeights = NOTHING_STORED
) -> None:
    """Raise ConfigError, before anything is allocated, if `total_bytes` of memory are too few for the weights, or for
    the cache of `cache.num_blocks`, of the ranks that share it, all about as large as this one. `stored`: see
    `weights_bytes`.
    """
    needed = num_local_ranks * loading_bytes(resolved, rank, stored)
    needed += num_local_ranks * draft_weights_bytes(resolved, rank)
    ranks = "this rank" if num_local_ranks == 1 else f"the {num_local_ranks} ranks here"
    if needed > total_bytes:
        raise ConfigError(
            f"model.path={resolved.model_folder} is too large: {resolved.model_config.num_parameters:,} parameters in "
            f"{resolved.dtype}, of which {ranks} would hold {format_bytes(needed)} ({needed:,} bytes), and there are "
            f"{format_bytes(total_bytes)} ({total_bytes:,} bytes) of memory: use more nodes or devices (parallel.*), "
            f"or check config.json"
        )
    spec, need = cache_spec_of(resolved, rank), _state_need(resolved)
    given = {"scheduler.max_num_seqs": need.num_seqs, "cache.num_state_snapshots": need.num_snapshots}
    for key, number in given.items():
        needed = num_local_ranks * (number or 0) * spec.slot_bytes
        if needed > total_bytes:
            raise ConfigError(
                f"{key}={number} is too large: {ranks} would hold {format_bytes(needed)} of recurrent states, "
                f"{format_bytes(spec.slot_bytes)} each, and there are {format_bytes(total_bytes)} of memory: lower it, "
                f"or leave it out to use what fits"
            )
    num_blocks = resolved.config.cache.num_blocks
    if num_blocks is None or resolved.model_config.is_encoder:
        return
    needed = num_local_ranks * num_blocks * spec.row_block_bytes
    if needed > total_bytes:
        raise ConfigError(
            f"cache.num_blocks={num_blocks} is too large: {ranks} would hold {format_bytes(needed)} of blocks, and "
            f"there are {format_bytes(total_bytes)} of memory: lower it, or leave it out to use what fits"
        )


def resolve_swap_space_bytes(resolved: ResolvedRun) -> int:
    """One rank's bytes of host memory for swapped-out blocks; 0 by default if the cache itself is in host memory."""
    wanted = resolved.config.cache.swap_space_gib
    if wanted is None:
        takes_host_memory = resolved.device_type == "cpu" and resolved.config.cache.num_blocks is None
        wanted = 0.0 if takes_host_memory else _DEFAULT_SWAP_SPACE_GIB
    return int(wanted * 2**30)


def num_tier_blocks(resolved: ResolvedRun, block_bytes: int) -> int:
    """Blocks of the host tier; as many as can be in use at once where a block takes no bytes."""
    num_bytes = int(resolved.config.cache.host_tier_gib * 2**30)
    if num_bytes and not block_bytes:
        return resolve_cache_need(resolved).num_blocks(resolved.config.cache.block_size)
    return num_bytes // max(block_bytes, 1)


def resolve_cache_need(resolved: ResolvedRun) -> CacheNeed:
    """The need of the maximum number of sequences."""
    return CacheNeed(resolved.max_num_seqs, resolved.max_model_len, resolved.max_encoder_positions)


def cache_spec_of(resolved: ResolvedRun, rank: int) -> CacheSpec:
    """One rank's share of the cache."""
    block_size, model_config, grouping = resolved.config.cache.block_size, resolved.model_config, grouping_of(resolved)
    spec = cache_spec(model_config, resolved.layout, rank, resolved.dtype, block_size, resolved.most_drafts)
    spec = replace(spec, draft_layers=draft_layers(resolved, rank), block_dtype_bytes=resolved.block_dtype_bytes)
    if not grouping.groups.num_windows:
        return spec
    indices = stage_of(resolved.layout, model_config, rank).indices
    parts = [parts_of_entries(model_config.layers[index], block_size) for index in indices]
    layers = [kept if each is None else each[0] for kept, each in zip(spec.layers, parts, strict=True)]
    return replace(
        spec,
        layers=(*layers, *[each[1] for each in parts if each is not None]),
        groups=grouping.groups,
        group_of=group_of_stage(grouping, model_config, indices),
        part_of=tuple([index for index, each in enumerate(parts) if each is not None]),
    )


def adapters_bytes_of(resolved: ResolvedRun, rank: int) -> int:
    """Bytes that a rank's LoRA adapters may take; 0 for a run without adapters."""
    limits = resolved.config.model.adapter_limits
    if limits is None:
        return 0
    return adapter_bytes(resolved.model_config, resolved.layout, rank, resolved.dtype, limits)


def size_rank(resolved: ResolvedRun, rank: int, measurement: MemoryMeasurement) -> CacheSizing:
    """Blocks of one rank, from a measurement or from `cache.num_blocks`; 0 for an encoder, and without attention."""
    cache = resolved.config.cache
    if resolved.model_config.is_encoder:
        # Keys and values of the largest step, in one layer, whose memory all layers use in turn.
        num_bytes = format_bytes(num_step_blocks(resolved) * cache_spec_of(resolved, rank).block_bytes)
        return CacheSizing(0, 0, f"no cache, because attention is bidirectional; a step has a buffer of {num_bytes}")
    spec, swap_space_bytes = cache_spec_of(resolved, rank), resolve_swap_space_bytes(resolved)
    if resolved.model_config.is_attention_free:
        states = _size_states(resolved, spec, measurement, 0)
        return size_without_blocks(measurement, cache.gpu_memory_utilization, states)
    states = _size_states(resolved, spec, measurement, swap_space_bytes) if spec.states else NO_STATES
    return size_cache(
        spec,
        measurement,
        replace(resolve_cache_need(resolved), max_num_seqs=states.num_seqs or resolved.max_num_seqs),
        num_blocks=cache.num_blocks,
        memory_utilization=cache.gpu_memory_utilization,
        swap_space_bytes=swap_space_bytes,
        is_swap_space_on_device=resolved.device_type == "cpu",
        states=states,
    )


def _state_need(resolved: ResolvedRun) -> StateNeed:
    """Wanted numbers of state slots."""
    config = resolved.config
    return StateNeed(
        config.scheduler.max_num_seqs,
        resolved.max_num_seqs,
        config.cache.num_state_snapshots,
        has_snapshots=config.cache.enable_prefix_caching,
        max_model_len=resolved.max_sequence_len,
        num_blocks=config.cache.num_blocks,
    )


def is_size_known(resolved: ResolvedRun) -> bool:
    """Whether the sizes of the cache depend on no measurement."""
    if resolved.model_config.has_states:
        return _state_need(resolved).is_given
    return resolved.model_config.is_encoder or resolved.config.cache.num_blocks is not None


def _size_states(
    resolved: ResolvedRun, spec: CacheSpec, measurement: MemoryMeasurement, swap_space_bytes: int
) -> StateSizing:
    """Raises ConfigError for numbers that do not fit. Of swap space in the same memory as much is subtracted as the
    highest number of sequences could use, because the part that is used depends on the numbers found here.
    """
    left_bytes = measurement.left_bytes(resolved.config.cache.gpu_memory_utilization)
    if resolved.device_type == "cpu":
        most_blocks = resolve_cache_need(resolved).num_blocks(spec.block_size, spec.groups)
        most_bytes = most_blocks * spec.block_bytes + resolved.max_num_seqs * spec.slot_bytes
        left_bytes -= min(swap_space_bytes, most_bytes)
    try:
        return size_states(spec, _state_need(resolved), left_bytes, swap_space_bytes=swap_space_bytes)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def num_step_blocks(resolved: ResolvedRun) -> int:
    """Blocks that suffice for any step of an encoder, however its tokens are divided among sequences."""
    block_size, num_tokens = resolved.config.cache.block_size, resolved.config.scheduler.max_num_batched_tokens
    return num_tokens // block_size + min(num_tokens, resolved.max_num_seqs)


def is_estimate_enough(resolved: ResolvedRun, rank: int, measurement: MemoryMeasurement) -> bool:
    """Whether the cache meets the maximum need even if activations take much more than `measurement` says."""
    pessimistic = replace(measurement, activation_bytes=_ESTIMATE_MARGIN * measurement.activation_bytes)
    try:
        found, most = (
            size_rank(resolved, rank, each)
            for each in (pessimistic, replace(measurement, total_bytes=_UNLIMITED_BYTES))
        )
    except ConfigError:
        return False
    return (found.num_device_blocks, found.states) == (most.num_device_blocks, most.states)
