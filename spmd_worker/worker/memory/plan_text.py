"""Text of a run's layout and memory plan, made without weights, devices or other ranks.

Equal ranks share a line. Only the run itself measures a GPU's memory: the plan lists GPUs of common sizes instead.
"""

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby, takewhile
from typing import Final

from kv_cache.cache_sizing import NO_BLOCKS, CacheSizing, MemoryMeasurement, StateSizing, format_bytes, num_swap_blocks
from kv_cache.layer_groups import LayerGroups
from kv_cache.state_sizing import describe_slot
from spmd_worker.base.config.adapter_limits import MERGED
from spmd_worker.base.errors import ConfigError
from spmd_worker.compat.image_reading import image_costs, video_cost
from spmd_worker.model_config.layer_config import LayerShare
from spmd_worker.model_config.model_config import DTYPE_BYTES, ModelConfig
from spmd_worker.model_config.vision_config import FRAMES_PER_SECOND
from spmd_worker.ranks.row_sums import describe_row_sums
from spmd_worker.ranks.stored_weights import NOTHING_STORED
from spmd_worker.ranks.topology import RankLayout, stage_of
from spmd_worker.replica.grammar.compiler import LEXER_STATE_BYTES, LIMITS
from spmd_worker.resolved import ResolvedRun
from spmd_worker.worker.memory import host
from spmd_worker.worker.memory.draft_memory import draft_activation_bytes, draft_weights_bytes, stream_bytes
from spmd_worker.worker.memory.estimate import (
    activation_bytes,
    expert_bytes,
    head_argmax_bytes,
    rank_layers,
    rank_vocabulary_rows,
    weights_bytes,
)
from spmd_worker.worker.memory.media_memory import media_row_limits, media_rows_bytes_of
from spmd_worker.worker.memory.plan import (
    adapters_bytes_of,
    cache_spec_of,
    check_cache_blocks,
    check_memory,
    is_size_known,
    loading_bytes,
    num_step_blocks,
    quantises_while_loading,
    resolve_cache_need,
    resolve_swap_space_bytes,
    size_rank,
)
from spmd_worker.worker.memory.plan_states import describe_states, describe_states_alone, fewest_states
from spmd_worker.worker.memory.window_groups import describe_windows, grouping_of
from spmd_worker.worker.stored_weights import planned_stored_weights

_OUTSIDE_BYTES: Final = {"cpu": 300 * 2**20, "cuda": 2**30}
"""Approximate memory of a process apart from its tensors: torch, and on a GPU CUDA's context and libraries."""

_GPU_GIB: Final = (24, 48, 80, 141)

_WIDTH: Final = 100

_COLUMNS: Final = ("ranks", "layers", "heads", "KV heads", "columns", "vocabulary", "weights", "activations", "cache")


