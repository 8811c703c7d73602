"""Rank 0 writes the output alone, and no other rank waits for it."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import ranks

MODEL = ranks.REPOSITORY / "scripts" / "demo" / "model"
TIMEOUT_S, MERGE_S = 10, 22

JOB = f"""
import sys, time
import launch
from spmd_worker.frontends.batch import open_job
from spmd_worker.engine.engine import Engine

write, close_followers = open_job.write_lines, Engine.close_followers

def take_time():
    # Busy all the while, not asleep.
    for _ in range({MERGE_S * 100}):
        sum(range(10_000))
        time.sleep(0.01)

def write_slowly(*given):
    take_time()
    return write(*given)

def close_slowly(engine):
    close_followers(engine)
    take_time()

if sys.argv.pop(1) == "while others wait":
    Engine.close_followers = close_slowly
else:
    open_job.write_lines = write_slowly
sys.exit(launch.main())
"""


def run(folder: Path, when: str) -> ranks.CompletedRanks:
    (folder / "in.jsonl").write_text("".join(f"{json.dumps({'prompt': f'add {n} 7 ='})}\n" for n in range(4)))
    arguments = [
        *(when, f"model.path={MODEL}", f"job.input={folder}/in.jsonl", f"job.output={folder}/out.jsonl"),
        *("parallel.tensor_parallel_size=2", f"executor.timeout_s={TIMEOUT_S:g}", "cache.num_blocks=64"),
    ]
    return ranks.run_ranks(JOB, 2, timeout_s=240, arguments=arguments)


@pytest.mark.stress
def test_long_output_writing_keeps_no_rank_waiting(tmp_path: Path):
    """And, as the control, a rank that is kept waiting as long fails. Both at once: they wait."""
    folders = [tmp_path / "merge", tmp_path / "control"]
    for folder in folders:
        folder.mkdir()
    with ThreadPoolExecutor() as pool:
        done, control = pool.map(run, folders, ("in the merge", "while others wait"))
    assert done.returncode == 0, done.output
    assert len((tmp_path / "merge" / "out.jsonl").read_text().splitlines()) == 4
    assert control.returncode != 0, control.output
    assert not (tmp_path / "control" / "out.jsonl").exists()
