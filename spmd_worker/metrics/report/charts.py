"""The charts of the report: what is drawn of the steps, in which colours, with which words.

A colour has one meaning on the whole page; colour-blind readers can tell them apart (most are Okabe and Ito's). Knows
columns and totals. Knows nothing about HTML.
"""

from collections.abc import Iterator
from typing import Final

from spmd_worker.metrics.report import svg as pen
from spmd_worker.metrics.report.data import Column, Totals
from spmd_worker.metrics.report.stack import TOP, Chart, Frame, Layer, draw_stack, usual_top, value_axis
from spmd_worker.metrics.report.svg import LegendEntry, ValueAxis
from spmd_worker.metrics.report.text import compact, count, duration, share
from spmd_worker.metrics.step_stats import StepStats
from spmd_worker.metrics.timeline import MARKS

WORKING: Final = "#0072b2"
CACHE: Final = "#009e73"
FREE: Final = "#efeee9"
FULLEST: Final = "#00273d"
SWAPPED: Final = "#d55e00"
RECOMPUTED: Final = "#aa3377"
RETURNED: Final = "#56b4e9"
PROMPT: Final = "#e69f00"
WAITING: Final = "#c9c8c1"
SLOWEST: Final = "#d9dde6"
PHASE_LOOKS: Final = {
    "execute": ("#8093ad", "computing"),
    "lockstep": ("#26324d", "agreeing, waiting for ranks"),
    "schedule": ("#c4bd4a", "deciding what to compute"),
    "apply": ("#8c6d31", "taking in the tokens"),
}
"""A phase's colour and what it is in plain words, in the order of the stack."""

MARK_COLORS: Final = (SWAPPED, RECOMPUTED, RETURNED, CACHE)
_LANE_HEIGHT: Final = 46
_WORTH_A_LINE: Final = 0.02
_ROOM_FOR_NUMBERS: Final = 20


def draw_charts(steps: list[StepStats], totals: Totals, slowest: list[StepStats]) -> list[Chart]:
    """All charts, in the page's order, of at least one step; the slowest are numbered in the chart of durations.

    What never happened has no chart.
    """
    frame = Frame.of(steps, totals)
    return [
        _blocks_chart(frame),
        *([_host_chart(frame)] if totals.max_host_blocks else []),
        *([_marks_chart(frame)] if any(getattr(totals.sums, field) for field, _ in MARKS) else []),
        _sequences_chart(frame),
        _tokens_chart(frame),
        _phases_chart(totals),
        _durations_chart(frame, slowest),
    ]


def _blocks_chart(frame: Frame) -> Chart:
    totals = frame.totals
    most_cached = max(stats.num_blocks_cached for stats in frame.steps)
    looks = (
        ("num_blocks_used", WORKING, "in use", f"at most {totals.max_blocks_used:,}"),
        ("num_blocks_cached", CACHE, "free, with a cached prefix", f"at most {most_cached:,}"),
        ("num_blocks_free", FREE, "free and empty", f"of {count(totals.num_blocks, 'block')} in all"),
    )
    fullest = _fullest_line(frame)
    return draw_stack(
        frame,
        "KV cache on the device: how full it is",
        "Where blue reaches the top there is no room left and sequences must give way (they are preempted). Green "
        "blocks can be taken at any time; until then they answer prompts that begin alike."
        + _if_condensed(frame, ", the dark line the fullest" if fullest else ""),
        [Layer(LegendEntry(color, label, note), frame.means(field)) for field, color, label, note in looks],
        _blocks_in_words,
        ValueAxis(TOP, 190, max(1, totals.num_blocks)),
        "blocks",
        has_steps=True,
        line=fullest,
    )


def _fullest_line(frame: Frame) -> Layer | None:
    """Where columns' means hide how full it was at times."""
    fullest = [float(column.max_blocks_used) for column in frame.columns]
    hidden = sum(fullest) - sum(frame.means("num_blocks_used"))
    if hidden < _WORTH_A_LINE * frame.totals.num_blocks * len(fullest):
        return None
    return Layer(LegendEntry(FULLEST, "in use, at the fullest"), fullest)


def _blocks_in_words(column: Column) -> str:
    used, cached, free = (
        count(_mean(column, field)) for field in ("num_blocks_used", "num_blocks_cached", "num_blocks_free")
    )
    most = "" if column.num_steps == 1 else f" (at most {column.max_blocks_used:,})"
    return f"{used} in use{most}, {cached} cached, {free} empty"


