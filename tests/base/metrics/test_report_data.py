"""Steps condensed to columns and totals: nothing that happened is lost, no moment is shown twice."""

from random import Random

import pytest
from step_runs import QUIET, pressed_steps, quiet_steps

from spmd_worker.base.metrics.step_stats import StepStats
from spmd_worker.frontends.report import text as report_text
from spmd_worker.frontends.report.charts import clipped_height
from spmd_worker.frontends.report.data import make_columns, make_totals, slowest_steps


def uneven_steps(num_steps: int) -> list[StepStats]:
    random, steps, start_us = Random(0), [], 5_000
    for index in range(num_steps):
        execute_us = random.choice((10, 100, 100, 100, 5_000))
        stats = QUIET._replace(step=index + 1, start_us=start_us, execute_us=execute_us)
        steps.append(stats._replace(num_recomputed=int(random.random() < 0.01), num_blocks_used=random.randint(0, 4)))
        start_us += stats.duration_us + random.randint(0, 30)
    return steps


def test_short_run_has_one_column_per_step():
    columns = make_columns(quiet_steps(3), 400)
    assert [(c.first_step, c.last_step, c.start_us, c.end_us) for c in columns] == [
        (1, 1, 0, 1_000),
        (2, 2, 1_000, 2_000),
        (3, 3, 2_000, 2_950),
    ]


@pytest.mark.parametrize("most", [1, 7, 100, 999])
def test_long_run_columns_hold_every_step_once(most: int):
    steps = uneven_steps(1_000)
    columns = make_columns(steps, most)
    assert 1 <= len(columns) <= most
    assert sum(column.num_steps for column in columns) == 1_000
    assert [c.first_step for c in columns[1:]] == [c.last_step + 1 for c in columns[:-1]]
    assert [c.start_us for c in columns[1:]] == [c.end_us for c in columns[:-1]]
    for field in ("num_recomputed", "execute_us", "num_tokens"):
        assert sum(getattr(c.sums, field) for c in columns) == sum(getattr(stats, field) for stats in steps), field
    assert max(c.slowest.duration_us for c in columns) == max(stats.duration_us for stats in steps)
    assert max(c.max_blocks_used for c in columns) == 4


def test_column_width_follows_step_duration():
    """A step that takes half of the run is a column of half the width."""
    steps = [
        stats._replace(start_us=stats.start_us + (99_000 if index >= 50 else 0))
        for index, stats in enumerate(quiet_steps(100))
    ]
    widest = max(make_columns(steps, 20), key=lambda column: column.end_us - column.start_us)
    assert widest.end_us - widest.start_us >= 99_000
    assert widest.last_step == 50


def test_totals_sum_the_steps():
    totals = make_totals(pressed_steps())
    assert (totals.num_steps, totals.wall_us, totals.between_us) == (6, 50_950, 50_950 - 6 * 950 - 8_800)
    assert (totals.median_us, totals.num_blocks, totals.max_blocks_used, totals.max_host_blocks) == (950, 10, 10, 5)
    assert (totals.num_preemptions, totals.sums.num_swapped_out, totals.sums.num_recomputed) == (3, 2, 1)
    assert totals.nearly_full_us == 30_000, "steps 2 to 4, until step 5 began"


def test_slowest_steps_come_first_and_ties_by_order():
    assert [stats.step for stats in slowest_steps(pressed_steps(), 3)] == [4, 1, 2]


def test_chart_top_ignores_few_outliers_only():
    """A few outliers do not flatten a chart; many are no outliers."""
    assert clipped_height([10.0] * 99 + [1_000.0]) == 15
    assert clipped_height([10.0] * 99 + [25.0]) == 25, "not far above the others"
    assert clipped_height([10.0] * 80 + [1_000.0] * 20) == 1_000
    assert clipped_height([10.0] * 9 + [50.0]) == 50, "few columns are wide enough to be seen"
    assert clipped_height([0.0, 0.0]) == 0


def test_report_numbers_are_formatted_for_people():
    assert [report_text.duration(us) for us in (0, 850, 12_340, 99_960, 999_600, 4_560_000, 59_970_000)] == [
        *("0 s", "850 µs", "12.3 ms", "100 ms", "1.00 s", "4.56 s", "1 min 00 s")
    ]
    assert [report_text.duration(seconds * 1e6) for seconds in (12.34, 185, 7_380)] == [
        "12.3 s",
        "3 min 05 s",
        "2 h 03 min",
    ]
    assert [report_text.count(value, "step") for value in (0, 1, 2.5, 1_200)] == [
        "0 steps",
        "1 step",
        "2.5 steps",
        "1,200 steps",
    ]
    assert [report_text.share(part, 1_000) for part in (0, 0.5, 32, 414)] == ["0 %", "under 0.1 %", "3.2 %", "41 %"]
    assert report_text.share(1, 0) == "0 %"
    numbers = (99_999, 100_000, 999_400, 999_600, 3_307_776, 12_000_000_000)
    assert [report_text.compact(number) for number in numbers] == ["99,999", "100k", "999k", "1M", "3.31M", "12G"]
