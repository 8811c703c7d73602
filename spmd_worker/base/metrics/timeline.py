"""Steps as a Chrome trace event file, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

Each step is a slice with its phases inside it; blocks, sequences and tokens are counters; preemptions, swap-ins and
cache hits are marks on a track of their own; each stage of a pipeline has a track of its busy times.
"""

import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from spmd_worker.base.files import create_job_file
from spmd_worker.base.metrics.stage_times import StageSpan
from spmd_worker.base.metrics.step_stats import StepStats

TIMELINE_NAME: Final = "timeline.json"
PHASES: Final = ("schedule", "lockstep", "execute", "apply")
MARKS: Final = (
    ("num_swapped_out", "preempted by swap"),
    ("num_recomputed", "preempted by recompute"),
    ("num_swapped_in", "back from the host"),
    ("num_cached_tokens", "cache hit"),
)
_COUNTERS: Final = (
    (
        "device blocks",
        (("used", "num_blocks_used"), ("cached", "num_blocks_cached"), ("free", "num_blocks_free")),
    ),
    ("host blocks", (("swapped", "num_host_blocks_used"),)),
    ("sequences", (("computed", "num_rows"), ("waiting", "num_waiting"), ("swapped", "num_swapped"))),
    ("tokens", (("decode", "num_decode_tokens"), ("prompt", "num_prompt_tokens"), ("cached", "num_cached_tokens"))),
)
_STEPS_TRACK: Final = 1
_MARKS_TRACK: Final = 2
_FIRST_STAGE_TRACK: Final = 10


def write_timeline(steps: list[StepStats], path: Path, name: str, spans: Sequence[StageSpan] = ()) -> None:
    """Write one event a line. `name` is the run's name; times are microseconds. Raises OSError."""
    stages = sorted(dict.fromkeys((span.replica, span.stage) for span in spans))
    tracks = {stage: track for track, stage in enumerate(stages, start=_FIRST_STAGE_TRACK)}
    with io.TextIOWrapper(create_job_file(path, buffering=-1), encoding="utf-8") as stream:
        stream.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        stream.write(",\n".join(_names(name, tracks)))
        for events in _events(steps):
            stream.write(",\n" + events)
        for span in spans:
            stream.write(
                f',\n{{"ph":"X","pid":1,"tid":{tracks[span.replica, span.stage]},"ts":{span.start_us},'
                f'"dur":{span.end_us - span.start_us},"name":"step {span.step}"}}'
            )
        stream.write("\n]}\n")


def _names(name: str, stage_tracks: dict[tuple[int, int], int]) -> list[str]:
    """Metadata events: names of the process and its tracks, and the order of the tracks."""
    has_replicas = any(replica for replica, _ in stage_tracks)
    tracks = [
        (_STEPS_TRACK, "steps"),
        (_MARKS_TRACK, "preemptions and cache hits"),
        *(
            (track, f"replica {replica}, stage {stage}" if has_replicas else f"stage {stage}")
            for (replica, stage), track in stage_tracks.items()
        ),
    ]
    return [
        _metadata("process_name", 0, {"name": f"run {name}"}),
        *(_metadata("thread_name", track, {"name": title}) for track, title in tracks),
        *(_metadata("thread_sort_index", track, {"sort_index": track}) for track, _ in tracks),
    ]


def _metadata(kind: str, track: int, arguments: dict[str, str | int]) -> str:
    return json.dumps({"ph": "M", "name": kind, "pid": 1, "tid": track, "args": arguments})


def _events(steps: list[StepStats]) -> Iterator[str]:
    """Events of each step. A slice ends before the next begins, also where rounding would overlap them."""
    counters = [_Counter(name, series) for name, series in _COUNTERS]
    next_starts_us = [stats.start_us for stats in steps[1:]] + [None]
    for stats, next_us in zip(steps, next_starts_us):
        end_us = stats.start_us + stats.duration_us
        yield ",\n".join(
            [
                *_slices(stats, end_us if next_us is None else min(end_us, next_us)),
                *(_mark(stats, field, title) for field, title in MARKS if getattr(stats, field)),
                *(event for counter in counters if (event := counter.event(stats)) is not None),
            ]
        )


def _slices(stats: StepStats, end_us: int) -> Iterator[str]:
    # Written by hand: json.dumps takes five times as long, and a long run has a million slices.
    start_us = stats.start_us
    yield (
        f'{{"ph":"X","pid":1,"tid":{_STEPS_TRACK},"ts":{start_us},"dur":{end_us - start_us},'
        f'"name":"step {stats.step}","args":{{"sequences":{stats.num_rows},"tokens":{stats.num_tokens},'
        f'"finished":{stats.num_finished}}}}}'
    )
    for phase, duration_us in zip(PHASES, stats[2:6]):
        stop_us = min(start_us + duration_us, end_us)
        if stop_us > start_us:
            yield (
                f'{{"ph":"X","pid":1,"tid":{_STEPS_TRACK},"ts":{start_us},"dur":{stop_us - start_us},"name":"{phase}"}}'
            )
        start_us = stop_us


def _mark(stats: StepStats, field: str, title: str) -> str:
    unit = "tokens" if field == "num_cached_tokens" else "sequences"
    return (
        f'{{"ph":"i","s":"t","pid":1,"tid":{_MARKS_TRACK},"ts":{stats.start_us},"name":"{title}",'
        f'"args":{{"step":{stats.step},"{unit}":{getattr(stats, field)}}}}}'
    )


class _Counter:
    """One counter track for each series. No event while the values stay the same, as many do while sequences decode."""

    def __init__(self, name: str, series: tuple[tuple[str, str], ...]) -> None:
        self._fields = [field for _, field in series]
        arguments = ",".join(f'"{label}":%d' for label, _ in series)
        self._format = f'{{"ph":"C","pid":1,"ts":%d,"name":"{name}","args":{{{arguments}}}}}'
        self._last: list[int] | None = None

    def event(self, stats: StepStats) -> str | None:
        """The event of this step; None if the values are unchanged."""
        values = [getattr(stats, field) for field in self._fields]
        if values == self._last:
            return None
        self._last = values
        return self._format % (stats.start_us, *values)
