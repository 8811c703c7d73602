"""Steps condensed for a page: columns of the charts, totals of the run, the slowest steps.

A run of any length becomes a bounded number of columns, each of consecutive steps; a column sums their counts, so every
preemption and cache hit is shown.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from statistics import median
from typing import Final

from spmd_worker.base.metrics.step_stats import StepStats

NEARLY_FULL: Final = 0.9
"""Share of the device blocks in use from which the cache counts as nearly full."""


@dataclass(frozen=True, slots=True)
class Column:
    """Consecutive steps, up to the start of the next column. `sums` has the sum of each field of the steps."""

    start_us: int
    end_us: int
    first_step: int
    last_step: int
    num_steps: int
    sums: StepStats
    slowest: StepStats
    max_blocks_used: int
    max_host_blocks: int


@dataclass(frozen=True, slots=True)
class Totals:
    """Totals of the run. `wall_us` ends with the last step; `between_us` is the part of it between the steps, and
    `nearly_full_us` the part with a nearly full cache.
    """

    num_steps: int
    wall_us: int
    between_us: int
    median_us: float
    sums: StepStats
    num_blocks: int
    max_blocks_used: int
    max_host_blocks: int
    max_rows: int
    nearly_full_us: int

    @property
    def num_preemptions(self) -> int:
        return self.sums.num_swapped_out + self.sums.num_recomputed


def make_columns(steps: list[StepStats], max_columns: int) -> list[Column]:
    """Condense steps that began in the same small span of time; few steps have a column each."""
    if not steps:
        return []
    first_us, groups = steps[0].start_us, [[stats] for stats in steps]
    if len(steps) > max_columns:
        span_us = max(1, _end_us(steps) - first_us) / max_columns
        spans = groupby(steps, key=lambda stats: min(max_columns - 1, int((stats.start_us - first_us) / span_us)))
        groups = [list(group) for _, group in spans]
    ends = [group[0].start_us for group in groups[1:]] + [_end_us(steps)]
    return [_column(group, end_us) for group, end_us in zip(groups, ends)]


def make_totals(steps: list[StepStats]) -> Totals:
    """Totals of at least one step."""
    sums = _sum(steps)
    wall_us = _end_us(steps) - steps[0].start_us
    # A step's blocks count until the next step begins.
    ends = [stats.start_us for stats in steps[1:]] + [_end_us(steps)]
    return Totals(
        num_steps=len(steps),
        wall_us=wall_us,
        between_us=max(0, wall_us - sums.duration_us),
        median_us=median(stats.duration_us for stats in steps),
        sums=sums,
        num_blocks=max(stats.num_blocks for stats in steps),
        max_blocks_used=max(stats.num_blocks_used for stats in steps),
        max_host_blocks=max(stats.num_host_blocks_used for stats in steps),
        max_rows=max(stats.num_rows for stats in steps),
        nearly_full_us=sum(
            end_us - stats.start_us
            for stats, end_us in zip(steps, ends)
            if stats.num_blocks_used >= NEARLY_FULL * stats.num_blocks > 0
        ),
    )


def slowest_steps(steps: list[StepStats], most: int) -> list[StepStats]:
    """The slowest first; of equally slow ones the earlier."""
    return sorted(steps, key=lambda stats: (-stats.duration_us, stats.step))[:most]


def _column(steps: list[StepStats], end_us: int) -> Column:
    return Column(
        start_us=steps[0].start_us,
        end_us=max(end_us, steps[0].start_us),
        first_step=steps[0].step,
        last_step=steps[-1].step,
        num_steps=len(steps),
        sums=_sum(steps),
        slowest=max(steps, key=lambda stats: stats.duration_us),
        max_blocks_used=max(stats.num_blocks_used for stats in steps),
        max_host_blocks=max(stats.num_host_blocks_used for stats in steps),
    )


def _sum(steps: Iterable[StepStats]) -> StepStats:
    return StepStats._make(map(sum, zip(*steps)))


def _end_us(steps: list[StepStats]) -> int:
    return steps[-1].start_us + steps[-1].duration_us
