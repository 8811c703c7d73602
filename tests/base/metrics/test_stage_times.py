"""When stages compute: sums, shares, the file, and what is refused."""

from pathlib import Path

import pytest

from spmd_worker.base.metrics import stage_times
from spmd_worker.base.metrics.stage_times import (
    StageClock,
    StageSpan,
    busy_shares,
    read_stage_times,
    write_stage_times,
)


def at(monkeypatch: pytest.MonkeyPatch, *times_us: int) -> None:
    times = iter(times_us)
    monkeypatch.setattr(stage_times, "now_us", lambda: next(times))


def report(stage: int, *spans: tuple[int, int, int]) -> dict:
    return {
        "stage": stage,
        "busy_us": sum(end - start for _, start, end in spans),
        "first_us": spans[0][1] if spans else 0,
        "last_us": spans[-1][2] if spans else 0,
        "spans": [list(span) for span in spans],
    }


def test_stage_is_busy_only_between_begin_and_end(monkeypatch: pytest.MonkeyPatch):
    at(monkeypatch, 100, 110, 150, 180)
    clock = StageClock(1)
    clock.begin(7)
    clock.end()
    clock.begin()
    clock.end()
    assert clock.report() == report(1, (7, 100, 110), (7, 150, 180))


def test_stage_sums_cover_spans_no_longer_kept(monkeypatch: pytest.MonkeyPatch):
    at(monkeypatch, *range(100, 140, 5))
    clock = StageClock(0, num_kept=2)
    for step in range(1, 5):
        clock.begin(step)
        clock.end()
    told = clock.report()
    assert (told["busy_us"], told["first_us"], told["last_us"]) == (20, 100, 135)
    assert [step for step, _, _ in told["spans"]] == [3, 4]


def test_busy_shares_are_relative_to_each_replica():
    """The time between a replica's first and last work is its complete time."""
    first = [report(0, (1, 0, 80), (2, 80, 100)), report(1, (1, 80, 160), (2, 180, 200))]
    second = [report(0, (1, 1000, 1010)), report(1)]
    assert busy_shares([first, second]) == [(0, 0, 0.5), (0, 1, 0.5), (1, 0, 1.0)]


def test_stage_times_file_counts_from_the_run_start(tmp_path: Path):
    write_stage_times(tmp_path / "stages.csv", [[report(0, (1, 1000, 1010))], [report(1, (2, 1005, 1020))]], 990)
    assert read_stage_times(tmp_path / "stages.csv") == [StageSpan(0, 0, 1, 10, 20), StageSpan(1, 1, 2, 15, 30)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("step,start\n", "line 1 does not name the columns"),
        ("", "line 1 does not name the columns"),
        ("replica,stage,step,start_us,end_us\n0,0,1,2,3\n0,0,x,2,3\n", "line 3 is not a stage time: 0,0,x,2,3"),
        ("replica,stage,step,start_us,end_us\n0,0,1\n", "line 2 is not a stage time: 0,0,1"),
    ],
)
def test_stage_times_reader_names_the_bad_line(tmp_path: Path, text: str, message: str):
    (tmp_path / "stages.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_stage_times(tmp_path / "stages.csv")
