"""Charts of a pool as data: rows over time by worker, and a lane of leases for each. Seconds since the first joined."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final, Literal

from spmd_worker.frontends.batch.pool.pool_history import Holding, PoolHistory
from spmd_worker.frontends.batch.pool.pool_progress import PoolProgress, Status, WorkerProgress
from spmd_worker.frontends.report.charts import CACHE, FREE, RECOMPUTED, REJECTED, RETURNED, SWAPPED, WAITING, WORKING

MAX_LANES: Final = 60
"""Lanes of a chart; those of workers that died, failed or are slow come first."""
MAX_LAYERS: Final = 8
"""Workers with a layer of their own in the chart of rows."""
_NUM_PIXELS: Final = 1000
"""A bar has at least this fraction of the time."""
_NARROW: Final = 5
"""Bars of up to this many pixels are drawn as one; those of a loss have at least as many."""
_LAYER_COLORS: Final = (WORKING, "#e69f00", CACHE, REJECTED, RETURNED, RECOMPUTED, "#f0e442", "#8093ad")
_SERIOUS: Final[tuple[Status, ...]] = ("dead", "failed", "slow", "left", "alive", "ended")

Kind = Literal["done", "taken over", "held", "handback", "lost"]
KIND_LOOKS: Final[dict[Kind, tuple[str, str]]] = {
    "done": (WORKING, "range finished"),
    "taken over": (CACHE, "range of another worker taken over"),
    "held": (RETURNED, "range held now"),
    "handback": ("#e69f00", "range handed back"),
    "lost": (SWAPPED, "range not finished by this worker"),
}
_USUAL: Final = ("done", "taken over", "held")
IDLE: Final = FREE


@dataclass(frozen=True, slots=True)
class Bar:
    """One lease of a worker, or several without a gap."""

    start_s: float
    end_s: float
    kind: Kind


@dataclass(frozen=True, slots=True)
class Lane:
    """A worker's leases, from joining to its last heartbeat."""

    worker: str
    status: Status
    joined_s: float
    last_s: float
    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True)
class Layer:
    """Rows of a worker, or of several, done by each of the times."""

    label: str
    color: str
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Takeover:
    """A range that went from one worker to another; the former was seen, or handed it back, at `left_s` for the last
    time.
    """

    number: int
    former: str
    worker: str
    left_s: float
    taken_s: float
    num_rows_before: int


@dataclass(frozen=True, slots=True)
class PoolLife:
    """Everything that the charts show. `times_s` are the times of the layers' rows; `num_other_lanes` are not shown."""

    lived_s: float
    times_s: tuple[float, ...]
    layers: tuple[Layer, ...]
    lanes: tuple[Lane, ...]
    num_other_lanes: int
    takeovers: tuple[Takeover, ...]


def make_life(progress: PoolProgress, history: PoolHistory, num_times: int) -> PoolLife:
    """The life of a pool until now, or until its last worker left; the chart of rows has `num_times` columns."""
    now_s, holdings = progress.state.now_s, history.holdings
    joined = [now_s - each.state.joined_age_s for each in progress.workers]
    first_s = min([*joined, *(each.start_s for each in holdings)], default=now_s)
    is_over = progress.state.merged is not None or not progress.with_status("alive", "slow")
    last_seen = (now_s - each.state.age_s for each in progress.workers if each.status != "dead")
    ends = [now_s] if not is_over else [*last_seen, *(each.end_s or each.start_s for each in holdings)]
    lived_s = max(max(ends, default=now_s) - first_s, 1e-3)
    times_s = tuple(lived_s * column / num_times for column in range(num_times + 1))
    ordered = sorted(progress.workers, key=lambda each: (_SERIOUS.index(each.status), -each.num_rows, each.name))
    chosen = sorted(ordered[:MAX_LANES], key=lambda each: (-each.state.joined_age_s, each.name))
    lanes = tuple(_lane(worker, holdings, first_s, now_s, lived_s) for worker in chosen)
    return PoolLife(
        *(lived_s, times_s, _layers(holdings, first_s, times_s), lanes, len(ordered) - len(chosen)),
        tuple(_takeovers(progress, holdings, first_s)),
    )


