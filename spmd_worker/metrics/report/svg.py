"""The hand that draws: scales with round ticks, and areas, bars, legends and axes as SVG text.

All charts of a page are of one width and stand under one another on one time axis. Colours and sizes are attributes of
each element, so that programs that know no style sheets draw them too. Knows columns of a chart as spans of time.
Knows nothing about what is counted in them.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape
from typing import Final

WIDTH: Final = 1120
LEFT: Final = 70
RIGHT: Final = 250
PLOT_WIDTH: Final = WIDTH - LEFT - RIGHT
INK: Final = "#222222"
FAINT_INK: Final = "#666666"
FONT: Final = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', Arial, sans-serif"
_ROUND_SECONDS: Final = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
_MIN_MARK_WIDTH: Final = 2.5


@dataclass(frozen=True, slots=True)
class TimeAxis:
    """Where a moment stands from left to right. `starts_us` and `first_steps` are those of the columns."""

    first_us: int
    last_us: int
    starts_us: tuple[int, ...]
    first_steps: tuple[int, ...]
    last_step: int

    @property
    def span_us(self) -> int:
        return max(1, self.last_us - self.first_us)

    def x(self, moment_us: float) -> float:
        return LEFT + PLOT_WIDTH * (moment_us - self.first_us) / self.span_us

    def ticks_us(self) -> list[int]:
        """Round times after the first step began, about eight of them."""
        tick_us = round_time_us(self.span_us / 8)
        return list(range(0, self.span_us + 1, tick_us))

    def step_at(self, moment_us: float) -> int:
        """The step that ran then; within a column of several steps they are taken to be equally long."""
        index = max(0, bisect_right(self.starts_us, moment_us) - 1)
        is_last = index + 1 == len(self.starts_us)
        stop_us = self.last_us if is_last else self.starts_us[index + 1]
        stop_step = self.last_step + 1 if is_last else self.first_steps[index + 1]
        share = (moment_us - self.starts_us[index]) / max(1, stop_us - self.starts_us[index])
        first_step = self.first_steps[index]
        return min(stop_step - 1, first_step + int(share * (stop_step - first_step)))


@dataclass(frozen=True, slots=True)
class ValueAxis:
    """Where a value stands between `top` + `height` (zero) and `top` (`limit`). What goes above ends at the top."""

    top: float
    height: float
    limit: float

    @property
    def bottom(self) -> float:
        return self.top + self.height

    def y(self, value: float) -> float:
        return self.bottom - self.height * min(value, self.limit) / self.limit

    def ticks(self) -> list[float]:
        """Round values from zero up, about four of them in a chart of usual height."""
        tick = round_value(self.limit / max(1.0, self.height / 28))
        return [index * tick for index in range(int(self.limit / tick + 1e-9) + 1)]


@dataclass(frozen=True, slots=True)
class LegendEntry:
    """A colour, its meaning, and a figure in a second line (empty for none)."""

    color: str
    label: str
    note: str = ""


def round_value(least: float) -> float:
    """The smallest of 1, 2, 5, 10, 20, ... (and 0.1, 0.2, ...) that is not less."""
    power = 1.0
    while power > least:
        power /= 10
    while power * 10 <= least:
        power *= 10
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * 0.999)


def round_time_us(least_us: float) -> int:
    """A span of time that people count in, not less than asked for."""
    if least_us < 1e6:
        return max(1, round(round_value(least_us)))
    days = 86400 * round_value(least_us / 86400e6) if least_us > 86400e6 else 0
    return int(1e6 * (days or next(seconds for seconds in _ROUND_SECONDS if seconds * 1e6 >= least_us)))


def time_label(moment_us: int, tick_us: int) -> str:
    """A tick's time in the unit that suits the ticks: `250 ms`, `1.5 s`, `20 s`, `3 min`, `1 h 30`."""
    if moment_us == 0:
        return "0"
    if tick_us < 1_000:
        return f"{moment_us:,} µs"
    if tick_us < 100_000 and moment_us < 1_000_000:
        return f"{moment_us // 1000} ms"
    if tick_us < 60_000_000:
        return f"{moment_us / 1e6:,.10g} s"
    hours, minutes = divmod(moment_us // 60_000_000, 60)
    return f"{hours} h {minutes:02d}" if hours and minutes else f"{hours} h" if hours else f"{minutes} min"


def value_label(value: float) -> str:
    """A tick's value in few characters: `0.5`, `1,500`, `250k`, `1.5M`."""
    for power, suffix in ((1e6, "M"), (1e3, "k")):
        if value >= power * 100 or (suffix == "M" and value >= power):
            return f"{value / power:,.10g}{suffix}"
    return f"{value:,.10g}"


def number(value: float) -> str:
    """A coordinate: a tenth of a pixel is enough."""
    return f"{value:.1f}".removesuffix(".0")


def text(
    x: float, y: float, content: str, *, size: float = 12, color: str = INK, anchor: str = "start", bold: bool = False
) -> str:
    """`y` is the line that letters stand on."""
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{number(x)}" y="{number(y)}" font-size="{size:g}" fill="{color}" text-anchor="{anchor}"{weight}>'
        f"{escape(content)}</text>"
    )


