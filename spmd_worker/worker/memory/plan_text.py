"""The layout and memory plan of a run, in words, made without weights, devices or other ranks.

Ranks that hold the same share one line. A GPU's memory is measured by the run itself, which alone may touch it: the
plan says what GPUs of common sizes would hold.
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
from spmd_worker.base.errors import ConfigError
from spmd_worker.model_config.model_config import DTYPE_BYTES
from spmd_worker.ranks.topology import stage_of
from spmd_worker.replica.grammar.compiler import LEXER_STATE_BYTES, LIMITS
from spmd_worker.resolved import ResolvedRun
from spmd_worker.worker.memory import host
from spmd_worker.worker.memory.estimate import (
    RankSizes,
    activation_bytes,
    expert_bytes,
    rank_sizes,
    screen_bytes_of,
    weights_bytes,
)
from spmd_worker.worker.memory.plan import (
    cache_spec_of,
    check_memory,
    num_step_blocks,
    resolve_cache_need,
    resolve_swap_space_bytes,
    size_rank,
)

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

    resolved: ResolvedRun
    shares: tuple[RankShare, ...]
    sizings: tuple[CacheSizing, ...]

    @property
    def num_blocks_of_longest(self) -> int:
        """Blocks of a sequence of `max_model_len` tokens."""
        return num_blocks_for(self.resolved.max_model_len, self.resolved.config.cache.block_size)

    @property
    def num_blocks(self) -> int | None:
        """Blocks that every rank will have; None when only the run can tell."""
        return min((sizing.num_device_blocks for sizing in self.sizings), default=None)

    @property
    def num_swap_blocks(self) -> int:
        """Blocks of swap space that every rank will have."""
        num_bytes, need = resolve_swap_space_bytes(self.resolved), resolve_cache_need(self.resolved)
        ranks = range(self.resolved.layout.world_size)
        return min(num_swap_blocks(cache_spec_of(self.resolved, rank), num_bytes, need) for rank in ranks)

    @property
    def error_result(self) -> str | None:
        """Why a run here would be refused: memory cannot hold the weights or the cache, or the cache one sequence. None
        when they can, or nobody knows.
        """
        num_ranks, given = self.resolved.layout.world_size, _given_bytes(self.resolved)
        try:
            if self.resolved.device_type == "cpu":
                check_memory(self.resolved, 0, num_ranks, host.total_bytes() if given is None else given)
            elif given is not None:
                for rank in range(num_ranks):
                    check_memory(self.resolved, rank, 1, given)
        except ConfigError as error:
            return str(error)
        if self.num_blocks is None or self.resolved.model_config.is_encoder:
            return None
        cache = self.resolved.config.cache
        try:
            check_cache_holds_one_sequence(
                self.num_blocks,
                cache.block_size,
                self.resolved.max_model_len,
                is_profiled=cache.num_blocks is None,
                has_swap_space_on_device=self.resolved.device_type == "cpu" and self.num_swap_blocks > 0,
            )
        except ValueError as error:
            return str(error)
        return None


def make_plan(resolved: ResolvedRun) -> MemoryPlan:
    """A plan for the resolved device; CPU ranks share the machine's memory equally."""
    num_ranks = resolved.layout.world_size
    shares = tuple(_share(resolved, rank) for rank in range(num_ranks))
    sizings: tuple[CacheSizing, ...] = ()
    is_known = resolved.config.cache.num_blocks is not None or resolved.model_config.is_encoder
    given = _given_bytes(resolved)
    if resolved.device_type == "cpu" or is_known or given is not None:
        total = host.available_bytes() if given is None else given
        if given is None or resolved.device_type == "cpu":
            total //= num_ranks
        sizings = tuple(_sizing(resolved, rank, share, total) for rank, share in enumerate(shares))
    return MemoryPlan(resolved, shares, sizings)


def _given_bytes(resolved: ResolvedRun) -> int | None:
    """`plan.memory_gib`: of the machine, or of each rank's GPU."""
    gib = resolved.config.plan.memory_gib
    return None if gib is None else int(gib * 2**30)


def describe_plan(plan: MemoryPlan) -> str:
    """Lines for people: the model, the ranks as a table, the cache and what fits in it."""
    model_config, layout = plan.resolved.model_config, plan.resolved.layout
    model = (
        f"{model_config.architecture}, {model_config.num_parameters:,} parameters, {model_config.num_layers} layers, "
        f"hidden size {model_config.hidden_size:,}, "
        f"{model_config.num_heads} heads, {model_config.num_kv_heads} key-value heads"
    )
    ranks = (
        f"{layout.world_size} = {layout.data_parallel_size} data x {layout.pipeline_parallel_size} pipeline x "
        f"{layout.tensor_parallel_size} tensor"
    )
    lines = [
        f"model      {model}",
        *_quantised(plan),
        *_int8(plan),
        *_screen(plan),
        *_experts(plan),
        f"computes   {_where(plan)}",
        f"ranks      {ranks}",
        *_replicas(plan),
    ]
    lines += ["", *_table(plan), ""]
    lines += _describe_cache(plan) if plan.sizings else _describe_gpus(plan)
    lines += _forms(plan)
    error_result = plan.error_result
    return "\n".join([*lines, *([f"refused    {error_result}"] if error_result else [])])


