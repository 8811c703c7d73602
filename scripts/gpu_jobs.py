"""Whole jobs under torchrun on one GPU: the demo, and two ranks that share the GPU.

    python scripts/gpu_jobs.py {demo,two_ranks,leaves} [--device-backend NAME] [--dry]

`demo`: the model that ships answers its 480 rows on one rank; every answer has to be right. `two_ranks`: the same
model in float32, greedy, tensor parallel over two ranks that add up over symmetric memory, beside one rank: equal
tokens. `leaves`: in bfloat16 with parallel.invariant_tensor_parallel, over one, two and four ranks: equal outputs, each
bit of log-probabilities. NCCL refuses ranks that share a GPU, so their groups are gloo's. A line a finding, and one
JSON object last; exits with 1 where something is wrong. --dry: on the CPU.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gpu_figures import Findings

ROOT = Path(__file__).resolve().parents[1]
NUM_ROWS = 480
_RANKS_SCRIPT = """
import sys
import torch.distributed as dist

new_group = dist.new_group
# NCCL refuses two ranks on one GPU.
dist.new_group = lambda ranks=None, *given, backend=None, **named: new_group(ranks, *given, backend="gloo", **named)
sys.argv[:1] = ["launch.py"]
sys.path.insert(0, {root!r})
from launch import main
sys.exit(main())
"""


def torchrun(num_ranks: int, folder: Path, device: str, backend: str, *overrides: str) -> list[str]:
    """A demo job into `folder`; the last lines of one that failed. What is `auto` is not said: it is the default."""
    script = "launch.py"
    variables = dict(os.environ, OMP_NUM_THREADS="1")
    if num_ranks > 1 and device != "cpu":
        path = folder.parent / f"{folder.name}_ranks.py"
        path.write_text(_RANKS_SCRIPT.format(root=str(ROOT)))
        script = str(path)
        variables |= {"SPMD_WORKER_SHARE_GPUS": "1", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
        variables |= {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES") or "0"}
    said = {"device": device, "executor.device_backend": backend}
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks), script),
        *("experiment=demo", f"parallel.tensor_parallel_size={num_ranks}"),
        *(f"job.run_dir={folder}", f"job.output={folder / 'output.jsonl'}"),
        *(f"{key}={value}" for key, value in said.items() if value != "auto"),
        *overrides,
    ]
    done = subprocess.run(
        command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    return done.stdout.splitlines()[-12:] if done.returncode else []


def answers(folder: Path) -> dict[str, str]:
    """Each row's output, as it is in the file."""
    lines = (folder / "output.jsonl").read_text().splitlines()
    return {row["custom_id"]: json.dumps(row, sort_keys=True) for row in map(json.loads, lines)}


def demo(findings: Findings, folder: Path, device: str, backend: str) -> None:
    problem = torchrun(1, folder / "demo", device, backend)
    findings.must("demo: last lines of a job that failed", problem, [])
    score = [sys.executable, "scripts/demo/score.py", str(folder / "demo" / "output.jsonl"), "--at-least", "1.0"]
    done = subprocess.run(score, cwd=ROOT, capture_output=True, text=True, check=False)
    findings.say("demo: score", done.stdout.strip().splitlines()[-1:])
    findings.must("demo: all answers are right", done.returncode, 0)
    findings.must("demo: rows", len(answers(folder / "demo")), NUM_ROWS)


def two_ranks(findings: Findings, folder: Path, device: str, backend: str) -> None:
    _compare(findings, folder, device, backend, (1, 2), "model.dtype=float32")


def leaves(findings: Findings, folder: Path, device: str, backend: str) -> None:
    overrides = ("model.dtype=bfloat16", "sampling.logprobs=1", "parallel.invariant_tensor_parallel=true")
    _compare(findings, folder, device, backend, (1, 2, 4), *overrides)


def _compare(
    findings: Findings, folder: Path, device: str, backend: str, sizes: Sequence[int], *overrides: str
) -> None:
    """Outputs of one rank beside those of more."""
    found = {}
    for num_ranks in sizes:
        problem = torchrun(num_ranks, folder / str(num_ranks), device, backend, *overrides)
        findings.must(f"{num_ranks} ranks: last lines of a job that failed", problem, [])
        if not problem:
            found[num_ranks] = answers(folder / str(num_ranks))
    alone = found.get(1, {})
    findings.must("rows", len(alone), NUM_ROWS)
    for num_ranks, others in found.items():
        different = [key for key in alone if alone[key] != others.get(key)]
        findings.must(f"rows that differ between one rank and {num_ranks}", different[:5], [])


JOBS = {"demo": demo, "two_ranks": two_ranks, "leaves": leaves}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", choices=tuple(JOBS))
    parser.add_argument("--device-backend", default="auto", metavar="NAME")
    parser.add_argument("--dry", action="store_true", help="on the CPU")
    arguments = parser.parse_args()
    findings = Findings()
    device, backend = ("cpu", "auto") if arguments.dry else ("auto", arguments.device_backend)
    with tempfile.TemporaryDirectory(prefix="gpu-jobs-") as folder, findings.part(arguments.job):
        JOBS[arguments.job](findings, Path(folder), device, backend)
    return findings.report()


if __name__ == "__main__":
    sys.exit(main())
