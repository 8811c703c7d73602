"""A job killed under one layout goes on under another, to the same bytes: every pair of five layouts, 200 kills in all.

SPMD_WORKER_KILLS sets the number of kills, TESTS_SEED the seed. Rows are greedy and sampled, some with
log-probabilities, in float32: a sum in another order changes their text.
"""

import itertools
import json
import os
import random
from collections import Counter
from pathlib import Path

import pytest
from job_attempts import ALL_LAYOUTS, LIMIT_S, WIDE_LAYOUTS, Attempt, slow_after, write_rows
from stress_seed import SEED
from waiting import wait_until

NUM_KILLS = int(os.environ.get("SPMD_WORKER_KILLS", "200"))
LAYOUTS = ("one rank", "two shards", *WIDE_LAYOUTS)
PAIRS = [*itertools.permutations(LAYOUTS, 2)]
NUM_ROWS = 80
MOST_A_JOB = 5
MOST_STEPS = 120
START_S = 4.0
"""About how long a start takes; moments are drawn from it."""
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
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Ending:
    return ended(job_in(tmp_path_factory.mktemp("unbroken") / "job"), "one rank")


def is_killed(folder: Path, layout: str, chance: random.Random) -> bool:
    """Start the job and kill one rank or all: as often when it has made some steps as at any moment of its start. False
    if it was faster, and has ended.
    """
    num_steps = chance.randint(1, MOST_STEPS) if chance.random() < 0.5 else 0
    steps = folder / "out.jsonl.run" / "steps.csv"
    steps.unlink(missing_ok=True)
    attempt = Attempt(folder, layout, script=slow_after(num_steps or 1, folder))
    if num_steps:
        wait_until(
            lambda: attempt.ends_within(0.0) or (steps.exists() and steps.read_bytes().count(b"\n") > num_steps),
            LIMIT_S,
        )
    if attempt.ends_within(0.0 if num_steps else chance.uniform(0.3, START_S)):
        attempt.close()
        return False
    attempt.kill(chance.choice([None, *range(ALL_LAYOUTS[layout][0])]))
    return True


@pytest.mark.stress
@pytest.mark.guarantee("Killed under any layout, resumed under another: the same bytes")
@pytest.mark.parametrize(("first", "second"), PAIRS, ids=[" to ".join(each) for each in PAIRS])
def test_job_goes_on_under_any_layout(tmp_path: Path, unbroken: Ending, first: str, second: str):
    """Killed and started under the two layouts by turns, and ended under the one that was not last."""
    part = PAIRS.index((first, second))
    num_kills = NUM_KILLS * (part + 1) // len(PAIRS) - NUM_KILLS * part // len(PAIRS)
    chance, counts = random.Random(f"{SEED} {part}"), Counter[str]()
    while counts["kills"] < num_kills:
        counts["jobs"] += 1
        folder = job_in(tmp_path / f"job {counts['jobs']}")
        layouts = itertools.cycle((first, second))
        for layout in itertools.islice(layouts, min(MOST_A_JOB, num_kills - counts["kills"])):
            if not is_killed(folder, layout, chance):
                break
            counts["kills"] += 1
        else:
            assert ended(folder, next(layouts)) == unbroken
            metrics = json.loads((folder / "out.jsonl.run" / "metrics.json").read_text())
            counts["resumed with rows"] += metrics["resumed_rows"] > 0
        assert (folder / "out.jsonl").read_bytes() == unbroken[0]
    print(f"\nKILLS of seed {SEED}, {first} to {second}: {dict(counts)}", end="")


@pytest.mark.control("Killed under any layout, resumed under another: the same bytes")
@pytest.mark.stress
def test_sums_of_ranks_have_other_bytes(tmp_path: Path, unbroken: Ending):
    """Negative control: the order before leaves, in which each rank adds what it has."""
    output, _ = ended(job_in(tmp_path / "job"), "two shards", "parallel.invariant_tensor_parallel=false")
    assert output != unbroken[0]
    assert len(output.splitlines()) == len(unbroken[0].splitlines())
