"""What a run comes to before it starts: dtype, longest sequence, swap space, blocks of a rank.

Knows sizes and rules. Both the run and its plan in words (`plan_text.py`) take them from here.
"""

from dataclasses import replace
from typing import Final

from kv_cache.cache_sizing import CacheNeed, CacheSizing, MemoryMeasurement, check_cache_holds_one_sequence, size_cache
from spmd_worker.config.schema import RunConfig
from spmd_worker.distributed.topology import RankLayout
from spmd_worker.errors import ConfigError
from spmd_worker.memory.estimate import cache_spec
from spmd_worker.model_config.model_config import ModelConfig

_DEFAULT_SWAP_SPACE_GIB: Final = 4.0
"""A rank's."""

_ESTIMATE_MARGIN: Final = 2
"""Activations were never seen to take this many times their estimate."""


def resolve_dtype(config: RunConfig, model_config: ModelConfig, device: str) -> str:
    """The dtype the model runs in. Raises ConfigError for one the device cannot compute with."""
    if device == "cpu" and config.model.dtype == "float16":
        raise ConfigError("model.dtype=float16 is not supported on the CPU: use bfloat16 (as small) or float32 (exact)")
    if config.model.dtype != "auto":
        return config.model.dtype
    return "float32" if device == "cpu" and model_config.dtype == "float16" else model_config.dtype


def resolve_max_model_len(config: RunConfig, model_config: ModelConfig) -> int:
    """Longest sequence, tokens. Raises ConfigError for more than the model was made for."""
    wanted = config.model.max_model_len
    if wanted is not None and wanted > model_config.max_model_len:
        raise ConfigError(
            f"model.max_model_len={wanted} is more than the model's {model_config.max_model_len} tokens: "
            f"lower it or leave it null"
        )
    max_model_len = wanted or model_config.max_model_len
    tokens = config.scheduler.max_num_batched_tokens
    if not config.scheduler.enable_chunked_prefill and tokens < max_model_len:
        raise ConfigError(
            f"scheduler.max_num_batched_tokens={tokens} cannot hold a prompt of model.max_model_len={max_model_len} "
            f"with scheduler.enable_chunked_prefill=false: raise it to {max_model_len} or enable chunked prefill"
        )
    return max_model_len


def check_cache_setting(config: RunConfig, model_config: ModelConfig) -> None:
    """Raise ConfigError when `cache.num_blocks` cannot hold one sequence; what is measured is checked once it is."""
    if config.cache.num_blocks is None:
        return
    try:
        check_cache_holds_one_sequence(
            config.cache.num_blocks, config.cache.block_size, resolve_max_model_len(config, model_config)
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None


def resolve_swap_space_bytes(config: RunConfig, device_type: str) -> int:
    """Host memory of one rank for swapped-out blocks; `device_type` is `cpu` or `cuda`.

    By default there is none where the cache itself takes all of the host's memory that it can use.
    """
    wanted = config.cache.swap_space_gib
    if wanted is None:
        takes_host_memory = device_type == "cpu" and config.cache.num_blocks is None
        wanted = 0.0 if takes_host_memory else _DEFAULT_SWAP_SPACE_GIB
    return int(wanted * 2**30)


def resolve_cache_need(config: RunConfig, model_config: ModelConfig) -> CacheNeed:
    """What may run at once."""
    return CacheNeed(config.scheduler.max_num_seqs, resolve_max_model_len(config, model_config))


def size_rank(
    config: RunConfig,
    model_config: ModelConfig,
    layout: RankLayout,
    rank: int,
    dtype: str,
    device_type: str,
    measurement: MemoryMeasurement,
) -> CacheSizing:
    """Blocks of one rank, from a measurement or from `cache.num_blocks`."""
    return size_cache(
        cache_spec(model_config, layout, rank, dtype, config.cache.block_size),
        measurement,
        resolve_cache_need(config, model_config),
        num_blocks=config.cache.num_blocks,
        memory_utilization=config.cache.gpu_memory_utilization,
        swap_space_bytes=resolve_swap_space_bytes(config, device_type),
        is_swap_space_on_device=device_type == "cpu",
    )


def is_estimate_enough(
    config: RunConfig,
    model_config: ModelConfig,
    layout: RankLayout,
    rank: int,
    dtype: str,
    device_type: str,
    measurement: MemoryMeasurement,
) -> bool:
    """Whether the cache is as large as it may be useful even if activations take much more than `measurement` says."""
    pessimistic = replace(measurement, activation_bytes=_ESTIMATE_MARGIN * measurement.activation_bytes)
    sizing = size_rank(config, model_config, layout, rank, dtype, device_type, pessimistic)
    return sizing.num_device_blocks >= resolve_cache_need(config, model_config).num_blocks(config.cache.block_size)
