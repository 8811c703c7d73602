"""Under torchrun: the stages of a pipeline compute at the same time, and a job says how much of it they did."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import ranks
from reference_models import checkpoint_folder

from spmd_worker.observability.stage_times import StageSpan, read_stage_times

ONE_AT_A_TIME = """
import sys
import launch
from spmd_worker.engine_pipeline import StepPipeline
StepPipeline.is_full = property(lambda self: len(self) > 0)
sys.exit(launch.main())
"""
"""The engine without virtual engines: a step ends before the next begins."""


def job(folder: Path, model: str) -> list[str]:
    asked = {"max_tokens": 60, "temperature": 0, "ignore_eos": True}
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


def two_cores_are_free() -> bool:
    """Whether two processes get a core each, or nearly: they count what time they have while a second passes."""
    count = "import time; end = time.monotonic() + 1\nwhile time.monotonic() < end: pass\nprint(time.process_time())"
    started = [subprocess.Popen([sys.executable, "-c", count], stdout=subprocess.PIPE) for _ in range(2)]
    return all(float(each.communicate(timeout=30)[0]) > 0.8 for each in started)


def test_both_stages_compute_at_once_and_the_job_says_for_how_long(tmp_path: Path, model: str):
    shares_at_once = []
    # Where others use the cores, stages cannot compute at once: one quiet moment will do.
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        done = ranks.run_started([ranks.REPOSITORY / "launch.py", *job(folder, model)], 2, timeout_s=60)
        assert done.returncode == 0, done.output
        shares_at_once.append(overlap_share(folder))
        if shares_at_once[-1] > 0.3:
            break
    if shares_at_once[-1] <= 0.3 and not two_cores_are_free():
        pytest.skip("others use the cores, so stages cannot compute at once")
    assert shares_at_once[-1] > 0.3, shares_at_once
    metrics = json.loads((folder / "run" / "metrics.json").read_text())
    assert [(each["replica"], each["stage"]) for each in metrics["stages"]] == [(0, 0), (0, 1)]
    shares = [each["busy_share"] for each in metrics["stages"]]
    assert all(0 < share <= 1 for share in shares)
    assert metrics["bubble_share"] == pytest.approx(1 - sum(shares) / 2, abs=1e-3)
    assert f"stages busy               {shares[0]:.0%}, {shares[1]:.0%}" in done.stderr


@pytest.mark.slow
def test_with_one_step_under_way_stages_take_turns(tmp_path: Path, model: str):
    """Negative control: only what is prepared before the stage before has sent anything overlaps."""
    done = ranks.run_ranks(ONE_AT_A_TIME, 2, timeout_s=60, arguments=job(tmp_path, model))
    assert done.returncode == 0, done.output
    assert overlap_share(tmp_path) < 0.3
