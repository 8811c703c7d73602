"""The report of a run: one self-contained HTML page, without network or script.

Each chart is also a table, or only a table if matplotlib is not installed.
"""

from collections.abc import Container, Iterable, Iterator, Mapping
from html import escape
from typing import Any, Final

from spmd_worker.base.metrics.step_stats import StepStats
from spmd_worker.frontends.report.charts import Chart, Frame, make_charts
from spmd_worker.frontends.report.data import Column, make_totals, slowest_steps
from spmd_worker.frontends.report.drawing import NARROW_INCHES, WIDE_INCHES, draw_chart
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
    "matplotlib is not installed: the page has tables and no charts. For charts run "
    "pip install 'spmd-worker[report]' and write the report again."
)
MAX_SLOWEST: Final = 10
_MAX_COLUMNS: Final = {"wide": 400, "narrow": 150, "table": 24}
"""Most columns of a longer run: in a picture for a screen, for a phone, in a table."""
_SLOWEST_HEADS: Final = ("", "step", "began at", "took", "× median", "sequences", "slowest phase", "events")
_RIGHT: Final = ' class="number"'
_STYLE: Final = """
body { margin: 0; background: #ffffff; color: #222222; font: 15px/1.45 system-ui, -apple-system, "Segoe UI", Roboto,
  "DejaVu Sans", Arial, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 28px 24px 48px; }
h1 { font-size: 26px; margin: 0 0 6px; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 0 0 2px; }
p { margin: 0 0 10px; max-width: 1000px; }
.diagnosis { font-size: 16px; }
.warning { background: #fff4d6; border-left: 4px solid #e69f00; padding: 8px 12px; }
.explanation { color: #555555; font-size: 13.5px; margin-bottom: 4px; }
.figures { display: grid; grid-template-columns: repeat(4, 1fr); gap: 10px; margin: 18px 0 30px; }
.figure { border: 1px solid #dddddd; border-radius: 6px; padding: 9px 13px; }
.figure b { display: block; font-size: 23px; line-height: 1.25; }
.figure small { display: block; color: #666666; font-size: 12.5px; }
section { margin: 0 0 26px; break-inside: avoid; }
svg { display: block; width: 100%; height: auto; }
svg text { font-family: inherit !important; }
.narrow { display: none; }
details { font-size: 13.5px; color: #555555; }
details table { width: auto; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; margin-top: 6px; }
th, td { text-align: left; padding: 5px 14px 5px 0; border-bottom: 1px solid #e3e3e3; vertical-align: top; }
th { color: #555555; font-weight: 600; }
.positions { max-width: 640px; }
.bar { width: 45%; vertical-align: middle; }
.bar i { display: block; height: 12px; background: #0072b2; }
.number { text-align: right; white-space: nowrap; }
@media (max-width: 700px) {
  main { padding: 16px 10px 32px; }
  .figures { grid-template-columns: repeat(2, 1fr); }
  .wide { display: none; }
  .narrow { display: block; }
  section > .scroll > table { min-width: 860px; }
}
footer { color: #666666; font-size: 13px; }
@page { size: landscape; margin: 11mm; }
@media print {
  main { padding: 0; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
}
"""


def report_page(name: str, steps: list[StepStats], metrics: Mapping[str, Any] | None, *, has_charts: bool) -> str:
    """The page as text. `metrics` are those of `metrics.json`, of which any may be missing; None for a run without it.
    Charts need matplotlib: `has_charts` is the result of `can_draw`.
    """
    body = [] if metrics is not None else [_warning(NO_METRICS)]
    if steps:
        body += _steps_body(steps, metrics or {}, has_charts)
    else:
        body.append("<p>steps.csv has no steps: nothing was computed before the run ended.</p>")
    title = escape(f"Run {name}")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n<h1>{title}</h1>\n"
        + "\n".join(body)
        + "\n</main>\n</body>\n</html>\n"
    )


