"""The doctor of a pool reports its workers, what is left, who died, and what became of their ranges."""

import errno
import json
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from timed_pools import STARTED_S, TimedStore, World, crowd, make_pool
from tools_main import tool

from spmd_worker.frontends.batch.pool import driver
from spmd_worker.frontends.batch.pool.object_store import ObjectStore
from spmd_worker.frontends.batch.pool.pool_history import read_history
from spmd_worker.frontends.batch.pool.pool_progress import make_progress
from spmd_worker.frontends.batch.pool.posix_store import open_folder
from spmd_worker.frontends.batch.pool.store import Delete, Now, perform
from spmd_worker.frontends.batch.pool.view import read_pool
from spmd_worker.frontends.tools import pool_status
from spmd_worker.frontends.tools.pool_status import pool_lines

COLUMNS = 80


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Run the script: (exit code, standard output, standard error)."""
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    return tool("doctor", capsys)


@pytest.fixture(autouse=True)
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The output of the pools, which name it without a folder."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "answers.jsonl"
    path.write_bytes(b"")
    return path


def lines_of(store: TimedStore, columns: int = COLUMNS) -> list[str]:
    return pool_lines(make_progress(read_pool(store)), read_history(store).holdings, columns)


def six(**changes: float) -> list[World]:
    worlds = [World(f"gpu-0{number}-4711-ab12cd34", number, 200 + number) for number in range(4)]
    slow = World("gpu-04-812-01020304", 3, 30)
    return [*worlds, slow, World("spot-a-17-deadbeef", 0, 200, **changes)]


def test_running_pool_is_reported():
    lines = lines_of(make_pool(300_000, six(dies_s=100.0), until_s=200.0))
    assert lines[0] == "The pool is running: 164,352 of 300,000 rows are done (55 %), in 83 ranges."
    assert re.fullmatch(r"\d+ rows and \d+k output tokens per second; about 3 min \d\d s left\.", lines[1])
    assert lines[2:6] == [
        "6 workers: 5 alive (1 slow), 1 dead.",
        "",
        "  worker                state    rows  rows/s  tokens/s  ranges  heartbeat",
        "  spot-a-17-deadbeef    dead   14,336     156    39,092       1  108 s ago",
    ]
    assert lines[6].split()[:2] == ["gpu-04-812-01020304", "slow"]
    assert lines[-1] == ("spot-a-17-deadbeef is dead: no heartbeat for 1 min 48 s. 1 range waits for a worker.")


@pytest.mark.guarantee("spmd-worker-doctor POOL names what became of a dead worker's ranges")
@pytest.mark.parametrize("until_s", [200.0, float("inf")])
def test_ranges_of_the_dead_are_accounted_for(until_s: float):
    store = make_pool(100_000, six(dies_s=100.0), until_s=until_s)
    (note,) = [line for line in lines_of(store) if "is dead" in line]
    assert fate_is_told(note, store), note


@pytest.mark.control("spmd-worker-doctor POOL names what became of a dead worker's ranges")
def test_fate_needs_the_history_of_the_pool(monkeypatch: pytest.MonkeyPatch):
    store = make_pool(100_000, six(dies_s=100.0))
    (note,) = [line for line in pool_lines(make_progress(read_pool(store)), ()) if "is dead" in line]
    assert not fate_is_told(note, store), note


def fate_is_told(note: str, store: TimedStore) -> bool:
    """Whether, by the logs, another worker has the range that the dead one held."""
    following = {}
    for name in store.folders["ranges"]:
        record = json.loads(store.objects[name][0])
        if record.get("kind") == "lease" or "stop" in record:
            following.setdefault(name.partition(".")[0], []).append((name, record["worker"]))
    heirs = [
        workers[index + 1][1]
        for workers in map(sorted, following.values())
        for index, (_, worker) in enumerate(workers[:-1])
        if worker == "spot-a-17-deadbeef"
    ]
    return (f"1 range went to {heirs[0]}." if heirs else "1 range waits for a worker.") in note


@pytest.mark.parametrize(("columns", "most"), [(80, 80), (100, 100)])
def test_two_hundred_workers_fit_the_terminal(columns: int, most: int):
    lines = pool_lines(make_progress(crowd(200, 150)), (), columns)
    table = lines[4:26]
    assert max(map(len, table)) <= most
    assert len({line.split()[0] for line in table[1:21]}) == 20
    assert table[1].split()[1] == "dead"
    assert re.fullmatch(r"  and 180 more: 180 alive, \d+ to \d+ rows/s", table[21])


@pytest.mark.parametrize(
    ("worlds", "until_s", "code", "first"),
    [
        ([World("one-1", 0, 100)], float("inf"), 0, "The pool has ended well: 800 of 800 rows are done (100 %)"),
        ([World("one-1", 0, 100)], 24.0, 1, "The pool is running: "),
        ([World("one-1", 0, 100, dies_s=24.0)], 24.0, 1, "The pool has not ended: "),
    ],
)
def test_exit_code_says_whether_the_pool_ended(
    doctor, tmp_path: Path, worlds: list[World], until_s: float, code: int, first: str
):
    store = make_pool(800, worlds, until_s, lease_rows=400)
    age_s = 1000.0 if worlds[0].dies_s < float("inf") else 0.0
    store.write(tmp_path / "pool", age_s)
    found, out, err = doctor(tmp_path / "pool")
    assert (found, err) == (code, "")
    assert out.startswith(first), out
    assert ("No worker is alive. Start the same command again" in out) == bool(age_s)


@pytest.mark.parametrize("name", ["collect", "replay"])
def test_tools_of_runs_name_a_pool(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Regression: no job had run in the folder."""
    make_pool(800, [World("one-1", 0, 100)], lease_rows=400).write(tmp_path / "pool", 0.0)
    code, _, err = tool(name, capsys)(tmp_path / "pool")
    assert code == 2
    assert f"it is a pool, which doctor and report read: give a worker's run directory, inside {tmp_path}/pool/" in err


