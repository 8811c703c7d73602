"""Draws measured figures as bars: docs/lab/benchmarks.json -> docs/lab/benchmarks.svg.

    python scripts/draw_benchmarks.py [FIGURES.json [OUT.svg]]

FIGURES is a list of charts, each with `title`, `unit` and `bars`; a bar has a `name` and the `values` of its runs. The
bar ends at the median; a line shows the least and the most. The numbers stand beside the bars.
"""

import json
import statistics
import sys
from html import escape
from pathlib import Path
from typing import Any

FIGURES = Path(__file__).resolve().parents[1] / "docs" / "lab" / "benchmarks.json"
WIDTH, LABELS, NUMBERS = 760, 230, 130
BAR, GAP, TITLE, MARGIN = 18, 8, 34, 14
PRIMARY, OTHER, INK, PAPER = "#2f6f9f", "#b9b4a7", "#222222", "#ffffff"


def main(arguments: list[str]) -> None:
    source = Path(arguments[0]) if arguments else FIGURES
    target = Path(arguments[1]) if len(arguments) > 1 else source.with_suffix(".svg")
    target.write_text(draw(json.loads(source.read_text(encoding="utf-8"))), encoding="utf-8")


def draw(charts: list[dict[str, Any]]) -> str:
    parts, top = [], MARGIN
    for chart in charts:
        lines, height = draw_chart(chart, top)
        parts += lines
        top += height
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{top}" viewBox="0 0 {WIDTH} {top}" '
        f'font-family="sans-serif" font-size="13" fill="{INK}">'
    )
    return "\n".join([head, f'<rect width="{WIDTH}" height="{top}" fill="{PAPER}"/>', *parts, "</svg>\n"])


def draw_chart(chart: dict[str, Any], top: int) -> tuple[list[str], int]:
    """Elements, and how high they are together."""
    bars, unit = chart["bars"], chart["unit"]
    most = max(max(bar["values"]) for bar in bars)
    scale = (WIDTH - LABELS - NUMBERS) / most
    lines = [f'<text x="{MARGIN}" y="{top + 14}" font-weight="bold">{escape(chart["title"])}</text>']
    for number, bar in enumerate(bars):
        lines += draw_bar(bar, unit, top + TITLE - 8 + number * (BAR + GAP), scale)
    return lines, TITLE + len(bars) * (BAR + GAP) + MARGIN


def draw_bar(bar: dict[str, Any], unit: str, top: int, scale: float) -> list[str]:
    values = bar["values"]
    median, middle = statistics.median(values), top + BAR / 2
    color = PRIMARY if bar["name"].startswith("ours") else OTHER
    lines = [
        f'<text x="{LABELS - 10}" y="{middle + 4:g}" text-anchor="end">{escape(bar["name"])}</text>',
        f'<rect x="{LABELS}" y="{top}" width="{median * scale:.1f}" height="{BAR}" fill="{color}"/>',
    ]
    if len(values) > 1:
        ends = [LABELS + each * scale for each in (min(values), max(values))]
        where = f'x1="{ends[0]:.1f}" x2="{ends[1]:.1f}" y1="{middle:g}" y2="{middle:g}"'
        lines.append(f'<line {where} stroke="{INK}" stroke-width="2"/>')
    right = LABELS + max(values) * scale + 8
    lines.append(f'<text x="{right:.1f}" y="{middle + 4:g}">{median:g} {escape(unit)}</text>')
    return lines


if __name__ == "__main__":
    main(sys.argv[1:])
