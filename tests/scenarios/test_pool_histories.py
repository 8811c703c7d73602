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
LEASE_S = 2


def histories(folder: Path, number: int, at_once: int, *more: str) -> dict[str, Any]:
    path = os.pathsep.join([str(ranks.REPOSITORY), str(ranks.SUPPORT)])
    words = [sys.executable, SCRIPT, folder, SEED * 10_000, number, at_once, LEASE_S, *more]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    figures: dict[str, Any] = json.loads(done.stdout)
    os.write(1, f"\npools: { {key: value for key, value in figures.items() if key != 'failed'} }\n".encode())
    return figures


@pytest.mark.stress
@pytest.mark.timeout(1200 + 5 * NUM_HISTORIES)
@pytest.mark.guarantee("A pool's output is that of one piece")
def test_histories_end_with_bytes_of_one_piece(tmp_path: Path):
    figures = histories(tmp_path, NUM_HISTORIES, 10)
    assert figures["failed"] == []
    assert figures["histories"] == NUM_HISTORIES
    assert min(figures[key] for key in ("kills", "pauses", "terms", "lost")) >= NUM_HISTORIES // 10


@pytest.mark.stress
@pytest.mark.timeout(1200 + 300 * NUM_LAUNCHES)
def test_launches_end_with_bytes_of_one_piece(tmp_path: Path):
    """Each is killed at least once in the middle of a lease, which another world takes over."""
    figures = histories(tmp_path, NUM_LAUNCHES, 1, "launches")
    assert figures["failed"] == []
    assert figures["lost"] >= figures["kills"] >= NUM_LAUNCHES
    assert figures["computed"] > figures["rows"]


@pytest.mark.stress
@pytest.mark.control("A pool's output is that of one piece")
@pytest.mark.parametrize("flaw", ["no fencing", "first part"])
def test_histories_detect_broken_rules(tmp_path: Path, flaw: str):
    """Negative controls: an entry replaces another's; the merge takes a range's first part for all of it."""
    assert len(histories(tmp_path, 24, 8, flaw)["failed"]) > 0