def _host_chart(frame: Frame) -> Chart:
    entry = LegendEntry(SWAPPED, "swapped out", f"at most {frame.totals.max_host_blocks:,}")
    layers = [Layer(entry, [float(column.max_host_blocks) for column in frame.columns])]
    return draw_stack(
        frame,
        "KV cache in host memory: what was swapped out",
        "Blocks of sequences that gave way and were copied to the host. They are copied back when there is room."
        + (" A column is several steps: it shows the most of any." if frame.is_condensed else ""),
        layers,
        lambda column: f"{count(column.max_host_blocks, 'block')} in host memory",
        value_axis(76, layers),
        "blocks",
    )


def _sequences_chart(frame: Frame) -> Chart:
    swapped, waiting = frame.means("num_swapped"), frame.means("num_waiting")
    layers = [
        Layer(LegendEntry(WORKING, "computed", f"at most {frame.totals.max_rows:,}"), frame.means("num_rows")),
        Layer(LegendEntry(SWAPPED, "waiting in host memory"), swapped),
        Layer(LegendEntry(WAITING, "waiting"), [max(0.0, each - part) for each, part in zip(waiting, swapped)]),
    ]
    return draw_stack(
        frame,
        "Batch: how many sequences are computed, how many wait",
        "Those that wait have not begun yet, or gave way to others." + _if_condensed(frame),
        layers,
        _sequences_in_words,
        value_axis(140, layers),
        "sequences",
    )


def _sequences_in_words(column: Column) -> str:
    computed, waiting, swapped = (count(_mean(column, f"num_{what}")) for what in ("rows", "waiting", "swapped"))
    return f"{computed} computed, {waiting} waiting, of them {swapped} in host memory"


def _tokens_chart(frame: Frame) -> Chart:
    looks = (
        ("num_decode_tokens", WORKING, "generating (decode)"),
        ("num_prompt_tokens", PROMPT, "prompt, or computed again"),
        ("num_cached_tokens", CACHE, "found in the prefix cache"),
    )
    layers = [
        Layer(LegendEntry(color, label, f"{compact(getattr(frame.totals.sums, field))} in all"), frame.means(field))
        for field, color, label in looks
    ]
    most_computed = max(frame.means("num_tokens"))
    return draw_stack(
        frame,
        "Tokens of each step",
        "Blue and orange were computed. Green was not: the prefix cache had it." + _if_condensed(frame),
        layers,
        _tokens_in_words,
        # Hits of many prompts in one step would flatten what was computed.
        value_axis(140, layers, 2.5 * most_computed if most_computed else None),
        "tokens",
    )


def _tokens_in_words(column: Column) -> str:
    decode, prompt, cached = (count(_mean(column, f"num_{what}_tokens")) for what in ("decode", "prompt", "cached"))
    return f"{decode} decode, {prompt} prompt, {cached} from the cache"


def _durations_chart(frame: Frame, slowest: list[StepStats]) -> Chart:
    tallest_us = [float(column.slowest.duration_us) for column in frame.columns]
    limit_us = max(1.0, usual_top(tallest_us) * 1.12)
    unit_us, unit = (1e6, "s") if limit_us >= 2e6 else (1e3, "ms") if limit_us >= 2e3 else (1.0, "µs")
    values = ValueAxis(TOP + _ROOM_FOR_NUMBERS, 150, limit_us / unit_us)
    behind = Layer(LegendEntry(SLOWEST, "the slowest of a column"), [each / unit_us for each in tallest_us])
    return draw_stack(
        frame,
        "How long a step takes, and what for",
        "The numbers are the slowest steps; the table below tells more of them." + _if_condensed(frame),
        [
            Layer(LegendEntry(color, words), [each / unit_us for each in frame.means(f"{phase}_us")])
            for phase, (color, words) in PHASE_LOOKS.items()
        ],
        _duration_in_words,
        values,
        unit,
        has_steps=True,
        behind=behind if frame.is_condensed else None,
        above=_numbers(frame, values, slowest, unit_us),
        height_in_words=lambda height: duration(height * unit_us),
    )


def _duration_in_words(column: Column) -> str:
    if column.num_steps == 1:
        return duration(column.sums.duration_us)
    return f"{duration(_mean(column, 'duration_us'))} a step, the slowest {duration(column.slowest.duration_us)}"


