"""`bench_runtime.py cache` on small caches: its states are what they say, and it fails where a bound is missed.

No test here looks at how long anything takes.
"""

import json
from importlib import import_module
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return import_module("control_path.cache")


@pytest.mark.stress
@pytest.mark.matrix
def test_cache_bench_prints_rows_and_one_json_line(bench, capsys):
    """Each state and operation has a row."""
    code = import_module("bench_runtime").main(["cache", "--blocks", "1000,2000", "--rounds", "20"])
    *rows, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)
    # Which of the two it is, is a matter of time.
    assert code == (0 if result["is_within_target"] else 1)
    assert sorted(result["ratios"]) == sorted(
        ["plain allocate", "plain append", "plain free", *(f"filling {operation}" for operation in bench.OPERATIONS)]
    )
    assert set(result["ns"]) == {*bench.STATES, "dict"}
    assert all(len(nanoseconds) == 2 for state in result["ns"].values() for nanoseconds in state.values())
    assert result["lookup_100k_tokens_ms"] > 0
    num_rows = sum(len(state) for state in result["ns"].values())
    assert sum(row.split()[0] in result["ns"] for row in rows) == num_rows


@pytest.mark.parametrize("state", ["plain", "filling", "evicting", "worst"])
def test_world_stays_in_its_state(bench, state):
    world = bench.World(1000, state)
    world.fill()
    for _ in range(40):
        world.round()
        manager = world.manager
        manager.check_integrity([table for table, _ in world.running])
        assert manager.num_used_blocks > 300
        num_unnamed = manager.num_free_blocks - manager.num_cached_blocks
        if state == "plain":
            assert manager.num_cached_blocks == 0
        elif state != "filling":
            # The rest of a table that did not end with a full block, and what was freed of such.
            assert num_unnamed < manager.num_cached_blocks
    assert all(world.times[operation] for operation in ("allocate", "append", "free"))
    assert bool(world.times["lookup"]) == (state != "plain")


@pytest.mark.parametrize(
    ("last_ns", "lookup_ms", "is_within_target"),
    [(149.0, (9.0, 10.0), True), (150.0, (9.0, 10.0), False), (149.0, (9.0, 11.0), False)],
)
def test_bound_miss_of_ratio_or_lookup_is_reported(bench, last_ns, lookup_ms, is_within_target):
    rows = {"plain": {"allocate": [100.0, last_ns]}, "worst": {"allocate": [100.0, 900.0]}}
    result = bench.cache_summary(rows, lookup_ms)
    assert result["ratios"] == {"plain allocate": last_ns / 100}
    assert result["other_ratios"] == {"worst allocate": 9.0}
    assert result["is_within_target"] is is_within_target


def test_long_prompt_is_found_completely(bench):
    """The prompt has 100,000 tokens."""
    naming_ms, finding_ms = bench.measure_long_lookup(6300)
    assert naming_ms > 0
    assert finding_ms > 0