def line(x1: float, y1: float, x2: float, y2: float, color: str, opacity: float = 1.0) -> str:
    """One pixel wide."""
    faint = f' stroke-opacity="{opacity:g}"' if opacity < 1 else ""
    ends = f'x1="{number(x1)}" y1="{number(y1)}" x2="{number(x2)}" y2="{number(y2)}"'
    return f'<line {ends} stroke="{color}" stroke-width="1"{faint}/>'


def area(axis: TimeAxis, values: ValueAxis, heights: list[float], color: str) -> str:
    """From zero to a value for each column; a column reaches to the next one's start."""
    corners = [f"M{number(axis.x(axis.starts_us[0]))} {number(values.bottom)}"]
    last_y = ""
    for start_us, height in zip(axis.starts_us, heights):
        y = number(values.y(height))
        if y != last_y:
            corners.append(f"H{number(axis.x(start_us))}V{y}")
            last_y = y
    corners.append(f"H{number(axis.x(axis.last_us))}V{number(values.bottom)}Z")
    return f'<path d="{"".join(corners)}" fill="{color}"/>'


def outline(axis: TimeAxis, values: ValueAxis, heights: list[float], color: str) -> str:
    """The upper edge of `area`, alone."""
    corners = [f"M{number(axis.x(axis.first_us))} {number(values.y(heights[0]))}"]
    for start_us, height in zip(axis.starts_us, heights):
        corners.append(f"H{number(axis.x(start_us))}V{number(values.y(height))}")
    corners.append(f"H{number(axis.x(axis.last_us))}")
    return f'<path d="{"".join(corners)}" fill="none" stroke="{color}" stroke-width="0.8"/>'


def mark(axis: TimeAxis, values: ValueAxis, start_us: int, end_us: int, value: float, title: str) -> str:
    """One column's bar: never too narrow to be seen, never outside the plot, with a title to point at."""
    width = max(_MIN_MARK_WIDTH, axis.x(end_us) - axis.x(start_us))
    x, y = min(axis.x(start_us), LEFT + PLOT_WIDTH - width), values.y(value)
    return _column_path(x, y, width, values.bottom - y, title)


def marks(color: str, each: Iterable[str]) -> Iterator[str]:
    """Marks of one kind."""
    yield f'<g class="marks" fill="{color}">'
    yield from each
    yield "</g>"


def _column_path(x: float, y: float, width: float, height: float, title: str) -> str:
    # A path is shorter than a rectangle with four attributes, and a page has thousands.
    corners = f"M{number(x)} {number(y)}h{number(width)}v{number(height)}h-{number(width)}z"
    return f'<path d="{corners}"><title>{escape(title)}</title></path>'


