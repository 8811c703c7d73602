"""A job killed at any moment and resumed with any layout writes the same bytes, each row once.

SPMD_WORKER_KILLS sets the number of kills of the stress tests, under torchrun with fresh interpreters.
"""

import json
import os
import random
from pathlib import Path

import pytest
from job_attempts import LAYOUTS, LIMIT_S, NUM_LONG_ROWS, Attempt, slow_after, write_rows
from stress_seed import SEED

from spmd_worker.frontends.tools import replay

NUM_KILLS = int(os.environ.get("SPMD_WORKER_KILLS", "40"))
NUM_PARTS = 4
NUM_FEW_ROWS, NUM_TOKENS = 70, 16
"""Rows of a job that is killed twice, and the fewest tokens of one."""
LIFE_S = 9.0
"""About how long the job lives; moments are drawn from it, start and merge included."""


def whole_output(folder: Path, num_rows: int, num_tokens: int = 40) -> bytes:
    folder.mkdir()
    write_rows(folder, num_rows, num_tokens)
    attempt = Attempt(folder, "one rank")
    assert attempt.ends_within(LIMIT_S), (folder / "log").read_text()
    assert attempt.close() == 0, (folder / "log").read_text()
    return (folder / "out.jsonl").read_bytes()


def killed_job(folder: Path, chance: random.Random, most_kills: int, first: str) -> tuple[bytes, int]:
    """The output of a job that was killed up to `most_kills` times, and how often it was."""
    folder.mkdir()
    write_rows(folder, NUM_LONG_ROWS)
    num_kills = 0
    while True:
        layout = first if chance.random() < 0.5 else chance.choice(list(LAYOUTS))
        attempt = Attempt(folder, layout, torchrun=(), is_fresh=True)
        if num_kills < most_kills and not attempt.ends_within(chance.uniform(0, LIFE_S)):
            num_ranks = LAYOUTS[layout][0]
            attempt.kill(chance.choice([None, None, *range(num_ranks)]))
            num_kills += 1
            continue
        assert attempt.ends_within(LIMIT_S), (folder / "log").read_text()
        assert attempt.close() == 0, (folder / "log").read_text()
        return (folder / "out.jsonl").read_bytes(), num_kills


def check_lines(output: bytes, num_rows: int) -> None:
    assert [json.loads(line)["index"] for line in output.splitlines()] == list(range(num_rows))


@pytest.mark.guarantee("Killed anywhere, the same command: the same bytes")
@pytest.mark.parametrize(
    ("layouts", "victims"),
    [
        pytest.param(["two replicas", "two shards", "one rank"], [1, 0], marks=pytest.mark.matrix),
        pytest.param(["two shards", "two stages", "one rank"], [0, None], marks=pytest.mark.stress),
        pytest.param(["two stages", "two replicas", "two shards"], [None, 1], marks=pytest.mark.stress),
    ],
    ids=["a replica, a shard", "a shard, all stages", "all stages, a replica"],
)
def test_killed_job_resumes_to_equal_bytes(tmp_path: Path, whole: bytes, layouts: list[str], victims: list[int | None]):
    """Killed when it has made some steps: one rank, or all (None). Each start goes on under another layout, and what
    the last killed one computed is recomputed from its log on one rank.
    """
    write_rows(tmp_path, NUM_FEW_ROWS, NUM_TOKENS)
    for number, (layout, victim) in enumerate(zip(layouts, victims)):
        attempt = Attempt(tmp_path, layout, "job.step_log=true", script=slow_after(30 * (number + 1), tmp_path))
        attempt.wait_for_steps(30 * (number + 1))
        attempt.kill(victim)
    assert replay.main([str(tmp_path / "out.jsonl.run" / "steps.log"), "--with-model"]) == 0
    attempt = Attempt(tmp_path, layouts[-1])
    assert attempt.close() == 0, (tmp_path / "log").read_text()
    output = (tmp_path / "out.jsonl").read_bytes()
    check_lines(output, NUM_FEW_ROWS)
    assert output == whole
    metrics = json.loads((tmp_path / "out.jsonl.run" / "metrics.json").read_text())
    assert 0 < metrics["resumed_rows"] < NUM_FEW_ROWS


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return whole_output(tmp_path_factory.mktemp("whole") / "job", NUM_FEW_ROWS, NUM_TOKENS)


@pytest.mark.stress
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_kills_at_many_moments_keep_rows_exact(tmp_path: Path, part: int):
    whole = whole_output(tmp_path / "whole", NUM_LONG_ROWS)
    chance, num_kills, number = random.Random(f"{SEED} {part}"), 0, part
    while num_kills < NUM_KILLS // NUM_PARTS:
        number += 1
        first = ("two shards", "two replicas")[number % 2]
        output, more = killed_job(tmp_path / f"job {number}", chance, min(8, NUM_KILLS // NUM_PARTS - num_kills), first)
        num_kills += more
        check_lines(output, NUM_LONG_ROWS)
        assert output == whole
    print(f"\nKILLS at any second, of seed {SEED}: {num_kills} in {number - part} jobs", end="")