@dataclass(frozen=True, slots=True)
class RankShare:
    """A rank's share of the model, `layers` the distinct ones of its stage, and its bytes."""

    layers: tuple[LayerShare, ...]
    num_vocabulary_rows: int
    weights_bytes: int
    activation_bytes: int
    block_bytes: int
    slot_bytes: int = 0


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """`shares` and `sizings` have one entry per rank; `sizings` is empty if only the run can measure the memory, or if
    that does not hold the recurrent states: then `sizing_error` is the run's error.
    """

    resolved: ResolvedRun
    shares: tuple[RankShare, ...]
    sizings: tuple[CacheSizing, ...]
    sizing_error: str | None = None

    @property
    def num_blocks_of_longest(self) -> int:
        """Most blocks of a sequence of `max_model_len` tokens, of all groups of layers."""
        return self.groups.num_blocks(self.resolved.max_sequence_len, self.resolved.config.cache.block_size)

    @property
    def groups(self) -> LayerGroups:
        return grouping_of(self.resolved).groups

    @property
    def num_blocks(self) -> int | None:
        """Blocks of every rank; None if only the run can measure it."""
        return min((sizing.num_device_blocks for sizing in self.sizings), default=None)

    @property
    def states(self) -> StateSizing:
        """Slots of recurrent states of every rank; none without sizings, or if the model has no states."""
        return fewest_states([sizing.states for sizing in self.sizings])

    @property
    def num_swap_blocks(self) -> int:
        """Blocks of swap space of every rank."""
        if self.sizings:
            return min(sizing.num_host_blocks for sizing in self.sizings)
        num_bytes, need = resolve_swap_space_bytes(self.resolved), resolve_cache_need(self.resolved)
        ranks = range(self.resolved.layout.world_size)
        return min(num_swap_blocks(cache_spec_of(self.resolved, rank), num_bytes, need) for rank in ranks)

    @property
    def block_bytes(self) -> int:
        return max(share.block_bytes for share in self.shares)

    @property
    def layers_bytes(self) -> int:
        """Bytes of one block in all layers."""
        ranks = range(self.resolved.layout.world_size)
        return max(cache_spec_of(self.resolved, rank).layers_bytes for rank in ranks)

    @property
    def error_result(self) -> str | None:
        """Error of a run whose memory cannot hold the weights or the cache, or whose cache cannot hold one sequence;
        None if they fit or the memory is unknown.
        """
        resolved, num_blocks = self.resolved, self.num_blocks
        num_ranks, given = resolved.layout.world_size, _given_bytes(resolved)
        stored = planned_stored_weights(resolved)
        try:
            if resolved.device_type == "cpu":
                check_memory(resolved, 0, num_ranks, host.total_bytes() if given is None else given, stored)
            elif given is not None:
                for rank in range(num_ranks):
                    check_memory(resolved, rank, 1, given, stored)
            if num_blocks is not None and not resolved.model_config.is_encoder:
                check_cache_blocks(resolved, num_blocks, self.num_swap_blocks)
        except ConfigError as error:
            return str(error)
        return self.sizing_error


def make_plan(resolved: ResolvedRun) -> MemoryPlan:
    """A plan for the resolved device; CPU ranks share the machine's memory equally."""
    num_ranks = resolved.layout.world_size
    shares = tuple(_share(resolved, rank) for rank in range(num_ranks))
    sizings: tuple[CacheSizing, ...] = ()
    given, sizing_error = _given_bytes(resolved), None
    if resolved.device_type == "cpu" or is_size_known(resolved) or given is not None:
        total = host.available_bytes() if given is None else given
        if given is None or resolved.device_type == "cpu":
            total //= num_ranks
        try:
            sizings = tuple(_sizing(resolved, rank, share, total) for rank, share in enumerate(shares))
        except ConfigError as error:
            sizing_error = str(error)
    return MemoryPlan(resolved, shares, sizings, sizing_error)


def _given_bytes(resolved: ResolvedRun) -> int | None:
    """`plan.memory_gib` of the machine or of each rank's GPU, in bytes."""
    gib = resolved.config.plan.memory_gib
    return None if gib is None else int(gib * 2**30)


def describe_plan(plan: MemoryPlan) -> str:
    """Readable lines: the model, a table of ranks, the cache and its capacity."""
    model_config, layout = plan.resolved.model_config, plan.resolved.layout
    ranks = (
        f"{layout.world_size} = {layout.data_parallel_size} data x {layout.pipeline_parallel_size} pipeline x "
        f"{layout.tensor_parallel_size} tensor"
    )
    lines = [
        f"model      {model_config.architecture}, {model_config.num_parameters:,} parameters, "
        f"{model_config.num_layers} layers, hidden size {model_config.hidden_size:,}, "
        f"{_heads(model_config)}",
        *_merged(plan),
        *_quantised(plan),
        *_int8(plan),
        *_head_argmax(plan),
        *_experts(plan),
        *_adapters(plan),
        *_draft(plan),
        *_media(plan),
        f"computes   {_where(plan)}",
        f"ranks      {ranks}",
        f"sums       {describe_row_sums(plan.resolved.config.parallel, model_config, layout, plan.resolved.row_sums)}",
        *_replicas(plan),
        *_drafts(plan),
    ]
    lines += ["", *_table(plan), ""]
    lines += _describe_cache(plan) if plan.sizings else _describe_unsized(plan)
    lines += _grammars(plan)
    error_result = plan.error_result
    lines += [f"rejected   {error_result}"] if error_result else []
    return "\n".join(lines)


