"""One rank: its device, its groups, its shard of the model, its cache, its mirror of the scheduler."""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from kv_cache.cache_sizing import CacheSizing
from kv_cache.cache_spec import CacheSpec
from spmd_worker.model.decoder import DecoderForCausalLM
from spmd_worker.model.weights.weight_update import WeightUpdateReport
from spmd_worker.ranks.environment import RankEnvironment
from spmd_worker.ranks.groups import ParallelGroups
from spmd_worker.replica.sequence.step import StepPlan, StepResult
from spmd_worker.resolved import ResolvedRun
from spmd_worker.worker.device import gpu_identity
from spmd_worker.worker.inspection import describe_model, describe_slices
from spmd_worker.worker.loaded_model import LoadedModel, load_model
from spmd_worker.worker.memory.device import give_back_freed
from spmd_worker.worker.memory.plan import cache_spec_of
from spmd_worker.worker.opened_device import OpenedDevice, current_device, open_device
from spmd_worker.worker.runner.model_runner import LaunchedStep, ModelRunner
from spmd_worker.worker.running_worker import RunningWorker
from spmd_worker.worker.sleep import WorkerSleep
from spmd_worker.worker.start import allocate, measure
from spmd_worker.worker.trace_profiler import TraceProfiler
from spmd_worker.worker.worker_base import WorkerBase, WorkerReport

logger = logging.getLogger(__name__)

_Record = TypeVar("_Record")