def _steps_body(steps: list[StepStats], metrics: Mapping[str, Any], has_charts: bool) -> Iterator[str]:
    totals, slowest, first_us = make_totals(steps), slowest_steps(steps, MAX_SLOWEST), steps[0].start_us
    if not has_charts:
        yield _warning(NO_CHARTS)
    yield f'<p class="diagnosis">{escape(diagnosis(totals, metrics))}</p>'
    yield '<div class="figures">'
    for figure in summary_figures(totals, metrics):
        value, label, note = map(escape, (figure.value, figure.label, figure.note))
        yield f'<div class="figure"><b>{value}</b>{label}<small>{note}</small></div>'
    yield "</div>"
    frames = {kind: Frame.of(steps, totals, most) for kind, most in _MAX_COLUMNS.items()}
    charts = {kind: make_charts(frame, slowest) for kind, frame in frames.items()}
    for wide, narrow, table in zip(charts["wide"], charts["narrow"], charts["table"]):
        yield f"<section>\n<h2>{escape(table.title)}</h2>"
        if has_charts:
            for kind, chart, width_inches in (("wide", wide, WIDE_INCHES), ("narrow", narrow, NARROW_INCHES)):
                picture = draw_chart(chart, frames[kind], width_inches)
                yield f'<div class="{kind}">\n{_explanation(chart)}\n{picture}\n</div>'
            yield f"<details><summary>as a table</summary>\n{_chart_table(table, frames['table'])}\n</details>"
        else:
            yield f"{_explanation(table)}\n{_chart_table(table, frames['table'])}"
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
    yield f"<section>\n<h2>The slowest steps</h2>\n{_table(_SLOWEST_HEADS, rows, (6, 7))}\n</section>"
    yield (
        "<footer>Time begins with the first step in all charts. For the same run step by step open timeline.json in "
        "ui.perfetto.dev.</footer>"
    )


def _positions_section(positions: list[tuple[int, int]]) -> str:
    """Table of the drafts by their position in a row's step, with a bar for each share."""
    lines = [
        f"<tr><td{_RIGHT}>{number}</td><td{_RIGHT}>{made:,}</td><td{_RIGHT}>{kept:,}</td>"
        f'<td{_RIGHT}>{share(kept, made)}</td><td class="bar">'
        f'<i style="width: {100 * kept / made if made else 0:.1f}%"></i></td></tr>'
        for number, (made, kept) in enumerate(positions, 1)
    ]
    heads = "".join(f"<th{_RIGHT}>{head}</th>" for head in ("position", "drafted", "accepted", "share"))
    return (
        "<section>\n<h2>Drafts by position</h2>\n"
        '<p class="explanation">A draft is accepted where it is the token that is sampled without it, and all drafts '
        "before it were: the share falls with the position.</p>\n"
        f'<table class="positions">\n<tr>{heads}<th></th></tr>\n' + "\n".join(lines) + "\n</table>\n</section>"
    )


def _warning(text: str) -> str:
    return f'<p class="warning">{escape(text)}</p>'


def _explanation(chart: Chart) -> str:
    return f'<p class="explanation">{escape(chart.explanation)}</p>'


def _chart_table(chart: Chart, frame: Frame) -> str:
    """A row for each column of the frame; for lanes only for columns with events."""
    if chart.kind == "shares":
        return _table(("", "time"), [(each.label, each.note) for each in chart.series], (0, 1))
    series = [*chart.series, *([chart.peak] if chart.peak is not None else [])]
    unit = "" if chart.unit == "time" else f", {chart.unit}"
    first_us = frame.columns[0].start_us
    rows = [
        (_step_range(column), duration(column.start_us - first_us), *map(chart.format_value, values))
        for column, *values in zip(frame.columns, *(each.values for each in series))
        if chart.kind == "stack" or any(values)
    ]
    return _table(("step", "began at", *(f"{each.label}{unit}" for each in series)), rows, ())


def _step_range(column: Column) -> str:
    return f"{column.first_step:,}" + ("" if column.num_steps == 1 else f" to {column.last_step:,}")


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]], text_columns: Container[int]) -> str:
    """Table with numbers aligned at the right, text at the left."""
    lines = []
    for number, cells in enumerate([heads, *rows]):
        tag = "td" if number else "th"
        marked = (
            f"<{tag}{'' if index in text_columns else _RIGHT}>{escape(cell)}</{tag}>"
            for index, cell in enumerate(cells)
        )
        lines.append(f"<tr>{''.join(marked)}</tr>")
    return '<div class="scroll"><table>\n' + "\n".join(lines) + "\n</table></div>"
