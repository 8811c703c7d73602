"""A queue takes a machine away: the world under torchrun hands its rows back and exits with a preemption's code."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import ranks
from job_attempts import LAUNCH, MODEL
from waiting import LIMIT_S, wait_until

from spmd_worker.frontends.batch.pool.posix_store import PosixStore
from spmd_worker.frontends.batch.pool.view import read_pool


@pytest.mark.stress
def test_preempted_world_hands_back_and_exits_143(tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "copy a b c d e f g =", "max_tokens": 24}\n' * 20_000)
    overrides = [f"model.path={MODEL}", "device=cpu", "parallel.data_parallel_size=2", "job.lease_rows=64"]
    paths = [
        f"job.{key}={tmp_path / name}" for key, name in (("input", "rows.jsonl"), ("output", "out"), ("pool", "p"))
    ]
    launcher = [sys.executable, "-m", "spmd_worker.tools.torchrun", "--standalone", "--nproc-per-node", "2"]
    with open(tmp_path / "log", "ab") as log:
        world = subprocess.Popen(
            [*launcher, str(LAUNCH), *overrides, *paths],
            env=ranks.environment("", {}),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        wait_until(lambda: (tmp_path / "p" / "done" / "00000003").exists() or world.poll() is not None)
        world.send_signal(signal.SIGTERM)
        assert world.wait(LIMIT_S) == 128 + signal.SIGTERM, (tmp_path / "log").read_text()
        state = read_pool(PosixStore(tmp_path / "p"))
        (worker,) = state.workers
        assert worker.end is not None
        assert worker.end["how"] == "signalled"
        assert worker.counts["rows"] == state.num_rows_done
        assert {each.holder for each in state.open_ranges} <= {None}
        assert 0 < state.num_rows_done < 20_000
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(world.pid, signal.SIGKILL)