def _numbers(frame: Frame, values: ValueAxis, slowest: list[StepStats], unit_us: float) -> Iterator[str]:
    """The slowest steps' places in the table; where two would cover each other, that of the slower."""
    taken: list[float] = []
    for place, stats in enumerate(slowest, 1):
        x = max(frame.axis.x(stats.start_us + stats.duration_us / 2), pen.LEFT + 10)
        if all(abs(x - other) >= 17 for other in taken):
            taken.append(x)
            height = stats.duration_us / unit_us
            y = values.y(height) - 11 if height <= values.limit else values.top - _ROOM_FOR_NUMBERS
            yield pen.numbered_circle(x, y, str(place), f"step {stats.step:,}: {duration(stats.duration_us)}")


def _marks_chart(frame: Frame) -> Chart:
    """A lane for each kind of event that happened."""
    title = "Preemptions, returns and cache hits: when, and how many"
    kinds = [(field, label, color) for (field, label), color in zip(MARKS, MARK_COLORS)]
    happened = [kind for kind in kinds if getattr(frame.totals.sums, kind[0])]
    never = [label for field, label, _ in kinds if not getattr(frame.totals.sums, field)]
    top = 4
    bottom = top + len(happened) * _LANE_HEIGHT
    elements = list(pen.time_grid(frame.axis, top, bottom, has_steps=False))
    for index, (field, label, color) in enumerate(happened):
        elements += _lane(frame, field, label, color, top + index * _LANE_HEIGHT)
    return Chart(
        title,
        "A bar stands where it happened; the taller, the more at once. Preempted by swap: copied to host memory, so "
        "that nothing is lost. Preempted by recompute: dropped, and computed again later."
        + (f" Never in this run: {', '.join(never)}." if never else ""),
        pen.svg(bottom + 24, title, elements),
    )


def _lane(frame: Frame, field: str, label: str, color: str, top: float) -> Iterator[str]:
    unit = "token" if field == "num_cached_tokens" else "sequence"
    counts = [getattr(column.sums, field) for column in frame.columns]
    most, num_steps = max(counts), sum(1 for stats in frame.steps if getattr(stats, field))
    values = ValueAxis(top + 10, _LANE_HEIGHT - 10, most)
    note = f"{_compact(sum(counts), unit)} in {_compact(num_steps, 'step')}"
    yield from pen.legend([LegendEntry(color, label, note)], values.top + 2)
    yield pen.line(pen.LEFT, values.bottom, pen.LEFT + pen.PLOT_WIDTH, values.bottom, pen.FAINT_INK, 0.5)
    yield pen.text(pen.LEFT - 8, values.top + 8, pen.value_label(most), size=11, color=pen.FAINT_INK, anchor="end")
    # Never so low that one beside a hundred is not seen.
    yield from pen.marks(
        color,
        (
            pen.mark(
                frame.axis,
                values,
                column.start_us,
                column.end_us,
                max(number, most * 0.2),
                f"{frame.name(column)}: {count(number, unit)}",
            )
            for column, number in zip(frame.columns, counts)
            if number
        ),
    )


def _phases_chart(totals: Totals) -> Chart:
    """One bar from the first step to the last."""
    parts = [(color, words, getattr(totals.sums, f"{phase}_us")) for phase, (color, words) in PHASE_LOOKS.items()]
    parts.append((FREE, "between the steps", totals.between_us))
    in_all_us = max(1, sum(part_us for _, _, part_us in parts))
    title = "Where the time of the run went"
    return Chart(
        title,
        f"{duration(totals.wall_us)} from the first step to the last, on the first rank.",
        pen.svg(86, title, _share_bar(parts, in_all_us)),
    )


def _share_bar(parts: list[tuple[str, str, int]], in_all_us: int) -> Iterator[str]:
    x, bar_width, place_width = float(pen.LEFT), pen.WIDTH - 2 * pen.LEFT, (pen.WIDTH - pen.LEFT) / len(parts)
    for index, (color, words, part_us) in enumerate(parts):
        width = bar_width * part_us / in_all_us
        if width > 0:
            yield pen.box(x, 4, width, 26, color)
        x += width
        place = pen.LEFT + index * place_width
        yield pen.box(place, 44, 13, 13, color)
        yield pen.text(place + 19, 55, f"{share(part_us, in_all_us)}, {duration(part_us)}", bold=True)
        yield pen.text(place + 19, 72, words, size=11, color=pen.FAINT_INK)


def _compact(number: int, noun: str) -> str:
    return f"{compact(number)} {noun if number == 1 else noun + 's'}"


def _mean(column: Column, field: str) -> float:
    return float(getattr(column.sums, field)) / column.num_steps


def _if_condensed(frame: Frame, also: str = "") -> str:
    return f" A column is several steps: it shows their mean{also}." if frame.is_condensed else ""
