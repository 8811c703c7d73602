"""The report's pictures: every run draws, nothing is cut off, what is too high or too narrow is still seen."""

import warnings
from itertools import pairwise
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import StepPatch
from step_runs import QUIET, pressed_steps, quiet_steps
from test_report_page import MAX_PAGE_BYTES, METRICS, STRANGE_RUNS, Page, charts_of, many_steps, outside_references

from spmd_worker.base.metrics.step_stats import StepStats
from spmd_worker.frontends.report.drawing import NARROW_INCHES, WIDE_INCHES, chart_style, draw_chart, make_figure
from spmd_worker.frontends.report.page import NO_CHARTS, report_page

WIDTHS = {WIDE_INCHES: 400, NARROW_INCHES: 150}
DURATIONS, EVENTS = "How long a step takes", "Preemptions, returns"


def figure_of(steps: list[StepStats], title: str, width: float = WIDE_INCHES) -> Figure:
    frame, charts = charts_of(steps, WIDTHS[width])
    (chart,) = (chart for chart in charts if chart.title.startswith(title))
    with chart_style():
        return make_figure(chart, frame, width)


def legend_of(figure: Figure) -> list[str]:
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def bars_of(axes: Axes) -> list[StepPatch]:
    return [patch for patch in axes.patches if isinstance(patch, StepPatch)]


def each_chart() -> list[Any]:
    """Narrow charts, where texts have the least room, and one wide one; the other wide ones are in the stress tier."""
    names = [name for name in STRANGE_RUNS if STRANGE_RUNS[name]]
    wide = {name: pytest.mark.matrix if name == "pressed" else pytest.mark.stress for name in names}
    return [
        *(pytest.param(name, NARROW_INCHES, id=f"{name}, narrow") for name in names),
        *(pytest.param(name, WIDE_INCHES, id=f"{name}, wide", marks=mark) for name, mark in wide.items()),
    ]


@pytest.mark.gate(
    "pressed, wide", "long, narrow", "one, narrow", "no blocks, narrow", "no time, narrow", "nothing computed, narrow"
)
@pytest.mark.parametrize(("name", "width"), each_chart())
def test_chart_text_is_neither_clipped_nor_overlapping(name: str, width: float):
    frame, charts = charts_of(STRANGE_RUNS[name], WIDTHS[width])
    for chart in charts:
        with chart_style(), warnings.catch_warnings():
            warnings.simplefilter("error")
            figure = make_figure(chart, frame, width)
            figure.draw_without_rendering()
            drawn = figure.get_tightbbox()
        assert drawn.x0 >= 0, (chart.title, drawn)
        assert drawn.y0 >= 0, (chart.title, drawn)
        assert drawn.x1 <= figure.get_figwidth(), (chart.title, drawn)
        assert drawn.y1 <= figure.get_figheight(), (chart.title, drawn)
        for legend in figure.legends:
            plots_top = max(axes.get_window_extent().y1 for axes in figure.axes)
            assert legend.get_window_extent().y0 >= plots_top, chart.title
        for axes in figure.axes:
            ticks = [label.get_window_extent() for label in axes.get_xticklabels() if label.get_text()]
            assert all(left.x1 <= right.x0 for left, right in pairwise(ticks)), chart.title


@pytest.mark.gate("large numbers")
@pytest.mark.parametrize(
    "name", ["pressed", *(pytest.param(name, marks=pytest.mark.matrix) for name in ("no time", "large numbers"))]
)
def test_page_with_charts_is_complete_without_external_references(name: str):
    page = report_page(name, STRANGE_RUNS[name], METRICS, has_charts=True)
    tags = [tag for tag, _ in Page(page).tags]
    num_charts = len(charts_of(STRANGE_RUNS[name])[1])
    assert (tags.count("svg"), tags.count("details")) == (2 * num_charts, num_charts)
    assert outside_references(page) == []
    assert NO_CHARTS not in page
    assert "nan" not in page.lower()


@pytest.mark.stress
def test_report_pages_are_reproducible_and_small():
    frame, charts = charts_of(many_steps(700))
    assert [draw_chart(chart, frame, WIDE_INCHES) for chart in charts] == [
        draw_chart(chart, frame, WIDE_INCHES) for chart in charts
    ]
    assert len(report_page("x", many_steps(20_000), METRICS, has_charts=True).encode()) < MAX_PAGE_BYTES


