"""What memory a run comes to: swap space, blocks of a rank.

Both the run and its plan in words (`plan_text.py`) take them from here.
"""

from dataclasses import replace
from typing import Final

from kv_cache.cache_sizing import (
    CacheNeed,
    CacheSizing,
    MemoryMeasurement,
    check_cache_holds_one_sequence,
    format_bytes,
    size_cache,
)
from kv_cache.cache_spec import CacheSpec
from spmd_worker.base.errors import ConfigError
from spmd_worker.resolved import ResolvedRun
from spmd_worker.worker.memory.estimate import cache_spec, weights_bytes

_DEFAULT_SWAP_SPACE_GIB: Final = 4.0
"""A rank's."""

_ESTIMATE_MARGIN: Final = 2
"""Activations were never seen to take this many times their estimate."""


def check_cache_setting(resolved: ResolvedRun) -> None:
    """Raise ConfigError when `cache.num_blocks` cannot hold one sequence; what is measured is checked once it is."""
    cache = resolved.config.cache
    if cache.num_blocks is None or resolved.model_config.is_encoder:
        return
    try:
        check_cache_holds_one_sequence(cache.num_blocks, cache.block_size, resolved.max_model_len)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def check_memory(resolved: ResolvedRun, rank: int, num_local_ranks: int, total_bytes: int) -> None:
    """Raise ConfigError when the weights of the ranks that share `total_bytes` of memory, each of which has about as
    much as this one, are more than that, or the cache of `cache.num_blocks` is: before anything is allocated.
    """
    needed = num_local_ranks * weights_bytes(
        resolved.model_config, resolved.layout, rank, resolved.dtype, resolved.device_type
    )
    ranks = "this rank" if num_local_ranks == 1 else f"the {num_local_ranks} ranks here"
    if needed > total_bytes:
        raise ConfigError(
            f"model.path={resolved.model_folder} is too large: {resolved.model_config.num_parameters:,} parameters in "
            f"{resolved.dtype}, of which {ranks} would hold {format_bytes(needed)} ({needed:,} bytes), and there are "
            f"{format_bytes(total_bytes)} ({total_bytes:,} bytes) of memory: take more nodes or devices (parallel.*), "
            f"or check config.json"
        )
    num_blocks = resolved.config.cache.num_blocks
    if num_blocks is None or resolved.model_config.is_encoder:
        return
    needed = num_local_ranks * num_blocks * cache_spec_of(resolved, rank).block_bytes
    if needed > total_bytes:
        raise ConfigError(
            f"cache.num_blocks={num_blocks} is too large: {ranks} would hold {format_bytes(needed)} of blocks, and "
            f"there are {format_bytes(total_bytes)} of memory: lower it, or leave it out for what there is room for"
        )


def resolve_swap_space_bytes(resolved: ResolvedRun) -> int:
    """Host memory of one rank for swapped-out blocks.

    By default there is none where the cache itself takes all of the host's memory that it can use.
    """
    wanted = resolved.config.cache.swap_space_gib
    if wanted is None:
        takes_host_memory = resolved.device_type == "cpu" and resolved.config.cache.num_blocks is None
        wanted = 0.0 if takes_host_memory else _DEFAULT_SWAP_SPACE_GIB
    return int(wanted * 2**30)


def resolve_cache_need(resolved: ResolvedRun) -> CacheNeed:
    """What may run at once."""
    return CacheNeed(resolved.config.scheduler.max_num_seqs, resolved.max_model_len)


def cache_spec_of(resolved: ResolvedRun, rank: int) -> CacheSpec:
    """One rank's share of the cache."""
    block_size = resolved.config.cache.block_size
    return cache_spec(resolved.model_config, resolved.layout, rank, resolved.dtype, block_size)


def size_rank(resolved: ResolvedRun, rank: int, measurement: MemoryMeasurement) -> CacheSizing:
    """Blocks of one rank, from a measurement or from `cache.num_blocks`; none of an encoder."""
    cache = resolved.config.cache
    if resolved.model_config.is_encoder:
        room = step_room(resolved, rank)
        return CacheSizing(0, 0, f"no cache: tokens see all of their row; a step keeps {format_bytes(room)} for itself")
    return size_cache(
        cache_spec_of(resolved, rank),
        measurement,
        resolve_cache_need(resolved),
        num_blocks=cache.num_blocks,
        memory_utilization=cache.gpu_memory_utilization,
        swap_space_bytes=resolve_swap_space_bytes(resolved),
        is_swap_space_on_device=resolved.device_type == "cpu",
    )


def step_room(resolved: ResolvedRun, rank: int) -> int:
    """Bytes of keys and values of an encoder's largest step, in one layer, whose memory all layers use in turn."""
    return num_step_blocks(resolved) * cache_spec_of(resolved, rank).block_bytes


def num_step_blocks(resolved: ResolvedRun) -> int:
    """Blocks in which a step of an encoder finds room, however its tokens are shared among its sequences."""
    scheduler, block_size = resolved.config.scheduler, resolved.config.cache.block_size
    num_tokens = scheduler.max_num_batched_tokens
    return num_tokens // block_size + min(num_tokens, scheduler.max_num_seqs)


def is_estimate_enough(resolved: ResolvedRun, rank: int, measurement: MemoryMeasurement) -> bool:
    """Whether the cache is as large as it may be useful even if activations take much more than `measurement` says."""
    pessimistic = replace(measurement, activation_bytes=_ESTIMATE_MARGIN * measurement.activation_bytes)
    sizing = size_rank(resolved, rank, pessimistic)
    return sizing.num_device_blocks >= resolve_cache_need(resolved).num_blocks(resolved.config.cache.block_size)