def _share(resolved: ResolvedRun, rank: int) -> RankShare:
    model_config, layout, scheduler = resolved.model_config, resolved.layout, resolved.config.scheduler
    num_tokens, num_rows = scheduler.max_num_batched_tokens, scheduler.max_num_seqs
    quantization = resolved.config.model.quantization
    weights = weights_bytes(model_config, layout, rank, resolved.dtype, resolved.device_type, quantization)
    weights += _screen_bytes(resolved, rank)
    return RankShare(
        rank_sizes(model_config, layout, rank),
        weights,
        activation_bytes(model_config, layout, rank, resolved.dtype, num_tokens, num_rows, quantization),
        cache_spec_of(resolved, rank).block_bytes,
    )


def _screen_bytes(resolved: ResolvedRun, rank: int) -> int:
    if resolved.config.model.quantization is not None or not resolved.config.executor.argmax_screen:
        return 0
    return screen_bytes_of(resolved.model_config, resolved.layout, rank, resolved.dtype, resolved.device_type)


def _sizing(resolved: ResolvedRun, rank: int, share: RankShare, total_bytes: int) -> CacheSizing:
    outside = _OUTSIDE_BYTES[resolved.device_type]
    measurement = MemoryMeasurement(total_bytes, share.weights_bytes, share.activation_bytes, outside, "estimated")
    return size_rank(resolved, rank, measurement)


def _where(plan: MemoryPlan) -> str:
    dtype = plan.resolved.dtype
    if plan.resolved.config.device == "auto":
        return f"in {dtype} on the CPU (device=auto takes a GPU where there is one: device=cuda plans for it)"
    return f"in {dtype} on {'the CPU' if plan.resolved.device_type == 'cpu' else 'one GPU a rank'}"


def _quantised(plan: MemoryPlan) -> list[str]:
    model_config, dtype = plan.resolved.model_config, plan.resolved.dtype
    if model_config.quantization is None:
        return []
    num_bytes = format_bytes(model_config.num_parameters * DTYPE_BYTES[dtype])
    return [
        f"files      quantised, {model_config.quantization.words}: dequantised to {dtype} when they are loaded, the "
        f"weights take {num_bytes}, as plain ones do"
    ]


def _int8(plan: MemoryPlan) -> list[str]:
    """What the weights take of the rank that has most, once they are quantised, and until then."""
    resolved = plan.resolved
    if resolved.config.model.quantization is None:
        return []
    model_config, layout = resolved.model_config, resolved.layout
    loading = max(
        weights_bytes(model_config, layout, rank, resolved.dtype, resolved.device_type)
        for rank in range(layout.world_size)
    )
    quantised = max(share.weights_bytes for share in plan.shares)
    return [
        f"quantised  to int8, a scale an output, all but the embedding and norms: {format_bytes(quantised)} on a rank, "
        f"scales included; while they are loaded {format_bytes(loading)}, in {resolved.dtype}"
    ]


def _screen(plan: MemoryPlan) -> list[str]:
    """What a head's screen takes of the weights of the rank that has most."""
    num_bytes = max(_screen_bytes(plan.resolved, rank) for rank in range(plan.resolved.layout.world_size))
    if num_bytes == 0:
        return []
    return [
        f"screen     a copy of the head in int8, {format_bytes(num_bytes)} of a rank's weights, where that is "
        f"faster (executor.argmax_screen)"
    ]


def _experts(plan: MemoryPlan) -> list[str]:
    """What they are of the weights, and of them the rank that has most."""
    resolved = plan.resolved
    model_config, layout = resolved.model_config, resolved.layout
    sparse = [layer.experts for layer in model_config.layers if layer.experts is not None]
    if not sparse:
        return []
    size = DTYPE_BYTES[resolved.dtype]
    ranks = range(layout.tensor_parallel_size * layout.pipeline_parallel_size)
    most = max(expert_bytes(model_config, layout, rank, resolved.dtype) for rank in ranks)
    of_rank = "whole ones" if layout.experts is not None else "columns of each"
    return [
        f"experts    {format_bytes(model_config.num_expert_parameters * size)} of "
        f"{format_bytes(model_config.num_parameters * size)} of weights: {sparse[0].num_experts} in each of "
        f"{len(sparse)} layers, {sparse[0].num_chosen} of them a token; a rank has {of_rank}, {format_bytes(most)} at "
        f"most"
    ]


