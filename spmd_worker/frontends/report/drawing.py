"""The charts as matplotlib figures, in SVG for an HTML page. Only this module needs matplotlib (extra `report`)."""

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape
from io import StringIO
from math import ceil, nan
from typing import TYPE_CHECKING, Any, Final

from spmd_worker.frontends.report.charts import Chart, Frame
from spmd_worker.frontends.report.text import compact

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDE_INCHES: Final = 8.4
NARROW_INCHES: Final = 4.0
"""Width of a phone, so that texts keep their size there."""
_PLOT_INCHES: Final = 1.75
_LANE_INCHES: Final = 0.42
_BAR_INCHES: Final = 0.3
_LEGEND_ROW_INCHES: Final = 0.19
_LETTER_INCHES: Final = 0.061
_NUMBER_INCHES: Final = 0.18
"""Space for the numbers of steps that reach the top."""
_LEFT_INCHES: Final = 0.62
_RIGHT_INCHES: Final = 0.25
_TIME_AXIS_INCHES: Final = 0.58
_POINTS: Final = 72.0
_ROUND: Final = (1, 2, 5, 10)
_INK: Final = "#222222"
_FAINT: Final = "#555555"
_STYLE: Final[dict[Any, Any]] = {
    **dict.fromkeys(("font.size", "axes.labelsize", "legend.fontsize"), 8),
    **dict.fromkeys(("xtick.labelsize", "ytick.labelsize"), 7.5),
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _FAINT),
    "text.color": _INK,
    **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
    "axes.grid": True,
    "grid.color": "#000000",
    "grid.alpha": 0.12,
    "grid.linewidth": 0.6,
    **dict.fromkeys(("figure.facecolor", "axes.facecolor"), "none"),
    # Texts remain texts: they are searchable, and use the page's font.
    "svg.fonttype": "none",
}
_TIME_UNITS: Final = (
    (3 * 3_600e6, 3_600e6, "hours"),
    (3 * 60e6, 60e6, "minutes"),
    (2e6, 1e6, "seconds"),
    (2e3, 1e3, "milliseconds"),
    (0.0, 1.0, "microseconds"),
)
"""Threshold in microseconds, microseconds per unit, and its name."""


