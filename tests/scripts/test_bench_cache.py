"""scripts/bench_cache.py runs, on small sizes: its figures are for people and change with the machine."""

import json
import subprocess
import sys

from ranks import REPOSITORY


def test_the_benchmark_measures_every_operation_in_every_state_and_ends_in_one_json_object():
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "scripts/bench_cache.py"), "--blocks", "1000,2000", "--rounds", "20"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={"PYTHONPATH": str(REPOSITORY)},
    )
    assert done.returncode in (0, 1), done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    ratios = [*result["ratios"], *result["other_ratios"]]
    assert len(ratios) == 3 + 5 + 5 + 5 + 2
    assert result["lookup_100k_tokens_ms"] > 0
    assert (done.returncode == 0) == result["is_within_target"]