def _heads(model_config: ModelConfig) -> str:
    """Heads of attention, in words."""
    if model_config.is_attention_free:
        return "no attention"
    layers = model_config.layers
    return (
        f"{_counts(each.num_heads for each in layers)} heads, {_counts(each.num_kv_heads for each in layers)} KV heads"
    )


def fold_plan(text: str) -> str:
    """The lines of `describe_plan` at most 100 columns wide: longer ones go on below their twelfth column."""
    return "\n".join(
        textwrap.fill(line, _WIDTH, subsequent_indent=" " * 11, break_long_words=False, break_on_hyphens=False)
        if len(line) > _WIDTH
        else line
        for line in text.splitlines()
    )


def _share(resolved: ResolvedRun, rank: int) -> RankShare:
    model_config, layout, scheduler = resolved.model_config, resolved.layout, resolved.config.scheduler
    num_tokens, num_rows = scheduler.max_num_batched_tokens, resolved.max_num_seqs
    quantization = resolved.config.model.quantization
    stored = planned_stored_weights(resolved)
    weights = weights_bytes(model_config, layout, rank, resolved.dtype, resolved.device_type, quantization, stored)
    weights += draft_weights_bytes(resolved, rank)
    weights += _argmax_bytes(resolved, rank) + adapters_bytes_of(resolved, rank) + media_rows_bytes_of(resolved, rank)
    spec = cache_spec_of(resolved, rank)
    return RankShare(
        tuple(dict.fromkeys(share for _, share in rank_layers(model_config, layout, rank))),
        rank_vocabulary_rows(model_config, layout),
        weights,
        max(
            draft_activation_bytes(resolved, rank),
            activation_bytes(
                model_config,
                layout,
                rank,
                resolved.dtype,
                num_tokens,
                num_rows,
                quantization,
                resolved.most_tower_rows,
                adds_by_tree=resolved.device_type == "cpu" or layout.num_leaves > 1,
                most_drafts=resolved.most_drafts,
            ),
        )
        + stream_bytes(resolved),
        spec.block_bytes,
        spec.slot_bytes,
    )


def _argmax_bytes(resolved: ResolvedRun, rank: int) -> int:
    if resolved.config.model.quantization is not None or not resolved.config.executor.argmax_screen:
        return 0
    return head_argmax_bytes(resolved.model_config, resolved.layout, rank, resolved.dtype, resolved.device_type)


def _sizing(resolved: ResolvedRun, rank: int, share: RankShare, total_bytes: int) -> CacheSizing:
    outside = _OUTSIDE_BYTES[resolved.device_type]
    measurement = MemoryMeasurement(total_bytes, share.weights_bytes, share.activation_bytes, outside, "estimated")
    return size_rank(resolved, rank, measurement)


def _where(plan: MemoryPlan) -> str:
    dtype = plan.resolved.dtype
    if plan.resolved.config.device == "auto":
        return f"in {dtype} on the CPU (device=auto takes a GPU if there is one: device=cuda plans for it)"
    return f"in {dtype} on {'the CPU' if plan.resolved.device_type == 'cpu' else 'one GPU a rank'}"


def _merged(plan: MemoryPlan) -> list[str]:
    folder = plan.resolved.config.model.merged_adapter
    return [] if folder is None else [f"adapter    {folder} is {MERGED}"]


