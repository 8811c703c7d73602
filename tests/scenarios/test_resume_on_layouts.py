"""A job killed under one layout goes on under another, to the same bytes: every pair of five layouts, 200 kills in all.

SPMD_WORKER_KILLS sets the number of kills, TESTS_SEED the seed. Rows are greedy and sampled, some with
log-probabilities, in float32: a sum in another order changes their text.
"""

import itertools
import json
import os
import random
import time
from pathlib import Path

import pytest
from job_attempts import ALL_LAYOUTS, WIDE_LAYOUTS, Attempt, write_rows
from stress_seed import SEED

NUM_KILLS = int(os.environ.get("SPMD_WORKER_KILLS", "200"))
LAYOUTS = ("one rank", "two shards", *WIDE_LAYOUTS)
PAIRS = [*itertools.permutations(LAYOUTS, 2)]
NUM_ROWS = 80
MOST_A_JOB = 5
Ending = tuple[bytes, dict[str, object]]


def ended(folder: Path, layout: str, *more: str) -> Ending:
    """Output of the job, which now ends, and what its provenance says of output and answers."""
    attempt = Attempt(folder, layout, *more)
    assert attempt.close() == 0, (folder / "log").read_text()
    provenance = json.loads((folder / "out.jsonl.run" / "provenance.json").read_text())
    about = {**provenance["output"], "path": "", **provenance["answers"], "images": provenance["images"]}
    assert provenance["overridden"] == []
    return (folder / "out.jsonl").read_bytes(), about


def job_in(folder: Path) -> Path:
    folder.mkdir()
    write_rows(folder, NUM_ROWS)
    return folder


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ending, float]:
    """An unbroken job's ending, and how long it lived: moments of kills are drawn from that."""
    folder, began_s = job_in(tmp_path_factory.mktemp("unbroken") / "job"), time.monotonic()
    return ended(folder, "one rank"), time.monotonic() - began_s


@pytest.mark.stress
@pytest.mark.guarantee("Killed under any layout, resumed under another: the same bytes")
@pytest.mark.parametrize(("first", "second"), PAIRS, ids=[" to ".join(each) for each in PAIRS])
def test_job_goes_on_under_any_layout(tmp_path: Path, unbroken: tuple[Ending, float], first: str, second: str):
    """Killed at any moment, one rank or all, and started under the two layouts by turns."""
    part = PAIRS.index((first, second))
    wanted = NUM_KILLS * (part + 1) // len(PAIRS) - NUM_KILLS * part // len(PAIRS)
    chance, num_kills, num_jobs, num_resumed = random.Random(f"{SEED} {part}"), 0, 0, 0
    expected, life_s = unbroken
    while num_kills < wanted:
        num_jobs += 1
        folder = job_in(tmp_path / f"job {num_jobs}")
        for layout in itertools.islice(itertools.cycle((first, second)), min(MOST_A_JOB, wanted - num_kills)):
            attempt = Attempt(folder, layout)
            if attempt.ends_within(chance.uniform(0.3, life_s)):
                # Its run has ended: the next start would be a new job.
                attempt.close()
                break
            attempt.kill(chance.choice([None, *range(ALL_LAYOUTS[layout][0])]))
            num_kills += 1
        else:
            layout = second if layout == first else first
        if not (folder / "out.jsonl").exists():
            assert ended(folder, layout) == expected
            num_resumed += json.loads((folder / "out.jsonl.run" / "metrics.json").read_text())["resumed_rows"] > 0
        assert (folder / "out.jsonl").read_bytes() == expected[0]
    print(
        f"\nKILLS of seed {SEED}, {first} to {second}: {num_kills} in {num_jobs} jobs, {num_resumed} had rows", end=""
    )


@pytest.mark.control("Killed under any layout, resumed under another: the same bytes")
@pytest.mark.stress
def test_sums_of_ranks_have_other_bytes(tmp_path: Path, unbroken: tuple[Ending, float]):
    """Negative control: the order before leaves, in which each rank adds what it has."""
    output, _ = ended(job_in(tmp_path / "job"), "two shards", "parallel.invariant_tensor_parallel=false")
    expected, _ = unbroken[0]
    assert output != expected
    assert len(output.splitlines()) == len(expected.splitlines())