def box(x: float, y: float, width: float, height: float, color: str) -> str:
    """A filled box with a faint edge: light colours are seen on white."""
    size = f'width="{number(width)}" height="{number(height)}"'
    return f'<rect x="{number(x)}" y="{number(y)}" {size} fill="{color}" stroke="#999999"/>'


def triangle(x: float, y: float, color: str) -> str:
    """A small arrow head that points up; its tip is at (x, y)."""
    return f'<path d="M{number(x)} {number(y)}l4.5 7h-9Z" fill="{color}"/>'


def numbered_circle(x: float, y: float, content: str, title: str) -> str:
    """Around (x, y); `title` is what it says when pointed at."""
    return (
        f'<g><title>{escape(title)}</title><circle cx="{number(x)}" cy="{number(y)}" r="8" fill="#ffffff" '
        f'stroke="{INK}" stroke-width="1"/>{text(x, y + 3.5, content, size=10, anchor="middle", bold=True)}</g>'
    )


def hover_columns(axis: TimeAxis, values: ValueAxis, titles: Iterable[str]) -> Iterator[str]:
    """What a column says when a person points at it. Comes after everything that it covers."""
    yield '<g fill="none" pointer-events="all">'
    ends_us = (*axis.starts_us[1:], axis.last_us)
    for start_us, end_us, title in zip(axis.starts_us, ends_us, titles):
        x, width = axis.x(start_us), axis.x(end_us) - axis.x(start_us)
        yield _column_path(x, values.top, width, values.height, title)
    yield "</g>"


def value_grid(values: ValueAxis, unit: str) -> Iterator[str]:
    """Labels at the left, faint lines across, the unit above."""
    yield text(LEFT - 8, values.top - 9, unit, size=11, color=FAINT_INK, anchor="end")
    for tick in values.ticks():
        y = values.y(tick)
        yield line(LEFT, y, LEFT + PLOT_WIDTH, y, "#000000", 0.12)
        yield text(LEFT - 8, y + 4, value_label(tick), size=11, color=FAINT_INK, anchor="end")


def time_grid(axis: TimeAxis, top: float, bottom: float, *, has_steps: bool) -> Iterator[str]:
    """Faint lines down, times below them and, in a second line, the steps that ran then."""
    ticks_us = axis.ticks_us()
    tick_us = ticks_us[1] if len(ticks_us) > 1 else axis.span_us
    last_step = ""
    for tick in ticks_us:
        x = axis.x(axis.first_us + tick)
        yield line(x, top, x, bottom, "#000000", 0.12)
        yield text(x, bottom + 16, time_label(tick, tick_us), size=11, color=FAINT_INK, anchor="middle")
        step = f"{axis.step_at(axis.first_us + tick):,}"
        if has_steps and step != last_step:
            words = f"step {step}" if tick == 0 else step
            yield text(x, bottom + 31, words, size=11, color=FAINT_INK, anchor="middle")
        last_step = step
    yield line(LEFT, bottom, LEFT + PLOT_WIDTH, bottom, FAINT_INK)


def legend(entries: Iterable[LegendEntry], top: float) -> Iterator[str]:
    """Right of the plot, from `top` down."""
    x, y = LEFT + PLOT_WIDTH + 18, top
    for entry in entries:
        yield box(x, y, 13, 13, entry.color)
        yield text(x + 20, y + 11, entry.label)
        if entry.note:
            yield text(x + 20, y + 26, entry.note, size=11, color=FAINT_INK)
        y += 37 if entry.note else 22


def svg(height: float, title: str, elements: Iterable[str]) -> str:
    """A picture of the page's width; grows and shrinks with the page."""
    body = "\n".join(elements)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {number(height)}" width="{WIDTH}" '
        f'height="{number(height)}" role="img" aria-label="{escape(title)}" font-family="{FONT}">\n{body}\n</svg>'
    )