def _quantised(plan: MemoryPlan) -> list[str]:
    model_config, dtype = plan.resolved.model_config, plan.resolved.dtype
    if model_config.quantization is None or not model_config.quantization.groups:
        return []
    if plan.resolved.config.model.quantization == "fp8":
        return [
            f"files      quantised, {model_config.quantization.words}: FP8 numbers that have a scale a tensor, a row "
            "or 128 inputs are computed with as they are, others are dequantised when they are loaded"
        ]
    stored = planned_stored_weights(plan.resolved)
    if stored.formats:
        formats = [each for of_layer in stored.formats.values() for each in of_layer.values()]
        kinds, others = " and ".join(dict.fromkeys(each.words for each in formats)), ""
        if stored.are_panels and stored.reason:
            others = f" ({stored.reason})"
        return [
            f"files      quantised, {model_config.quantization.words}: {stored.words} stay in {kinds} in "
            f"{len(stored.formats)} layers, other weights are dequantised to {dtype} when they are loaded{others}"
        ]
    files = f"files      quantised, {model_config.quantization.words}: dequantised to {dtype} when they are loaded"
    if plan.resolved.config.model.quantization is not None:
        return [files]
    num_bytes = format_bytes(model_config.num_parameters * DTYPE_BYTES[dtype])
    reason = f" ({stored.reason})" if stored.are_panels and stored.reason else ""
    return [f"{files}, the weights take {num_bytes}, like unquantised ones{reason}"]


def _int8(plan: MemoryPlan) -> list[str]:
    """Bytes of the largest rank's weights, quantised and while they are loaded."""
    resolved = plan.resolved
    if resolved.config.model.quantization is None:
        return []
    loading = format_bytes(max(loading_bytes(resolved, rank) for rank in range(resolved.layout.world_size)))
    is_whole = quantises_while_loading(resolved) and resolved.layout.tensor_parallel_size == 1
    kind, quantised = resolved.config.model.quantization, max(share.weights_bytes for share in plan.shares)
    others = "the embedding and norms" if kind == "int8" else "the embedding, the head and norms"
    if any(layer.experts is not None for layer in resolved.model_config.layers):
        others = "the embedding, norms and routers"
    meanwhile = f"; while they are loaded up to {loading}, in {resolved.dtype}"
    return [
        f"quantised  to {kind}, a scale an output, all but {others}: {format_bytes(quantised)} on a "
        f"rank, scales included{', while they are loaded too' if is_whole else meanwhile}"
    ]


def _head_argmax(plan: MemoryPlan) -> list[str]:
    """The int8 pre-filter of the head, on the rank whose is largest."""
    num_bytes = max(_argmax_bytes(plan.resolved, rank) for rank in range(plan.resolved.layout.world_size))
    if num_bytes == 0:
        return []
    return [
        f"argmax     an int8 copy of the head, {format_bytes(num_bytes)} of a rank's weights, if that is "
        f"faster (executor.argmax_screen)"
    ]


def _draft(plan: MemoryPlan) -> list[str]:
    """The draft, on the ranks of the last stage."""
    resolved, draft = plan.resolved, plan.resolved.draft
    if draft is None:
        return []
    ranks = range(resolved.layout.world_size)
    weights = format_bytes(max(draft_weights_bytes(resolved, rank) for rank in ranks))
    block = format_bytes(max(cache_spec_of(resolved, rank).draft_block_bytes for rank in ranks))
    whose = {"draft_model": draft.location.name, "eagle3": f"the head {draft.location.name}"}
    return [
        f"drafts     {whose.get(draft.method, 'a layer of the model')} (speculative_config.method={draft.method}), up "
        f"to {draft.num_drafts} tokens a row: {weights} of a rank's weights and {block} of each block, on the last "
        f"pipeline stage"
    ]


def _experts(plan: MemoryPlan) -> list[str]:
    """Bytes of all experts, and of the largest rank's."""
    resolved = plan.resolved
    model_config, layout = resolved.model_config, resolved.layout
    sparse = [layer.experts for layer in model_config.layers if layer.experts is not None]
    if not sparse:
        return []
    size, quantization = DTYPE_BYTES[resolved.dtype], resolved.config.model.quantization
    ranks = range(layout.tensor_parallel_size * layout.pipeline_parallel_size)
    kind = (resolved.dtype, planned_stored_weights(resolved), quantization, resolved.device_type)
    max_bytes = max(expert_bytes(model_config, layout, rank, *kind) for rank in ranks)
    whole = RankLayout(1)
    saved = expert_bytes(model_config, whole, 0, resolved.dtype) - expert_bytes(model_config, whole, 0, *kind)
    kinds = (resolved.dtype, resolved.device_type, None)
    plain, held = (weights_bytes(model_config, whole, 0, *kinds, each) for each in (NOTHING_STORED, kind[1]))
    total = model_config.num_parameters * size - (plain - held)
    if quantization is not None:
        total = weights_bytes(model_config, whole, 0, resolved.dtype, resolved.device_type, quantization)
    part = "complete ones" if layout.experts is not None else "columns of each"
    return [
        f"experts    {format_bytes(model_config.num_expert_parameters * size - saved)} of "
        f"{format_bytes(total)} of weights: {sparse[0].num_experts} in each of {len(sparse)} layers, "
        f"{sparse[0].num_chosen} per token; a rank has {part}, at most {format_bytes(max_bytes)}"
    ]


