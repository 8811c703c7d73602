"""WorkerBase: the interface between an executor and the worker of one rank, whatever its device.

Order of calls: `init_device`, `load_model`, `check_health`, `determine_num_available_blocks`, for a model with
recurrent states `determine_num_state_slots` and `initialize_states`, `initialize_cache`, optionally
`initialize_host_tier` or `initialize_connector`, `compile_or_warm_up_model`; then for each step `execute_model` and, if
that returned None, `sample_tokens`; with async scheduling, `launch_step` and later `read_step` instead. Between two
steps `prepare_event` and, after the next step, `end_event`. `shutdown` is last. Names follow vLLM's. Imports no torch
at run time, so that a worker process can set its environment before torch reads it.

A worker event NAME consists of up to three methods of the worker, of its extension, or of one of its `event_handlers`:

    prepare_NAME(payload) -> staged    May raise, which rejects the event on every rank. Reads files, allocates, checks.
                                       Steps continue until the commit, so nothing that a step uses may change.
    commit_NAME(staged)                All ranks have prepared: applies what is staged and returns the caller's result.
                                       Must not fail: an exception is fatal for the engine.
    undo_NAME(staged)                  Optional; some rank rejected the event: releases what is staged. `staged` is None
                                       if this rank's own prepare raised, perhaps halfway.

None of them may use a collective: a rank that rejects the event would leave the others waiting.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from kv_cache.cache_spec import CacheSpec
from spmd_worker.base.config.speculation import CPU_STEP_TOKENS
from spmd_worker.base.errors import AdapterError, ConfigError
from spmd_worker.media.sent_audio import SentMedia
from spmd_worker.replica.sequence.draft_token_ids import DraftTokenIds
from spmd_worker.replica.sequence.step import StepPlan, StepResult
from spmd_worker.worker.adapter_methods import AdapterCalls, AdapterMethods
from spmd_worker.worker.memory import host

if TYPE_CHECKING:
    from torch import nn

    from spmd_worker.model.weights.weight_update import WeightUpdateReport
    from spmd_worker.ranks.groups import ParallelGroups
    from spmd_worker.worker.adapters import WorkerAdapters
    from spmd_worker.worker.prompt_adapters import WorkerPromptAdapters


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """Current state of one rank; unknown fields are empty.

    `gpu_identity` is unique among ranks; empty if the rank has no GPU or may share it. `arithmetic` names the order in
    which the kernels add, once they are chosen: equal on every rank, or their bits differ. `stage_times`: compute times
    of a pipeline stage (`StageClock.report`). Since the cache was allocated: `thread_waits`, the time that kernels
    waited for threads (`waited_s`) and how often a thread must have lost its core to another process (`num_lost`);
    `expert_loads`, tokens per expert by layer index, reported by the first of the ranks that share the layers.
    `peak_memory_bytes`: peak host memory of the process. `keeps_histories`: see `SchedulerLimits`.
    `encode_s`: time in which rows of images were made. `numerical_policy`: `NumericalPolicy.as_dict`, once the model is
    loaded; equal on every rank too. `step_tokens`: tokens that a step computes while it reads the weights.
    `num_lookahead_tokens`: those of the rank's drafter.
    """

    device_type: str = "cpu"
    gpu_identity: str = ""
    arithmetic: str = ""
    stage_times: dict[str, Any] = field(default_factory=dict)
    thread_waits: dict[str, float] = field(default_factory=dict)
    expert_loads: dict[int, list[int]] = field(default_factory=dict)
    peak_memory_bytes: int = field(default_factory=host.peak_resident_bytes)
    keeps_histories: bool = False
    encode_s: float = 0.0
    numerical_policy: dict[str, Any] = field(default_factory=dict)
    step_tokens: int = CPU_STEP_TOKENS
    num_lookahead_tokens: int = 0


class WorkerBase(AdapterMethods, ABC):
    """The worker of one rank.

    `groups` are the process groups that `init_device` joined (`join_groups`). Under torchrun, where each rank has its
    own executor, the engine agrees on every step over `groups.control` and `groups.engine`; None is allowed only if
    there is one such rank.
    """

    groups: "ParallelGroups | None" = None
    model_runner: Any = None
    """The part that runs the model, if the worker has one; its `model` takes new weights (`load_weights`)."""
    event_handler_classes: ClassVar[tuple[type, ...]] = ()
    """Classes of the `event_handlers` other than the worker: an extension must not define their events."""
    _prepared: tuple[str, Any] | None = None
    """Name of the open worker event, and what its prepare staged."""
    _launched: tuple[Any, ...] = ()
    """Results of launched steps that are not read yet, oldest first."""

    @abstractmethod
    def init_device(self) -> None:
        """Choose the device, check the dtype, join the groups and keep them in `groups`."""

    def on_device(self) -> AbstractContextManager[object]:
        """Context in which this rank's device is the process's current one: every call of a `WorkerWrapper` runs in it,
        because a caller's process may have another current device. By default nothing changes.
        """
        return nullcontext()

    @abstractmethod
    def load_model(self) -> None:
        """Build this rank's shard and fill it."""

    @abstractmethod
    def get_kv_cache_spec(self) -> CacheSpec:
        """This rank's share of the cache."""

    @abstractmethod
    def determine_num_available_blocks(self) -> tuple[int, int]:
        """(device blocks, host blocks) that fit in this rank's memory."""

    def determine_available_memory(self) -> int:
        """Bytes of memory for the cache: those of the device blocks that fit."""
        return self.determine_num_available_blocks()[0] * self.get_cache_block_size_bytes()

    def determine_num_state_slots(self) -> tuple[int, int, int]:
        """Slots of recurrent states that fit in this rank's memory, of running sequences, of snapshots and of the host,
        after `determine_num_available_blocks`, whose blocks are beside them. Raises ConfigError.
        """
        raise ConfigError(f"{type(self).__name__} does not support models with recurrent states")

    def initialize_states(self, num_slots: int, num_host_slots: int) -> None:
        """Numbers of state slots, of the device for sequences and snapshots together, the same on every rank; called
        before `initialize_cache`, which allocates them.
        """
        raise ConfigError(f"{type(self).__name__} does not support models with recurrent states")

    @abstractmethod
    def initialize_cache(self, num_device_blocks: int, num_host_blocks: int) -> None:
        """Allocate the cache; the numbers are the same on every rank."""

    @abstractmethod
    def initialize_host_tier(self, num_slots: int) -> None:
        """Allocate host memory for `num_slots` evicted prefix blocks, after `initialize_cache`."""

    def initialize_connector(self, factory: str, options: dict[str, str], identity: dict[str, str]) -> None:
        """Make this worker's half of the KV connector whose factory has this name, after `initialize_cache`. `options`
        and `identity`: see `ConnectorContext`. Raises ConfigError.
        """
        raise ConfigError(f"cache.connector={factory}: {type(self).__name__} has no method initialize_connector")

    def compile_or_warm_up_model(self) -> None:  # optional
        """Run once what later steps run, after the cache is allocated, so that the first step is as fast as others."""

    def expect_step(self, num_tokens: int) -> None:  # optional: only speeds up the step
        """Announce, on a pipeline stage after the first, that the next unannounced step has `num_tokens` (at least 1)
        tokens. May be called while this rank computes the previous step; steps may also run unannounced.
        """

    def hold_rows(self, request_id: int, content: bytes, data: bytes) -> None:
        """Take the input embeddings of a request (`PromptRows`), before the first step that computes it; released when
        a plan lists the request as finished. Workers other than the first of the first stage have no use for them.
        """
        raise NotImplementedError(f"{type(self).__name__} does not support prompts of embeddings")

    def hold_media(self, request_id: int, index: int, media: SentMedia) -> None:
        """Take the pixels of image `index` of a request, or the audio that an encoder reads, before the first step that
        makes its rows; released when a plan lists the request as finished. Workers other than the first of the first
        stage have no use for them.
        """
        raise NotImplementedError(f"{type(self).__name__} does not support prompts with images or audio")

    @abstractmethod
    def execute_model(self, plan: StepPlan) -> StepResult | None:
        """Cache operations and forward pass; None if `sample_tokens` must finish the step."""

    @abstractmethod
    def sample_tokens(self, grammar_output: object | None = None) -> StepResult:
        """Sample the tokens of the last `execute_model`."""

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Drafts that this rank's model made in the last step that wanted some, once; None on other ranks, and where
        none drafts.
        """
        return None

    def execute_dummy_batch(self) -> None:
        """Compute one token that belongs to no request, without a change of the cache; all ranks at once."""
        raise NotImplementedError(f"{type(self).__name__} has no method execute_dummy_batch")

    def profile(self, is_start: bool = True, folder: str | None = None) -> Any:
        """Start this rank's profiler, which will write to `folder`, or stop it and return the path of the trace.
        Raises ValueError for a start without a folder, RuntimeError if it cannot.
        """
        if is_start and folder is None:
            raise ValueError("profile needs the folder to write to: profile(folder=...)")
        problem = self.prepare_event("start_profile" if is_start else "stop_profile", folder if is_start else None)
        result = self.end_event(is_committed=not problem)
        if problem:
            raise RuntimeError(problem)
        return result

    def reset_mm_cache(self) -> None:  # optional
        """No effect: the rows of images are dropped by a plan (`LLM.reset_mm_cache`)."""

    @property
    def event_handlers(self) -> tuple[object, ...]:
        """Objects with methods of worker events; the first that has a method wins, the worker comes first."""
        return (self,)

    def prepare_event(self, name: str, payload: Any) -> str:
        """Prepare worker event `name`. Returns "" or why this rank rejects it; `end_event` follows in both cases."""
        assert self._prepared is None, self._prepared
        self._prepared = (name, None)
        prepare, commit = self._event_method("prepare", name), self._event_method("commit", name)
        if prepare is None or commit is None:
            method = f"{'prepare' if prepare is None else 'commit'}_{name}"
            return f"{type(self).__name__} has no method {method}, which worker event {name!r} needs"
        try:
            self._prepared = (name, prepare(payload))
        except Exception as error:  # the other ranks must learn of any failure
            return f"{type(error).__name__}: {error}"
        return ""

    def end_event(self, is_committed: bool) -> Any:
        """Commit the prepared event or undo it. Returns the commit's result."""
        assert self._prepared is not None, "prepare_event comes first"
        (name, staged), self._prepared = self._prepared, None
        finish = self._event_method("commit" if is_committed else "undo", name)
        return None if finish is None else finish(staged)

    def _event_method(self, phase: str, name: str) -> Callable[[Any], Any] | None:
        found = [getattr(handler, f"{phase}_{name}", None) for handler in self.event_handlers]
        return next(filter(callable, found), None)

    @property
    def adapters(self) -> "WorkerAdapters":
        """This worker's LoRA adapters, one of its `event_handlers`. `add_lora` and its like change this worker alone:
        they are for a caller that drives it without an engine.
        """
        raise AdapterError(f"{type(self).__name__} takes no LoRA adapters")

    def stage_lora(self, *given: Any) -> tuple[int, str]:
        """`WorkerAdapters.stage`: read an adapter for the worker event `add_lora` that follows."""
        return self.adapters.stage(*given)

    def unstage_lora(self) -> None:
        self.adapters.unstage()

    def leave_adapters_to_engine(self) -> None:
        """Reject `add_lora` and `remove_lora` of this worker alone from now on."""
        self.adapters.leave_to_engine()

    @property
    def _adapter_calls(self) -> AdapterCalls:
        return self.adapters

    @property
    def prompt_adapters(self) -> "WorkerPromptAdapters":
        """This worker's prompt adapters, one of its `event_handlers`."""
        raise AdapterError(f"{type(self).__name__} takes no prompt adapters")

    def stage_prompt_adapter(self, int_id: int, path: str, num_tokens: int) -> tuple[int, str]:
        """`WorkerPromptAdapters.stage`: read an adapter for the worker event `add_prompt_adapter` that follows."""
        return self.prompt_adapters.stage(int_id, path, num_tokens)

    def unstage_prompt_adapter(self) -> None:
        self.prompt_adapters.unstage()

    @property
    def _prompt_adapter_calls(self) -> AdapterCalls:
        return self.prompt_adapters

    @abstractmethod
    def check_health(self) -> None:
        """Raise if this worker can no longer compute."""

    @abstractmethod
    def get_model(self) -> "nn.Module":
        """This rank's shard of the model, packed for its kernels."""

    def apply_model(self, function: "Callable[[nn.Module], Any]") -> Any:
        """Call `function`, which must live in this process, with the model under its checkpoint's names."""
        return function(self.get_model())

    def watch_requests(self, num_in_flight: Callable[[], int]) -> None:  # optional: weights may be fixed
        """Register the count of requests in flight, during which no weight may change. Called only if the worker is in
        the engine's process.
        """

    def watch_layers(self, on_layer: Callable[[], None]) -> None:  # optional: only for images that take minutes
        """Register what is called behind each layer of a tower. Called only if the worker is in the engine's process,
        by its thread.
        """

    def get_weight_update(self) -> "WeightUpdateReport | None":
        """The loaded weights that are not committed; None if there are none and none was rejected."""
        return None

    def reject_weight_update(self) -> None:  # optional: weights may be fixed
        """Reject the loaded weights of a tied head; the update stays open."""

    def end_weight_update(self) -> None:  # optional: weights may be fixed
        """Commit the loaded weights."""

    @abstractmethod
    def get_model_inspection(self) -> str:
        """A readable tree of modules with the shapes of this rank's parameters, then its slices of the checkpoint's
        tensors: "model.layers.0-3.self_attn.q_proj.weight rows 192 to 288 of 288, in qkv_proj".
        """

    def get_report(self) -> WorkerReport:
        return WorkerReport()

    def get_cache_block_size_bytes(self) -> int:
        """Bytes of one block on this rank, all layers."""
        return self.get_kv_cache_spec().block_bytes

    def launch_step(self, plan: StepPlan) -> None:
        """Execute a step and leave its result to `read_step`; the next step may be launched before that. This default
        waits for the device if `execute_model` or `sample_tokens` does.
        """
        result = self.execute_model(plan)
        self._launched = (*self._launched, self.sample_tokens() if result is None else result)

    def read_step(self) -> StepResult:
        """The result of the oldest launched step that is not read yet."""
        result, *rest = self._launched
        self._launched = tuple(rest)
        assert isinstance(result, StepResult), type(result)
        return result

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Token ids of the model."""

    @property
    @abstractmethod
    def max_model_len(self) -> int:
        """Maximum length of a sequence, in tokens."""

    @abstractmethod
    def shutdown(self) -> None:
        """Free the memory and leave the groups that this worker made."""
