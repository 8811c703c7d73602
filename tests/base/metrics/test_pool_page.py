"""The page of a pool: rows, leases and takeovers as they were, charts that fit, nothing from outside."""

import json
import warnings
from pathlib import Path

import pytest
from test_report_page import Page, outside_references
from timed_pools import STARTED_S, TimedStore, World, crowd, make_pool
from tools_main import tool

from spmd_worker.frontends.batch.pool.pool_history import Holding, PoolHistory, read_history
from spmd_worker.frontends.batch.pool.pool_progress import make_progress
from spmd_worker.frontends.batch.pool.view import read_pool
from spmd_worker.frontends.report import pool_drawing
from spmd_worker.frontends.report.drawing import NARROW_INCHES, WIDE_INCHES, chart_style
from spmd_worker.frontends.report.pool_charts import KIND_LOOKS, Bar, PoolLife, Takeover, make_life
from spmd_worker.frontends.report.pool_page import pool_page

WORLDS = (
    World("gpu-1", 0, 200),
    World("gpu-2", 2, 190),
    World("dead-1", 1, 210, dies_s=60.0),
    World("left-1", 3, 200, ends_s=70.0),
)


def worlds() -> list[World]:
    return [World(**vars(world)) for world in WORLDS]


@pytest.fixture(scope="module")
def ended() -> TimedStore:
    return make_pool(60_000, worlds())


def life_of(store: TimedStore, num_times: int = 100) -> PoolLife:
    return make_life(make_progress(read_pool(store)), read_history(store), num_times)


def page_of(store: TimedStore, *, has_charts: bool) -> str:
    return pool_page("night", make_progress(read_pool(store)), read_history(store), has_charts=has_charts)


def test_layers_end_with_all_rows_of_each_worker(ended: TimedStore):
    life = life_of(ended)
    assert sum(layer.rows[-1] for layer in life.layers) == 60_000
    assert all(list(layer.rows) == sorted(layer.rows) for layer in life.layers)
    parts = [each for each in read_history(ended).holdings if each.worker == "dead-1"]
    (dead,) = [layer for layer in life.layers if layer.label == "dead-1"]
    assert dead.rows[-1] == sum(each.num_rows for each in parts)
    assert life.lived_s == pytest.approx(ended.now - STARTED_S)


def test_takeovers_name_both_workers(ended: TimedStore):
    takeovers = life_of(ended).takeovers
    assert {each.former for each in takeovers} == {"dead-1", "left-1"}
    of_dead = next(each for each in takeovers if each.former == "dead-1")
    assert isinstance(of_dead, Takeover)
    # Its last heartbeat was before its death; the lease ended later.
    assert of_dead.left_s <= 60.0 < of_dead.taken_s
    assert {each.worker for each in takeovers} <= {"gpu-1", "gpu-2"}


def test_lanes_show_each_end_of_a_lease(ended: TimedStore):
    lanes = {lane.worker: lane for lane in life_of(ended).lanes}
    assert [*lanes] == ["gpu-1", "dead-1", "gpu-2", "left-1"]
    kinds = {name: [bar.kind for bar in lane.bars] for name, lane in lanes.items()}
    assert (kinds["dead-1"][-1], kinds["left-1"][-1]) == ("lost", "handback")
    assert "taken over" in kinds["gpu-1"] + kinds["gpu-2"]
    assert max(bar.end_s for bar in lanes["dead-1"].bars) <= 62.0
    for lane in lanes.values():
        assert all(left.end_s <= right.start_s for left, right in zip(lane.bars, lane.bars[1:])), lane.worker


def test_short_leases_become_one_bar():
    """A lane of a thousand ranges is not a thousand shapes."""
    state = crowd(1, -1)
    starts = [STARTED_S + number for number in range(600)]
    holdings = [
        Holding(number, state.workers[0].worker, start_s, start_s + 1.0, "done", ((start_s + 1.0, 9),))
        for number, start_s in enumerate(starts)
    ]
    (lane,) = make_life(make_progress(state), PoolHistory(tuple(holdings), 0), 10).lanes
    assert lane.bars == (Bar(0.0, pytest.approx(600.0), "done"),)


def test_many_workers_are_shown_in_part():
    state = crowd(90, 80)
    holdings = [
        Holding(number, worker.worker, STARTED_S + 20, STARTED_S + 50, "done", ((STARTED_S + 50, 1000),))
        for number, worker in enumerate(state.workers)
    ]
    life = make_life(make_progress(state), PoolHistory(tuple(holdings), 0), 10)
    assert (len(life.lanes), life.num_other_lanes) == (60, 30)
    assert [lane.worker for lane in life.lanes if lane.status == "dead"] == [state.workers[80].worker]
    assert [(layer.label, layer.rows[-1]) for layer in life.layers] == [("all 90 workers", 90_000)]


@pytest.mark.parametrize(
    ("until_s", "width_inches"),
    [(5.0, WIDE_INCHES), (80.0, NARROW_INCHES), (float("inf"), WIDE_INCHES)],
    ids=["begun", "running", "ended"],
)
def test_pool_charts_fit_their_figures(until_s: float, width_inches: float):
    life = life_of(make_pool(60_000, worlds(), until_s))
    for make in (pool_drawing._rows_figure, pool_drawing._leases_figure):
        with chart_style(), warnings.catch_warnings():
            warnings.simplefilter("error")
            figure = make(life, width_inches)
            figure.draw_without_rendering()
            drawn = figure.get_tightbbox()
        assert drawn.x0 >= 0, (make, drawn)
        assert drawn.y0 >= 0, (make, drawn)
        assert drawn.x1 <= figure.get_figwidth(), (make, drawn)
        assert drawn.y1 <= figure.get_figheight(), (make, drawn)
        for legend in figure.legends:
            assert legend.get_window_extent().y0 >= max(axes.get_window_extent().y1 for axes in figure.axes), make


def test_page_of_a_pool_needs_no_network(ended: TimedStore):
    page = page_of(ended, has_charts=True)
    tags = [tag for tag, _ in Page(page).tags]
    assert (tags.count("svg"), tags.count("details")) == (4, 1)
    assert outside_references(page) == []
    assert "1 worker died; 2 ranges went to another worker with the rows that were done." in page


def test_tables_replace_the_charts_of_a_pool(ended: TimedStore):
    page = Page(page_of(ended, has_charts=False))
    assert "svg" not in {tag for tag, _ in page.tags}
    heads = page.rows.index(["worker", *(label for _, label in KIND_LOOKS.values())])
    assert [row[0] for row in page.rows[heads + 1 : heads + 5]] == ["gpu-1", "dead-1", "gpu-2", "left-1"]
    assert [row[0] for row in page.rows[-4:]] == ["dead-1", "gpu-1", "gpu-2", "left-1"]
    assert page.rows[-4][1] == "dead"


def test_report_writes_the_page_into_the_pool(ended: TimedStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    report = tool("report", capsys)
    pool = tmp_path / "night"
    ended.write(pool)
    code, out, err = report(pool)
    assert (code, err) == (0, "")
    assert "<h1>Pool night</h1>" in (pool / "report.html").read_text(encoding="utf-8")
    assert json.loads(out.splitlines()[-1])["pool_rows_done"] == 60_000
    code, _, err = report(pool, "--output", pool / "ranges" / "00000000")
    assert code == 2
    assert "is a file of the pool" in err
