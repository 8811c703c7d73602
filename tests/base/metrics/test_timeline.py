"""timeline.json: slices that nest, counters that follow the steps, a mark for every preemption."""

import json
from pathlib import Path
from typing import Any

import pytest
from step_runs import QUIET, pressed_steps, quiet_steps

from spmd_worker.base.metrics.step_stats import StepStats
from spmd_worker.base.metrics.timeline import write_timeline


def events_of(tmp_path: Path, steps: list[StepStats], name: str = "demo") -> list[dict[str, Any]]:
    path = tmp_path / "timeline.json"
    write_timeline(steps, path, name)
    return json.loads(path.read_text(encoding="utf-8"))["traceEvents"]


def slices_of(events: list[dict[str, Any]]) -> list[tuple[str, int, int]]:
    return [(event["name"], event["ts"], event["ts"] + event["dur"]) for event in events if event["ph"] == "X"]


def misplaced(slices: list[tuple[str, int, int]]) -> list[str]:
    """Slices of one track that begin inside another and end outside it, or come out of order."""
    faults, open_slices, last_start = [], [], 0
    for name, start, end in slices:
        while open_slices and open_slices[-1][2] <= start:
            open_slices.pop()
        if start < last_start or end < start or (open_slices and end > open_slices[-1][2]):
            faults.append(name)
        open_slices.append((name, start, end))
        last_start = start
    return faults


def test_timeline_step_slice_contains_its_phases(tmp_path: Path):
    assert slices_of(events_of(tmp_path, [QUIET])) == [
        ("step 1", 0, 950),
        ("schedule", 0, 100),
        ("lockstep", 100, 300),
        ("execute", 300, 900),
        ("apply", 900, 950),
    ]


def test_timeline_slices_nest_without_overlap(tmp_path: Path):
    slices = slices_of(events_of(tmp_path, pressed_steps()))
    assert len(slices) == 30
    assert misplaced(slices) == []


def test_slice_check_detects_an_overlap():
    assert misplaced([("step 1", 0, 951), ("apply", 900, 950), ("step 2", 950, 1900)]) == ["step 2"]


def test_rounded_phases_end_before_the_next_step(tmp_path: Path):
    steps = quiet_steps(3, every_us=949)
    slices = slices_of(events_of(tmp_path, steps))
    assert misplaced(slices) == []
    assert slices[4:6] == [("apply", 900, 949), ("step 2", 949, 1898)]


def test_phase_without_duration_has_no_slice(tmp_path: Path):
    names = [name for name, _, _ in slices_of(events_of(tmp_path, [QUIET._replace(lockstep_us=0)]))]
    assert names == ["step 1", "schedule", "execute", "apply"]


@pytest.mark.parametrize(
    ("counter", "series"),
    [
        ("device blocks", {"used": "num_blocks_used", "cached": "num_blocks_cached", "free": "num_blocks_free"}),
        ("host blocks", {"swapped": "num_host_blocks_used"}),
        ("sequences", {"computed": "num_rows", "waiting": "num_waiting", "swapped": "num_swapped"}),
        ("tokens", {"decode": "num_decode_tokens", "prompt": "num_prompt_tokens", "cached": "num_cached_tokens"}),
    ],
)
def test_timeline_counters_are_written_on_change_only(tmp_path: Path, counter: str, series: dict[str, str]):
    steps = pressed_steps()
    told = {e["ts"]: e["args"] for e in events_of(tmp_path, steps) if e["ph"] == "C" and e["name"] == counter}
    shown, num_changes = None, 0
    for stats in steps:
        values = {label: getattr(stats, field) for label, field in series.items()}
        num_changes += values != shown
        shown = told.get(stats.start_us, shown)
        assert shown == values, stats.step
    assert len(told) == num_changes < len(steps)


def test_timeline_marks_every_preemption_return_and_hit(tmp_path: Path):
    marks = [event for event in events_of(tmp_path, pressed_steps()) if event["ph"] == "i"]
    assert [(mark["ts"], mark["name"], mark["args"]) for mark in marks] == [
        (10_000, "cache hit", {"step": 2, "tokens": 256}),
        (20_000, "preempted by swap", {"step": 3, "sequences": 2}),
        (30_000, "preempted by recompute", {"step": 4, "sequences": 1}),
        (40_000, "back from the host", {"step": 5, "sequences": 2}),
    ]
    assert {mark["s"] for mark in marks} == {"t"}, "drawn on their own track alone"


def test_timeline_names_tracks_and_run(tmp_path: Path):
    """A run's name may have quotes and backslashes."""
    events = events_of(tmp_path, [QUIET], name='a "run" \\ é')
    names = [event["args"]["name"] for event in events if event["ph"] == "M" and event["name"].endswith("_name")]
    assert names == ['run a "run" \\ é', "steps", "preemptions and cache hits"]


def test_timeline_without_steps_is_valid(tmp_path: Path):
    assert {event["ph"] for event in events_of(tmp_path, [])} == {"M"}