def _adapters(plan: MemoryPlan) -> list[str]:
    """Bytes of the adapters of the rank whose are largest."""
    limits = plan.resolved.config.model.adapter_limits
    if limits is None:
        return []
    num_bytes = max(adapters_bytes_of(plan.resolved, rank) for rank in range(plan.resolved.layout.world_size))
    return [
        f"adapters   at most {limits.max_cpu_loras} of rank {limits.max_lora_rank} (model.max_cpu_loras, "
        f"model.max_lora_rank), up to {format_bytes(num_bytes)} of a rank's weights; {limits.max_loras} in a step"
    ]


def _media(plan: MemoryPlan) -> list[str]:
    """Bytes of the rows of images, or of an encoder's inputs, on a rank of the first stage."""
    num_rows = media_row_limits(plan.resolved).num_rows
    if not num_rows:
        return []
    kept = (
        f"rows of {num_rows:,} tokens are kept (cache.media_rows_gib), "
        f"{format_bytes(media_rows_bytes_of(plan.resolved, 0))} of a rank's weights"
    )
    part = plan.resolved.model_config.encoder_part
    if part is not None:
        return [f"inputs     of the encoder, {part.kind}: {kept}"]
    vision, limits = plan.resolved.model_config.vision, plan.resolved.config.limits
    hearing, heard = None if vision is None else vision.hearing, list[str]()
    if hearing is not None and hearing.audio is not None:
        seconds, num_tokens = hearing.audio.num_frames / FRAMES_PER_SECOND, plan.resolved.max_audio_tokens
        if hearing.audio.chunk_frames or hearing.audio.window_frames:
            seconds = min(seconds, limits.max_audio_s)
        heard = [f"recordings of {seconds:g} s take {num_tokens:,} tokens each"]
    if vision is not None and not vision.sees:
        return [f"audio      {kept}", *heard]
    costs = [
        f"{image.num_rows:,} tokens and {image.num_patches:,} patches for {width} x {height} pixels"
        for height, width, image in image_costs(plan.resolved)
    ]
    video = video_cost(plan.resolved)
    of_video = (
        []
        if video is None
        else [
            f"a video    {video[3]:,} tokens for {video[0]} frames of {video[2]} x {video[1]} pixels; "
            f"limits.max_video_tokens is {limits.max_video_tokens:,}"
        ]
    )
    return [
        f"{'media     ' if heard else 'images    '} {kept}",
        *([f"an image   {', '.join(costs)}; limits.max_image_tokens is {limits.max_image_tokens:,}"] if costs else []),
        *of_video,
        *heard,
    ]


def _replicas(plan: MemoryPlan) -> list[str]:
    num_replicas = plan.resolved.layout.data_parallel_size
    if num_replicas == 1:
        return []
    size = plan.resolved.layout.world_size // num_replicas
    ranks = "one rank" if size == 1 else f"{size} ranks"
    return [
        f"replicas   {num_replicas} of {ranks}, each with a complete model and its own cache; they share a row queue"
    ]


