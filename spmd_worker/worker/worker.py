"""Worker of one rank: device, process groups, model shard, cache, mirror of the scheduler."""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from kv_cache.cache_sizing import CacheSizing
from kv_cache.cache_spec import CacheSpec
from kv_cache.connectors.interface import ConnectorContext
from spmd_worker.base.metrics.start_times import StartTimes
from spmd_worker.media.sent_audio import SentMedia
from spmd_worker.model.decoder import DecoderForCausalLM
from spmd_worker.model.weights.weight_update import WeightUpdateReport
from spmd_worker.ranks.environment import RankEnvironment
from spmd_worker.ranks.groups import ParallelGroups
from spmd_worker.replica.sequence.draft_token_ids import DraftTokenIds
from spmd_worker.replica.sequence.step import StepPlan, StepResult
from spmd_worker.resolved import ResolvedRun
from spmd_worker.worker.adapters import WorkerAdapters
from spmd_worker.worker.device import gpu_identity
from spmd_worker.worker.file_formats import reload_from_files
from spmd_worker.worker.inspection import describe_model, describe_slices
from spmd_worker.worker.loaded_model import LoadedModel, load_model
from spmd_worker.worker.memory.device import give_back_freed
from spmd_worker.worker.memory.plan import cache_spec_of
from spmd_worker.worker.opened_device import OpenedDevice, current_device, open_device
from spmd_worker.worker.prompt_adapters import WorkerPromptAdapters
from spmd_worker.worker.runner.model_runner import LaunchedStep, ModelRunner
from spmd_worker.worker.running_worker import RunningWorker
from spmd_worker.worker.save_options import DEFAULT_SIZE, saved_folder, size_in_bytes, tensorizer_folder
from spmd_worker.worker.saving import ModelSaver
from spmd_worker.worker.start import EVENT_HANDLER_CLASSES, allocate, compile_ahead, measure
from spmd_worker.worker.weight_checks import compare_with_files, digests_of_all_ranks
from spmd_worker.worker.worker_base import WorkerBase, WorkerReport
from spmd_worker.worker.worker_wrapper import connector_errors, new_connector

logger = logging.getLogger(__name__)

_Record = TypeVar("_Record")


