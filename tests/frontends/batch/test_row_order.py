"""A job whose rows begin alike, in random order, with a cache for a tenth of the beginnings: prompt tokens computed.

`scripts/bench_order.py` does the same with 20,000 rows.
"""

import json
import random
from pathlib import Path

import pytest
from ranks import REPOSITORY

from spmd_worker.base.config.schema import CacheConfig, JobConfig, ModelOptions, RunConfig, SchedulerConfig
from spmd_worker.frontends.batch.job import run_job
from spmd_worker.ranks.environment import RankEnvironment

NUM_ROWS, NUM_BEGINNINGS, BEGINNING_TOKENS, OWN_TOKENS, BLOCK_SIZE = 200, 20, 32, 4, 4
LEAST_TOKENS = NUM_BEGINNINGS * BEGINNING_TOKENS + NUM_ROWS * OWN_TOKENS


def rows() -> list[str]:
    source = random.Random(1)
    ids = [[source.randrange(60, 120) for _ in range(BEGINNING_TOKENS)] for _ in range(NUM_BEGINNINGS)]
    prompts = [ids[row % NUM_BEGINNINGS] + [source.randrange(60, 120) for _ in range(4)] for row in range(NUM_ROWS)]
    source.shuffle(prompts)
    # Sampled: an answer depends on the row's index.
    return [
        json.dumps({"prompt_token_ids": prompt, "temperature": 1.0, "max_tokens": 1, "ignore_eos": True})
        for prompt in prompts
    ]


def run(folder: Path, window_rows: int) -> tuple[bytes, int]:
    """The output, and the prompt tokens that were computed."""
    (folder / "rows.jsonl").write_text("\n".join(rows()))
    output = folder / f"{window_rows}.jsonl"
    config = RunConfig(
        model=ModelOptions(path=str(REPOSITORY / "scripts" / "demo" / "model"), max_model_len=40),
        cache=CacheConfig(block_size=BLOCK_SIZE, num_blocks=NUM_BEGINNINGS // 10 * BEGINNING_TOKENS // BLOCK_SIZE),
        scheduler=SchedulerConfig(max_num_seqs=4),
        job=JobConfig(input=str(folder / "rows.jsonl"), output=str(output), window_rows=window_rows),
        device="cpu",
    )
    run_job(config, RankEnvironment())
    metrics = json.loads((folder / f"{output.name}.run" / "metrics.json").read_text())
    assert metrics["preemptions"] == 0
    return output.read_bytes(), metrics["computed_prompt_tokens"]


@pytest.mark.guarantee("Rows that begin alike are computed together", is_control_inside=True)
def test_common_beginnings_are_computed_nearly_once(tmp_path: Path):
    answers, num_computed = run(tmp_path, JobConfig().window_rows)
    assert LEAST_TOKENS <= num_computed <= 1.2 * LEAST_TOKENS
    in_file_order, num_computed_in_file_order = run(tmp_path, 1)
    assert answers == in_file_order
    # The control: the order of the file computes the beginnings again and again.
    assert num_computed_in_file_order > 2 * LEAST_TOKENS
