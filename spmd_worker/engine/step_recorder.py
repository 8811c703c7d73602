"""What each step was, for `steps.csv`: differences of the running totals, read once a step on rank 0.

Decides nothing.
"""

from dataclasses import astuple

from spmd_worker.base.metrics.step_stats import StepStats
from spmd_worker.base.metrics.step_times import StepTimes
from spmd_worker.replica.scheduler.counters import SchedulerCounters
from spmd_worker.replica.scheduler.scheduler import Scheduler
from spmd_worker.replica.sequence.step import StepPlan, StepResult


class StepRecorder:
    """Call `record` after each step, from the first on."""

    def __init__(self, scheduler: Scheduler, times: StepTimes) -> None:
        self._scheduler, self._times = scheduler, times
        self._first_began_s: float | None = None
        self._last_times = times.phases()
        self._last = SchedulerCounters(*astuple(scheduler.counters))

    def record(self, plan: StepPlan, result: StepResult) -> StepStats:
        """The step that `plan` and `result` belong to, the scheduler and the clocks being as it has left them."""
        scheduler, last = self._scheduler, self._last
        counters, cache = scheduler.counters, scheduler.cache
        if self._first_began_s is None:
            self._first_began_s = self._times.began_s
        phases = self._times.phases()
        num_decoding = len(plan.continuing)
        num_swapped_out = counters.num_swapped_out - last.num_swapped_out
        num_free, num_cached = cache.num_free_blocks, cache.num_cached_blocks
        schedule_us, lockstep_us, execute_us, apply_us = (
            round((now - before) * 1e6) for now, before in zip(phases, self._last_times, strict=True)
        )
        stats = StepStats(
            step=plan.step,
            start_us=round((self._times.began_s - self._first_began_s) * 1e6),
            schedule_us=schedule_us,
            lockstep_us=lockstep_us,
            execute_us=execute_us,
            apply_us=apply_us,
            num_rows=num_decoding + sum(len(group.sequences) for group in plan.groups),
            num_waiting=scheduler.queues.num_waiting,
            num_swapped=scheduler.num_swapped,
            num_tokens=plan.num_tokens,
            num_decode_tokens=num_decoding + sum(max(each - 1, 0) for each in plan.continuing_num_ids),
            # Without those behind the end of an answer.
            num_sampled_tokens=counters.num_output_tokens - last.num_output_tokens,
            num_blocks_used=cache.num_blocks - num_free,
            num_blocks_cached=num_cached,
            num_blocks_free=num_free - num_cached,
            num_host_blocks_used=cache.num_used_host_blocks,
            num_swapped_out=num_swapped_out,
            num_recomputed=counters.num_preemptions - last.num_preemptions - num_swapped_out,
            num_swapped_in=counters.num_swapped_in - last.num_swapped_in,
            num_cached_tokens=counters.num_cached_prompt_tokens - last.num_cached_prompt_tokens,
            num_finished=counters.num_finished - last.num_finished,
        )
        self._last_times, self._last = phases, SchedulerCounters(*astuple(counters))
        return stats