def _replicas(plan: MemoryPlan) -> list[str]:
    num_replicas = plan.resolved.layout.data_parallel_size
    if num_replicas == 1:
        return []
    size = plan.resolved.layout.world_size // num_replicas
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
    num_blocks = num_step_blocks(plan.resolved) if plan.resolved.model_config.is_encoder else plan.num_blocks
    cache = "measured" if num_blocks is None else format_bytes(num_blocks * share.block_bytes)
    counts = (
        stage_of(plan.resolved.layout, plan.resolved.model_config, ranks[0]).num_layers,
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
    if plan.resolved.model_config.is_encoder:
        return _describe_steps(plan)
    block_size, fewest = (
        plan.resolved.config.cache.block_size,
        min(plan.sizings, key=lambda each: each.num_device_blocks),
    )
    # The shares of the device's memory are the indented lines under the first; swap space has a line of its own here.
    reasons = list(takewhile(lambda line: line.startswith(" "), fewest.reason.splitlines()[1:]))
    return [
        f"blocks     {plan.num_blocks:,} of {block_size} tokens on every rank, {plan.num_blocks * block_size:,} tokens "
        f"in all, {_block_bytes(plan)} each",
        f"sequences  {_sequences(plan, plan.num_blocks)}",
        f"swap       {_swap_space(plan)}",
        *(f"{'why' if index == 0 else '':<11}{reason.strip()}" for index, reason in enumerate(reasons)),
    ]


def _describe_steps(plan: MemoryPlan) -> list[str]:
    """In place of a cache."""
    resolved = plan.resolved
    room = format_bytes(num_step_blocks(resolved) * max(share.block_bytes for share in plan.shares))
    return [
        f"blocks     none: tokens of an encoder see all of their row, and nothing of it is kept; a step has {room} for "
        f"keys and values of one layer, which all layers use in turn",
        f"steps      {resolved.config.scheduler.max_num_batched_tokens:,} tokens (scheduler.max_num_batched_tokens), "
        f"rows whole, the longest of {resolved.max_model_len:,} (model.max_model_len)",
    ]


def _sequences(plan: MemoryPlan, num_blocks: int) -> str:
    where = " in each replica" if plan.resolved.layout.data_parallel_size > 1 else ""
    return (
        f"{num_blocks // plan.num_blocks_of_longest:,} of {plan.resolved.max_model_len:,} tokens (model.max_model_len) "
        f"fit at once{where}; scheduler.max_num_seqs is {plan.resolved.config.scheduler.max_num_seqs:,}"
    )


def _swap_space(plan: MemoryPlan) -> str:
    num_blocks = plan.num_swap_blocks
    if num_blocks == 0:
        return "none (cache.swap_space_gib): what is preempted is computed again"
    num_bytes = num_blocks * max(share.block_bytes for share in plan.shares)
    return f"{num_blocks:,} blocks, {format_bytes(num_bytes)} of host memory, on every rank (cache.swap_space_gib)"


def _forms(plan: MemoryPlan) -> list[str]:
    """What is in no other figure: nobody knows before the rows are read how many of them have forms."""
    if plan.resolved.model_config.pooling is not None:
        return []
    num_states = LIMITS["max_lexer_states"]
    most = format_bytes(num_states * LEXER_STATE_BYTES)
    return [
        f"forms      not counted: host memory of rows that run with structured_outputs, 0.3 MiB each as a rule, at "
        f"most {most} ({num_states:,} states of a lexer)"
    ]


def _block_bytes(plan: MemoryPlan) -> str:
    return format_bytes(max(share.block_bytes for share in plan.shares))


def _describe_gpus(plan: MemoryPlan) -> list[str]:
    """What GPUs of common sizes would hold, because the run measures its own."""
    utilization = plan.resolved.config.cache.gpu_memory_utilization
    lines = [
        f"blocks     measured when the run starts, or set by cache.num_blocks: {_block_bytes(plan)} each, "
        f"{plan.num_blocks_of_longest:,} for a sequence of {plan.resolved.max_model_len:,} tokens "
        f"(model.max_model_len)",
        f"swap       {_swap_space(plan)}",
        f"about      with cache.gpu_memory_utilization={utilization:g} a rank has, on a GPU of",
    ]
    for gib in _GPU_GIB:
        num_blocks = min(
            _sizing(plan.resolved, rank, share, gib * 2**30).num_device_blocks for rank, share in enumerate(plan.shares)
        )
        lines.append(
            f"{'':<11}{gib:>3} GiB  {num_blocks:>9,} blocks: {num_blocks // plan.num_blocks_of_longest:,} sequences"
        )
    return lines
