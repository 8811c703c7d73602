"""Last stages of a worker's start: memory profiling, then allocation of the cache.

    open_device -> OpenedDevice      device, backend, groups         (opened_device.py)
    load_model  -> LoadedModel       operations, filled shard        (loaded_model.py)
    compile_ahead                    kernels, where a backend compiles them
    measure     -> CacheSizing       blocks that fit in this rank's memory
    allocate    -> RunningWorker     caches, mirror, runner: ready for steps

Each record is complete when it is made. Between `measure` and `allocate` all ranks agree on the numbers of blocks.
"""

import logging
import os
from dataclasses import replace
from functools import partial
from typing import Final

import torch

from kv_cache import host_reserve
from kv_cache.cache_sizing import CacheSizing, MemoryMeasurement
from kv_cache.cache_spec import CacheSpec
from spmd_worker.base.metrics.stage_times import StageClock
from spmd_worker.model.adapters.adapter_memory import AdapterMemory
from spmd_worker.model.layers.choice_bytes import choice_bytes
from spmd_worker.model.weight_memory import WeightMemory
from spmd_worker.model_config.model_config import DTYPE_BYTES
from spmd_worker.native.library import thread_waits
from spmd_worker.replica.mirror.mirror import Mirror
from spmd_worker.replica.mirror.plan_check import AdapterRules
from spmd_worker.resolved import CHECK_VARIABLE
from spmd_worker.worker.adapters import WorkerAdapters
from spmd_worker.worker.caches import WorkerCaches
from spmd_worker.worker.hit_comparison import HitComparer
from spmd_worker.worker.loaded_model import LoadedModel
from spmd_worker.worker.memory.device import PreparedStep, is_on_any_rank, measure_cuda, measure_host, profile_host
from spmd_worker.worker.memory.draft_memory import draft_activation_bytes, stream_bytes
from spmd_worker.worker.memory.estimate import activation_bytes, tower_bytes
from spmd_worker.worker.memory.media_memory import media_rows_bytes_of
from spmd_worker.worker.memory.plan import (
    adapters_bytes_of,
    check_cache_blocks,
    is_estimate_enough,
    is_size_known,
    num_step_blocks,
    size_rank,
)
from spmd_worker.worker.prompt_adapters import WorkerPromptAdapters
from spmd_worker.worker.runner.dummy_steps import lagging, longest_chunk, max_step, prepared_step
from spmd_worker.worker.runner.stream_keeper import StreamKeeper
from spmd_worker.worker.running_worker import RunningWorker
from spmd_worker.worker.sleep import WorkerSleep
from spmd_worker.worker.trace_profiler import TraceProfiler

logger = logging.getLogger(__name__)

_NUM_COMPILED_BLOCKS: Final = 16

EVENT_HANDLER_CLASSES: Final = (WorkerSleep, TraceProfiler, WorkerAdapters, WorkerPromptAdapters, StreamKeeper)
"""Classes of the objects that handle worker events next to the worker; `allocate` makes one of each."""


