"""The stages of a pipeline compute at the same time, and a job says how much of it they did."""

import json
from pathlib import Path

import pytest
import ranks
from reference_models import checkpoint_folder

from spmd_worker.base.metrics.stage_times import StageSpan, read_stage_times

HELD = """
import os, sys
from pathlib import Path
import launch
from spmd_worker.engine.pipeline import StepPipeline
from spmd_worker.worker.runner import model_runner
from waiting import NotInTime, wait_until

folder, limit_s, takes_turns = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3] == "takes turns"
rank, right, held = int(os.environ["RANK"]), model_runner.build_batch, 8
steps = iter(range(1, 1_000_000))

def build_batch(*arguments, **keywords):
    step = next(steps)
    if rank == 0 and step == held + 1:
        (folder / "begun").touch()
        wait_until((folder / "held").exists, limit_s)
    if rank == 1 and step == held:
        (folder / "held").touch()
        try:
            wait_until((folder / "begun").exists, limit_s)
            (folder / "at once").touch()
        except NotInTime:
            pass
    return right(*arguments, **keywords)

model_runner.build_batch = build_batch
if takes_turns:
    StepPipeline.is_full = property(lambda self: len(self) > 0)
sys.exit(launch.main(sys.argv[4:]))
"""
"""The last stage does not compute a step before the first stage has begun the next one, or LIMIT_S are over, and the
first one does not compute that before the last stage is there: both are at it at one moment, however fast either is.
"""


def job(folder: Path, model: str, max_tokens: int = 60) -> list[str]:
    asked = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    rows = [{"prompt_token_ids": [1 + index, 7, 9], **asked} for index in range(24)]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return [
        *(f"model.path={model}", "device=cpu", "parallel.pipeline_parallel_size=2", "cache.num_blocks=200"),
        *(f"job.input={folder / 'rows.jsonl'}", f"job.output={folder / 'out.jsonl'}", f"job.run_dir={folder / 'run'}"),
    ]


def overlap_us(spans: list[StageSpan]) -> int:
    """How long both stages computed at once."""
    of_stage = [[(each.start_us, each.end_us) for each in spans if each.stage == stage] for stage in (0, 1)]
    return sum(
        max(0, min(end, other_end) - max(start, other_start))
        for start, end in of_stage[0]
        for other_start, other_end in of_stage[1]
    )


def busy_us(spans: list[StageSpan], stage: int) -> int:
    return sum(each.end_us - each.start_us for each in spans if each.stage == stage)


@pytest.fixture(scope="module")
def model() -> str:
    return str(checkpoint_folder("llama3"))


def overlap_share(folder: Path) -> float:
    """Of the time that the less busy stage computed, how much the other one did too."""
    spans = read_stage_times(folder / "run" / "stages.csv")
    return overlap_us(spans) / min(busy_us(spans, 0), busy_us(spans, 1))


@pytest.mark.stress
@pytest.mark.timed
def test_stages_overlap_on_two_quiet_cores(tmp_path: Path, model: str):
    ranks.run_forked([ranks.REPOSITORY / "launch.py", *job(tmp_path, model)], 2, timeout_s=240).checked()
    print(f"both stages computed for {overlap_share(tmp_path):.0%} of the time of the less busy one")
    assert overlap_share(tmp_path) > 0.3


def run_held(folder: Path, model: str, limit_s: float, how: str) -> ranks.CompletedRanks:
    return ranks.run_ranks(
        HELD, 2, timeout_s=240, arguments=[folder, str(limit_s), how, *job(folder, model, 16)]
    ).checked()


def test_first_stage_overlaps_the_last_ones_previous_step(tmp_path: Path, model: str):
    done = run_held(tmp_path, model, 60.0, "at once")
    assert (tmp_path / "at once").exists()
    assert overlap_us(read_stage_times(tmp_path / "run" / "stages.csv")) > 0
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert [(each["replica"], each["stage"]) for each in metrics["stages"]] == [(0, 0), (0, 1)]
    shares = [each["busy_share"] for each in metrics["stages"]]
    assert all(0 < share <= 1 for share in shares)
    assert metrics["bubble_share"] == pytest.approx(1 - sum(shares) / 2, abs=1e-3)
    assert f"stages busy               {shares[0]:.0%}, {shares[1]:.0%}" in done.stderr


@pytest.mark.stress
def test_overlap_check_detects_one_step_in_flight(tmp_path: Path, model: str):
    """Negative control: a step ends before the next begins, however long one waits."""
    run_held(tmp_path, model, 1.0, "takes turns")
    assert not (tmp_path / "at once").exists()
    assert (tmp_path / "begun").exists()
