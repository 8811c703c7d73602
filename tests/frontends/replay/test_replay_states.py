"""A run of a model with recurrent states replays: its slots, snapshots and swaps are decided by the header."""

from dataclasses import replace
from pathlib import Path

import pytest
from logged_run import LoggedRun, request, write_log

from spmd_worker.base.errors import ReplayDivergedError
from spmd_worker.frontends.replay.replay import Replay
from spmd_worker.frontends.replay.step_log import read_step_log
from spmd_worker.replica.sequence.events import Admit, ResetPrefixCache
from spmd_worker.replica.sequence.metadata import SequenceData

STATES = {
    "max_model_len": 300,
    "max_num_batched_tokens": 90,
    "num_blocks": 76,
    "num_host_blocks": 120,
    "enable_prefix_caching": True,
    "preemption_mode": "auto",
    "block_copy_tokens": 0.5,
    "num_state_slots": 11,
    "num_host_state_slots": 2,
    "slot_copy_tokens": 20.0,
    "snapshot_interval": 64,
    "verify_hits": 1,
    "verify_steps": 4,
}


def write_state_log(path: Path, **changes: object) -> LoggedRun:
    """Waves of requests that share 130 tokens; the snapshots are forgotten once."""
    head = tuple(range(1, 70)) + tuple(range(1, 62))
    events = {30: [ResetPrefixCache()]}
    for wave, step in enumerate((1, 12, 31)):
        rows = [request(5 * wave + row, 140 + row, head=head, max_tokens=40, n=1 + row % 2) for row in range(5)]
        events.setdefault(step, []).extend(map(Admit, rows))
    return write_log(path, events, **{**STATES, **changes})


@pytest.mark.parametrize("depth", [{}, {"pipeline_parallel_size": 2}, {"num_steps_ahead": 1}], ids=str)
def test_run_with_states_replays(tmp_path: Path, depth: dict[str, int]):
    run = write_state_log(tmp_path / "log", **depth)
    log = read_step_log(tmp_path / "log")
    replay = Replay(log.header, None)
    assert [step.plan for step in replay.steps(log.messages())] == run.plans
    assert replay.num_equal_digests == len(run.plans)
    counters = run.scheduler.counters
    assert counters == replay.scheduler.counters
    # The run holds what this is about.
    assert min(counters.num_snapshots, counters.num_snapshot_hits) >= 4
    assert counters.num_verified_hits >= 1
    assert counters.num_verified_steps >= 4
    for kind in ("swap_out", "swap_in", "copy"):
        assert any(getattr(plan.state_ops, kind) for plan in run.plans), f"no {kind}"


DRAFTS = {
    "speculation": '{"method": "mtp", "num_speculative_tokens": 3, "max_step_tokens": 90}',
    "num_lookahead_tokens": 3,
}


@pytest.mark.parametrize("depth", [{}, {"pipeline_parallel_size": 2}], ids=str)
def test_run_with_states_and_drafts_replays(tmp_path: Path, depth: dict[str, int]):
    run = write_state_log(tmp_path / "log", **{**DRAFTS, **depth, "preemption_mode": "swap"})
    log = read_step_log(tmp_path / "log")
    replay = Replay(log.header, None)
    assert [step.plan for step in replay.steps(log.messages())] == run.plans
    counters = run.scheduler.counters
    assert counters == replay.scheduler.counters
    assert counters.num_drafted_tokens > counters.num_accepted_tokens > 20
    assert min(counters.num_snapshots, counters.num_snapshot_hits, counters.num_swapped_in) > 0
    rows = [data for plan in run.plans for group in plan.groups for data in group.sequences]
    # A row is sent completely while its state lags, and its mirror accepts that.
    assert any(isinstance(data, SequenceData) and data.num_lagging_tokens for data in rows)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_state_slots": 0},
        {"num_state_slots": 9},
        {"num_host_state_slots": 0},
        {"slot_copy_tokens": 1000.0},
        {"snapshot_interval": 0},
        {"verify_hits": 0},
        {"verify_steps": 0},
    ],
    ids=str,
)
def test_replay_with_other_states_diverges(tmp_path: Path, changes: dict[str, float]):
    """Negative control: every key of the header that says how states are kept counts."""
    write_state_log(tmp_path / "log")
    log = read_step_log(tmp_path / "log")
    with pytest.raises(ReplayDivergedError, match=r"^step \d+: (state_ops|groups|block_ops|continuing|repeated_rows)"):
        list(Replay(replace(log.header, **changes), None).steps(log.messages()))
