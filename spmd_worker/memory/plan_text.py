"""The layout and memory plan of a run, in words, made without weights, devices or other ranks.

Ranks that hold the same share one line. Knows sizes and the memory this machine has now. A GPU's memory is measured by
the run itself, which alone may touch it: the plan says what GPUs of common sizes would hold.
"""

from dataclasses import dataclass
from itertools import takewhile
from typing import Final

from kv_cache.block import num_blocks_for
from kv_cache.cache_sizing import (
    CacheSizing,
    MemoryMeasurement,
    check_cache_holds_one_sequence,
    format_bytes,
    num_swap_blocks,
)
from spmd_worker.config.schema import RunConfig
from spmd_worker.distributed.topology import RankLayout, stage_of
from spmd_worker.memory import host
from spmd_worker.memory.estimate import RankSizes, activation_bytes, cache_spec, rank_sizes, weights_bytes
from spmd_worker.memory.plan import (
    resolve_cache_need,
    resolve_dtype,
    resolve_max_model_len,
    resolve_swap_space_bytes,
    size_rank,
)
from spmd_worker.model_config.model_config import ModelConfig

_OUTSIDE_BYTES: Final = {"cpu": 300 * 2**20, "cuda": 2**30}
"""About what a process holds beside its tensors: torch itself, and on a GPU CUDA's context and libraries."""

_GPU_GIB: Final = (24, 48, 80, 141)

_COLUMNS: Final = ("ranks", "layers", "heads", "KV heads", "columns", "vocabulary", "weights", "activations", "cache")


@dataclass(frozen=True, slots=True)
class RankShare:
    """What a rank holds of the model, and in bytes."""

    sizes: RankSizes
    weights_bytes: int
    activation_bytes: int
    block_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """`shares` has one entry a rank; `sizings` too, but is empty when only the run itself can measure the memory."""

    config: RunConfig
    model_config: ModelConfig
    layout: RankLayout
    device: str
    dtype: str
    shares: tuple[RankShare, ...]
    sizings: tuple[CacheSizing, ...]

    @property
    def max_model_len(self) -> int:
        """Longest sequence, tokens."""
        return resolve_max_model_len(self.config, self.model_config)

    @property
    def num_blocks_of_longest(self) -> int:
        """Blocks of a sequence of `max_model_len` tokens."""
        return num_blocks_for(self.max_model_len, self.config.cache.block_size)

    @property
    def num_blocks(self) -> int | None:
        """Blocks that every rank will have; None when only the run can tell."""
        return min((sizing.num_device_blocks for sizing in self.sizings), default=None)

    @property
    def num_swap_blocks(self) -> int:
        """Blocks of swap space that every rank will have."""
        num_bytes, need = (
            resolve_swap_space_bytes(self.config, self.device),
            resolve_cache_need(self.config, self.model_config),
        )
        return min(
            num_swap_blocks(
                cache_spec(self.model_config, self.layout, rank, self.dtype, self.config.cache.block_size),
                num_bytes,
                need,
            )
            for rank in range(self.layout.world_size)
        )

    @property
    def error_result(self) -> str | None:
        """Why a run here would be refused: the cache cannot hold one sequence. None when it can, or nobody knows."""
        if self.num_blocks is None:
            return None
        is_profiled = self.config.cache.num_blocks is None
        try:
            check_cache_holds_one_sequence(
                self.num_blocks,
                self.config.cache.block_size,
                self.max_model_len,
                is_profiled=is_profiled,
                has_swap_space_on_device=self.device == "cpu" and self.num_swap_blocks > 0,
            )
        except ValueError as error:
            return str(error)
        return None


def make_plan(config: RunConfig, model_config: ModelConfig, layout: RankLayout) -> MemoryPlan:
    """Raises ConfigError for a dtype or length that cannot run. Its CPU ranks share this machine's memory equally."""
    device = "cpu" if config.device == "auto" else config.device
    dtype = resolve_dtype(config, model_config, device)
    shares = tuple(_share(config, model_config, layout, rank, dtype, device) for rank in range(layout.world_size))
    sizings: tuple[CacheSizing, ...] = ()
    if device == "cpu" or config.cache.num_blocks is not None:
        total = host.available_bytes() // layout.world_size
        sizings = tuple(
            _sizing(config, model_config, layout, rank, dtype, share, total, device)
            for rank, share in enumerate(shares)
        )
    return MemoryPlan(config, model_config, layout, device, dtype, shares, sizings)


def describe_plan(plan: MemoryPlan) -> str:
    """Lines for people: the model, the ranks as a table, the cache and what fits in it."""
    model_config, layout = plan.model_config, plan.layout
    model = (
        f"{model_config.architecture}, {model_config.num_parameters:,} parameters, {model_config.num_layers} layers, "
        f"hidden size {model_config.hidden_size:,}, "
        f"{model_config.num_heads} heads, {model_config.num_kv_heads} key-value heads"
    )
    ranks = (
        f"{layout.world_size} = {layout.data_parallel_size} data x {layout.pipeline_parallel_size} pipeline x "
        f"{layout.tensor_parallel_size} tensor"
    )
    lines = [f"model      {model}", f"computes   {_where(plan)}", f"ranks      {ranks}", *_replicas(plan)]
    lines += ["", *_table(plan), ""]
    lines += _describe_cache(plan) if plan.sizings else _describe_gpus(plan)
    error_result = plan.error_result
    return "\n".join([*lines, *([f"refused    {error_result}"] if error_result else [])])