def _table(plan: MemoryPlan) -> list[str]:
    """One aligned line for each distinct share."""
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
    num_blocks = num_step_blocks(plan.resolved) if plan.resolved.model_config.is_encoder else plan.num_blocks
    num_bytes = (num_blocks or 0) * share.block_bytes + plan.states.num_slots * share.slot_bytes
    cache = "measured" if num_blocks is None else format_bytes(num_bytes)
    num_layers = stage_of(plan.resolved.layout, plan.resolved.model_config, ranks[0]).num_layers
    sizes = [(each.num_heads, each.num_kv_heads, each.num_columns) for each in share.layers]
    of_layers = [*map(_counts, zip(*sizes, strict=True))]
    if plan.resolved.model_config.is_attention_free:
        of_layers[:2] = ["-", "-"]
    if not any(layer.has_feed_forward for layer in plan.resolved.model_config.layers):
        of_layers[2] = "-"
    counts = [f"{num_layers:,}", *of_layers, f"{share.num_vocabulary_rows:,}"]
    return (_spans(ranks), *counts, format_bytes(share.weights_bytes), format_bytes(share.activation_bytes), cache)


def _counts(counts: Iterable[int]) -> str:
    """`8`, or `8/4` where layers differ."""
    return "/".join(f"{count:,}" for count in dict.fromkeys(counts))


def _spans(ranks: list[int]) -> str:
    """`0-3,6` for 0, 1, 2, 3, 6."""
    spans = [[rank for _, rank in span] for _, span in groupby(enumerate(ranks), lambda each: each[1] - each[0])]
    return ",".join(str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans)


def _describe_cache(plan: MemoryPlan) -> list[str]:
    assert plan.num_blocks is not None, "the caller has sizings"
    resolved, scheduler = plan.resolved, plan.resolved.config.scheduler
    if resolved.model_config.is_encoder:
        buffer = format_bytes(num_step_blocks(resolved) * plan.block_bytes)
        return [
            f"blocks     no cache, because attention is bidirectional; a step has {buffer} for keys and values of one "
            f"layer, which all layers use in turn",
            f"steps      {scheduler.max_num_batched_tokens:,} tokens (scheduler.max_num_batched_tokens), in complete "
            f"rows of at most {resolved.max_model_len:,} (model.max_model_len)",
        ]
    if resolved.model_config.is_attention_free:
        weights = max(share.weights_bytes for share in plan.shares)
        return describe_states_alone(plan.states, plan.sizings[0].reason, weights)
    in_fp8 = cache_spec_of(resolved, 0).in_fp8
    block_size, fewest = resolved.config.cache.block_size, min(plan.sizings, key=lambda each: each.num_device_blocks)
    # The shares of the device's memory are the indented lines under the first; swap space has its own line here.
    reasons = list(takewhile(lambda line: line.startswith(" "), fewest.reason.splitlines()[1:]))
    states, num_seqs = plan.states, plan.states.num_seqs or resolved.max_num_seqs
    where = " in each replica" if resolved.layout.data_parallel_size > 1 else ""
    in_all = f"{plan.num_blocks * block_size:,} tokens in all"
    if plan.groups.num_groups > 1:
        in_all = f"each of one of {plan.groups.num_groups} groups of layers"
    return [
        f"blocks     {plan.num_blocks:,} of {block_size} tokens on every rank, {in_all}, "
        f"{format_bytes(plan.block_bytes)} each{in_fp8}",
        *describe_windows(plan.resolved, plan.block_bytes, plan.layers_bytes),
        f"sequences  {plan.num_blocks // plan.num_blocks_of_longest:,} of {_longest(resolved)} fit at once{where}; "
        f"scheduler.max_num_seqs is {num_seqs:,}",
        *describe_states(states, max(share.weights_bytes for share in plan.shares)),
        f"swap       {_swap_space(plan)}",
        *(f"{'why' if index == 0 else '':<11}{reason.strip()}" for index, reason in enumerate(reasons)),
    ]


def _longest(resolved: ResolvedRun) -> str:
    """The length of the longest sequence, in words."""
    behind = ""
    if resolved.max_encoder_len:
        behind = f" behind an encoder's input of {resolved.max_encoder_len:,} (scheduler.max_encoder_len)"
    return f"{resolved.max_model_len:,} tokens (model.max_model_len){behind}"


