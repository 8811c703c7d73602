"""One chart: areas stacked over time, with grid, legend, what to read when pointing at a column, and marks where a
column reaches above the chart.

Knows columns of steps. Knows nothing about which numbers are stacked.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from spmd_worker.metrics.report import svg as pen
from spmd_worker.metrics.report.data import Column, Totals, make_columns
from spmd_worker.metrics.report.svg import LegendEntry, TimeAxis, ValueAxis
from spmd_worker.metrics.report.text import duration
from spmd_worker.metrics.step_stats import StepStats

TOP: Final = 26
"""Above every plot, for the unit of its values."""
_ROOM_ABOVE: Final = 1.06
_SHARE_ABOVE: Final = 0.02
"""Of the columns, so many may reach above a chart in which all others would be flat beside them."""
_FAR_ABOVE: Final = 3.0
_FEW_COLUMNS: Final = 40
_FAR_ABOVE_FEW: Final = 10.0
"""Few columns are wide: they can be told apart when they are lower."""


@dataclass(frozen=True, slots=True)
class Chart:
    """A picture with its heading and a sentence on how to read it."""

    title: str
    explanation: str
    svg: str


@dataclass(frozen=True, slots=True)
class Layer:
    """One area of a stack: a height for each column."""

    entry: LegendEntry
    heights: list[float]


@dataclass(frozen=True, slots=True)
class Frame:
    """What all charts share: the steps, condensed to columns, on one time axis."""

    steps: list[StepStats]
    columns: list[Column]
    totals: Totals
    axis: TimeAxis

    @classmethod
    def of(cls, steps: list[StepStats], totals: Totals) -> "Frame":
        """Of at least one step."""
        columns = make_columns(steps)
        axis = TimeAxis(
            first_us=columns[0].start_us,
            last_us=columns[-1].end_us,
            starts_us=tuple(column.start_us for column in columns),
            first_steps=tuple(column.first_step for column in columns),
            last_step=columns[-1].last_step,
        )
        return cls(steps, columns, totals, axis)

    @property
    def is_condensed(self) -> bool:
        """Whether a column may be of several steps."""
        return len(self.columns) < len(self.steps)

    def means(self, field: str) -> list[float]:
        """A field per step, for each column."""
        return [getattr(column.sums, field) / column.num_steps for column in self.columns]

    def name(self, column: Column) -> str:
        """`step 12 (3.4 s)`, or `steps 12 to 20 (3.4 s)`."""
        steps = f"steps {column.first_step:,} to {column.last_step:,}"
        steps = f"step {column.first_step:,}" if column.num_steps == 1 else steps
        return f"{steps} ({duration(column.start_us - self.axis.first_us)})"


def draw_stack(
    frame: Frame,
    title: str,
    explanation: str,
    layers: list[Layer],
    words: Callable[[Column], str],
    values: ValueAxis,
    unit: str,
    *,
    has_steps: bool = False,
    behind: Layer | None = None,
    line: Layer | None = None,
    above: Iterable[str] = (),
    height_in_words: Callable[[float], str] | None = None,
) -> Chart:
    """`layers` stand on one another, the first at the bottom; `words` say what a column is. `behind` is an area behind
    the stack, `line` a line over it, `above` whatever else. With `has_steps` the steps' numbers stand below the times.
    `height_in_words` is how to say a height that is more than fits, where the unit does not suit it.
    """
    tops = _tops(layers)
    elements: list[str] = []
    if behind is not None:
        elements.append(pen.area(frame.axis, values, behind.heights, behind.entry.color))
    elements += _areas(frame, layers, tops, values)
    if line is not None:
        elements.append(pen.outline(frame.axis, values, line.heights, line.entry.color))
    elements += pen.value_grid(values, unit)
    elements += pen.time_grid(frame.axis, values.top, values.bottom, has_steps=has_steps)
    titles = (f"{frame.name(column)}: {words(column)}" for column in frame.columns)
    elements += pen.hover_columns(frame.axis, values, titles)
    elements += above
    elements += pen.legend([layer.entry for layer in (*layers, behind, line) if layer is not None], values.top)
    highest = behind.heights if behind is not None else tops
    elements += _marks_above(frame.axis, values, highest, height_in_words or (lambda height: f"{height:,.0f} {unit}"))
    return Chart(title, explanation, pen.svg(values.bottom + (40 if has_steps else 24), title, elements))


def value_axis(height: float, layers: list[Layer], most: float | None = None) -> ValueAxis:
    """High enough for the whole stack, or for `most`; what is higher is marked."""
    tallest = max(_tops(layers))
    limit = tallest if most is None else min(tallest, most)
    return ValueAxis(TOP, height, limit * _ROOM_ABOVE if limit > 0 else 1)


def usual_top(heights: list[float]) -> float:
    """What nearly all columns stay below, with room; the tallest where it is not far above them."""
    by_height = sorted(heights)
    usual = by_height[int((len(by_height) - 1) * (1 - _SHARE_ABOVE))]
    far = _FAR_ABOVE if len(heights) >= _FEW_COLUMNS else _FAR_ABOVE_FEW
    return 1.5 * usual if 0 < far * usual < by_height[-1] else by_height[-1]


def _tops(layers: list[Layer]) -> list[float]:
    return [sum(heights) for heights in zip(*(layer.heights for layer in layers))]


def _areas(frame: Frame, layers: list[Layer], tops: list[float], values: ValueAxis) -> Iterator[str]:
    """Each is drawn down to zero and covered by those below it: no seams between them."""
    for layer in reversed(layers):
        if any(layer.heights):
            yield pen.area(frame.axis, values, tops, layer.entry.color)
        tops = [max(0.0, top - height) for top, height in zip(tops, layer.heights)]


def _marks_above(
    axis: TimeAxis, values: ValueAxis, heights: list[float], in_words: Callable[[float], str]
) -> Iterator[str]:
    """An arrow head at each column that goes on above the chart, and how far the highest goes."""
    spans = zip(axis.starts_us, (*axis.starts_us[1:], axis.last_us), heights)
    above = [(start_us, end_us, height) for start_us, end_us, height in spans if height > values.limit * 1.001]
    if not above:
        return
    for start_us, end_us, _ in above:
        yield pen.triangle(axis.x((start_us + end_us) / 2), values.top - 9, pen.INK)
    highest = in_words(max(height for *_, height in above))
    x, y = pen.LEFT + pen.PLOT_WIDTH + 18, values.top - 10
    yield pen.triangle(x + 6.5, y - 8, pen.INK)
    yield pen.text(x + 20, y, f"goes on, up to {highest}", size=11, color=pen.FAINT_INK)
