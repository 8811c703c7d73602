"""A run of a model with windows replays: the header has its groups of layers."""

from dataclasses import replace
from pathlib import Path

import pytest
from logged_run import PRESSURE, pressure_events, write_log

from spmd_worker.base.errors import ReplayDivergedError
from spmd_worker.frontends.replay.replay import Replay
from spmd_worker.frontends.replay.step_log import read_step_log

WINDOWS = {
    **PRESSURE,
    "num_tier_blocks": 0,
    "num_blocks": 45,
    "num_host_blocks": 40,
    "block_copy_tokens": 0.6,
    "num_full_groups": 1,
    "num_window_groups": 2,
    "windows": (7,),
}


@pytest.mark.parametrize("depth", [{}, {"pipeline_parallel_size": 2}, {"num_steps_ahead": 1}], ids=str)
def test_run_with_windows_replays(tmp_path: Path, depth: dict[str, int]):
    run = write_log(tmp_path / "log", pressure_events(), **{**WINDOWS, **depth})
    log = read_step_log(tmp_path / "log")
    replay = Replay(log.header, None)
    assert [step.plan for step in replay.steps(log.messages())] == run.plans
    assert replay.num_equal_digests == len(run.plans)
    assert run.scheduler.counters == replay.scheduler.counters
    assert run.scheduler.counters.num_preemptions > 0
    # Negative control: another window gives other blocks back.
    with pytest.raises(ReplayDivergedError, match=r"^step \d+: (groups|block_ops|continuing)"):
        list(Replay(replace(log.header, windows=(15,)), None).steps(log.messages()))