def _swap_space(plan: MemoryPlan) -> str:
    num_blocks, states = plan.num_swap_blocks, plan.states
    if num_blocks + states.num_host_slots == 0:
        return "none (cache.swap_space_gib): preempted sequences are recomputed"
    num_bytes = format_bytes(num_blocks * plan.block_bytes)
    besides = ""
    if states.num_host_slots:
        besides = f" and {states.num_host_slots:,} states, {format_bytes(states.host_bytes)}"
    return f"{num_blocks:,} blocks, {num_bytes} of host memory{besides}, on every rank (cache.swap_space_gib)"


def _drafts(plan: MemoryPlan) -> list[str]:
    speculation = plan.resolved.config.speculative_config
    if not speculation.is_on:
        return []
    most = speculation.max_step_tokens
    step = f"{most:,} tokens" if most else "as many tokens as the device computes while it reads the weights"
    return [
        f"drafts     {speculation.method}, at most {speculation.most_drafts} of a row in a step, in steps of at most "
        f"{step}; answers are the same"
    ]


def _grammars(plan: MemoryPlan) -> list[str]:
    """Memory that no other line counts, because the number of rows with structured outputs is unknown."""
    if plan.resolved.model_config.pooling is not None:
        return []
    num_states = LIMITS["max_lexer_states"]
    max_bytes = format_bytes(num_states * LEXER_STATE_BYTES)
    return [
        f"grammars   not counted: host memory of running rows with structured_outputs, usually 0.3 MiB each, at most "
        f"{max_bytes} ({num_states:,} lexer states)"
    ]


def _describe_unsized(plan: MemoryPlan) -> list[str]:
    """Capacity of GPUs of common sizes, because the run measures its own; on the CPU the sizes alone."""
    utilization, is_on_cpu = plan.resolved.config.cache.gpu_memory_utilization, plan.resolved.device_type == "cpu"
    in_fp8 = cache_spec_of(plan.resolved, 0).in_fp8
    source = "none fit" if is_on_cpu else "measured when the run starts, or set by cache.num_blocks"
    lines = [
        f"blocks     {source}: {format_bytes(plan.block_bytes)} each{in_fp8}, {plan.num_blocks_of_longest:,} for a "
        f"sequence of {_longest(plan.resolved)}",
        *describe_windows(plan.resolved, plan.block_bytes, plan.layers_bytes),
        *_describe_slot(plan),
        f"swap       {_swap_space(plan)}",
    ]
    if plan.resolved.model_config.is_attention_free:
        lines = [f"blocks     {NO_BLOCKS}", *_describe_slot(plan)]
    if is_on_cpu:
        return lines
    lines += [f"about      with cache.gpu_memory_utilization={utilization:g} a rank has, on a GPU of"]
    return [*lines, *(f"{'':<11}{gib:>3} GiB  {_on_gpu(plan, gib * 2**30)}" for gib in _GPU_GIB)]


def _describe_slot(plan: MemoryPlan) -> list[str]:
    """The states of one sequence on the rank whose layers have most; nothing for a model without any."""
    rank = max(range(len(plan.shares)), key=lambda each: plan.shares[each].slot_bytes)
    spec = cache_spec_of(plan.resolved, rank)
    return [f"states     a sequence has {describe_slot(spec)}"] if spec.slot_bytes else []


def _on_gpu(plan: MemoryPlan, total_bytes: int) -> str:
    """Capacity of ranks that have so much memory each."""
    try:
        sizings = [_sizing(plan.resolved, rank, share, total_bytes) for rank, share in enumerate(plan.shares)]
    except ConfigError:
        blocks = "" if plan.resolved.model_config.is_attention_free else f"{0:>9,} blocks: "
        return f"{blocks}the recurrent states do not fit"
    num_blocks = min(each.num_device_blocks for each in sizings)
    states = fewest_states([each.states for each in sizings])
    if plan.resolved.model_config.is_attention_free:
        return f"{states.num_seqs:>9,} sequences of any length, {states.num_snapshots:,} snapshots of states"
    slots = f", states of {states.num_seqs:,}, {states.num_snapshots:,} snapshots" if states.num_seqs else ""
    return f"{num_blocks:>9,} blocks: {num_blocks // plan.num_blocks_of_longest:,} sequences{slots}"
