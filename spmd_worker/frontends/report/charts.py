"""Charts of the report as data: series, colours and texts; drawing.py draws them and page.py makes tables.

A colour has one meaning on the page; colour-blind readers can distinguish them (most are Okabe and Ito's).
"""

from dataclasses import dataclass
from typing import Final, Literal

from spmd_worker.base.metrics.step_stats import StepStats
from spmd_worker.base.metrics.timeline import MARKS
from spmd_worker.frontends.report.data import Column, Totals, make_columns
from spmd_worker.frontends.report.text import compact, count, duration, share

WORKING: Final = "#0072b2"
CACHE: Final = "#009e73"
FREE: Final = "#e9e7df"
PEAK: Final = "#00273d"
SWAPPED: Final = "#d55e00"
RECOMPUTED: Final = "#aa3377"
REJECTED: Final = "#cc79a7"
RETURNED: Final = "#56b4e9"
PROMPT: Final = "#e69f00"
WAITING: Final = "#c9c8c1"
SLOWEST: Final = "#d9dde6"
MARK_COLORS: Final = (SWAPPED, RECOMPUTED, RETURNED, CACHE)
PHASE_LOOKS: Final = {
    "execute": ("#8093ad", "computing"),
    "lockstep": ("#26324d", "agreeing, waiting for ranks"),
    "schedule": ("#c4bd4a", "scheduling"),
    "apply": ("#8c6d31", "applying the tokens"),
}
"""Colour and plain text of each phase, in the order of the stack."""

_MIN_PEAK_SHARE: Final = 0.02
"""Share of the blocks that a column's mean must hide for the chart to show its maximum."""
_OUTLIER_SHARE: Final = 0.02
"""Share of columns that may exceed a chart in which all others would be flat next to them."""
_OUTLIER_FACTOR: Final = 3.0
_FEW_COLUMNS: Final = 40
_OUTLIER_FACTOR_OF_FEW: Final = 10.0
"""Few columns are wide: they are visible even when lower."""


@dataclass(frozen=True, slots=True)
class Series:
    """One number for each column of the frame; in a chart of shares one for the run."""

    label: str
    color: str
    values: list[float]
    note: str = ""

    @property
    def name(self) -> str:
        return f"{self.label} ({self.note})" if self.note else self.label


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart: its `series` are stacked, the first at the bottom, or have a lane each, or share one bar.

    Values are in `unit`, in microseconds for "time". `peak` is the maximum of any step of a column. Values above
    `limit`, if given, are clipped and marked. `numbered` are the steps to number, from 1.
    """

    kind: Literal["stack", "lanes", "shares"]
    title: str
    explanation: str
    unit: str
    series: list[Series]
    peak: Series | None = None
    limit: float | None = None
    numbered: tuple[StepStats, ...] = ()

    def format_value(self, value: float) -> str:
        return duration(value) if self.unit == "time" else count(value)


@dataclass(frozen=True, slots=True)
class Frame:
    """Common data of all charts: the steps, condensed to columns, and the totals."""

    steps: list[StepStats]
    columns: list[Column]
    totals: Totals

    @classmethod
    def of(cls, steps: list[StepStats], totals: Totals, max_columns: int) -> "Frame":
        return cls(steps, make_columns(steps, max_columns), totals)

    @property
    def is_condensed(self) -> bool:
        return len(self.columns) < len(self.steps)

    def means(self, field: str) -> list[float]:
        """Mean of a field per step, for each column."""
        return [getattr(column.sums, field) / column.num_steps for column in self.columns]


def make_charts(frame: Frame, slowest: list[StepStats]) -> list[Chart]:
    """All charts of events that happened, in the page's order; the chart of durations numbers the slowest steps."""
    totals = frame.totals
    return [
        _blocks_chart(frame),
        *([_host_chart(frame)] if totals.max_host_blocks else []),
        *([_marks_chart(frame)] if any(getattr(totals.sums, field) for field, _ in MARKS) else []),
        _sequences_chart(frame),
        _tokens_chart(frame),
        _phases_chart(totals),
        _durations_chart(frame, slowest),
    ]


def clipped_height(heights: list[float]) -> float:
    """Height of a chart: the maximum, or a height above nearly all columns if the maximum is far above them."""
    by_height = sorted(heights)
    usual = by_height[int((len(by_height) - 1) * (1 - _OUTLIER_SHARE))]
    factor = _OUTLIER_FACTOR if len(heights) >= _FEW_COLUMNS else _OUTLIER_FACTOR_OF_FEW
    return 1.5 * usual if 0 < factor * usual < by_height[-1] else by_height[-1]


def _blocks_chart(frame: Frame) -> Chart:
    totals = frame.totals
    most_cached = max(stats.num_blocks_cached for stats in frame.steps)
    looks = (
        ("num_blocks_used", WORKING, "in use", f"at most {totals.max_blocks_used:,}"),
        ("num_blocks_cached", CACHE, "free, with a cached prefix", f"at most {most_cached:,}"),
        ("num_blocks_free", FREE, "free and empty", f"of {count(totals.num_blocks, 'block')} in all"),
    )
    peaks = [float(column.max_blocks_used) for column in frame.columns]
    hidden = sum(peaks) - sum(frame.means("num_blocks_used"))
    has_peak = hidden > _MIN_PEAK_SHARE * totals.num_blocks * len(peaks)
    return Chart(
        "stack",
        "KV cache on the device: blocks in use",
        "Where blue reaches the top the cache is full and sequences are preempted. Green blocks can be evicted at any "
        "time; until then they serve prompts with the same prefix."
        + _if_condensed(frame, ", the dark line the maximum" if has_peak else ""),
        "blocks",
        [Series(label, color, frame.means(field), note) for field, color, label, note in looks],
        peak=Series("in use, at the fullest", PEAK, peaks) if has_peak else None,
        limit=max(1, totals.num_blocks),
    )


