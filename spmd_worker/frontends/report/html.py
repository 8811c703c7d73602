"""Parts of the reports' pages: one self-contained HTML file each, without network or script."""

from collections.abc import Container, Iterable
from html import escape
from typing import Final

from spmd_worker.frontends.report.summary import Figure

RIGHT: Final = ' class="number"'
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


def html_page(title: str, body: Iterable[str]) -> str:
    """The page as text; `body` is HTML, the title is not."""
    title = escape(title)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n<h1>{title}</h1>\n"
        + "\n".join(body)
        + "\n</main>\n</body>\n</html>\n"
    )


def figures_grid(figures: Iterable[Figure]) -> str:
    """Figures of a summary, side by side."""
    lines = ['<div class="figures">']
    for figure in figures:
        value, label, note = map(escape, (figure.value, figure.label, figure.note))
        lines.append(f'<div class="figure"><b>{value}</b>{label}<small>{note}</small></div>')
    return "\n".join([*lines, "</div>"])


def warning(text: str) -> str:
    """Paragraph that stands out."""
    return f'<p class="warning">{escape(text)}</p>'


def explanation(text: str) -> str:
    """Paragraph below a chart's title."""
    return f'<p class="explanation">{escape(text)}</p>'


def table(heads: Iterable[str], rows: Iterable[Iterable[str]], text_columns: Container[int]) -> str:
    """Table with numbers aligned at the right, text at the left."""
    lines = []
    for number, cells in enumerate([heads, *rows]):
        tag = "td" if number else "th"
        marked = (
            f"<{tag}{'' if index in text_columns else RIGHT}>{escape(cell)}</{tag}>" for index, cell in enumerate(cells)
        )
        lines.append(f"<tr>{''.join(marked)}</tr>")
    return '<div class="scroll"><table>\n' + "\n".join(lines) + "\n</table></div>"
