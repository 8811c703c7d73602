"""Jobs of a model with recurrent states: killed and resumed under any layout they write the same bytes, and a step log
replays with every token.
"""

import json
import random
import re
from pathlib import Path

import pytest
from job_attempts import Attempt, slow_after
from state_models import state_folder
from tools_main import tool

from spmd_worker.base.config.schema import CacheConfig, JobConfig, ModelOptions, RunConfig, SchedulerConfig
from spmd_worker.frontends.batch.job import run_job
from spmd_worker.frontends.replay.replay import read_messages
from spmd_worker.frontends.replay.step_log import read_step_log
from spmd_worker.ranks.environment import RankEnvironment

NUM_ROWS = 120


def write_rows(folder: Path, num_rows: int = NUM_ROWS) -> None:
    """Rows with a common beginning of 70 tokens, which sample."""
    chance = random.Random(5)
    head = [chance.randrange(5, 90) for _ in range(70)]
    rows = [
        {
            "prompt_token_ids": head + [chance.randrange(5, 90) for _ in range(1 + index % 60)],
            "max_tokens": 20 + index % 30,
            "temperature": float(index % 2),
            "ignore_eos": True,
        }
        for index in range(num_rows)
    ]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def attempt(folder: Path, layout: str, **more: tuple[str, ...]) -> Attempt:
    options = (f"model.path={state_folder('lfm2')}", "cache.num_blocks=64", "cache.num_state_snapshots=8")
    return Attempt(folder, layout, *options, **more)


@pytest.mark.stress
def test_killed_job_with_states_resumes_to_equal_bytes(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
        write_rows(folder)
    assert attempt(whole, "one rank").close() == 0, (whole / "log").read_text()
    for number, (layout, victim) in enumerate([("two stages", None), ("two replicas", 1)]):
        started = attempt(killed, layout, script=slow_after(40 * (number + 1), killed))
        started.wait_for_steps(40 * (number + 1))
        started.kill(victim)
    assert attempt(killed, "one rank").close() == 0, (killed / "log").read_text()
    assert (killed / "out.jsonl").read_bytes() == (whole / "out.jsonl").read_bytes()
    metrics = json.loads((killed / "out.jsonl.run" / "metrics.json").read_text())
    assert 0 < metrics["resumed_rows"] < NUM_ROWS


@pytest.mark.stress
def test_log_of_states_replays_with_every_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Preempted by swap, forked, found again."""
    write_rows(tmp_path, 24)
    config = RunConfig(
        model=ModelOptions(path=str(state_folder("lfm2")), dtype="float32", max_model_len=256),
        cache=CacheConfig(num_blocks=20, swap_space_gib=0.01, num_state_snapshots=4),
        scheduler=SchedulerConfig(max_num_seqs=8, preemption_mode="swap"),
        job=JobConfig(
            input=str(tmp_path / "rows.jsonl"), output=str(tmp_path / "o.jsonl"), run_dir=str(tmp_path), step_log=True
        ),
        device="cpu",
    )
    run_job(config, RankEnvironment())
    log = read_step_log(tmp_path / "steps.log")
    messages = list(read_messages(log.messages()))
    for kind in ("swap_out", "swap_in", "copy"):
        assert any(getattr(message.plan.state_ops, kind) for message in messages), f"no {kind}"
    assert (log.header.num_state_slots, log.header.num_host_state_slots) == (12, 8)
    code, output, _ = tool("replay", capsys)(tmp_path / "steps.log", "--with-model")
    assert code == 0, output
    assert re.search(r"\nreplayed \d+ steps, digests equal\n(\d+) of \1 tokens equal\n$", output)
