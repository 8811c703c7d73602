"""Histories of pools: worlds that are added, killed, paused, slowed and asked to end at random.

Whatever happened, the output has the bytes of one piece, no row is in two parts, and a row is computed twice only if
its lease was not finished. SPMD_WORKER_POOL_HISTORIES sets the number of histories of processes without an engine,
SPMD_WORKER_POOL_LAUNCHES that of launches of the demo model under any layout; TESTS_SEED the seed.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ranks
from stress_seed import SEED

SCRIPT = ranks.SUPPORT / "pool_histories.py"
NUM_HISTORIES = int(os.environ.get("SPMD_WORKER_POOL_HISTORIES", "500"))
NUM_LAUNCHES = int(os.environ.get("SPMD_WORKER_POOL_LAUNCHES", "20"))
NUM_PARTS = 4
"""Tests among which the launches are shared out: each takes a minute or two, and no test more than 20."""
LEASE_S = 2


def histories(folder: Path, number: int, at_once: int, *more: str, first: int = 0) -> dict[str, Any]:
    path = os.pathsep.join([str(ranks.REPOSITORY), str(ranks.SUPPORT)])
    words = [sys.executable, SCRIPT, folder, SEED * 10_000 + first, number, at_once, LEASE_S, *more]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    figures: dict[str, Any] = json.loads(done.stdout)
    os.write(1, f"\npools: { {key: value for key, value in figures.items() if key != 'failed'} }\n".encode())
    return figures


@pytest.mark.stress
@pytest.mark.guarantee("A pool's output is that of one piece")
def test_histories_end_with_bytes_of_one_piece(tmp_path: Path):
    figures = histories(tmp_path, NUM_HISTORIES, 10)
    assert figures["failed"] == []
    assert figures["histories"] == NUM_HISTORIES
    assert min(figures[key] for key in ("kills", "pauses", "terms", "lost")) >= NUM_HISTORIES // 10


@pytest.mark.stress
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_launches_end_with_bytes_of_one_piece(tmp_path: Path, part: int):
    """Each is killed at least once in the middle of a lease, which another world takes over."""
    first, last = (NUM_LAUNCHES * each // NUM_PARTS for each in (part, part + 1))
    figures = histories(tmp_path, last - first, 1, "launches", first=first)
    assert figures["failed"] == []
    assert figures["lost"] >= figures["kills"] >= last - first
    assert figures["computed"] > figures["rows"]


@pytest.mark.stress
@pytest.mark.control("A pool's output is that of one piece")
@pytest.mark.parametrize("flaw", ["no fencing", "first part"])
def test_histories_detect_broken_rules(tmp_path: Path, flaw: str):
    """Negative controls: an entry replaces another's; the merge takes a range's first part for all of it."""
    assert len(histories(tmp_path, 24, 8, flaw)["failed"]) > 0