def can_draw() -> bool:
    """True if matplotlib can be imported."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return False
    return True


@contextmanager
def chart_style() -> Iterator[None]:
    """Set matplotlib's defaults and ours, independent of the user's matplotlibrc. Make and draw figures within it."""
    import matplotlib as mpl

    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(_STYLE)
        yield


def draw_chart(chart: Chart, frame: Frame, width_inches: float) -> str:
    """Draw a chart as an `svg` element; equal charts have equal text."""
    return draw_figure(lambda: make_figure(chart, frame, width_inches), chart.title, width_inches)


def draw_figure(make: Callable[[], "Figure"], title: str, width_inches: float) -> str:
    """Draw the figure that `make` returns as an `svg` element; equal figures have equal text."""
    import matplotlib as mpl

    with chart_style(), StringIO() as stream:
        # Ids of clipping paths are content hashes, and must differ from those of other pictures on the page.
        mpl.rcParams["svg.hashsalt"] = f"{title} {width_inches}"
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        make().savefig(stream, format="svg", metadata=metadata)
        text = stream.getvalue()
    # Ids of groups, such as axes_1, are the same in every picture and nothing refers to them.
    text = re.sub(r' id="[A-Za-z0-9.]+_[0-9]+"', "", text[text.index("<svg ") :])
    return text.replace("<svg ", f'<svg role="img" aria-label="{escape(title)}" ', 1).strip()


def make_figure(chart: Chart, frame: Frame, width_inches: float) -> "Figure":
    """Figure of a chart; call within `chart_style`."""
    if chart.kind == "lanes":
        return _lanes_figure(chart, frame, width_inches)
    if chart.kind == "shares":
        return _shares_figure(chart, width_inches)
    return _stack_figure(chart, frame, width_inches)


def _stack_figure(chart: Chart, frame: Frame, width_inches: float) -> "Figure":
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    tops = [sum(values) for values in zip(*(each.values for each in chart.series))]
    highest = chart.peak.values if chart.peak is not None else tops
    limit = chart.limit or max(highest) * 1.06 or 1.0
    scale, unit = time_unit(limit) if chart.unit == "time" else (1.0, chart.unit)
    clipped = [index for index, height in enumerate(highest) if height > limit * 1.001]
    names = [each.name for each in (*chart.series, chart.peak) if each is not None]
    if clipped:
        most = chart.format_value(max(highest))
        names.append(f"higher, up to {most}" if chart.unit == "time" else f"higher, up to {most} {chart.unit}")
    above_inches = legend_inches(names, width_inches) + (_NUMBER_INCHES if chart.numbered else 0.0)
    figure, (axes,) = _make_axes(frame, width_inches, above_inches, [_PLOT_INCHES])
    edges, _, _ = _edges(frame)
    # The peak is an area behind the stack if it is above it, else a line over the stack.
    is_behind = chart.peak is not None and max(chart.peak.values) > max(tops)
    peaks = []
    if chart.peak is not None:
        values = [value / scale for value in chart.peak.values]
        look: dict[str, Any] = {"color": chart.peak.color, "label": chart.peak.name}
        peaks = [axes.stairs(values, edges, baseline=0 if is_behind else None, fill=is_behind, linewidth=0.9, **look)]
    # Each is drawn down to zero and covered by those below it: no seams.
    patches = []
    for each in reversed(chart.series):
        patches.append(axes.stairs([top / scale for top in tops], edges, fill=True, color=each.color, label=each.name))
        tops = [max(0.0, top - value) for top, value in zip(tops, each.values)]
    for peak in peaks:
        peak.set_zorder(0.5 if is_behind else 1.5)
    handles: list[Artist] = [*reversed(patches), *peaks]
    axes.set_ylim(0, limit / scale)
    if clipped:
        middles = [(edges[index] + edges[index + 1]) / 2 for index in clipped]
        top = [limit / scale] * len(clipped)
        handles += axes.plot(middles, top, "^", color=_INK, markersize=4, clip_on=False, label=names[-1])
    _number_steps(axes, chart, frame, limit / scale, scale)
    axes.set_ylabel(unit)
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=_ROUND, integer=chart.unit != "time"))
    if chart.unit != "time":
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: compact(round(value))))
    add_legend(figure, handles, width_inches)
    return figure


def _lanes_figure(chart: Chart, frame: Frame, width_inches: float) -> "Figure":
    num_lanes = len(chart.series)
    figure, lanes = _make_axes(frame, width_inches, 0.22, [_LANE_INCHES] * num_lanes, gap_inches=0.24)
    edges, _, _ = _edges(frame)
    for axes, each in zip(lanes, chart.series):
        most = max(each.values)
        # A low bar remains visible next to a high one; the edge makes a narrow bar wide enough.
        heights = [max(value, most * 0.15) if value else nan for value in each.values]
        axes.stairs(heights, edges, fill=True, facecolor=each.color, edgecolor=each.color, linewidth=1.2)
        axes.set_title(each.name, loc="left", fontsize=8, pad=3)
        axes.set_ylim(0, most * 1.05)
        axes.set_yticks([0, most], ["0", compact(int(most))])
        axes.grid(visible=False, axis="y")
    return figure


def _shares_figure(chart: Chart, width_inches: float) -> "Figure":
    from matplotlib.figure import Figure

    height = legend_inches([each.name for each in chart.series], width_inches) + _BAR_INCHES + 0.06
    figure = Figure(figsize=(width_inches, height))
    margin = 0.04 / width_inches
    axes = figure.add_axes((margin, 0.04 / height, 1 - 2 * margin, _BAR_INCHES / height))
    axes.set_axis_off()
    total, start = sum(each.values[0] for each in chart.series) or 1.0, 0.0
    bars: list[Artist] = []
    for each in chart.series:
        (bar,) = axes.barh([0], each.values, left=start, height=1, color=each.color)
        bar.set_label(each.name)
        bars.append(bar)
        start += each.values[0]
    axes.set_xlim(0, total)
    axes.set_ylim(-0.5, 0.5)
    add_legend(figure, bars, width_inches)
    return figure


def _make_axes(
    frame: Frame, width_inches: float, above_inches: float, heights_inches: list[float], gap_inches: float = 0.0
) -> tuple["Figure", list["Axes"]]:
    """Plots of these heights, stacked over one time axis, the same in all figures of a width."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    gaps = gap_inches * (len(heights_inches) - 1)
    height = above_inches + sum(heights_inches) + gaps + _TIME_AXIS_INCHES
    figure = Figure(figsize=(width_inches, height))
    plot_width = (width_inches - _LEFT_INCHES - _RIGHT_INCHES) / width_inches
    edges, scale, unit = _edges(frame)
    starts_us = [stats.start_us for stats in frame.steps]

    def moment(value: float, _: object) -> str:
        index = bisect_right(starts_us, starts_us[0] + round(value * scale)) - 1
        return f"{value:,g}\n{frame.steps[max(0, index)].step:,}"

    found: list[Axes] = []
    top = height - above_inches
    for each in heights_inches:
        axes = figure.add_axes((_LEFT_INCHES / width_inches, (top - each) / height, plot_width, each / height))
        axes.set_axisbelow(False)
        axes.set_xlim(0, edges[-1] or 1.0)
        axes.xaxis.set_major_locator(MaxNLocator(8 if width_inches > NARROW_INCHES else 4, steps=_ROUND))
        axes.tick_params(labelbottom=False)
        found.append(axes)
        top -= each + gap_inches
    found[-1].tick_params(labelbottom=True)
    found[-1].xaxis.set_major_formatter(FuncFormatter(moment))
    found[-1].set_xlabel(f"{unit} since the first step; below: the step at that time", fontsize=7, labelpad=2)
    return figure, found


