"""One rank: its device, its groups, its shard of the model, its cache, its mirror of the scheduler.

A step is a plan in and token ids out.
"""

import contextlib
import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from kv_cache import host_reserve
from kv_cache.cache_engine import CacheEngine
from kv_cache.cache_sizing import CacheSizing, MemoryMeasurement, check_cache_holds_one_sequence
from kv_cache.cache_spec import CacheSpec
from kv_cache.host_tier_engine import HostTierEngine
from spmd_worker.base.errors import ConfigError
from spmd_worker.base.metrics.stage_times import StageClock
from spmd_worker.model.decoder import DecoderForCausalLM
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.registry import build_model
from spmd_worker.model.weight_memory import WeightMemory
from spmd_worker.model.weights.checkpoint import Checkpoint
from spmd_worker.model.weights.dense_files import dummy_denses, read_denses
from spmd_worker.model.weights.dequantised_checkpoint import DequantisedCheckpoint
from spmd_worker.model.weights.dummy import fill_dummy
from spmd_worker.model.weights.loader import load_weights, load_whole
from spmd_worker.model.weights.weight_update import WeightUpdateReport
from spmd_worker.native.library import TeamCounters, thread_waits
from spmd_worker.native.threads import torch_alone, torchs_threads_sleep
from spmd_worker.ops.sampling.sampler import Sampler
from spmd_worker.ranks.communicator import GroupHandle
from spmd_worker.ranks.environment import RankEnvironment
from spmd_worker.ranks.groups import ParallelGroups, join_groups
from spmd_worker.ranks.topology import stage_of
from spmd_worker.replica.grammar.compiler import GrammarCompiler
from spmd_worker.replica.grammar.step_masks import GrammarMasks
from spmd_worker.replica.mirror.mirror import Mirror
from spmd_worker.replica.sequence.sampled import SampledIds
from spmd_worker.replica.sequence.step import StepPlan, StepResult
from spmd_worker.resolved import ResolvedRun
from spmd_worker.tokenizer.tokenizer import Tokenizer
from spmd_worker.worker.backends.backend import DeviceBackend, Operations
from spmd_worker.worker.backends.choice import new_backend
from spmd_worker.worker.device import choose_device, gpu_identity
from spmd_worker.worker.inspection import describe_model, describe_slices
from spmd_worker.worker.memory import host
from spmd_worker.worker.memory.device import (
    PreparedStep,
    give_back_freed,
    is_on_any_rank,
    measure_cuda,
    measure_host,
    profile_host,
)
from spmd_worker.worker.memory.estimate import activation_bytes
from spmd_worker.worker.memory.plan import (
    cache_spec_of,
    check_memory,
    is_estimate_enough,
    num_step_blocks,
    size_rank,
)
from spmd_worker.worker.runner.largest_step import largest_step, longest_chunk, prepared_step
from spmd_worker.worker.runner.model_runner import LaunchedStep, ModelRunner
from spmd_worker.worker.runner.step_graphs import StepGraphs
from spmd_worker.worker.sleep import CacheMemory, GoingToSleep, WakingUp, WorkerSleep
from spmd_worker.worker.trace_profiler import TraceProfiler
from spmd_worker.worker.worker_base import WorkerBase

logger = logging.getLogger(__name__)


