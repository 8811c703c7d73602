"""The layout and memory plan of a run, in words, made without weights, devices or other ranks.

Knows sizes. The numbers are those the run itself would come to if it measured the memory this machine has now.
"""

from dataclasses import dataclass

from kv_cache.cache_sizing import (
    CacheSizing,
    MemoryMeasurement,
    check_cache_holds_one_sequence,
    format_bytes,
    size_cache,
)
from spmd_worker.config import ConfigError, RunConfig
from spmd_worker.memory import host
from spmd_worker.memory.estimate import activation_bytes, cache_spec, rank_sizes, weights_bytes
from spmd_worker.model_shape import ModelShape
from spmd_worker.parallel.layout import RankLayout


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One rank's share, bytes, and the cache it could have."""

    rank: int
    weights_bytes: int
    activation_bytes: int
    block_bytes: int
    sizing: CacheSizing


def resolve_dtype(config: RunConfig, shape: ModelShape, device: str) -> str:
    """The dtype the model runs in. Raises ConfigError for one the device cannot compute with."""
    if device == "cpu" and config.model.dtype == "float16":
        raise ConfigError("model.dtype=float16 is not supported on the CPU: use bfloat16 (as small) or float32 (exact)")
    if config.model.dtype != "auto":
        return config.model.dtype
    return "float32" if device == "cpu" and shape.dtype == "float16" else shape.dtype


def resolve_max_model_len(config: RunConfig, shape: ModelShape) -> int:
    """Longest sequence, tokens. Raises ConfigError for more than the model was made for."""
    wanted = config.model.max_model_len
    if wanted is not None and wanted > shape.max_model_len:
        raise ConfigError(
            f"model.max_model_len={wanted} is more than the model's {shape.max_model_len} tokens: "
            f"lower it or leave it null"
        )
    max_model_len = wanted or shape.max_model_len
    tokens = config.scheduler.max_num_batched_tokens
    if not config.scheduler.enable_chunked_prefill and tokens < max_model_len:
        raise ConfigError(
            f"scheduler.max_num_batched_tokens={tokens} cannot hold a prompt of model.max_model_len={max_model_len} "
            f"with scheduler.enable_chunked_prefill=false: raise it to {max_model_len} or enable chunked prefill"
        )
    return max_model_len


def size_rank(
    config: RunConfig, shape: ModelShape, layout: RankLayout, rank: int, dtype: str, measurement: MemoryMeasurement
) -> CacheSizing:
    """Blocks of one rank, from a measurement or from `cache.num_blocks`."""
    return size_cache(
        cache_spec(shape, layout, rank, dtype, config.cache.block_size),
        measurement,
        num_blocks=config.cache.num_blocks,
        memory_utilization=config.cache.gpu_memory_utilization,
        swap_space_bytes=int(config.cache.swap_space_gib * 2**30),
        max_num_seqs=config.scheduler.max_num_seqs,
        max_model_len=resolve_max_model_len(config, shape),
    )


def plan_rank(config: RunConfig, shape: ModelShape, layout: RankLayout, rank: int, dtype: str) -> RankPlan:
    """What `rank` will hold, on ranks that share this machine's memory equally."""
    weights = weights_bytes(shape, layout, rank, dtype)
    tokens, rows = config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs
    activations = activation_bytes(shape, layout, rank, dtype, tokens, rows)
    share = host.available_bytes() // layout.world_size
    measurement = MemoryMeasurement(share, weights, activations, host.resident_bytes())
    block_bytes = cache_spec(shape, layout, rank, dtype, config.cache.block_size).block_bytes
    return RankPlan(rank, weights, activations, block_bytes, size_rank(config, shape, layout, rank, dtype, measurement))


def describe_plan(config: RunConfig, shape: ModelShape, layout: RankLayout, dtype: str) -> str:
    """Several lines for people. Raises ConfigError when the cache could not hold one sequence."""
    plans = [plan_rank(config, shape, layout, rank, dtype) for rank in range(layout.world_size)]
    num_blocks = min(plan.sizing.num_device_blocks for plan in plans)
    max_model_len, block_size = resolve_max_model_len(config, shape), config.cache.block_size
    lines = [
        f"model     {shape.architecture}, {shape.num_parameters:,} parameters, {shape.num_layers} layers, "
        f"hidden {shape.hidden_size}, {shape.num_heads} heads, {shape.num_kv_heads} key-value heads, {dtype}",
        f"ranks     {layout.world_size} = {layout.data_parallel_size} data x {layout.pipeline_parallel_size} pipeline "
        f"x {layout.tensor_parallel_size} tensor",
        *(_describe_rank(plan, shape, layout) for plan in plans),
        f"blocks    {num_blocks:,} of {block_size} tokens on every rank ({num_blocks * block_size:,} tokens)",
        f"fits      {num_blocks * block_size // max_model_len:,} sequences of {max_model_len:,} tokens at once; "
        f"scheduler.max_num_seqs is {config.scheduler.max_num_seqs}",
        *(f"          {line}" for line in plans[0].sizing.reason.splitlines()),
    ]
    try:
        check_cache_holds_one_sequence(
            num_blocks, block_size, max_model_len, is_profiled=config.cache.num_blocks is None
        )
    except ValueError as error:
        lines.append(f"refused   {error}")
    return "\n".join(lines)


def _describe_rank(plan: RankPlan, shape: ModelShape, layout: RankLayout) -> str:
    sizes = rank_sizes(shape, layout, plan.rank)
    first_head = layout.tensor_rank(plan.rank) * sizes.num_heads
    return (
        f"rank {plan.rank:<4} layers 0-{shape.num_layers - 1}, heads {first_head}-{first_head + sizes.num_heads - 1}, "
        f"{sizes.num_kv_heads} key-value heads, {sizes.num_columns} columns: "
        f"weights {format_bytes(plan.weights_bytes)}, activations {format_bytes(plan.activation_bytes)}, "
        f"cache {format_bytes(plan.sizing.num_device_blocks * plan.block_bytes)}"
    )
