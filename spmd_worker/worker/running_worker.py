"""Worker after its start: executes step plans on the loaded model and the allocated cache."""

import contextlib
from dataclasses import dataclass, field, replace

from spmd_worker.base.metrics.stage_times import StageClock
from spmd_worker.native.library import ThreadPoolCounters, thread_waits
from spmd_worker.native.threads import single_threaded_torch, torch_threads_are_passive
from spmd_worker.replica.mirror.mirror import Mirror
from spmd_worker.replica.sequence.draft_token_ids import DraftTokenIds
from spmd_worker.replica.sequence.sampled import SampledIds, sampling_keys
from spmd_worker.replica.sequence.sequence import SequenceKey
from spmd_worker.replica.sequence.step import StepPlan, StepResult
from spmd_worker.worker.adapters import WorkerAdapters
from spmd_worker.worker.caches import WorkerCaches
from spmd_worker.worker.hit_comparison import HitComparer
from spmd_worker.worker.loaded_model import LoadedModel
from spmd_worker.worker.prompt_adapters import WorkerPromptAdapters
from spmd_worker.worker.runner.dummy_steps import prepared_step, prompt_step
from spmd_worker.worker.runner.model_runner import LaunchedStep, ModelRunner
from spmd_worker.worker.sleep import WorkerSleep
from spmd_worker.worker.trace_profiler import TraceProfiler


@dataclass(eq=False)
class RunningWorker:
    """Made by `start.allocate`. `event_handlers` have the methods of worker events; `sleep` and `adapters` are two.
    `waits_before`: the kernels' thread counters when the cache was allocated. `last_drafts` are those of the last step
    in which this rank's model drafted, `drafting` the sequences of steps in flight that want some.
    """

    loaded: LoadedModel
    caches: WorkerCaches
    mirror: Mirror
    runner: ModelRunner
    clock: StageClock
    sleep: WorkerSleep
    adapters: WorkerAdapters
    prompt_adapters: WorkerPromptAdapters
    comparer: HitComparer
    profiler: TraceProfiler
    event_handlers: tuple[object, ...]
    waits_before: ThreadPoolCounters | None
    last_drafts: DraftTokenIds | None = None
    drafting: dict[int, tuple[SequenceKey, ...]] = field(default_factory=dict)

    def warm_up(self) -> None:
        engine = self.caches.engine
        self.loaded.opened.backend.warm_up(
            lambda graphs: self.loaded.new_runner(engine, graphs=graphs), self.runner.graphs, engine.num_device_blocks
        )
        self.loaded.forget_expert_loads()

    def execute_model(self, plan: StepPlan) -> StepResult | None:
        """Cache operations and forward pass; None if tokens must be sampled, by `sample_tokens` or `launch`. Raises
        MirrorError, before anything runs, for a plan that does not follow from the last one, and RuntimeError for one
        that would compute or move anything while this worker sleeps.
        """
        scheduled = self.mirror.apply(plan)
        self.runner.forget(plan)
        if self.runner.media is not None and not (self.sleep.tags and scheduled):
            with self._threads():
                self.runner.media.apply(plan, self.mirror.request)
        if self.sleep.tags:
            if scheduled or not (plan.block_ops.is_empty and plan.state_ops.is_empty):
                raise RuntimeError(f"step {plan.step} cannot run while this worker sleeps: call wake_up first")
            return StepResult(plan.step)
        self.caches.move(plan.block_ops, plan.state_ops)
        if not scheduled:
            self.caches.save(plan.block_ops)
            return StepResult(plan.step, finished_transfers=self.caches.take_finished_transfers())
        with self._threads():
            wants_drafts = plan.wants_drafts
            if wants_drafts:
                self.drafting[plan.step] = sampling_keys(plan)
            repeated = plan.repeated_rows
            self.runner.forward(plan.step, scheduled, plan.num_ahead, repeated_rows=repeated, wants_drafts=wants_drafts)
        if plan.hit_comparisons:
            self.comparer.compare(plan)
        self.caches.save(plan.block_ops)
        return None

    def sample_tokens(self) -> StepResult:
        """Sample the tokens of the last `execute_model` and read them."""
        with self._threads():
            result = self.runner.sample()
        return self.note(result)

    def launch(self) -> LaunchedStep:
        """Sample the tokens of the last `execute_model`; `LaunchedStep.collect` reads them, for `note`."""
        with self._threads():
            return self.runner.launch()

    def read(self, launched: LaunchedStep) -> StepResult:
        """Wait for a launched step, and draft for the next one."""
        with self._threads():
            result = launched.collect()
        return self.note(result)

    def note(self, result: StepResult) -> StepResult:
        """Give the mirror the sampled ids of a step, which plans made ahead lack, and complete the result."""
        self.mirror.take_sampled(result.step, SampledIds(result.token_ids, result.num_token_ids))
        keys = self.drafting.pop(result.step, ())
        if result.drafts:
            self.last_drafts = DraftTokenIds.of(keys, result.drafts)
        return replace(result, finished_transfers=self.caches.take_finished_transfers())

    def execute_dummy_batch(self) -> None:
        """`WorkerBase.execute_dummy_batch`, in a cache of one block. The token counts in `expert_loads`."""
        resolved, spec = self.loaded.opened.resolved, self.caches.engine.spec
        pooling, engine = resolved.model_config.pooling, self.loaded.new_cache_engine(spec, 1, 0)
        scheduled = prompt_step(1, resolved.max_model_len, spec.block_size, 1, pooling)
        with prepared_step(self.loaded.model, engine, self.loaded.new_runner, scheduled) as run, self._threads():
            run()

    def thread_waits(self) -> dict[str, float]:
        if self.waits_before is None:
            return {}
        now, before = thread_waits(), self.waits_before
        return {"waited_s": now.waited_s - before.waited_s, "num_lost": now.num_slept - before.num_slept}

    def _threads(self) -> contextlib.AbstractContextManager[None]:
        """Context of a step's computation: torch's threads must not spin alongside the kernels'."""
        is_alone = self.loaded.operations.is_native and not torch_threads_are_passive()
        return single_threaded_torch() if is_alone else contextlib.nullcontext()
