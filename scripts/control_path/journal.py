"""What the journal and the progress line cost a job: pairs of runs with and without them."""

import argparse
import filecmp
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_JOURNAL = """
import sys
import launch
from spmd_worker.frontends.batch.run_dir.journal import RowJournal
from spmd_worker.frontends.batch.progress import Progress

kept = {}
def append(self, key, answer):
    self._add(answer.index)
    kept[answer.index] = answer.line
RowJournal.append = append
RowJournal.tick = RowJournal.commit = lambda self: None
RowJournal.lines = lambda self, first_row: (kept[index] for index in sorted(kept))
Progress.update = lambda self, rows, tokens, *_: None
sys.exit(launch.main())
"""


def run_job(options: argparse.Namespace, folder: Path, which: str) -> float:
    """Seconds to generate."""
    folder.mkdir(exist_ok=True)
    script = [str(ROOT / "launch.py")] if which == "with" else ["-c", WITHOUT_JOURNAL]
    command = [
        *(sys.executable, *script, f"model.path={options.model}", f"job.input={options.workload}"),
        *(f"job.output={folder}/out.jsonl", *options.keys),
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the job failed:\n{done.stderr}")
    metrics = json.loads((folder / "out.jsonl.run" / "metrics.json").read_text(encoding="utf-8"))
    return float(metrics["generate_s"])


def bench_journal(options: argparse.Namespace) -> int:
    """What the journal and the progress display cost a job.

    Runs `launch.py` with them and without them in turn, and compares the seconds to generate that `metrics.json` has.
    Without: rows are kept in memory, nothing is committed, nothing is shown. The outputs must be equal. `overhead` is
    the median of the pairs' ratios, less one.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        seconds: dict[str, list[float]] = {"with": [], "without": []}
        for number in range(options.pairs):
            # Which is first changes, because the machine warms up, or something else starts on it.
            for which in ("with", "without") if number % 2 else ("without", "with"):
                seconds[which].append(run_job(options, folder / which, which))
        if not filecmp.cmp(folder / "with" / "out.jsonl", folder / "without" / "out.jsonl", shallow=False):
            raise SystemExit("the outputs differ")
    ratios = [own / other for own, other in zip(seconds["with"], seconds["without"], strict=True)]
    for own, other, ratio in zip(seconds["with"], seconds["without"], ratios, strict=True):
        print(f"with {own:8.3f} s   without {other:8.3f} s   ratio {ratio:.4f}")
    print(json.dumps({**seconds, "overhead": round(statistics.median(ratios) - 1, 4)}))
    return 0
