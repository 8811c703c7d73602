"""Second stage of a worker's start: this rank's model shard, built and filled from the checkpoint."""

import logging
import os
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch

from kv_cache.cache_engine import CacheEngine
from kv_cache.cache_spec import CacheSpec
from kv_cache.state_engine import StateEngine
from spmd_worker.base.metrics.log import SAME_ON_EVERY_RANK
from spmd_worker.base.metrics.stage_times import StageClock
from spmd_worker.model.adapters.loaded import LoadedAdapters
from spmd_worker.model.decoder import DecoderForCausalLM
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.registry import build_model
from spmd_worker.model.weights.dense_files import dummy_denses, read_denses
from spmd_worker.model.weights.staging import staging_for
from spmd_worker.model.weights.store import LoadReport
from spmd_worker.ops.attention.backend import block_shapes, draft_block_shapes
from spmd_worker.ops.attention.cache_dtype import cache_dtype_of
from spmd_worker.ops.sampling.sampler import Sampler
from spmd_worker.ranks.stored_weights import NOTHING_STORED, StoredWeights
from spmd_worker.ranks.topology import stage_of
from spmd_worker.replica.grammar.compiler import GrammarCompiler
from spmd_worker.replica.grammar.step_masks import GrammarMasks
from spmd_worker.resolved import ResolvedRun
from spmd_worker.tokenizer.tokenizer import Tokenizer
from spmd_worker.worker.backends.backend import Operations
from spmd_worker.worker.file_formats import fill_from_files
from spmd_worker.worker.loaded_draft import LoadedDraft, load_draft
from spmd_worker.worker.memory import host
from spmd_worker.worker.memory.device import is_on_any_rank
from spmd_worker.worker.memory.plan import check_memory
from spmd_worker.worker.merged_adapter import with_merged_adapter
from spmd_worker.worker.opened_device import OpenedDevice
from spmd_worker.worker.runner.dummy_steps import DUMMY_SLOTS
from spmd_worker.worker.runner.media_store import MediaStore
from spmd_worker.worker.runner.model_runner import ModelRunner
from spmd_worker.worker.runner.prefix_store import PrefixStore
from spmd_worker.worker.runner.row_store import RowStore
from spmd_worker.worker.runner.step_graphs import StepGraphs
from spmd_worker.worker.runner.stream_keeper import StreamKeeper
from spmd_worker.worker.stored_weights import stored_experts_of, stored_panels_of

logger = logging.getLogger(__name__)

_MIN_READERS: Final = 2
_MAX_READERS: Final = 8
_MAX_GENERATORS: Final = 16
"""Threads of dummy weights, each with pinned buffers."""
"""Threads that read files for a GPU: one copies from the page cache at 5 to 10 GB/s, and a GPU takes 50."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its weights and operations; makes cache engines and runners. `adapters`: the LoRA adapters that it
    has loaded, None if it takes none. `draft`: the model or head that drafts, on the last stage.
    """

    opened: OpenedDevice
    operations: Operations
    model: DecoderForCausalLM
    report: LoadReport | None = None
    adapters: LoadedAdapters | None = None
    draft: LoadedDraft | None = None

    def new_cache_engine(
        self,
        spec: CacheSpec,
        num_device_blocks: int,
        num_host_blocks: int,
        num_slots: tuple[int, int] = DUMMY_SLOTS,
    ) -> CacheEngine:
        """A paged cache in the block layout of this model's attention, not allocated yet. `num_slots` are those of the
        device and of the host, if the model has states.
        """
        shapes = block_shapes(self.operations.attention, spec)
        if self.draft is not None:
            shapes += draft_block_shapes(self.draft.attention, spec)
        dtype, device = getattr(torch, self.opened.resolved.dtype), self.opened.device
        states = StateEngine(spec, *num_slots, dtype, device) if spec.states else None
        of_blocks = cache_dtype_of(dtype, self.opened.resolved.cache_dtype)
        return CacheEngine(spec, shapes, num_device_blocks, num_host_blocks, of_blocks, device, states)

    def new_runner(
        self, engine: CacheEngine, clock: StageClock | None = None, graphs: StepGraphs | None = None
    ) -> ModelRunner:
        """A runner of this model on a cache; it samples on the last stage of a generating model."""
        resolved, model, sampler, grammars = self.opened.resolved, self.model, None, None
        model_config, groups = resolved.model_config, self.opened.groups
        if model.stage.is_last and model.pooler is None:
            vocab_size, eos_ids = model_config.vocab_size, model_config.eos_token_ids
            mode, kernels = resolved.config.model.logprobs_mode, self.operations.kernels
            sampler = Sampler(groups.tensor, model.lm_head.shard.start, vocab_size, eos_ids, mode, kernels)
            # Opened by the first row that needs it.
            open_tokenizer = partial(Tokenizer.open_if_present, resolved.model_folder)
            grammars = GrammarMasks(GrammarCompiler(open_tokenizer, vocab_size, eos_ids))
        block_size, keeps_state = resolved.config.cache.block_size, self.opened.backend.keeps_state
        rows = media = None
        dtype, device = getattr(torch, resolved.dtype), self.opened.device
        if model.stage.is_first:
            rows = RowStore(model_config.embedding_size, dtype, device, is_holder=groups.tensor.rank == 0)
        vision, encoder = model_config.vision, model_config.encoder_part
        if model.stage.is_first and (vision is not None or encoder is not None):
            tower, sizes = getattr(model, "tower", None), (model_config.hidden_size, vision.num_added if vision else 0)
            kind = "audio" if vision is None else " or ".join(each.medium for each in vision.parts)
            media = MediaStore(tower, groups.tensor, *sizes, dtype, device, kind)
        parts = (model, engine, sampler, block_size, groups.pipeline, clock, grammars, graphs)
        prefixes, adapters = PrefixStore(self.operations.attention, block_size, device), self.adapters
        # Steps that measure memory have no keys of a draft.
        drafter = self.draft.new_drafter(engine) if self.draft is not None and engine.spec.draft_layers else None
        return ModelRunner(
            *parts,
            keeps_state=keeps_state,
            adapters=adapters,
            rows=rows,
            prefixes=prefixes,
            media=media,
            rank=self.opened.environment.rank,
            drafter=drafter,
            keeper=StreamKeeper(model.stage, model_config.stream_size, dtype, is_holder=groups.tensor.rank == 0),
            aux_layers=() if resolved.draft is None else resolved.draft.aux_layers,
        )

    def expert_loads(self) -> dict[int, list[int]]:
        """`WorkerReport.expert_loads`."""
        is_first = self.opened.resolved.layout.tensor_rank(self.opened.environment.rank) == 0
        return self.model.expert_loads() if is_first else {}

    def forget_expert_loads(self) -> None:
        """Reset the counts, which include steps of profiling and warm-up."""
        for layer in self.model.sparse_layers.values():
            layer.forget_num_tokens()


