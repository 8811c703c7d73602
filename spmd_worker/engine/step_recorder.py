"""Statistics of each step for `steps.csv`: differences of running totals, read once a step on rank 0."""

from typing import Any

from spmd_worker.base.metrics.step_stats import StepStats
from spmd_worker.base.metrics.step_times import StepTimes
from spmd_worker.replica.scheduler.counters import SchedulerCounters
from spmd_worker.replica.scheduler.scheduler import Scheduler
from spmd_worker.replica.sequence.step import StepPlan


class StepRecorder:
    """Call `record` after each step, from the first step on."""

    def __init__(self, scheduler: Scheduler, times: StepTimes) -> None:
        self._scheduler, self._times = scheduler, times
        self._first_began_s: float | None = None
        self._last_times = times.phases()
        self._last_totals = scheduler.counters.totals()

    def record(self, plan: StepPlan) -> StepStats:
        scheduler, cache = self._scheduler, self._scheduler.cache
        if self._first_began_s is None:
            self._first_began_s = self._times.began_s
        phases, totals = self._times.phases(), scheduler.counters.totals()
        schedule_us, lockstep_us, execute_us, apply_us = (
            round((now - before) * 1e6) for now, before in zip(phases, self._last_times, strict=True)
        )
        differences: dict[str, Any] = {name: now - self._last_totals[name] for name, now in totals.items()}
        counts = SchedulerCounters(**differences)
        self._last_times, self._last_totals = phases, totals
        num_decoding = len(plan.continuing)
        num_free, num_cached = cache.num_free_blocks, cache.num_cached_blocks
        return StepStats(
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
            # Without the ids sampled after the end of an answer.
            num_sampled_tokens=counts.num_output_tokens,
            num_blocks_used=cache.num_blocks - num_free,
            num_blocks_cached=num_cached,
            num_blocks_free=num_free - num_cached,
            num_host_blocks_used=cache.num_used_host_blocks,
            num_swapped_out=counts.num_swapped_out,
            num_recomputed=counts.num_preemptions - counts.num_swapped_out,
            num_swapped_in=counts.num_swapped_in,
            num_cached_tokens=counts.num_cached_prompt_tokens,
            num_finished=counts.num_finished,
            num_verified_hits=counts.num_verified_hits,
        )