def test_charts_of_one_page_have_unique_ids():
    frame, charts = charts_of(pressed_steps())
    page = "".join(draw_chart(chart, frame, width) for chart in charts for width in WIDTHS)
    names = [attributes["id"] for _, attributes in Page(page).tags if "id" in attributes]
    assert len(names) > len(charts)
    assert len(set(names)) == len(names)


def test_event_bar_is_wide_enough_to_see():
    """The last and narrowest event is wide enough too."""
    steps = [*quiet_steps(2, every_us=1_000_000), QUIET._replace(step=3, start_us=2_000_000, num_recomputed=1)]
    (lane,) = figure_of(steps, EVENTS).axes
    (bars,) = bars_of(lane)
    assert bars.get_linewidth() >= 1
    assert bars.get_edgecolor() == bars.get_facecolor()
    assert bars.get_data().edges[-1] == pytest.approx(lane.get_xlim()[1])


def test_event_bar_is_high_enough_next_to_hundred():
    steps = [stats._replace(num_recomputed=number) for stats, number in zip(quiet_steps(3), (100, 0, 1))]
    (lane,) = figure_of(steps, EVENTS).axes
    (bars,) = bars_of(lane)
    assert list(bars.get_data().values)[::2] == [100, 15]
    assert [label.get_text() for label in lane.get_yticklabels()] == ["0", "100"]


def test_duration_chart_numbers_slowest_steps_like_the_table():
    (axes,) = figure_of(pressed_steps(), DURATIONS).axes
    numbers = {text.get_text(): text.xy for text in axes.texts}
    assert sorted(numbers) == ["1", "2", "3", "4", "5", "6"]
    # Step 4 ran from 30 to 39.75 ms, ten times as long as the others: its number stands at the top, at 1,596 us.
    assert numbers["1"] == (pytest.approx(34.875), pytest.approx(1_596))


def test_overlapping_chart_numbers_are_omitted():
    steps = quiet_steps(3_000)
    steps[1_000:1_010] = [stats._replace(execute_us=900 - index) for index, stats in enumerate(steps[1_000:1_010])]
    (axes,) = figure_of(steps, DURATIONS).axes
    assert [text.get_text() for text in axes.texts] == ["1"]


def test_outlier_step_is_marked_above_the_chart():
    steps = quiet_steps(100, every_us=1_000_000)
    assert not any("higher" in entry for entry in legend_of(figure_of(steps, DURATIONS)))
    steps[70] = steps[70]._replace(execute_us=876_543)
    figure = figure_of(steps, DURATIONS)
    assert "higher, up to 877 ms" in legend_of(figure)
    (axes,) = figure.axes
    (marks,) = axes.lines
    assert list(marks.get_xdata()) == [70.5]


@pytest.mark.parametrize(
    ("span_s", "unit", "last"),
    [
        (0.0004, "microseconds", 400),
        (0.04, "milliseconds", 40),
        (3, "seconds", 3),
        (400, "minutes", 400 / 60),
        (90_000, "hours", 25),
    ],
)
def test_time_axis_uses_readable_unit_and_names_steps(span_s: float, unit: str, last: float):
    steps = [QUIET._replace(step=7, execute_us=0, lockstep_us=0, schedule_us=0, apply_us=int(span_s * 1e6))]
    (axes,) = figure_of(steps, DURATIONS).axes
    assert axes.get_xlabel().startswith(f"{unit} since the first step")
    assert axes.get_xlim()[1] == pytest.approx(last)
    assert axes.xaxis.get_major_formatter()(0, 0) == "0\n7"


def test_charts_ignore_the_user_matplotlibrc(monkeypatch: pytest.MonkeyPatch):
    import matplotlib as mpl

    frame, charts = charts_of(pressed_steps())
    before = draw_chart(charts[0], frame, WIDE_INCHES)
    monkeypatch.setitem(mpl.rcParams, "font.size", 31)
    monkeypatch.setitem(mpl.rcParams, "lines.linewidth", 31)
    assert draw_chart(charts[0], frame, WIDE_INCHES) == before
    assert mpl.rcParams["font.size"] == 31