def _edges(frame: Frame) -> tuple[list[float], float, str]:
    """Column edges since the first step, the microseconds of their unit, and its name."""
    edges_us = [column.start_us for column in frame.columns] + [frame.columns[-1].end_us]
    scale, unit = time_unit(edges_us[-1] - edges_us[0])
    return [(each - edges_us[0]) / scale for each in edges_us], scale, unit


def time_unit(most_us: float) -> tuple[float, str]:
    """Microseconds of the unit that suits a time, and its name."""
    return next((scale, name) for least, scale, name in _TIME_UNITS if most_us >= least)


def _number_steps(axes: "Axes", chart: Chart, frame: Frame, limit: float, scale: float) -> None:
    """Number the slowest steps, without numbers that would overlap that of a slower step."""
    first_us, (_, time_scale, _) = frame.columns[0].start_us, _edges(frame)
    width_points = axes.get_window_extent().width / axes.figure.dpi * _POINTS
    points_per_unit = width_points / (axes.get_xlim()[1] or 1.0)
    numbered: list[float] = []
    for number, stats in enumerate(chart.numbered, 1):
        x = (stats.start_us + stats.duration_us / 2 - first_us) / time_scale
        if all(abs(x - other) * points_per_unit >= 14 for other in numbered):
            numbered.append(x)
            axes.annotate(
                str(number),
                (x, min(stats.duration_us / scale, limit)),
                xytext=(0, 7),
                textcoords="offset points",
                ha="center",
                va="center",
                fontsize=6.5,
                bbox={"boxstyle": "circle,pad=0.25", "facecolor": "#ffffff", "edgecolor": _INK, "linewidth": 0.6},
            )


def _legend_columns(names: list[str], width_inches: float) -> int:
    """Number of columns that the longest name allows, with any font."""
    return max(1, min(4, int(width_inches / (0.5 + _LETTER_INCHES * max(map(len, names))))))


def legend_inches(names: list[str], width_inches: float) -> float:
    """Height of a legend."""
    return ceil(len(names) / _legend_columns(names, width_inches)) * _LEGEND_ROW_INCHES + 0.1


def add_legend(figure: "Figure", handles: list["Artist"], width_inches: float) -> None:
    """Add a legend at the top of a figure."""
    height = figure.get_figheight()
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0.02 / width_inches, 1 - 0.02 / height),
        ncols=_legend_columns([str(each.get_label()) for each in handles], width_inches),
        frameon=False,
        borderaxespad=0,
        borderpad=0,
        handlelength=1.1,
        handleheight=1.1,
        handletextpad=0.5,
        columnspacing=1.6,
        labelspacing=0.45,
    )