def compile_ahead(loaded: LoadedModel, spec: CacheSpec) -> str:
    """Compile kernels before any step runs; every rank calls this. Returns what was done in words, or nothing."""
    opened = loaded.opened
    # A stage of a pipeline would wait for the tensors of another.
    if not opened.backend.compiles_ahead or opened.resolved.layout.pipeline_parallel_size > 1:
        return ""
    num_threads = max(1, len(os.sched_getaffinity(0)) // opened.environment.local_world_size)
    engine = loaded.new_cache_engine(spec, _NUM_COMPILED_BLOCKS, 0)
    with prepared_step(loaded.model, engine, loaded.new_runner):
        try:
            return opened.backend.compile_ahead(partial(loaded.new_runner, engine), _NUM_COMPILED_BLOCKS, num_threads)
        except Exception as error:
            if opened.groups.tensor.size > 1:
                # Other ranks are in collectives of the same steps.
                raise
            logger.warning("kernels are compiled one by one when they are first launched (%s)", error, exc_info=True)
            return ""


def measure(loaded: LoadedModel, spec: CacheSpec) -> CacheSizing:
    """This rank's numbers of blocks and state slots, measured unless they are set or the model is an encoder; every
    rank calls this. The activations of CUDA graphs, at most those of the largest step, are added to the measured ones.
    """
    opened = loaded.opened
    measurement = MemoryMeasurement(0, 0, 0, 0)
    if not is_size_known(opened.resolved):
        measurement = _with_tower(loaded, measure_step(loaded, spec))
        if opened.backend.can_record(opened.groups.tensor):
            measurement = replace(measurement, activation_bytes=2 * measurement.activation_bytes)
    return size_rank(opened.resolved, opened.environment.rank, measurement)


def _with_tower(loaded: LoadedModel, measurement: MemoryMeasurement) -> MemoryMeasurement:
    """The measurement with at least the activations of the tower and of a draft, which the measured step does not
    run.
    """
    resolved = loaded.opened.resolved
    size = draft_activation_bytes(resolved, loaded.opened.environment.rank)
    if loaded.model.tower is not None:
        size = max(size, tower_bytes(resolved.model_config, resolved.dtype, *resolved.most_tower_rows))
    return replace(measurement, activation_bytes=max(measurement.activation_bytes, size))


def measure_step(loaded: LoadedModel, spec: CacheSpec) -> MemoryMeasurement:
    """Memory of the largest step; on the CPU estimated, if the estimate already leaves enough."""
    opened, model = loaded.opened, loaded.model
    weights = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
    resolved, environment = opened.resolved, opened.environment
    scheduler, rank = resolved.config.scheduler, environment.rank
    # On the CPU they take their memory when they are loaded.
    weights += adapters_bytes_of(resolved, rank)
    # Rows of images take theirs step by step.
    weights += media_rows_bytes_of(resolved, rank)
    weights += 0 if loaded.draft is None else loaded.draft.num_bytes
    if opened.device.type == "cuda":
        return measure_cuda(opened.device, weights, opened.readings, prepare_max_step(loaded, spec))
    estimate = activation_bytes(
        resolved.model_config,
        resolved.layout,
        rank,
        resolved.dtype,
        scheduler.max_num_batched_tokens,
        resolved.max_num_seqs,
        resolved.config.model.quantization,
        resolved.most_tower_rows,
        adds_by_tree=True,
        most_drafts=resolved.most_drafts,
    )
    estimate = max(estimate, draft_activation_bytes(resolved, rank)) + stream_bytes(resolved)
    measurement = measure_host(weights, estimate, environment.local_world_size)
    is_scarce = not is_estimate_enough(resolved, rank, measurement)
    # The step contains collectives: if one rank has to run it, all run it.
    if not is_on_any_rank(opened.groups.control, is_scarce):
        return measurement
    measured = profile_host(measurement, prepare_max_step(loaded, spec))
    # Rows of that step are too short to choose from many keys.
    num_ranks = resolved.layout.tensor_parallel_size
    of_choice = choice_bytes(resolved.model_config, DTYPE_BYTES[resolved.dtype], num_ranks)
    return replace(measured, activation_bytes=measured.activation_bytes + of_choice)


def prepare_max_step(loaded: LoadedModel, spec: CacheSpec) -> PreparedStep:
    """All layers on CUDA, and a second step with the largest chunk for attention; on the CPU, where each layer costs
    time, only two layers, or the first ones that have blocks and states of each shape.
    """
    resolved = loaded.opened.resolved
    scheduler, block_size = resolved.config.scheduler, resolved.config.cache.block_size
    max_tokens, pooling = scheduler.max_num_batched_tokens, resolved.model_config.pooling
    is_on_cpu = loaded.opened.device.type == "cpu"
    sizes = (max_tokens, resolved.max_num_seqs, resolved.max_model_len, block_size)
    scheduled = lagging(max_step(*sizes, pooling, all_filtered=not is_on_cpu), spec.most_drafts)
    num_blocks = sum(len(each.sequence.block_ids) for each in scheduled)
    if is_on_cpu and not spec.part_of:
        kinds = list(zip(spec.layers, spec.states or (None,) * spec.num_layers, strict=True))
        num_layers = max(2, 1 + max(map(kinds.index, kinds)))
        parts = (spec.layers[:num_layers], spec.states[:num_layers], spec.group_of[:num_layers])
        spec = replace(spec, layers=parts[0], states=parts[1], group_of=parts[2], draft_layers=())
    engine = loaded.new_cache_engine(spec, num_blocks, 0)
    # A pooled row must start at its first token, and the CPU's attention holds nothing of a row's length.
    has_chunk = not is_on_cpu and pooling is None
    chunk = [longest_chunk(max_tokens, resolved.max_model_len, block_size, num_blocks)] if has_chunk else []
    return prepared_step(loaded.model, engine, loaded.new_runner, scheduled, *chunk)


def allocate(
    loaded: LoadedModel,
    spec: CacheSpec,
    num_device_blocks: int,
    num_host_blocks: int,
    num_slots: tuple[int, int],
) -> RunningWorker:
    """Allocate the cache, and `num_slots` of the device and of the host if the model has states; an encoder gets memory
    for the keys and values of one step. Raises ConfigError, naming the setting to change, if the cache cannot hold one
    sequence of `max_model_len`.
    """
    opened, model, resolved = loaded.opened, loaded.model, loaded.opened.resolved
    block_size, device = resolved.config.cache.block_size, opened.device
    if resolved.model_config.is_encoder:
        assert (num_device_blocks, num_host_blocks) == (0, 0), (num_device_blocks, num_host_blocks)
        engine = loaded.new_cache_engine(spec, num_step_blocks(resolved), 0)
    else:
        check_cache_blocks(resolved, num_device_blocks, num_host_blocks)
        engine = loaded.new_cache_engine(spec, num_device_blocks, num_host_blocks, num_slots)
    caches = WorkerCaches(engine, spec.block_bytes, device)
    try:
        engine.allocate(host_reserve.offered())
        host_reserve.offer(None)
        graphs = opened.backend.new_graphs(model, opened.groups.tensor, loaded.adapters)
        clock = StageClock(resolved.layout.pipeline_rank(opened.environment.rank))
        runner = loaded.new_runner(engine, clock, graphs)
    except BaseException:
        caches.release()
        raise
    loaded.forget_expert_loads()
    weights, num_local_ranks = WeightMemory(model, loaded.operations.kernels), opened.environment.local_world_size
    of_adapters = AdapterMemory(loaded.adapters)
    of_draft = None if loaded.draft is None else WeightMemory(loaded.draft.module, loaded.draft.kernels)
    parts = (graphs, of_adapters, runner.media, of_draft)
    sleep = WorkerSleep(model, weights, caches, device, num_local_ranks, *parts)
    limits = resolved.config.model.adapter_limits
    adapters = WorkerAdapters(loaded.adapters, 0 if limits is None else limits.max_cpu_loras)
    rules = None if limits is None else AdapterRules(adapters.has, limits.max_loras)
    assert runner.prefixes is not None, "made with each runner"
    dtype, tensor = getattr(torch, resolved.dtype), opened.groups.tensor
    stores = (runner.rows, runner.prefixes)
    prompt_adapters = WorkerPromptAdapters(
        *stores, resolved.model_config, dtype, model.stage, (tensor.rank, tensor.size), spec.groups.windows
    )
    profiler = TraceProfiler(opened.environment.rank)
    event_handlers = (sleep, profiler, adapters, prompt_adapters, runner.keeper)
    assert tuple(map(type, event_handlers)) == EVENT_HANDLER_CLASSES, event_handlers
    sizes = (num_device_blocks, block_size, resolved.num_steps_ahead)
    checks_blocks = os.environ.get(CHECK_VARIABLE) == "1"
    mirror = Mirror(*sizes, rules, num_slots[0], spec.groups, resolved.most_drafts, checks_blocks=checks_blocks)
    return RunningWorker(
        loaded,
        caches,
        mirror,
        runner,
        clock,
        sleep,
        adapters,
        prompt_adapters,
        HitComparer(engine, mirror, opened.environment.rank, model.stage.start),
        profiler,
        event_handlers,
        thread_waits() if device.type == "cpu" else None,
    )
