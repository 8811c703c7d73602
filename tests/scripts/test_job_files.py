"""The job files for Slurm and Kubernetes, as far as they can be checked without a cluster."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import ranks
import yaml
from torch.distributed.run import get_args_parser
from waiting import LIMIT_S, wait_until

SLURM = ranks.REPOSITORY / "scripts" / "slurm" / "job.sbatch"
KUBERNETES = ranks.REPOSITORY / "scripts" / "k8s" / "job.yaml"

STAND_INS = {
    "scontrol": 'echo "scontrol $*" >>"$CALLS"; [ "$1" = show ] && printf "alpha\\nbeta\\n"; true',
    # The step that asks for the address, else the ranks of the second node.
    "srun": 'case "$*" in *hostname*) echo "10.0.0.7 fe80::1";; *) shift; SLURM_NODEID=1 "$@";; esac',
    "torchrun": 'printf "%s\\n" "$@" >"$CALLS.torchrun"; [ -z "${SLOW:-}" ] || sleep 60',
}
"""What the job file calls on a cluster."""


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """An environment in which Slurm seems to have started the job on two nodes."""
    for name, body in STAND_INS.items():
        folder = tmp_path / ("home/.venv/bin" if name == "torchrun" else "bin")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "CALLS": str(tmp_path / "calls"),
        "SPMD_WORKER_HOME": str(tmp_path / "home"),
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_ID": "41",
        "SLURM_JOB_NODELIST": "alpha,beta",
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "4",
    }


def check_overrides(overrides: list[str]) -> None:
    """launch.py composes them."""
    done = ranks.run_command([sys.executable, str(ranks.REPOSITORY / "launch.py"), "--cfg", "job", *overrides], LIMIT_S)
    assert done.returncode == 0, done.output


def test_every_slurm_rank_starts_with_the_users_arguments(cluster: dict[str, str]):
    overrides = ["model.path=/models/a b", "parallel.tensor_parallel_size=8"]
    subprocess.run(["bash", str(SLURM), *overrides], env=cluster, check=True, timeout=LIMIT_S)
    arguments = Path(f"{cluster['CALLS']}.torchrun").read_text().splitlines()
    options = get_args_parser().parse_args(arguments)
    assert (options.nnodes, options.node_rank, options.nproc_per_node, options.max_restarts) == ("2", 1, "4", 3)
    assert (options.master_addr, options.master_port) == ("10.0.0.7", 20041)
    assert options.training_script == f"{cluster['SPMD_WORKER_HOME']}/launch.py"
    assert options.training_script_args == overrides
    assert "requeue" not in Path(cluster["CALLS"]).read_text()


def test_slurm_job_out_of_time_is_queued_again(cluster: dict[str, str], tmp_path: Path):
    job = subprocess.Popen(["bash", str(SLURM), "seed=1"], env={**cluster, "SLOW": "1"}, start_new_session=True)
    try:
        ranks_started = Path(f"{cluster['CALLS']}.torchrun")
        wait_until(lambda: ranks_started.exists() and ranks_started.read_text())
        job.send_signal(signal.SIGUSR1)
        assert job.wait(timeout=LIMIT_S) == 0
        assert "scontrol requeue 41" in Path(cluster["CALLS"]).read_text()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)


def test_slurm_header_requests_requeue_and_warning():
    lines = [line for line in SLURM.read_text().splitlines() if line.startswith("#SBATCH")]
    assert {"#SBATCH --requeue", "#SBATCH --signal=B:USR1@120", "#SBATCH --open-mode=append"} <= {*lines}


def test_kubernetes_job_starts_the_nodes_ranks_expect():
    job = yaml.safe_load(KUBERNETES.read_text())
    assert (job["apiVersion"], job["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (nodes,) = job["spec"]["replicatedJobs"]
    template = nodes["template"]["spec"]
    (container,) = template["template"]["spec"]["containers"]
    options = get_args_parser().parse_args([each.replace("$(NODE_RANK)", "0") for each in container["args"]])
    assert int(options.nnodes) == template["parallelism"] == template["completions"]
    assert template["completionMode"] == "Indexed"
    assert int(options.nproc_per_node) == container["resources"]["limits"]["nvidia.com/gpu"]
    name, replicated = job["metadata"]["name"], nodes["name"]
    assert options.master_addr == f"{name}-{replicated}-0-0.{name}"
    assert options.training_script == "/opt/spmd-worker/launch.py"
    assert int(options.nnodes) * int(options.nproc_per_node) == 8 * 2
    check_overrides(options.training_script_args)
