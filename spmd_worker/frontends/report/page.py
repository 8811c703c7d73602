"""The report of a run: one self-contained HTML page, without network or script.

Each chart is also a table, or only a table if matplotlib cannot be imported.
"""

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any, Final

from spmd_worker.base.metrics.step_stats import StepStats
from spmd_worker.frontends.report.charts import Chart, Frame, make_charts
from spmd_worker.frontends.report.data import Column, make_totals, slowest_steps
from spmd_worker.frontends.report.drawing import NARROW_INCHES, WIDE_INCHES, draw_chart
from spmd_worker.frontends.report.html import RIGHT, explanation, figures_grid, html_page, table, warning
from spmd_worker.frontends.report.summary import (
    NO_METRICS,
    diagnosis,
    draft_positions,
    slowest_phase,
    step_events,
    summary_figures,
)
from spmd_worker.frontends.report.text import count, duration, share

NO_CHARTS: Final = (
    "matplotlib is not installed, or cannot be imported (python -c 'import matplotlib.figure' shows why): the page has "
    "tables and no charts. For charts run pip install 'spmd-worker[report]' and write the report again."
)
MAX_SLOWEST: Final = 10
_MAX_COLUMNS: Final = {"wide": 400, "narrow": 150, "table": 24}
"""Most columns of a longer run: in a picture for a screen, for a phone, in a table."""
_SLOWEST_HEADS: Final = ("", "step", "began at", "took", "× median", "sequences", "slowest phase", "events")


def report_page(name: str, steps: list[StepStats], metrics: Mapping[str, Any] | None, *, has_charts: bool) -> str:
    """The page as text. `metrics` are those of `metrics.json`, of which any may be missing; None for a run without it.
    Charts need matplotlib: `has_charts` is the result of `can_draw`.
    """
    body = [] if metrics is not None else [warning(NO_METRICS)]
    if steps:
        body += _steps_body(steps, metrics or {}, has_charts)
    else:
        body.append("<p>steps.csv has no steps: nothing was computed before the run ended.</p>")
    return html_page(f"Run {name}", body)


def _steps_body(steps: list[StepStats], metrics: Mapping[str, Any], has_charts: bool) -> Iterator[str]:
    totals, slowest, first_us = make_totals(steps), slowest_steps(steps, MAX_SLOWEST), steps[0].start_us
    if not has_charts:
        yield warning(NO_CHARTS)
    yield f'<p class="diagnosis">{escape(diagnosis(totals, metrics))}</p>'
    yield figures_grid(summary_figures(totals, metrics))
    frames = {kind: Frame.of(steps, totals, most) for kind, most in _MAX_COLUMNS.items()}
    charts = {kind: make_charts(frame, slowest) for kind, frame in frames.items()}
    for wide, narrow, shown in zip(charts["wide"], charts["narrow"], charts["table"]):
        yield f"<section>\n<h2>{escape(shown.title)}</h2>"
        if has_charts:
            for kind, chart, width_inches in (("wide", wide, WIDE_INCHES), ("narrow", narrow, NARROW_INCHES)):
                picture = draw_chart(chart, frames[kind], width_inches)
                yield f'<div class="{kind}">\n{explanation(chart.explanation)}\n{picture}\n</div>'
            yield f"<details><summary>as a table</summary>\n{_chart_table(shown, frames['table'])}\n</details>"
        else:
            yield f"{explanation(shown.explanation)}\n{_chart_table(shown, frames['table'])}"
        yield "</section>"
    positions = draft_positions(metrics)
    if positions:
        yield _positions_section(positions)
    rows = [
        (
            str(number),
            f"{stats.step:,}",
            duration(stats.start_us - first_us),
            duration(stats.duration_us),
            f"{stats.duration_us / totals.median_us:,.1f}" if totals.median_us else "",
            count(stats.num_rows),
            slowest_phase(stats),
            step_events(stats),
        )
        for number, stats in enumerate(slowest, 1)
    ]
    yield f"<section>\n<h2>The slowest steps</h2>\n{table(_SLOWEST_HEADS, rows, (6, 7))}\n</section>"
    yield (
        "<footer>Time begins with the first step in all charts. For the same run step by step open timeline.json in "
        "ui.perfetto.dev.</footer>"
    )


def _positions_section(positions: list[tuple[int, int]]) -> str:
    """Table of the drafts by their position in a row's step, with a bar for each share."""
    lines = [
        f"<tr><td{RIGHT}>{number}</td><td{RIGHT}>{made:,}</td><td{RIGHT}>{kept:,}</td>"
        f'<td{RIGHT}>{share(kept, made)}</td><td class="bar">'
        f'<i style="width: {100 * kept / made if made else 0:.1f}%"></i></td></tr>'
        for number, (made, kept) in enumerate(positions, 1)
    ]
    heads = "".join(f"<th{RIGHT}>{head}</th>" for head in ("position", "drafted", "accepted", "share"))
    return (
        "<section>\n<h2>Drafts by position</h2>\n"
        '<p class="explanation">A draft is accepted where it is the token that is sampled without it, and all drafts '
        "before it were: the share falls with the position.</p>\n"
        f'<table class="positions">\n<tr>{heads}<th></th></tr>\n' + "\n".join(lines) + "\n</table>\n</section>"
    )


def _chart_table(chart: Chart, frame: Frame) -> str:
    """A row for each column of the frame; for lanes only for columns with events."""
    if chart.kind == "shares":
        return table(("", "time"), [(each.label, each.note) for each in chart.series], (0, 1))
    series = [*chart.series, *([chart.peak] if chart.peak is not None else [])]
    unit = "" if chart.unit == "time" else f", {chart.unit}"
    first_us = frame.columns[0].start_us
    rows = [
        (_step_range(column), duration(column.start_us - first_us), *map(chart.format_value, values))
        for column, *values in zip(frame.columns, *(each.values for each in series))
        if chart.kind == "stack" or any(values)
    ]
    return table(("step", "began at", *(f"{each.label}{unit}" for each in series)), rows, ())


def _step_range(column: Column) -> str:
    return f"{column.first_step:,}" + ("" if column.num_steps == 1 else f" to {column.last_step:,}")