def _share(
    config: RunConfig, model_config: ModelConfig, layout: RankLayout, rank: int, dtype: str, device: str
) -> RankShare:
    scheduler = config.scheduler
    return RankShare(
        rank_sizes(model_config, layout, rank),
        weights_bytes(model_config, layout, rank, dtype, device),
        activation_bytes(model_config, layout, rank, dtype, scheduler.max_num_batched_tokens, scheduler.max_num_seqs),
        cache_spec(model_config, layout, rank, dtype, config.cache.block_size).block_bytes,
    )


def _sizing(
    config: RunConfig,
    model_config: ModelConfig,
    layout: RankLayout,
    rank: int,
    dtype: str,
    share: RankShare,
    total_bytes: int,
    device: str,
) -> CacheSizing:
    measurement = MemoryMeasurement(
        total_bytes, share.weights_bytes, share.activation_bytes, _OUTSIDE_BYTES[device], "estimated"
    )
    return size_rank(config, model_config, layout, rank, dtype, device, measurement)


def _where(plan: MemoryPlan) -> str:
    if plan.config.device == "auto":
        return f"in {plan.dtype} on the CPU (device=auto takes a GPU where there is one: device=cuda plans for it)"
    return f"in {plan.dtype} on {'the CPU' if plan.device == 'cpu' else 'one GPU a rank'}"


def _replicas(plan: MemoryPlan) -> list[str]:
    num_replicas = plan.layout.data_parallel_size
    if num_replicas == 1:
        return []
    size = plan.layout.world_size // num_replicas
    ranks = "one rank" if size == 1 else f"{size} ranks"
    what = "each with a whole model and a cache of its own; they draw rows from one queue"
    return [f"replicas   {num_replicas} of {ranks}, {what}"]


def _table(plan: MemoryPlan) -> list[str]:
    """One line for each different share, aligned."""
    ranks_of: dict[RankShare, list[int]] = {}
    for rank, share in enumerate(plan.shares):
        ranks_of.setdefault(share, []).append(rank)
    rows = [_COLUMNS, *(_row(plan, share, ranks) for share, ranks in ranks_of.items())]
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))])
        for row in rows
    ]


def _row(plan: MemoryPlan, share: RankShare, ranks: list[int]) -> tuple[str, ...]:
    sizes = share.sizes
    cache = "measured" if plan.num_blocks is None else format_bytes(plan.num_blocks * share.block_bytes)
    counts = (
        stage_of(plan.layout, plan.model_config, ranks[0]).num_layers,
        sizes.num_heads,
        sizes.num_kv_heads,
        sizes.num_columns,
        sizes.num_vocabulary_rows,
    )
    in_bytes = (format_bytes(share.weights_bytes), format_bytes(share.activation_bytes), cache)
    return (_spans(ranks), *(f"{count:,}" for count in counts), *in_bytes)


def _spans(ranks: list[int]) -> str:
    """`0-3,6` for 0, 1, 2, 3, 6."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def _describe_cache(plan: MemoryPlan) -> list[str]:
    assert plan.num_blocks is not None, "the caller has sizings"
    block_size, fewest = plan.config.cache.block_size, min(plan.sizings, key=lambda each: each.num_device_blocks)
    # The shares of the device's memory are the indented lines under the first; swap space has a line of its own here.
    reasons = list(takewhile(lambda line: line.startswith(" "), fewest.reason.splitlines()[1:]))
    return [
        f"blocks     {plan.num_blocks:,} of {block_size} tokens on every rank, {plan.num_blocks * block_size:,} tokens "
        f"in all, {_block_bytes(plan)} each",
        f"sequences  {_sequences(plan, plan.num_blocks)}",
        f"swap       {_swap_space(plan)}",
        *(f"{'why' if index == 0 else '':<11}{reason.strip()}" for index, reason in enumerate(reasons)),
    ]


def _sequences(plan: MemoryPlan, num_blocks: int) -> str:
    where = " in each replica" if plan.layout.data_parallel_size > 1 else ""
    return (
        f"{num_blocks // plan.num_blocks_of_longest:,} of {plan.max_model_len:,} tokens (model.max_model_len) fit at "
        f"once{where}; scheduler.max_num_seqs is {plan.config.scheduler.max_num_seqs:,}"
    )


def _swap_space(plan: MemoryPlan) -> str:
    num_blocks = plan.num_swap_blocks
    if num_blocks == 0:
        return "none (cache.swap_space_gib): what is preempted is computed again"
    num_bytes = num_blocks * max(share.block_bytes for share in plan.shares)
    return f"{num_blocks:,} blocks, {format_bytes(num_bytes)} of host memory, on every rank (cache.swap_space_gib)"


def _block_bytes(plan: MemoryPlan) -> str:
    return format_bytes(max(share.block_bytes for share in plan.shares))


def _describe_gpus(plan: MemoryPlan) -> list[str]:
    """What GPUs of common sizes would hold, because the run measures its own."""
    config, model_config, layout = plan.config, plan.model_config, plan.layout
    lines = [
        f"blocks     measured when the run starts, or set by cache.num_blocks: {_block_bytes(plan)} each, "
        f"{plan.num_blocks_of_longest:,} for a sequence of {plan.max_model_len:,} tokens (model.max_model_len)",
        f"swap       {_swap_space(plan)}",
        f"about      with cache.gpu_memory_utilization={config.cache.gpu_memory_utilization:g} a rank has, on a GPU of",
    ]
    for gib in _GPU_GIB:
        num_blocks = min(
            _sizing(config, model_config, layout, rank, plan.dtype, share, gib * 2**30, "cuda").num_device_blocks
            for rank, share in enumerate(plan.shares)
        )
        lines.append(
            f"{'':<11}{gib:>3} GiB  {num_blocks:>9,} blocks: {num_blocks // plan.num_blocks_of_longest:,} sequences"
        )
    return lines
