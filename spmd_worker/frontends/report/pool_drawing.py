"""The charts of a pool as matplotlib figures."""

from typing import TYPE_CHECKING, Final

from spmd_worker.frontends.report.drawing import NARROW_INCHES, add_legend, draw_figure, legend_inches, time_unit
from spmd_worker.frontends.report.pool_charts import IDLE, KIND_LOOKS, Lane, PoolLife
from spmd_worker.frontends.report.text import compact, shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROWS_TITLE: Final = "Rows done over time, by worker"
LEASES_TITLE: Final = "Who held which rows when"
_PLOT_INCHES: Final = 1.9
_LANE_INCHES: Final = 0.19
_THIN_LANE_INCHES: Final = 0.12
_MANY_LANES: Final = 24
_AXIS_INCHES: Final = 0.42
_RIGHT_INCHES: Final = 0.2
_NAME_CHARACTERS: Final = {True: 24, False: 12}
"""Most characters of a worker's name next to its lane, in a wide picture and in a narrow one."""
_INK: Final = "#222222"
_ROUND: Final = (1, 2, 5, 10)


def draw_rows(life: PoolLife, width_inches: float) -> str:
    """The rows that are done, stacked by worker, as an `svg` element."""
    return draw_figure(lambda: _rows_figure(life, width_inches), ROWS_TITLE, width_inches)


def draw_leases(life: PoolLife, width_inches: float) -> str:
    """A lane of leases for each worker, as an `svg` element."""
    return draw_figure(lambda: _leases_figure(life, width_inches), LEASES_TITLE, width_inches)


def _rows_figure(life: PoolLife, width_inches: float) -> "Figure":
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    names = [shortened(layer.label, 24) for layer in life.layers]
    above_inches = legend_inches(names, width_inches) if names else 0.1
    figure, axes, scale = _make_axes(life, width_inches, 0.62, above_inches, _PLOT_INCHES)
    times = [time_s / scale for time_s in life.times_s]
    if life.layers:
        colors = [layer.color for layer in life.layers]
        areas = axes.stackplot(times, *(layer.rows for layer in life.layers), colors=colors, labels=names, linewidth=0)
        add_legend(figure, list(areas), width_inches)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("rows")
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=_ROUND, integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: compact(round(value))))
    return figure


def _leases_figure(life: PoolLife, width_inches: float) -> "Figure":
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    is_wide = width_inches > NARROW_INCHES
    lane_inches = _THIN_LANE_INCHES if len(life.lanes) > _MANY_LANES else _LANE_INCHES
    handles: list[Patch | Line2D] = [
        Patch(color=color, label=label)
        for kind, (color, label) in KIND_LOOKS.items()
        if any(bar.kind == kind for lane in life.lanes for bar in lane.bars)
    ]
    handles.append(Patch(color=IDLE, label="without a range"))
    if any(lane.status == "dead" for lane in life.lanes):
        handles.append(Line2D([], [], color=_INK, marker="x", linestyle="none", label="last heartbeat of a dead one"))
    above_inches = legend_inches([str(each.get_label()) for each in handles], width_inches)
    labels = [shortened(lane.worker, _NAME_CHARACTERS[is_wide]) for lane in life.lanes]
    left_inches = 0.12 + 0.062 * max(map(len, labels), default=0)
    figure, axes, scale = _make_axes(life, width_inches, left_inches, above_inches, lane_inches * max(len(labels), 1))
    for row, lane in enumerate(life.lanes):
        _draw_lane(axes, row, lane, scale)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_yticks(range(len(labels)), labels, fontsize=7 if lane_inches == _LANE_INCHES else 5.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    add_legend(figure, list(handles), width_inches)
    return figure


def _draw_lane(axes: "Axes", row: int, lane: Lane, scale: float) -> None:
    span = (lane.joined_s / scale, max(lane.last_s - lane.joined_s, 0.0) / scale)
    axes.broken_barh([span], (row - 0.4, 0.8), facecolors=IDLE, linewidth=0)
    for kind, (color, _) in KIND_LOOKS.items():
        bars = [(bar.start_s / scale, (bar.end_s - bar.start_s) / scale) for bar in lane.bars if bar.kind == kind]
        if bars:
            axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=color, edgecolors="#ffffff", linewidth=0.4)
    if lane.status == "dead":
        axes.plot([lane.last_s / scale], [row], "x", color=_INK, markersize=5, markeredgewidth=1.4, clip_on=False)


def _make_axes(
    life: PoolLife, width_inches: float, left_inches: float, above_inches: float, plot_inches: float
) -> tuple["Figure", "Axes", float]:
    """A plot over the pool's time, and the seconds of its unit."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    height = above_inches + plot_inches + _AXIS_INCHES
    figure = Figure(figsize=(width_inches, height))
    width = (width_inches - left_inches - _RIGHT_INCHES) / width_inches
    axes = figure.add_axes((left_inches / width_inches, _AXIS_INCHES / height, width, plot_inches / height))
    axes.set_axisbelow(False)
    scale_us, unit = time_unit(life.lived_s * 1e6)
    axes.set_xlim(0, life.lived_s * 1e6 / scale_us)
    axes.xaxis.set_major_locator(MaxNLocator(8 if width_inches > NARROW_INCHES else 4, steps=_ROUND))
    axes.set_xlabel(f"{unit} since the first worker joined", fontsize=7, labelpad=2)
    return figure, axes, scale_us / 1e6