class Worker(WorkerBase):
    """The contract's calls drive the start, each of whose stages is a complete record (`start.py`): `opened`, `loaded`,
    then `running`, which computes the steps. See `WorkerBase` for what each call does and in which order they come.
    """

    event_handler_classes: ClassVar[tuple[type, ...]] = (WorkerSleep, TraceProfiler)

    def __init__(self, resolved: ResolvedRun, environment: RankEnvironment) -> None:
        self.resolved, self.environment = resolved, environment
        self.config, self.model_config, self.layout = resolved.config, resolved.model_config, resolved.layout
        self.device = torch.device("cpu")
        self.groups: ParallelGroups | None = None
        self.sizing: CacheSizing | None = None
        self.model_runner: ModelRunner | None = None
        self._opened: OpenedDevice | None = None
        self._loaded: LoadedModel | None = None
        self._running: RunningWorker | None = None

    @property
    def opened(self) -> OpenedDevice:
        """The device, from `init_device` on."""
        return _there(self._opened, "init_device")

    @property
    def loaded(self) -> LoadedModel:
        """The model, from `load_model` on."""
        return _there(self._loaded, "load_model")

    @property
    def running(self) -> RunningWorker:
        """The worker that steps come to, from `initialize_cache` on."""
        return _there(self._running, "initialize_cache")

    def init_device(self) -> None:
        self._opened = open_device(self.resolved, self.environment)
        self.device, self.groups = self._opened.device, self._opened.groups

    def on_device(self) -> AbstractContextManager[object]:
        return current_device(self.device)

    def load_model(self) -> None:
        """See `loaded_model.load_model`. A class of somebody's may have wrapped the groups that were joined."""
        self._loaded = load_model(replace(self.opened, groups=_there(self.groups, "init_device")))

    def get_kv_cache_spec(self) -> CacheSpec:
        return cache_spec_of(self.resolved, self.environment.rank)

    def determine_num_available_blocks(self) -> tuple[int, int]:
        """See `start.measure`; the reason in words is in `sizing`."""
        self.sizing = measure(self.loaded, self.get_kv_cache_spec())
        logger.info("%s", self.sizing.reason)
        return self.sizing.num_device_blocks, self.sizing.num_host_blocks

    def initialize_cache(self, num_device_blocks: int, num_host_blocks: int) -> None:
        self._running = allocate(self.loaded, self.get_kv_cache_spec(), num_device_blocks, num_host_blocks)
        self.model_runner = self._running.runner

    def initialize_host_tier(self, num_slots: int) -> None:
        self.running.caches.add_tier(num_slots)

    def compile_or_warm_up_model(self) -> None:
        self.running.warm_up()

    def expect_step(self, num_tokens: int) -> None:
        self.running.runner.expect(num_tokens)

    def execute_model(self, plan: StepPlan) -> StepResult | None:
        return self.running.execute_model(plan)

    def sample_tokens(self, grammar_output: object | None = None) -> StepResult:
        """See `WorkerBase.sample_tokens`; grammars are this worker's own, so their output must be None."""
        assert grammar_output is None, grammar_output
        return self.running.sample_tokens()

    def launch_step(self, plan: StepPlan) -> None:
        if type(self).sample_tokens is not Worker.sample_tokens:
            # What a class of somebody else's does there is not left out.
            super().launch_step(plan)
            return
        result: StepResult | LaunchedStep | None = self.execute_model(plan)
        self._launched = (*self._launched, self.running.launch() if result is None else result)

    def read_step(self) -> StepResult:
        launched, *rest = self._launched
        self._launched = tuple(rest)
        return launched if isinstance(launched, StepResult) else self.running.note(launched.collect())

    @property
    def event_handlers(self) -> tuple[object, ...]:
        return (self,) if self._running is None else (self, self._running.sleep, self._running.profiler)

    def get_supported_tasks(self) -> tuple[str, ...]:
        pooling = self.model_config.pooling
        return ("generate",) if pooling is None else pooling.tasks

    def get_report(self) -> WorkerReport:
        report = WorkerReport(self.device.type, gpu_identity(self.device))
        if self._loaded is not None:
            arithmetic = self.opened.backend.arithmetic(self._loaded.operations.attention)
            loads = {layer: [*counts] for layer, counts in self._loaded.expert_loads().items()}
            report = replace(report, arithmetic=arithmetic, expert_loads=loads)
        if self._running is not None:
            times = self._running.clock.report() if self.layout.pipeline_parallel_size > 1 else {}
            report = replace(report, stage_times=times, thread_waits=self._running.thread_waits())
        return report

    def check_health(self) -> None:
        """Raise RuntimeError unless the device computes."""
        probe = torch.ones(2, device=self.device).sum().item()
        if probe != 2.0:
            raise RuntimeError(f"rank {self.environment.rank}: {self.device} adds 1 and 1 to {probe}")

    def get_model(self) -> nn.Module:
        """See `WorkerBase.get_model`. Who has it may put weights elsewhere."""
        self._look_at_addresses()
        return self.loaded.model

    def apply_model(self, function: Callable[[nn.Module], Any]) -> Any:
        try:
            with self.loaded.model.as_checkpoint() as view:
                return function(view)
        finally:
            self._look_at_addresses()

    def watch_requests(self, num_in_flight: Callable[[], int]) -> None:
        self.loaded.model.weights.update.num_in_flight = num_in_flight

    def get_weight_update(self) -> WeightUpdateReport | None:
        if self._loaded is None:
            return None
        weights = self._loaded.model.weights
        return weights.update.report(weights.tensors, weights.buffer_names)

    def refuse_weight_update(self) -> None:
        self.loaded.model.weights.update.refuse()

    def end_weight_update(self) -> None:
        self.loaded.model.weights.update.end()
        self._look_at_addresses()

    def reload_weights(self, folder: str | None = None) -> None:
        """Load all weights again from safetensors files: the model's own, or those of `folder`. Raises CheckpointError,
        with the weights as they were, for a folder whose names or shapes are not the model's.
        """
        self.loaded.reload_weights(self.resolved.model_folder if folder is None else Path(folder))
        self._look_at_addresses()

    def get_model_inspection(self) -> str:
        model = self.get_model()
        slices = describe_slices(model) if isinstance(model, DecoderForCausalLM) else ""
        return "\n".join(filter(None, (describe_model(model), slices)))

    def get_cache_block_size_bytes(self) -> int:
        return self.get_kv_cache_spec().block_bytes

    @property
    def vocab_size(self) -> int:
        return self.model_config.vocab_size

    @property
    def max_model_len(self) -> int:
        return self.resolved.max_model_len

    def shutdown(self) -> None:
        """Idempotent. The caller's own groups stay."""
        if self._running is not None:
            self._running.caches.release()
        # Attention keeps tensors of the last step.
        self.model_runner = self._running = self._loaded = self._opened = None
        if self.groups is not None:
            self.groups.destroy()
            self.groups = None
        give_back_freed(self.device)

    def _look_at_addresses(self) -> None:
        """Weights may be elsewhere than where graphs read them."""
        if self._running is not None and self._running.runner.graphs is not None:
            self._running.runner.graphs.look_at_addresses()


def _there(record: _Record | None, call: str) -> _Record:
    assert record is not None, f"{call} comes first"
    return record
