"""The contract of a worker: what one rank does for an executor, whatever its device.

Order of calls: `init_device`, `load_model`, `check_health`, `determine_num_available_blocks`, `initialize_cache`,
`initialize_host_tier` if at all, `compile_or_warm_up_model`, then for each step `execute_model` and, when that returned
nothing, `sample_tokens`, or, where a step is launched before the one before it is read, `launch_step` and later
`read_step`; between two steps `prepare_event` and, after the next step, `end_event`; `shutdown` last.
Names follow vLLM's. Imports no torch when it runs, so that a process can learn its environment before torch reads it.

A worker event NAME is up to three methods of the worker, its own or an extension's, or of its `event_handlers`:

    prepare_NAME(payload) -> staged    may raise, which refuses the event on every rank. Reads files, allocates, checks;
                                       steps go on before it is committed, so nothing that a step uses may change.
    commit_NAME(staged)                all ranks have prepared: puts in place what is staged. Must not fail: what it
                                       raises ends the engine. Its result is the caller's.
    undo_NAME(staged)                  optional; a rank refused: gives back what is staged, which is None where this
                                       rank's own prepare raised, halfway perhaps.

None of them may use a collective: a rank that refuses would leave the others waiting.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from kv_cache.cache_spec import CacheSpec
from spmd_worker.replica.sequence.step import StepPlan, StepResult
from spmd_worker.worker.memory import host

if TYPE_CHECKING:
    from torch import nn

    from spmd_worker.model.weights.weight_update import WeightUpdateReport
    from spmd_worker.ranks.groups import ParallelGroups


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """One rank as it is now. No two ranks have the same `gpu_identity`, which is empty where a rank has no GPU, or may
    share it. `arithmetic` is the order in which its kernels add, in words, once they are chosen: the same on every
    rank, or their bits differ. `stage_times`: when its stage of a pipeline computed (`StageClock.report`). Since the
    cache was made: `thread_waits`, how long its kernels waited for threads (`waited_s`, and `num_lost`, how often so
    long that a thread must have lost its core to another process), and `expert_loads`, by the number of each sparse
    layer how many tokens have met each expert; of the ranks that share layers the first reports, for all. What is not
    known is empty. `peak_memory_bytes`: the most host memory that its process ever had.
    """

    device_type: str = "cpu"
    gpu_identity: str = ""
    arithmetic: str = ""
    stage_times: dict[str, Any] = field(default_factory=dict)
    thread_waits: dict[str, float] = field(default_factory=dict)
    expert_loads: dict[int, list[int]] = field(default_factory=dict)
    peak_memory_bytes: int = field(default_factory=host.peak_resident_bytes)


class WorkerBase(ABC):
    """One rank.

    `groups` are the process groups that `init_device` joined (`join_groups`). Where ranks have an executor each, under
    torchrun, the engine agrees on every step over `groups.control` and `groups.engine`; a worker may leave them None
    where no such rank has another beside it.
    """

    groups: "ParallelGroups | None" = None
    model_runner: Any = None
    """What runs the model, where the worker has such a part; its `model` takes new weights (`load_weights`)."""
    _prepared: tuple[str, Any] | None = None
    """The open worker event's name and what it staged."""
    _launched: tuple[Any, ...] = ()
    """Results of steps that were launched and not read, the oldest first."""

    @abstractmethod
    def init_device(self) -> None:
        """Choose the device, check the dtype, join the groups and keep them in `groups`."""

    def on_device(self) -> AbstractContextManager[object]:
        """Within it this rank's device is the process's current one, which it need not be in a world of the caller's:
        every call of a `WorkerWrapper` runs in it. By default nothing changes.
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
        """(device blocks, host blocks) this rank has room for."""

    @abstractmethod
    def initialize_cache(self, num_device_blocks: int, num_host_blocks: int) -> None:
        """Allocate the cache; the numbers are the same on every rank."""

    @abstractmethod
    def initialize_host_tier(self, num_slots: int) -> None:
        """Host memory for `num_slots` prefix blocks that lose their place; after `initialize_cache`, if at all."""

    def compile_or_warm_up_model(self) -> None:  # noqa: B027  # where a first run costs what every run costs
        """Run what will be run, so that the first step is like the others; once, after the cache is there."""

    def expect_step(self, num_tokens: int) -> None:  # noqa: B027  # to do nothing is right, only slower
        """On a stage behind another: the next step that was not expected yet has `num_tokens` (at least one), which
        may come while this rank still computes the one before. A step may also run unexpected, so nothing need be done.
        """

    @abstractmethod
    def execute_model(self, plan: StepPlan) -> StepResult | None:
        """Cache operations and forward pass; None when `sample_tokens` must finish the step."""

    @abstractmethod
    def sample_tokens(self, grammar_output: object | None = None) -> StepResult:
        """Choose the tokens of the last `execute_model`."""

    event_handler_classes: ClassVar[tuple[type, ...]] = ()
    """Classes of the other `event_handlers`, with whose events an extension's must not collide."""

    @property
    def event_handlers(self) -> tuple[object, ...]:
        """Objects with methods of worker events, the worker first: where several have one, the first is asked."""
        return (self,)

    def prepare_event(self, name: str, payload: Any) -> str:
        """Prepare worker event `name`. Returns "" or why this rank refuses it; `end_event` follows in both cases."""
        assert self._prepared is None, self._prepared
        self._prepared = (name, None)
        prepare, commit = self._event_method("prepare", name), self._event_method("commit", name)
        if prepare is None or commit is None:
            method = f"{'prepare' if prepare is None else 'commit'}_{name}"
            return f"{type(self).__name__} has no method {method}, which worker event {name!r} needs"
        try:
            self._prepared = (name, prepare(payload))
        except Exception as error:  # whatever it is, the other ranks must hear of it
            return f"{type(error).__name__}: {error}"
        return ""

    def end_event(self, is_committed: bool) -> Any:
        """Commit what was prepared, or undo it. Returns what the commit returned."""
        assert self._prepared is not None, "prepare_event comes first"
        (name, staged), self._prepared = self._prepared, None
        finish = self._event_method("commit" if is_committed else "undo", name)
        return None if finish is None else finish(staged)

    def _event_method(self, phase: str, name: str) -> Callable[[Any], Any] | None:
        found = [getattr(handler, f"{phase}_{name}", None) for handler in self.event_handlers]
        return next(filter(callable, found), None)

    @abstractmethod
    def check_health(self) -> None:
        """Raise when this worker can no longer compute."""

    @abstractmethod
    def get_model(self) -> "nn.Module":
        """This rank's shard of the model, packed as its kernels want it."""

    def apply_model(self, function: "Callable[[nn.Module], Any]") -> Any:
        """Call `function` with the model as its checkpoint has it; it must live in this process."""
        return function(self.get_model())

    def watch_requests(self, num_in_flight: Callable[[], int]) -> None:  # noqa: B027  # for weights that never change
        """`num_in_flight` says how many requests are being answered: no weight may change meanwhile. Only called where
        the worker is in the engine's process.
        """

    def get_weight_update(self) -> "WeightUpdateReport | None":
        """Of weights that were loaded and not committed: digests by checkpoint name, the names of those that were not
        loaded (buffers, which trainers do not hand over, may be), and whether none of these may stay as it is; the
        numbers of the calls of `apply_model`, from 1 on, whose changes were refused since the last commit; whether all
        weights were loaded, buffers too; and what is wrong with a tied head that was loaded, or "". None where no
        update is open and none was refused.
        """
        return None

    def refuse_weight_update(self) -> None:  # noqa: B027  # where none is ever open
        """What was loaded of a tied head was refused; the update stays open."""

    def end_weight_update(self) -> None:  # noqa: B027  # where none is ever open
        """What was loaded is committed."""

    @abstractmethod
    def get_model_inspection(self) -> str:
        """A readable tree of modules with the shapes of this rank's parameters; below it, which slices it has of the
        checkpoint's tensors: "model.layers.0-3.self_attn.q_proj.weight rows 192 to 288 of 288, in qkv_proj".
        """

    def get_report(self) -> WorkerReport:
        """This rank as it is now. A worker of another device or arithmetic says so."""
        return WorkerReport()

    @abstractmethod
    def get_cache_block_size_bytes(self) -> int:
        """Bytes of one block on this rank, all layers."""

    def launch_step(self, plan: StepPlan) -> None:
        """Execute a step whose result `read_step` returns later; the next may be launched before. A worker that waits
        for its device in `execute_model` and `sample_tokens` waits here.
        """
        result = self.execute_model(plan)
        self._launched = (*self._launched, self.sample_tokens() if result is None else result)

    def read_step(self) -> StepResult:
        """The result of the oldest step that was launched and not read."""
        result, *rest = self._launched
        self._launched = tuple(rest)
        assert isinstance(result, StepResult), type(result)
        return result

    def get_supported_tasks(self) -> tuple[str, ...]:
        """What this worker can be asked for."""
        return ("generate",)

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Token ids of the model."""

    @property
    @abstractmethod
    def max_model_len(self) -> int:
        """Longest sequence, tokens."""

    @abstractmethod
    def shutdown(self) -> None:
        """Give back memory and leave the groups that this worker made."""