def test_pool_killed_before_it_began_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    """Regression: no job had run in the folder."""
    open_folder(tmp_path / "pool")
    for name, words in (("doctor", "killed before it had begun"), ("report", "killed before"), ("collect", "a pool")):
        code, _, err = tool(name, capsys)(tmp_path / "pool")
        assert (code, words in err) == (2, True), err


def test_missing_output_is_not_a_good_end(doctor, tmp_path: Path, output: Path):
    """Regression: the pool had ended well, by the exit code too, and its output was lost."""
    make_pool(800, [World("one-1", 0, 100)], lease_rows=400).write(tmp_path / "pool", 0.0)
    output.unlink()
    code, out, _ = doctor(tmp_path / "pool")
    assert code == 1
    assert out.splitlines()[:2] == [
        "The pool has ended, but its output is missing: 800 of 800 rows are done (100 %), in 16 ranges.",
        "Restore answers.jsonl, or remove the pool to compute it again.",
    ]


def test_pool_that_has_not_begun_cannot_be_read(doctor, tmp_path: Path):
    (tmp_path / "input.index").write_bytes(b"")
    code, out, err = doctor(tmp_path)
    assert (code, out) == (2, "")
    assert "there is no pool: no job.json" in err


def test_store_out_of_reach_is_soon_reported(doctor, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("spmd_worker.base.remote_store._MAX_TRIES", 1)
    monkeypatch.setattr("spmd_worker.frontends.batch.pool.driver.time", None)
    code, out, err = doctor("http://me:planted@127.0.0.1:9/pool?planted")
    assert (code, out) == (2, "")
    assert "http://127.0.0.1:9/pool?...: ClientConnectorError after" in err
    assert "planted" not in err


def test_transient_error_of_a_store_ends_no_report(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Regression: one failed request ended doctor and report; each request fails twice here."""
    store = make_pool(800, [World("one-1", 0, 100), World("two-2", 0, 100)], 24.0)
    failures: Counter[object] = Counter()
    pauses: list[float] = []

    def failing(given: Any, operation: Any) -> Any:
        failures[repr(operation)] += 1
        if failures[repr(operation)] <= 2 and not isinstance(operation, Now | Delete):
            raise OSError(errno.EIO, "a fault")
        return perform(given, operation)

    monkeypatch.setattr(driver, "perform", failing)
    monkeypatch.setattr(driver, "time", SimpleNamespace(sleep=pauses.append))
    assert not pool_status.watch_pool(store, None)
    assert "The pool is running" in capsys.readouterr().out
    assert set(pauses) == {0.1, 0.3}
    assert read_history(store).holdings


def test_watch_repeats_until_the_pool_ends(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    moments = [make_pool(800, [World("one-1", 0, 100)], until_s) for until_s in (24.0, 26.0, float("inf"))]
    states = iter(moments)
    monkeypatch.setattr(pool_status, "read_pool", lambda *_, **__: read_pool(next(states)))
    pauses: list[float] = []
    # Of this module alone: a thread that another test has left may sleep, too.
    monkeypatch.setattr(pool_status, "time", SimpleNamespace(sleep=pauses.append))
    assert pool_status.watch_pool(TimedStore(STARTED_S), 7.0)
    firsts = [line for line in capsys.readouterr().out.splitlines() if line.startswith("The pool ")]
    assert [first.partition(":")[0] for first in firsts] == [*["The pool is running"] * 2, "The pool has ended well"]
    assert pauses == [7.0, 7.0]


def test_watch_is_for_pools(doctor, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        doctor(tmp_path, "--watch", "3")
    assert "--watch is for a pool" in capsys.readouterr().err
    for seconds in ("0", "-1", "nan", "inf", "x"):
        with pytest.raises(SystemExit):
            doctor(tmp_path, f"--watch={seconds}")
        assert f"{seconds} must be a number of seconds, above 0" in capsys.readouterr().err


def test_pool_in_an_object_store_is_read(doctor, request: pytest.FixtureRequest):
    root = f"memory://{request.node.name}/pool"
    store = ObjectStore(root)
    for name, (data, _) in make_pool(800, [World("one-1", 0, 100)], lease_rows=400).objects.items():
        store.create(name, data)
    code, out, err = doctor(root)
    assert (code, err) == (0, "")
    assert out.startswith("The pool has ended well: 800 of 800 rows are done (100 %)"), out