def load_model(opened: OpenedDevice) -> LoadedModel | None:
    """Fill this rank's shard. Raises ConfigError, before anything is allocated, for weights that exceed the memory, and
    CheckpointError, before anything is filled, for wrong names, shapes or coverage.

    Ranks exchange parts of rows when they pack quantised weights, so they first agree that all have filled their
    shards: the rank that failed raises, the others return None.
    """
    exchanges = opened.resolved.config.model.quantization is not None and opened.groups.tensor.size > 1
    try:
        loaded = _filled_model(opened)
    except BaseException:
        if exchanges:
            is_on_any_rank(opened.groups.control, True)
        raise
    if exchanges and is_on_any_rank(opened.groups.control, False):
        return None
    loaded.model.pack_weights()
    if loaded.draft is not None:
        loaded.draft.pack_weights()
    return loaded


def _stored_weights(resolved: ResolvedRun, operations: Operations) -> StoredWeights:
    """The weights that stay as the checkpoint has them, with these kernels."""
    if operations.decodes_experts:
        return stored_experts_of(resolved)
    # None in any dtype without compiled kernels.
    return NOTHING_STORED if operations.kernels.stored_panels(torch.bfloat16) is None else stored_panels_of(resolved)


def _filled_model(opened: OpenedDevice) -> LoadedModel:
    """The model with the checkpoint's weights or with dummy weights, not packed yet."""
    resolved, environment, device = opened.resolved, opened.environment, opened.device
    num_local_ranks, total = environment.local_world_size, host.total_bytes()
    if device.type == "cuda":
        num_local_ranks, total = 1, torch.cuda.mem_get_info(device)[1]
    operations, options = opened.backend.operations(), resolved.config.model
    stored = _stored_weights(resolved, operations)
    check_memory(resolved, environment.rank, num_local_ranks, total, stored)
    if stored.reason:
        some = f"some {stored.words}" if stored.formats else stored.words
        logger.info("%s are dequantised: %s", some, stored.reason, extra=SAME_ON_EVERY_RANK)
    context = LayerContext(
        tensor_group=opened.groups.tensor,
        kernels=operations.kernels,
        attention=operations.attention,
        dtype=getattr(torch, resolved.dtype),
        device=device,
        expert_layout=resolved.layout.experts,
        quantised=operations.quantised,
        stored=stored.formats,
        num_leaves=resolved.layout.num_leaves,
        has_float32_head=options.head_dtype == "float32",
    )
    stage = stage_of(resolved.layout, resolved.model_config, environment.rank)
    allows_nonfinite, is_dummy = options.allow_nonfinite, options.load_format == "dummy"
    model = build_model(context, resolved.model_config, stage, allows_nonfinite=allows_nonfinite)
    # Before the target's weights, which may take minutes: faults of its files are known soon.
    draft = load_draft(opened, model, lambda of_draft: _filled_model(of_draft).model)
    staging = staging_for(device)
    # The CPU's compute threads, or on a GPU this rank's share of the cores.
    num_cores = len(os.sched_getaffinity(0)) // environment.local_world_size
    num_threads = torch.get_num_threads() if device.type == "cpu" else max(num_cores, _MIN_READERS)
    if is_dummy:
        num_generators = num_threads if device.type == "cpu" else min(num_threads, _MAX_GENERATORS)
        dummy = with_merged_adapter(model.weights.dummy(staging=staging), model.weights, options)
        report = model.weights.fill(dummy, num_generators)
    else:
        num_readers = 1 if device.type == "cpu" else min(num_threads, _MAX_READERS)
        report = fill_from_files(model, resolved, environment.rank, staging, num_readers)
        logger.info("loaded %d tensors, %d bytes in %.2f s", report.num_tensors, report.num_bytes_read, report.seconds)
    if model.pooler is not None:
        denses = model.pooler.config.denses
        model.pooler.set_denses(
            dummy_denses(denses)
            if is_dummy
            else read_denses(resolved.model_folder, denses, allows_nonfinite=allows_nonfinite)
        )
    limits = options.adapter_limits
    adapters = None if limits is None else LoadedAdapters(model, limits, options.path or "")
    return LoadedModel(opened, operations, model, report, adapters, draft)