class Worker(WorkerBase):
    """Implements `WorkerBase` for our models. The calls drive the stages of a start (`start.py`), each a complete
    record: `opened`, `loaded`, then `running`, which computes the steps.
    """

    event_handler_classes: ClassVar[tuple[type, ...]] = EVENT_HANDLER_CLASSES

    def __init__(self, resolved: ResolvedRun, environment: RankEnvironment) -> None:
        self.resolved, self.environment = resolved, environment
        self.config, self.model_config, self.layout = resolved.config, resolved.model_config, resolved.layout
        self.device = torch.device("cpu")
        self.groups: ParallelGroups | None = None
        self.sizing: CacheSizing | None = None
        self.model_runner: ModelRunner | None = None
        self.start_times = StartTimes()
        self._num_slots: tuple[int, int] | None = None
        """State slots of the device and of the host."""
        self._opened: OpenedDevice | None = None
        self._loaded: LoadedModel | None = None
        self._running: RunningWorker | None = None

    @property
    def rank(self) -> int:
        """Rank in the world, the wrapper's `global_rank`."""
        return self.environment.rank

    @property
    def local_rank(self) -> int:
        return self.environment.local_rank

    @property
    def is_driver_worker(self) -> bool:
        """Whether this is the first of the ranks that share its layers."""
        return self.layout.tensor_rank(self.rank) == 0

    @property
    def do_metadata_broadcast(self) -> bool:
        """False: every rank gets the metadata of a step with the agreed plan."""
        return False

    @property
    def kv_cache(self) -> list[list[torch.Tensor]]:
        """One list, because steps in flight share their blocks: this rank's cache [blocks, *block_shape] of each layer
        that has blocks.
        """
        return [[each for each in self.running.caches.engine.layer_caches if each is not None]]

    @property
    def vocab_size(self) -> int:
        return self.model_config.vocab_size

    @property
    def max_model_len(self) -> int:
        return self.resolved.max_model_len

    @property
    def opened(self) -> OpenedDevice:
        return _existing(self._opened, "init_device")

    @property
    def loaded(self) -> LoadedModel:
        return _existing(self._loaded, "load_model")

    @property
    def running(self) -> RunningWorker:
        return _existing(self._running, "initialize_cache")

    def init_device(self) -> None:
        with self.start_times.part("device and groups"):
            self._opened = open_device(self.resolved, self.environment)
        self.device, self.groups = self._opened.device, self._opened.groups

    def on_device(self) -> AbstractContextManager[object]:
        return current_device(self.device)

    def load_model(self) -> None:
        # A user's subclass may have wrapped the groups that were joined.
        with self.start_times.part("weights"):
            self._loaded = load_model(replace(self.opened, groups=_existing(self.groups, "init_device")))
        if self._loaded is not None and self._loaded.report is not None:
            self.start_times.note("weights", str(self._loaded.report))

    def get_kv_cache_spec(self) -> CacheSpec:
        return cache_spec_of(self.resolved, self.environment.rank)

    def determine_num_available_blocks(self) -> tuple[int, int]:
        with self.start_times.part("kernels"):
            words = compile_ahead(self.loaded, self.get_kv_cache_spec())
        if words:
            self.start_times.note("kernels", words)
        with self.start_times.part("profile"):
            self.sizing = measure(self.loaded, self.get_kv_cache_spec())
        logger.info("%s", self.sizing.reason)
        return self.sizing.num_device_blocks, self.sizing.num_host_blocks

    def determine_available_memory(self) -> int:
        # Measured once: later the cache itself takes the memory.
        sizing = self.sizing
        num_blocks = self.determine_num_available_blocks()[0] if sizing is None else sizing.num_device_blocks
        return num_blocks * self.get_cache_block_size_bytes()

    def determine_num_state_slots(self) -> tuple[int, int, int]:
        states = _existing(self.sizing, "determine_num_available_blocks").states
        return states.num_seqs, states.num_snapshots, states.num_host_slots

    def initialize_states(self, num_slots: int, num_host_slots: int) -> None:
        self._num_slots = (num_slots, num_host_slots)

    def initialize_cache(self, num_device_blocks: int, num_host_blocks: int) -> None:
        spec, num_slots = self.get_kv_cache_spec(), (0, 0)
        if spec.states:
            num_slots = _existing(self._num_slots, "initialize_states")
        with self.start_times.part("cache"):
            self._running = allocate(self.loaded, spec, num_device_blocks, num_host_blocks, num_slots)
        self.model_runner = self._running.runner

    def initialize_host_tier(self, num_slots: int) -> None:
        self.running.caches.add_tier(num_slots)

    def initialize_connector(self, factory: str, options: dict[str, str], identity: dict[str, str]) -> None:
        num_ranks = self.layout.tensor_parallel_size * self.layout.pipeline_parallel_size
        replica, rank = divmod(self.rank, num_ranks)
        context = ConnectorContext(options, identity, rank, num_ranks, replica)
        connector = new_connector(factory, context)
        with connector_errors(factory):
            self.running.caches.connect(connector.worker_half)

    def compile_or_warm_up_model(self) -> None:
        times, graphs = self.start_times, self.running.runner.graphs
        with times.part("warm-up"):
            self.running.warm_up()
        if graphs is not None:
            times.move(graphs.recording_s, "warm-up", "graphs")
            times.note("graphs", f"{graphs.num_recorded} recorded")
        logger.info("worker ready in %s", times)

    def expect_step(self, num_tokens: int) -> None:
        self.running.runner.expect(num_tokens)

    def execute_model(self, plan: StepPlan) -> StepResult | None:
        return self.running.execute_model(plan)

    def hold_rows(self, request_id: int, content: bytes, data: bytes) -> None:
        rows = self.running.runner.rows
        if rows is not None:
            rows.hold(request_id, content, data)

    def hold_media(self, request_id: int, index: int, media: SentMedia) -> None:
        store = self.running.runner.media
        if store is not None:
            store.hold(request_id, index, media)

    def sample_tokens(self, grammar_output: object | None = None) -> StepResult:
        """`grammar_output` must be None: this worker computes its grammars itself."""
        assert grammar_output is None, grammar_output
        return self.running.sample_tokens()

    def launch_step(self, plan: StepPlan) -> None:
        if type(self).sample_tokens is not Worker.sample_tokens:
            # A user's subclass may sample in its own way.
            super().launch_step(plan)
            return
        result: StepResult | LaunchedStep | None = self.execute_model(plan)
        self._launched = (*self._launched, self.running.launch() if result is None else result)

    def read_step(self) -> StepResult:
        launched, *rest = self._launched
        self._launched = tuple(rest)
        return launched if isinstance(launched, StepResult) else self.running.read(launched)

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        running = self.running
        found, running.last_drafts = running.last_drafts, None
        return found

    def execute_dummy_batch(self) -> None:
        self.running.execute_dummy_batch()

    @property
    def event_handlers(self) -> tuple[object, ...]:
        return (self,) if self._running is None else (self, *self._running.event_handlers)

    @property
    def adapters(self) -> WorkerAdapters:
        return self.running.adapters

    @property
    def prompt_adapters(self) -> WorkerPromptAdapters:
        return self.running.prompt_adapters

    def get_supported_tasks(self) -> tuple[str, ...]:
        pooling = self.model_config.pooling
        return ("generate",) if pooling is None else pooling.tasks

    def get_report(self) -> WorkerReport:
        report = WorkerReport(self.device.type, gpu_identity(self.device))
        if self._loaded is not None:
            of_device = self.opened.backend.arithmetic(self._loaded.operations.attention)
            arithmetic = f"{of_device}; row-parallel sums {self.opened.resolved.row_sums}"
            loads = self._loaded.expert_loads()
            keeps_histories = self._loaded.operations.kernels.samples_on_device
            policy = self.opened.backend.numerical_policy(self._loaded.operations, self.opened.groups.tensor).as_dict()
            report = replace(report, arithmetic=arithmetic, expert_loads=loads, keeps_histories=keeps_histories)
            report = replace(report, numerical_policy=policy, step_tokens=self.opened.backend.step_tokens)
        if self._running is not None:
            media = self._running.runner.media
            times = self._running.clock.report() if self.layout.pipeline_parallel_size > 1 else {}
            report = replace(report, stage_times=times, thread_waits=self._running.thread_waits())
            report = replace(report, encode_s=0.0 if media is None else media.encode_s)
            report = replace(report, num_lookahead_tokens=self._running.runner.num_lookahead_tokens)
        return report

    def check_health(self) -> None:
        """Raises RuntimeError unless the device computes."""
        probe = torch.ones(2, device=self.device).sum().item()
        if probe != 2.0:
            raise RuntimeError(f"rank {self.environment.rank}: {self.device} computes 1 + 1 = {probe}")

    def get_model(self) -> nn.Module:
        # The caller may move weights.
        self._check_graph_addresses()
        self.loaded.model.hold()
        return self.loaded.model

    def apply_model(self, function: Callable[[nn.Module], Any]) -> Any:
        try:
            with self.loaded.model.as_checkpoint() as view:
                return function(view)
        finally:
            self._check_graph_addresses()

    def watch_requests(self, num_in_flight: Callable[[], int]) -> None:
        self.loaded.model.weights.update.num_in_flight = num_in_flight

    def watch_layers(self, on_layer: Callable[[], None]) -> None:
        media = self.running.runner.media
        if media is not None:
            media.on_layer = on_layer

    def get_weight_update(self) -> WeightUpdateReport | None:
        return None if self._loaded is None else self._loaded.model.weights.report()

    def reject_weight_update(self) -> None:
        self.loaded.model.weights.update.reject()

    def end_weight_update(self) -> None:
        self.loaded.model.weights.update.end()
        self._check_graph_addresses()

    def reload_weights(self, folder: str | None = None) -> None:
        """Reload all weights from the model's own files or those of `folder`, which may be a name of the hub whose
        files are in the local cache: a checkpoint, or a sharded state of this layout. The adapter of `model.lora_merge`
        is read again and merged into a checkpoint. Raises CheckpointError or AdapterError, with the
        weights unchanged, if names or shapes in a folder are not the model's.
        """
        adapters = self.loaded.adapters
        loaded = () if adapters is None else adapters.digests
        reload_from_files(self.loaded.model, self.resolved, self.environment.rank, folder, loaded)
        self._check_graph_addresses()

    def save_sharded_state(
        self,
        path: str,
        pattern: str | None = None,
        max_size: int | str | None = None,
        weight_version: int | None = None,
    ) -> None:
        """Save this rank's parameters, together with the other ranks, which call this too: `ModelSaver`."""
        self._saver.save_sharded_state(saved_folder(path), pattern, size_in_bytes(max_size), weight_version)

    def save_checkpoint(self, path: str, max_size: int | str | None = DEFAULT_SIZE) -> None:
        """Save the model of all ranks, which call this too, in the hub's names: `ModelSaver`."""
        self._saver.save_checkpoint(saved_folder(path), size_in_bytes(max_size))

    def save_streamed(self, path: str) -> None:
        """`save_checkpoint` into one file that is read by several threads."""
        self._saver.save_checkpoint(saved_folder(path), None, is_streamed=True)

    def save_tensorized_model(self, tensorizer_config: Any) -> None:
        """`save_streamed` into the folder of vLLM's `TensorizerConfig`, of a dict of its fields, or of their JSON."""
        self._saver.save_checkpoint(tensorizer_folder(tensorizer_config), None, is_streamed=True)

    def get_weights_digests(self) -> tuple[dict[str, str], str]:
        """Digest of each tensor of the model, together with the other ranks: `weight_checks.digests_of_all_ranks`."""
        return digests_of_all_ranks(self.loaded.model, _existing(self.groups, "init_device"))

    def compare_weights(self, folder: str | None = None) -> tuple[str, str]:
        """Compare all weights with files, together with the other ranks: `weight_checks.compare_with_files`."""
        groups = _existing(self.groups, "init_device")
        return compare_with_files(self.loaded.model, self.resolved, groups, folder)

    @property
    def _saver(self) -> ModelSaver:
        groups = _existing(self.groups, "init_device")
        return ModelSaver(self.loaded.model, self.resolved, self.environment, groups)

    def get_model_inspection(self) -> str:
        model = self.get_model()
        slices = describe_slices(model) if isinstance(model, DecoderForCausalLM) else ""
        return "\n".join(filter(None, (describe_model(model), slices)))

    def shutdown(self) -> None:
        """Idempotent. The caller's own groups are kept."""
        if self._running is not None:
            self._running.profiler.close()
            self._running.caches.disconnect()
            self._running.caches.release()
        # Attention holds tensors of the last step.
        self.model_runner = self._running = self._loaded = self._opened = None
        if self.groups is not None:
            self.groups.destroy()
            self.groups = None
        give_back_freed(self.device)

    def _check_graph_addresses(self) -> None:
        """Have the next step check that weights are where CUDA graphs and stacked experts read them."""
        if self._loaded is not None:
            self._loaded.model.forget_addresses()
        if self._running is not None and self._running.runner.graphs is not None:
            self._running.runner.graphs.request_address_check()


def _existing(record: _Record | None, call: str) -> _Record:
    assert record is not None, f"{call} comes first"
    return record