def _layers(holdings: Iterable[Holding], first_s: float, times_s: Sequence[float]) -> tuple[Layer, ...]:
    parts: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
    for holding in holdings:
        parts[holding.worker] += [(time_s - first_s, rows) for time_s, rows in holding.parts]
    by_rows = sorted(parts, key=lambda worker: (-sum(rows for _, rows in parts[worker]), worker))
    shown = by_rows if len(by_rows) <= MAX_LAYERS else by_rows[: MAX_LAYERS - 1]
    others = [part for worker in by_rows[len(shown) :] for part in parts[worker]]
    if 2 * len(others) > sum(map(len, parts.values())):
        # Among so many no worker has a share that could be seen.
        everything = [part for worker in by_rows for part in parts[worker]]
        return (Layer(f"all {len(by_rows)} workers", WORKING, _cumulative(everything, times_s)),)
    layers = [Layer(worker, color, _cumulative(parts[worker], times_s)) for worker, color in zip(shown, _LAYER_COLORS)]
    if others:
        layers.append(Layer(f"{len(by_rows) - len(shown)} others", WAITING, _cumulative(others, times_s)))
    return tuple(layers)


def _cumulative(parts: Iterable[tuple[float, int]], times_s: Sequence[float]) -> tuple[int, ...]:
    """Rows done by each time."""
    ordered = sorted(parts)
    sums = [0, *accumulate(rows for _, rows in ordered)]
    times = [time_s for time_s, _ in ordered]
    return tuple(sums[bisect_right(times, time_s + 1e-9)] for time_s in times_s)


def _lane(worker: WorkerProgress, holdings: Sequence[Holding], first_s: float, now_s: float, lived_s: float) -> Lane:
    last_s = now_s - worker.state.age_s - first_s
    bars: list[Bar] = []
    for before, holding in zip([None, *holdings], holdings):
        if holding.worker != worker.name:
            continue
        start_s = holding.start_s - first_s
        if holding.end is None:
            # Until its death: nobody has taken the range over yet.
            bar = Bar(start_s, max(last_s, start_s), "lost" if worker.status in ("dead", "failed") else "held")
        else:
            # What it did after its death is another's.
            end_s = (holding.end_s or now_s) - first_s
            is_taken = before is not None and before.number == holding.number and holding.end == "done"
            kind: Kind = "taken over" if is_taken else _KINDS[holding.end]
            bar = Bar(start_s, max(min(end_s, last_s), start_s) if kind == "lost" else end_s, kind)
        bars.append(bar)
    joined_s = now_s - worker.state.joined_age_s - first_s
    return Lane(worker.name, worker.status, joined_s, last_s, tuple(_joined(bars, lived_s / _NUM_PIXELS)))


_KINDS: Final[dict[str, Kind]] = {"done": "done", "handback": "handback", "lost": "lost"}


def _joined(bars: Iterable[Bar], gap_s: float) -> Iterable[Bar]:
    """Neighbours of a kind as one bar; thousands of leases would be thousands of shapes."""
    last: Bar | None = None
    for bar in sorted(bars, key=lambda each: (each.start_s, each.end_s)):
        # A worker holds the next range while it computes one.
        start_s = bar.start_s if last is None else max(bar.start_s, last.end_s)
        end_s = max(bar.end_s, start_s + gap_s * (1 if bar.kind in _USUAL else _NARROW))
        if last is None or bar.kind != last.kind or start_s - last.end_s > gap_s or end_s - start_s > _NARROW * gap_s:
            if last is not None:
                yield last
            last = Bar(start_s, end_s, bar.kind)
        else:
            last = Bar(last.start_s, end_s, bar.kind)
    if last is not None:
        yield last


def _takeovers(progress: PoolProgress, holdings: Sequence[Holding], first_s: float) -> Iterable[Takeover]:
    seen = {worker.name: progress.state.now_s - worker.state.age_s for worker in progress.workers}
    for before, after in pairwise(holdings):
        if before.number == after.number:
            left_s = min(before.end_s or after.start_s, seen.get(before.worker, after.start_s)) - first_s
            yield Takeover(before.number, before.worker, after.worker, left_s, after.start_s - first_s, before.num_rows)