def _host_chart(frame: Frame) -> Chart:
    most = [float(column.max_host_blocks) for column in frame.columns]
    return Chart(
        "stack",
        "KV cache in host memory: swapped-out blocks",
        "Blocks of sequences that were preempted and copied to the host. They are copied back when blocks are free."
        + (" A column is several steps: it shows their maximum." if frame.is_condensed else ""),
        "blocks",
        [Series("swapped out", SWAPPED, most, f"at most {frame.totals.max_host_blocks:,}")],
    )


def _marks_chart(frame: Frame) -> Chart:
    """One lane for each kind of event that happened."""
    never, lanes = [], []
    for (field, label), color in zip(MARKS, MARK_COLORS):
        total = getattr(frame.totals.sums, field)
        if not total:
            never.append(label)
            continue
        counts = [float(getattr(column.sums, field)) for column in frame.columns]
        num_steps = sum(1 for stats in frame.steps if getattr(stats, field))
        unit = "token" if field == "num_cached_tokens" else "sequence"
        lanes.append(Series(label, color, counts, f"{_compact(total, unit)} in {_compact(num_steps, 'step')}"))
    return Chart(
        "lanes",
        "Preemptions, returns and cache hits over time",
        "A bar shows when it happened; the taller, the more at once. Preempted by swap: copied to host memory, so that "
        "nothing is lost. Preempted by recompute: dropped, and recomputed later."
        + (f" Never in this run: {', '.join(never)}." if never else ""),
        "number",
        lanes,
    )


def _sequences_chart(frame: Frame) -> Chart:
    swapped, waiting = frame.means("num_swapped"), frame.means("num_waiting")
    others = [max(0.0, each - part) for each, part in zip(waiting, swapped)]
    return Chart(
        "stack",
        "Batch: computed and waiting sequences",
        "Waiting sequences have not begun yet, or were preempted." + _if_condensed(frame),
        "sequences",
        [
            Series("computed", WORKING, frame.means("num_rows"), f"at most {frame.totals.max_rows:,}"),
            Series("waiting in host memory", SWAPPED, swapped),
            Series("waiting", WAITING, others),
        ],
    )


def _tokens_chart(frame: Frame) -> Chart:
    has_drafts = frame.totals.sums.num_drafted_tokens > 0
    computed = "Blue, pink and orange" if has_drafts else "Blue and orange"
    looks = (
        ("num_kept_decode_tokens", WORKING, "generating (decode)"),
        *([("num_rejected_tokens", REJECTED, "rejected drafts")] if has_drafts else []),
        ("num_prompt_tokens", PROMPT, "prompt, or recomputed"),
        ("num_cached_tokens", CACHE, "found in the prefix cache"),
    )
    series = [
        Series(label, color, frame.means(field), f"{compact(getattr(frame.totals.sums, field))} in all")
        for field, color, label in looks
    ]
    most_computed = max(frame.means("num_tokens"))
    return Chart(
        "stack",
        "Tokens of each step",
        f"{computed} were computed. Green was not: the prefix cache had it." + _if_condensed(frame),
        "tokens",
        series,
        # Cache hits of many prompts in one step would flatten the computed tokens.
        limit=min(max(map(sum, zip(*[each.values for each in series]))), 2.5 * most_computed) * 1.06
        if most_computed
        else None,
    )


def _phases_chart(totals: Totals) -> Chart:
    """One bar from the first step to the last."""
    parts = [(color, label, getattr(totals.sums, f"{phase}_us")) for phase, (color, label) in PHASE_LOOKS.items()]
    parts.append((FREE, "between the steps", totals.between_us))
    total_us = max(1, sum(part_us for *_, part_us in parts))
    return Chart(
        "shares",
        "Time of the run by phase",
        f"{duration(totals.wall_us)} from the first step to the last, on the first rank.",
        "time",
        [
            Series(label, color, [part_us], f"{share(part_us, total_us)}, {duration(part_us)}")
            for color, label, part_us in parts
        ],
    )


def _durations_chart(frame: Frame, slowest: list[StepStats]) -> Chart:
    tallest_us = [float(column.slowest.duration_us) for column in frame.columns]
    return Chart(
        "stack",
        "How long a step takes, by phase",
        "The numbers are the slowest steps; the table below has more on them." + _if_condensed(frame),
        "time",
        [Series(label, color, frame.means(f"{phase}_us")) for phase, (color, label) in PHASE_LOOKS.items()],
        peak=Series("the slowest of a column", SLOWEST, tallest_us) if frame.is_condensed else None,
        limit=max(1.0, clipped_height(tallest_us) * 1.12),
        numbered=tuple(slowest),
    )


def _compact(number: int, noun: str) -> str:
    return f"{compact(number)} {noun if number == 1 else noun + 's'}"


def _if_condensed(frame: Frame, also: str = "") -> str:
    return f" A column is several steps: it shows their mean{also}." if frame.is_condensed else ""