class Worker(WorkerBase):
    """See `WorkerBase` for what each call does and in which order they come."""

    def __init__(self, resolved: ResolvedRun, environment: RankEnvironment) -> None:
        self.resolved, self.environment = resolved, environment
        self.config, self.model_config, self.layout = resolved.config, resolved.model_config, resolved.layout
        self.device = torch.device("cpu")
        self.groups: ParallelGroups | None = None
        self.sizing: CacheSizing | None = None
        self._free_at_start = self._reserved_at_start = 0
        self.backend: DeviceBackend | None = None
        self._operations: Operations | None = None
        self._graphs: StepGraphs | None = None
        self._model: DecoderForCausalLM | None = None
        self._cache_engine: CacheEngine | None = None
        self._tier_engine: HostTierEngine | None = None
        self._num_tier_slots = 0
        self._sleep: WorkerSleep | None = None
        self._mirror: Mirror | None = None
        self.model_runner: ModelRunner | None = None
        self._clock = StageClock(self.layout.pipeline_rank(environment.rank))
        self._waits_before: TeamCounters | None = None
        self._profiler = TraceProfiler(environment.rank)

    def init_device(self) -> None:
        """Raises ConfigError for a device or dtype that this machine does not have."""
        self.device = choose_device(
            self.config.device, self.environment.local_rank, is_callers_world=dist.is_initialized()
        )
        timeout_s = self.config.executor.timeout_s
        if self.device.type == "cuda":
            self._check_cuda_dtype()
            if self.layout.world_size > 1 and not dist.is_initialized():
                # The world will be ours, and with it the process.
                torch.cuda.set_device(self.device)
        with self.on_device():
            if self.device.type == "cuda":
                self._free_at_start, _ = torch.cuda.mem_get_info(self.device)
                self._reserved_at_start = torch.cuda.memory_reserved(self.device)
            self.backend = new_backend(self.resolved, self.device)
            groups = join_groups(self.layout, self.environment, self.device, timeout_s)
            try:
                self.groups = self.backend.wrap_groups(groups)
            except BaseException:
                # A caller who goes on has what there was before.
                groups.destroy()
                raise

    def on_device(self) -> AbstractContextManager[object]:
        """See `WorkerBase.on_device`. torch's operators find the device of their tensors; launches of Triton, pinned
        memory and what others call take the current one.
        """
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def load_model(self) -> None:
        """Raises ConfigError, before anything is allocated, for weights that no memory here can hold, and
        CheckpointError before anything is filled when names, shapes or coverage are wrong.
        """
        assert self.groups is not None, "init_device comes first"
        exchanges = self.config.model.quantization is not None and self.groups.tensor.size > 1
        model = self._filled_everywhere(self.groups.control) if exchanges else self._filled_model()
        if model is not None:
            model.pack_weights()
            self._model = model

    def _filled_everywhere(self, control: GroupHandle) -> DecoderForCausalLM | None:
        """The model, where every rank has filled its own: ranks that share rows of a weight exchange what they have of
        them when it is packed, and one that had failed would be waited for. It raises what went wrong; others get None.
        """
        try:
            model = self._filled_model()
        except BaseException:
            is_on_any_rank(control, True)
            raise
        return None if is_on_any_rank(control, False) else model

    def _filled_model(self) -> DecoderForCausalLM:
        """With what the checkpoint has, or with dummy weights, not packed yet."""
        assert self.groups is not None, "init_device comes first"
        self._check_memory()
        assert self.backend is not None, "init_device comes first"
        operations = self._operations = self.backend.operations()
        context = LayerContext(
            tensor_group=self.groups.tensor,
            kernels=operations.kernels,
            attention=operations.attention,
            dtype=getattr(torch, self.resolved.dtype),
            device=self.device,
            expert_layout=self.layout.experts,
            quantised=operations.quantised,
            screens_head=self.config.executor.argmax_screen,
        )
        stage = stage_of(self.layout, self.model_config, self.environment.rank)
        allows_nonfinite = self.config.model.allow_nonfinite
        model = build_model(context, self.model_config, stage, allows_nonfinite=allows_nonfinite)
        slices, paddings = model.weight_slices(), model.padding_slices()
        if self.config.model.load_format == "dummy":
            fill_dummy(model, slices, paddings, num_threads=self._num_loading_threads())
        else:
            with self._open_checkpoint(self.resolved.model_folder, model) as checkpoint:
                report = load_weights(
                    model,
                    slices,
                    paddings,
                    checkpoint,
                    ignorable=lambda name: model.is_ignorable(name) or checkpoint.is_unused(name),
                    tied=model.tied_tensors(),
                    allows_nonfinite=allows_nonfinite,
                )
            logger.info(
                "loaded %d tensors, %d bytes in %.2f s", report.num_tensors, report.num_bytes_read, report.seconds
            )
        if model.pooler is not None:
            denses, is_dummy = model.pooler.config.denses, self.config.model.load_format == "dummy"
            model.pooler.take_denses(
                dummy_denses(denses)
                if is_dummy
                else read_denses(self.resolved.model_folder, denses, allows_nonfinite=allows_nonfinite)
            )
        return model

    def get_kv_cache_spec(self) -> CacheSpec:
        """See `WorkerBase.get_kv_cache_spec`."""
        return cache_spec_of(self.resolved, self.environment.rank)

    def determine_num_available_blocks(self) -> tuple[int, int]:
        """Measures unless `cache.num_blocks` says, or the model is an encoder; the reason in words is in `sizing`."""
        needs_measuring = self.config.cache.num_blocks is None and not self.model_config.is_encoder
        measurement = self._measure() if needs_measuring else MemoryMeasurement(0, 0, 0, 0)
        self.sizing = size_rank(self.resolved, self.environment.rank, measurement)
        logger.info("%s", self.sizing.reason)
        return self.sizing.num_device_blocks, self.sizing.num_host_blocks

    def initialize_cache(self, num_device_blocks: int, num_host_blocks: int) -> None:
        """Raises ConfigError when the cache cannot hold one sequence of `max_model_len`, saying which setting to
        change. An encoder has memory for the keys and values of a step instead.
        """
        if self.model_config.is_encoder:
            assert (num_device_blocks, num_host_blocks) == (0, 0), (num_device_blocks, num_host_blocks)
            self._start_on(self._new_cache_engine(num_step_blocks(self.resolved), 0), num_device_blocks)
            return
        is_profiled = self.config.cache.num_blocks is None
        try:
            check_cache_holds_one_sequence(
                num_device_blocks,
                self.config.cache.block_size,
                self.max_model_len,
                is_profiled=is_profiled,
                has_swap_space_on_device=self.device.type == "cpu" and num_host_blocks > 0,
            )
        except ValueError as error:
            raise ConfigError(str(error)) from None
        self._start_on(self._new_cache_engine(num_device_blocks, num_host_blocks), num_device_blocks)

    def _start_on(self, engine: CacheEngine, num_device_blocks: int) -> None:
        """`num_device_blocks` are the scheduler's."""
        self._cache_engine = engine
        engine.allocate(host_reserve.offered())
        host_reserve.offer(None)
        self._mirror = Mirror(num_device_blocks, self.config.cache.block_size, self.resolved.num_steps_ahead)
        assert self.backend is not None, "init_device comes first"
        assert self.groups is not None, "init_device comes first"
        assert self._model is not None, "load_model comes first"
        self._graphs = self.backend.new_graphs(self._model, self.groups.tensor)
        self.model_runner = self._new_runner(engine, self._clock, self._graphs)
        # What was measured met experts too.
        self._forget_expert_loads()
        self._waits_before = thread_waits() if self.device.type == "cpu" else None

    def _forget_expert_loads(self) -> None:
        for counts in self.get_expert_loads().values():
            counts[:] = [0] * len(counts)

    def initialize_host_tier(self, num_slots: int) -> None:
        """See `WorkerBase.initialize_host_tier`."""
        assert self._cache_engine is not None, "initialize_cache comes first"
        self._num_tier_slots = num_slots
        self._tier_engine = HostTierEngine(self._cache_engine, num_slots)

    def compile_or_warm_up_model(self) -> None:
        """See `WorkerBase.compile_or_warm_up_model`: `DeviceBackend.warm_up`."""
        engine = self._cache_engine
        assert self.backend is not None, "init_device comes first"
        assert engine is not None, "initialize_cache comes first"
        self.backend.warm_up(
            lambda graphs: self._new_runner(engine, graphs=graphs), self._graphs, engine.num_device_blocks
        )
        self._forget_expert_loads()

    def _look_at_addresses(self) -> None:
        """Weights may be elsewhere than where graphs read them."""
        if self._graphs is not None:
            self._graphs.look_at_addresses()

    def expect_step(self, num_tokens: int) -> None:
        """See `WorkerBase.expect_step`."""
        assert self.model_runner is not None, "initialize_cache comes first"
        self.model_runner.expect(num_tokens)

    def execute_model(self, plan: StepPlan) -> StepResult | None:
        """Raises MirrorError, before anything runs, for a plan that does not follow from the last one."""
        assert self._mirror is not None, "initialize_cache comes first"
        assert self._cache_engine is not None, "initialize_cache comes first"
        assert self.model_runner is not None, "initialize_cache comes first"
        scheduled = self._mirror.apply(plan)
        self.model_runner.forget(plan)
        if self._sleep is not None and self._sleep.tags:
            return self._pass_step(plan, is_empty=not scheduled)
        if self._tier_engine is not None:
            self._tier_engine.store(plan.block_ops.transfer, plan.block_ops.store)
        self._cache_engine.execute(plan.block_ops)
        if self._tier_engine is not None:
            self._tier_engine.load(plan.block_ops.transfer, plan.block_ops.load)
        if not scheduled:
            return StepResult(plan.step, finished_transfers=self._take_finished_transfers())
        with self._threads():
            self.model_runner.forward(plan.step, scheduled, plan.num_ahead)
        return None

    def sample_tokens(self, grammar_output: object | None = None) -> StepResult:
        """See `WorkerBase.sample_tokens`; grammars are this worker's own, so their output must be None."""
        assert grammar_output is None, grammar_output
        assert self.model_runner is not None, "execute_model comes first"
        with self._threads():
            result = self.model_runner.sample()
        return self._noted(result)

    def launch_step(self, plan: StepPlan) -> None:
        """See `WorkerBase.launch_step`."""
        if type(self).sample_tokens is not Worker.sample_tokens:
            # What a class of somebody else's does there is not left out.
            super().launch_step(plan)
            return
        result: StepResult | LaunchedStep | None = self.execute_model(plan)
        if result is None:
            assert self.model_runner is not None, "initialize_cache comes first"
            with self._threads():
                result = self.model_runner.launch()
        self._launched = (*self._launched, result)

    def read_step(self) -> StepResult:
        """See `WorkerBase.read_step`."""
        launched, *rest = self._launched
        self._launched = tuple(rest)
        return launched if isinstance(launched, StepResult) else self._noted(launched.collect())

    def _noted(self, result: StepResult) -> StepResult:
        """What was sampled, which this worker needs too where the next plan goes ahead of it."""
        assert self._mirror is not None, "initialize_cache comes first"
        self._mirror.take_sampled(result.step, SampledIds(result.token_ids, result.num_token_ids))
        return replace(result, finished_transfers=self._take_finished_transfers())

    def _threads(self) -> contextlib.AbstractContextManager[None]:
        """Around what a step computes: torch's threads must not spin beside the kernels'."""
        assert self._operations is not None, "load_model comes first"
        is_alone = self._operations.is_native and not torchs_threads_sleep()
        return torch_alone() if is_alone else contextlib.nullcontext()

    def get_supported_tasks(self) -> tuple[str, ...]:
        """See `WorkerBase.get_supported_tasks`."""
        pooling = self.model_config.pooling
        return ("generate",) if pooling is None else pooling.tasks

    def get_stage_times(self) -> dict[str, Any]:
        """See `WorkerBase.get_stage_times`."""
        return self._clock.report()

    def get_thread_waits(self) -> dict[str, float]:
        """See `WorkerBase.get_thread_waits`."""
        if self._waits_before is None:
            return {}
        now, before = thread_waits(), self._waits_before
        return {"waited_s": now.waited_s - before.waited_s, "num_lost": now.num_slept - before.num_slept}

    def get_expert_loads(self) -> dict[int, list[int]]:
        """See `WorkerBase.get_expert_loads`."""
        is_first = self.layout.tensor_rank(self.environment.rank) == 0
        return self._model.expert_loads() if self._model is not None and is_first else {}

    def get_device_type(self) -> str:
        """See `WorkerBase.get_device_type`."""
        return self.device.type

    def get_gpu_identity(self) -> str:
        """See `WorkerBase.get_gpu_identity`."""
        return gpu_identity(self.device)

    def get_arithmetic(self) -> str:
        """See `WorkerBase.get_arithmetic`."""
        assert self.backend is not None, "init_device comes first"
        assert self._operations is not None, "load_model comes first"
        return self.backend.arithmetic(self._operations.attention)

    def prepare_start_profile(self, folder: str) -> Path:
        """Worker event `start_profile`: see `TraceProfiler`."""
        return self._profiler.prepare_start(folder)

    def commit_start_profile(self, path: Path) -> None:
        """See `TraceProfiler.start`."""
        self._profiler.start(path)

    def prepare_stop_profile(self, payload: None) -> None:
        """Worker event `stop_profile`: see `TraceProfiler`."""
        self._profiler.prepare_stop()

    def commit_stop_profile(self, staged: None) -> str:
        """See `TraceProfiler.stop`."""
        return self._profiler.stop()

    def prepare_sleep(self, level: int) -> GoingToSleep:
        """Worker event `sleep`: see `WorkerSleep`."""
        return self._asleep.prepare_sleep(level)

    def commit_sleep(self, staged: GoingToSleep) -> dict[str, int]:
        """See `WorkerSleep.commit_sleep`. Graphs go: what wakes up is elsewhere in the device's memory."""
        if self._graphs is not None:
            self._graphs.forget()
        return self._asleep.commit_sleep(staged)

    def prepare_wake_up(self, tags: list[str]) -> WakingUp:
        """Worker event `wake_up`: see `WorkerSleep`."""
        return self._asleep.prepare_wake_up(tags)

    def commit_wake_up(self, staged: WakingUp) -> dict[str, int]:
        """See `WorkerSleep.commit_wake_up`."""
        return self._asleep.commit_wake_up(staged)

    def undo_wake_up(self, staged: WakingUp | None) -> None:
        """See `WorkerSleep.undo_wake_up`."""
        self._asleep.undo_wake_up(staged)

    def check_health(self) -> None:
        """Raise RuntimeError unless the device computes."""
        probe = torch.ones(2, device=self.device).sum().item()
        if probe != 2.0:
            raise RuntimeError(f"rank {self.environment.rank}: {self.device} adds 1 and 1 to {probe}")

    def get_model(self) -> nn.Module:
        """See `WorkerBase.get_model`. Who has it may put weights elsewhere."""
        self._look_at_addresses()
        assert self._model is not None, "load_model comes first"
        return self._model

    def apply_model(self, function: Callable[[nn.Module], Any]) -> Any:
        """See `LLM.apply_model`."""
        assert self._model is not None, "load_model comes first"
        if self._sleep is not None:
            self._sleep.check_weights_awake()
        try:
            with self._model.as_checkpoint() as view:
                return function(view)
        finally:
            self._look_at_addresses()

    def watch_requests(self, num_in_flight: Callable[[], int]) -> None:
        """See `WorkerBase.watch_requests`."""
        assert self._model is not None, "load_model comes first"
        self._model.weight_update.num_in_flight = num_in_flight

    def get_weight_update(self) -> WeightUpdateReport | None:
        """See `WorkerBase.get_weight_update`."""
        model = self._model
        return None if model is None else model.weight_update.report(model.checkpoint_shapes, model.buffer_names)

    def refuse_weight_update(self) -> None:
        """See `WorkerBase.refuse_weight_update`."""
        assert self._model is not None, "load_model comes first"
        self._model.weight_update.refuse()

    def end_weight_update(self) -> None:
        """See `WorkerBase.end_weight_update`."""
        assert self._model is not None, "load_model comes first"
        self._model.weight_update.end()
        self._look_at_addresses()

    def reload_weights(self, folder: str | None = None) -> None:
        """Load all weights again from safetensors files: the model's own, or those of `folder`. Raises CheckpointError,
        with the weights as they were, for a folder whose names or shapes are not the model's.
        """
        assert self._model is not None, "load_model comes first"
        model, own = self._model, self.resolved.model_folder
        with self._open_checkpoint(own if folder is None else Path(folder), model) as checkpoint:
            model.weight_update.forget_tied_head()
            load_whole(
                model.load_weights,
                model.checkpoint_shapes,
                checkpoint,
                ignorable=lambda name: model.is_ignorable(name) or checkpoint.is_unused(name),
                tied=model.tied_tensors(),
            )
        self._look_at_addresses()

    def _open_checkpoint(self, folder: Path, model: DecoderForCausalLM) -> Checkpoint | DequantisedCheckpoint:
        """With the names that the model's table has, also where the files leave a prefix out or stack what the model
        has apart. Quantised weights are looked at as plain ones.
        """
        checkpoint, names = Checkpoint.open(folder), self.model_config.names
        checkpoint.rename(names.canonical)
        checkpoint.add_prefix(*model.optional_prefix)
        checkpoint.look_inside(model.places)
        quantization = self.model_config.quantization
        return checkpoint if quantization is None else DequantisedCheckpoint.open(checkpoint, quantization)

    def get_model_inspection(self) -> str:
        """See `WorkerBase.get_model_inspection`."""
        model = self.get_model()
        slices = describe_slices(model) if isinstance(model, DecoderForCausalLM) else ""
        return "\n".join(filter(None, (describe_model(model), slices)))

    def get_cache_block_size_bytes(self) -> int:
        """See `WorkerBase.get_cache_block_size_bytes`."""
        return self.get_kv_cache_spec().block_bytes

    @property
    def vocab_size(self) -> int:
        """See `WorkerBase.vocab_size`."""
        return self.model_config.vocab_size

    @property
    def max_model_len(self) -> int:
        """See `WorkerBase.max_model_len`."""
        return self.resolved.max_model_len

    def shutdown(self) -> None:
        """Idempotent. The caller's own groups stay."""
        self.model_runner = self._mirror = self._model = self._tier_engine = self._sleep = None
        # They keep tensors of the last step.
        self._operations = self._graphs = self.backend = None
        if self._cache_engine is not None:
            self._cache_engine.release()
            self._cache_engine = None
        if self.groups is not None:
            self.groups.destroy()
            self.groups = None
        give_back_freed(self.device)

    @property
    def _asleep(self) -> WorkerSleep:
        """Made with the first event: few engines ever sleep."""
        if self._sleep is None:
            assert self._model is not None, "load_model comes first"
            assert self._operations is not None, "load_model comes first"
            weights = WeightMemory(self._model, self._operations.kernels)
            num_local_ranks = self.environment.local_world_size
            self._sleep = WorkerSleep(self._model, weights, self._cache_memory(), self.device, num_local_ranks)
        return self._sleep

    def _cache_memory(self) -> CacheMemory:
        engine, block_bytes = self._cache_engine, self.get_cache_block_size_bytes()
        assert engine is not None, "initialize_cache comes first"
        num_host_blocks = engine.num_host_blocks + self._num_tier_slots if self.device.type == "cpu" else 0
        device_bytes, host_bytes = engine.num_device_blocks * block_bytes, num_host_blocks * block_bytes
        return CacheMemory(device_bytes, host_bytes, self._held_host_bytes, self._allocate_caches, self._release_caches)

    def _held_host_bytes(self) -> int:
        assert self._cache_engine is not None, "initialize_cache comes first"
        of_tier = 0 if self._tier_engine is None else self._tier_engine.num_host_bytes
        return self._cache_engine.num_host_bytes + of_tier

    def _allocate_caches(self) -> None:
        assert self._cache_engine is not None, "initialize_cache comes first"
        self._cache_engine.allocate()
        if self._num_tier_slots:
            self._tier_engine = HostTierEngine(self._cache_engine, self._num_tier_slots)

    def _release_caches(self) -> None:
        assert self._cache_engine is not None, "initialize_cache comes first"
        self._tier_engine = None
        self._cache_engine.release()

    def _pass_step(self, plan: StepPlan, *, is_empty: bool) -> StepResult:
        """A step that only carries events. Raises RuntimeError for one that would compute or move anything."""
        if not is_empty or not plan.block_ops.is_empty:
            raise RuntimeError(f"step {plan.step} would run while this worker sleeps: call wake_up first")
        return StepResult(plan.step)

    def _take_finished_transfers(self) -> tuple[int, ...]:
        return self._tier_engine.finished() if self._tier_engine is not None else ()

    def _num_loading_threads(self) -> int:
        """Of this rank's share of the cores; on the CPU those that it computes with."""
        if self.device.type == "cpu":
            return torch.get_num_threads()
        return max(1, len(os.sched_getaffinity(0)) // self.environment.local_world_size)

    def _check_cuda_dtype(self) -> None:
        if self.resolved.dtype == "bfloat16" and torch.cuda.get_device_capability(self.device) < (8, 0):
            name = torch.cuda.get_device_name(self.device)
            raise ConfigError(f"model.dtype=bfloat16 is not supported by {name}: use float16 or float32")

    def _check_memory(self) -> None:
        rank, num_local_ranks, total = self.environment.rank, self.environment.local_world_size, host.total_bytes()
        if self.device.type == "cuda":
            num_local_ranks, total = 1, torch.cuda.mem_get_info(self.device)[1]
        check_memory(self.resolved, rank, num_local_ranks, total)

    def _measure(self) -> MemoryMeasurement:
        """What graphs hold beside: the memory of the largest step that is recorded, at most as much as was measured."""
        measurement = self._measure_step()
        assert self.backend is not None, "init_device comes first"
        assert self.groups is not None, "init_device comes first"
        if not self.backend.can_record(self.groups.tensor):
            return measurement
        return replace(measurement, activation_bytes=2 * measurement.activation_bytes)

    def _measure_step(self) -> MemoryMeasurement:
        model = self.get_model()
        weights = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
        if self.device.type == "cuda":
            at_start = (self._free_at_start, self._reserved_at_start)
            return measure_cuda(self.device, weights, *at_start, self._largest_step())
        assert self.groups is not None, "init_device comes first"
        scheduler, rank = self.config.scheduler, self.environment.rank
        estimate = activation_bytes(
            self.model_config,
            self.layout,
            rank,
            self.resolved.dtype,
            scheduler.max_num_batched_tokens,
            scheduler.max_num_seqs,
            self.config.model.quantization,
        )
        measurement = measure_host(weights, estimate, self.environment.local_world_size)
        is_scarce = not is_estimate_enough(self.resolved, rank, measurement)
        # The step contains collectives: if one rank has to run it, all run it.
        if not is_on_any_rank(self.groups.control, is_scarce):
            return measurement
        return profile_host(measurement, self._largest_step())

    def _largest_step(self) -> PreparedStep:
        """All layers on CUDA, and a second step, of attention's largest chunk; on the CPU, where each layer takes its
        time, the first two.
        """
        scheduler, block_size = self.config.scheduler, self.config.cache.block_size
        max_tokens, pooling = scheduler.max_num_batched_tokens, self.model_config.pooling
        assert self._model is not None, "load_model comes first"
        is_on_cpu = self.device.type == "cpu"
        sizes = (max_tokens, scheduler.max_num_seqs, self.max_model_len, block_size)
        scheduled = largest_step(*sizes, pooling, all_filtered=not is_on_cpu)
        num_blocks = sum(len(each.sequence.block_ids) for each in scheduled)
        engine = self._new_cache_engine(num_blocks, 0, max_layers=2 if is_on_cpu else None)
        # What pools counts a row's tokens from its beginning, and the CPU's attention holds nothing of a row's length.
        has_chunk = not is_on_cpu and pooling is None
        chunk = [longest_chunk(max_tokens, self.max_model_len, block_size, num_blocks)] if has_chunk else []
        return prepared_step(self._model, engine, self._new_runner, scheduled, *chunk)

    def _new_cache_engine(
        self, num_device_blocks: int, num_host_blocks: int, max_layers: int | None = None
    ) -> CacheEngine:
        spec = self.get_kv_cache_spec()
        if max_layers is not None:
            spec = replace(spec, num_layers=min(max_layers, spec.num_layers))
        assert self._operations is not None, "load_model comes first"
        block_shape = self._operations.attention.block_shape(spec.num_kv_heads, spec.block_size, spec.head_size)
        dtype = getattr(torch, self.resolved.dtype)
        return CacheEngine(spec, block_shape, num_device_blocks, num_host_blocks, dtype, self.device)

    def _new_runner(
        self, engine: CacheEngine, clock: StageClock | None = None, graphs: StepGraphs | None = None
    ) -> ModelRunner:
        assert self.backend is not None, "init_device comes first"
        assert self._model is not None, "load_model comes first"
        assert self.groups is not None, "init_device comes first"
        samples = self._model.stage.is_last and self._model.pooler is None
        sampler = self._new_sampler(self._model, self.groups) if samples else None
        pipeline, grammars = self.groups.pipeline, None if sampler is None else self._new_grammars()
        block_size, keeps_state = self.config.cache.block_size, self.backend.keeps_state
        return ModelRunner(
            self._model, engine, sampler, block_size, pipeline, clock, grammars, graphs, keeps_state=keeps_state
        )

    def _new_grammars(self) -> GrammarMasks:
        """Reads nothing before the first row that needs it."""
        open_tokenizer = partial(Tokenizer.open_if_present, self.resolved.model_folder)
        compiler = GrammarCompiler(open_tokenizer, self.model_config.vocab_size, self.model_config.eos_token_ids)
        return GrammarMasks(compiler)

    def _new_sampler(self, model: DecoderForCausalLM, groups: ParallelGroups) -> Sampler:
        return Sampler(
            groups.tensor,
            model.lm_head.shard.start,
            self.model_config.vocab_size,
            self.model_config.eos_token_ids,
            self.config.model.logprobs_mode,
            None if self._operations is None else self._operations.kernels,
        )
