"""The report of a run: one HTML page that needs nothing else, neither network nor script.

Knows HTML. Knows nothing about files, and how charts and sentences come about only through those who make them.
"""

from collections.abc import Iterable, Iterator, Mapping
from html import escape
from typing import Any, Final

from spmd_worker.metrics.report.charts import draw_charts
from spmd_worker.metrics.report.data import Totals, make_totals, slowest_steps
from spmd_worker.metrics.report.stack import Chart
from spmd_worker.metrics.report.text import count, duration
from spmd_worker.metrics.report.words import (
    NO_METRICS,
    Figure,
    diagnosis,
    summary_figures,
    what_happened,
    why_slow,
)
from spmd_worker.metrics.step_stats import StepStats

MAX_SLOWEST: Final = 10
_NUMBER_COLUMNS: Final = ("", "step", "began at", "took", "× median", "sequences")
_TEXT_COLUMNS: Final = ("what took the time", "what happened in it")
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
table { border-collapse: collapse; width: 100%; font-size: 13.5px; margin-top: 6px; }
th, td { text-align: left; padding: 5px 14px 5px 0; border-bottom: 1px solid #e3e3e3; vertical-align: top; }
th { color: #555555; font-weight: 600; }
.number { text-align: right; white-space: nowrap; }
footer { color: #666666; font-size: 13px; }
@page { size: landscape; margin: 11mm; }
@media print {
  main { padding: 0; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
}
"""


def report_page(name: str, steps: list[StepStats], metrics: Mapping[str, Any] | None) -> str:
    """The page as text. `metrics` are those of `metrics.json`, of which any may be missing; None for a run without."""
    body = _steps_page(steps, metrics) if steps else _empty_page(metrics)
    title = escape(f"Run {name}")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n<h1>{title}</h1>\n"
        + "\n".join(body)
        + "\n</main>\n</body>\n</html>\n"
    )


def _empty_page(metrics: Mapping[str, Any] | None) -> Iterator[str]:
    if metrics is None:
        yield _warning(NO_METRICS)
    yield "<p>steps.csv holds no step: nothing was computed before the run ended.</p>"


def _steps_page(steps: list[StepStats], metrics: Mapping[str, Any] | None) -> Iterator[str]:
    totals, slowest = make_totals(steps), slowest_steps(steps, MAX_SLOWEST)
    known = metrics or {}
    if metrics is None:
        yield _warning(NO_METRICS)
    yield f'<p class="verdict">{escape(diagnosis(totals, known))}</p>'
    yield _figures(summary_figures(totals, known))
    yield from map(_chart, draw_charts(steps, totals, slowest))
    yield _table(slowest, totals, first_us=steps[0].start_us)
    yield (
        "<footer>Time runs from the start of the first step, and is the same in all charts; numbers below the times "
        "are steps. Point at a chart to read its values. The same run step by step: open timeline.json in "
        "ui.perfetto.dev.</footer>"
    )


def _warning(words: str) -> str:
    return f'<p class="warning">{escape(words)}</p>'


def _figures(figures: Iterable[Figure]) -> str:
    tiles = (
        f'<div class="figure"><b>{escape(figure.value)}</b>{escape(figure.label)}'
        f"<small>{escape(figure.note)}</small></div>"
        for figure in figures
    )
    return '<div class="figures">\n' + "\n".join(tiles) + "\n</div>"


def _chart(chart: Chart) -> str:
    return (
        f'<section>\n<h2>{escape(chart.title)}</h2>\n<p class="explanation">{escape(chart.explanation)}</p>\n'
        f"{chart.svg}\n</section>"
    )


def _table(slowest: list[StepStats], totals: Totals, first_us: int) -> str:
    heads = [f'<th class="number">{name}</th>' for name in _NUMBER_COLUMNS] + [f"<th>{n}</th>" for n in _TEXT_COLUMNS]
    rows = [_table_row(place, stats, totals, first_us) for place, stats in enumerate(slowest, 1)]
    return (
        "<section>\n<h2>The slowest steps</h2>\n<table>\n"
        f"<tr>{''.join(heads)}</tr>\n" + "\n".join(rows) + "\n</table>\n</section>"
    )


def _table_row(place: int, stats: StepStats, totals: Totals, first_us: int) -> str:
    times = f"{stats.duration_us / totals.median_us:,.1f}" if totals.median_us else ""
    numbers = (
        str(place),
        f"{stats.step:,}",
        duration(stats.start_us - first_us),
        duration(stats.duration_us),
        times,
        count(stats.num_rows),
    )
    cells = [f'<td class="number">{each}</td>' for each in numbers]
    cells += [f"<td>{escape(each)}</td>" for each in (why_slow(stats), what_happened(stats))]
    return f"<tr>{''.join(cells)}</tr>"
