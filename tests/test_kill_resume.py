"""Kill a job at any moment of its life, go on under any layout: the same bytes in the end, no row lost or done twice.

Under torchrun, as people run it. SPMD_WORKER_KILLS sets how many kills the slow test makes.
"""

import json
import os
import random
from pathlib import Path

import pytest
from job_attempts import LAYOUTS, LIMIT_S, NUM_ROWS, Attempt, write_rows

NUM_KILLS = int(os.environ.get("SPMD_WORKER_KILLS", "10"))
LIFE_S = 9.0
"""About how long the job lives; moments are drawn from it, start and merge included."""


def whole_output(folder: Path, layout: str = "two shards") -> bytes:
    folder.mkdir()
    write_rows(folder)
    attempt = Attempt(folder, layout)
    assert attempt.ends_within(LIMIT_S), (folder / "log").read_text()
    assert attempt.close() == 0, (folder / "log").read_text()
    return (folder / "out.jsonl").read_bytes()


def killed_job(folder: Path, chance: random.Random, most_kills: int, first: str) -> tuple[bytes, int]:
    """The output of a job that was killed up to `most_kills` times, and how often it was."""
    folder.mkdir()
    write_rows(folder)
    num_kills = 0
    while True:
        layout = first if chance.random() < 0.5 else chance.choice(list(LAYOUTS))
        attempt = Attempt(folder, layout)
        if num_kills < most_kills and not attempt.ends_within(chance.uniform(0, LIFE_S)):
            num_ranks = LAYOUTS[layout][0]
            attempt.kill(chance.choice([None, None, *range(num_ranks)]))
            num_kills += 1
            continue
        assert attempt.ends_within(LIMIT_S), (folder / "log").read_text()
        assert attempt.close() == 0, (folder / "log").read_text()
        return (folder / "out.jsonl").read_bytes(), num_kills


def check_lines(output: bytes) -> None:
    assert [json.loads(line)["index"] for line in output.splitlines()] == list(range(NUM_ROWS))


def test_a_job_that_was_killed_ends_with_the_bytes_of_one_that_was_not(tmp_path: Path):
    expected = whole_output(tmp_path / "whole")
    output, num_kills = killed_job(tmp_path / "killed", random.Random(4), 1, "two replicas")
    assert num_kills == 1
    check_lines(output)
    assert output == expected


@pytest.mark.slow
def test_kills_at_many_moments_lose_no_row_and_repeat_none(tmp_path: Path):
    chance, num_kills, number = random.Random(1), 0, 0
    expected = whole_output(tmp_path / "whole")
    while num_kills < NUM_KILLS:
        number += 1
        first = ("two shards", "two replicas")[number % 2]
        output, more = killed_job(tmp_path / f"job {number}", chance, min(8, NUM_KILLS - num_kills), first)
        num_kills += more
        print(f"KILLS {num_kills} in {number} jobs", flush=True)
        check_lines(output)
        assert output == expected
