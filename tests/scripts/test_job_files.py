"""The job files for Slurm, Kubernetes, SkyPilot and Hugging Face Jobs, checked as far as possible without a cluster."""

import contextlib
import os
import shlex
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import ranks
import yaml
from torch.distributed.run import get_args_parser
from waiting import LIMIT_S, wait_until

from spmd_worker.base.config.compose import compose_run
from spmd_worker.base.errors import DIVERGED_EXIT_CODE
from spmd_worker.frontends.rank_program import CONF

SLURM = ranks.REPOSITORY / "scripts" / "slurm" / "job.sbatch"
ARRAY = SLURM.with_name("array.sbatch")
SUBMIT_SHARDS = SLURM.with_name("submit_shards.sh")
KUBERNETES = ranks.REPOSITORY / "scripts" / "k8s" / "job.yaml"
KUBERNETES_POOL = KUBERNETES.with_name("pool.yaml")
SKYPILOT = ranks.REPOSITORY / "scripts" / "skypilot"
HF_JOBS = ranks.REPOSITORY / "scripts" / "hf_jobs" / "pool.sh"
LAUNCHER = ["-m", "spmd_worker.tools.torchrun"]
"""torchrun whose exit code says what ended the ranks."""

STAND_INS = {
    "scontrol": 'echo "scontrol $*" >>"$CALLS"; [ "$1" = show ] && printf "alpha\\nbeta\\n"; true',
    # The step that asks for the address, else the ranks of the second node.
    "srun": 'case "$*" in *hostname*) echo "10.0.0.7 fe80::1";; *) shift; SLURM_NODEID=1 "$@";; esac',
    "torchrun": 'printf "%s\\n" "$@" >"$CALLS.torchrun"; [ -z "${SLOW:-}" ] || sleep 60',
    "python": 'printf "%s\\n" "$@" >"$CALLS.torchrun"; [ -z "${SLOW:-}" ] || sleep 60',
    "sbatch": 'printf "%s\\n" "$@" >>"$CALLS.sbatch"; echo "$(wc -l <"$CALLS.sbatch");cluster"',
    "hf": 'printf "%s\\n" "$@" >>"$CALLS.hf"',
}
"""What the job file calls on a cluster."""


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """An environment in which Slurm seems to have started the job on two nodes."""
    for name, body in STAND_INS.items():
        folder = tmp_path / ("home/.venv/bin" if name in ("torchrun", "python") else "bin")
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
        **array_variables(range(7), 3),
    }


def array_variables(tasks: Sequence[int], own: int) -> dict[str, str]:
    """Variables of a task of an array."""
    values = {"COUNT": len(tasks), "MIN": min(tasks), "MAX": max(tasks), "ID": own}
    return {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in values.items()}


def check_overrides(overrides: list[str]) -> None:
    """Raises ConfigError for any that launch.py rejects."""
    compose_run(CONF, overrides)


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


@pytest.mark.parametrize("script", [SLURM, ARRAY], ids=lambda path: path.stem)
def test_slurm_job_out_of_time_is_queued_again(cluster: dict[str, str], script: Path):
    job = subprocess.Popen(["bash", str(script), "seed=1"], env={**cluster, "SLOW": "1"}, start_new_session=True)
    try:
        ranks_started = Path(f"{cluster['CALLS']}.torchrun")
        wait_until(lambda: ranks_started.exists() and ranks_started.read_text())
        job.send_signal(signal.SIGUSR1)
        assert job.wait(timeout=LIMIT_S) == 0
        assert "scontrol requeue 41" in Path(cluster["CALLS"]).read_text()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)


@pytest.mark.parametrize("script", [SLURM, ARRAY], ids=lambda path: path.stem)
def test_slurm_header_requests_requeue_and_warning(script: Path):
    lines = [line for line in script.read_text().splitlines() if line.startswith("#SBATCH")]
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


@pytest.mark.parametrize(
    ("array", "num_shards", "override", "added"),
    [
        (range(7), "", "seed=1", ["job.shard=3/7"]),
        # Two tasks that failed, started again.
        ((3, 5), "7", "seed=1", ["job.shard=3/7"]),
        (range(7), "", "job.pool=/shared/a pool", []),
        (range(7), "", "job.shard=2/3", []),
    ],
)
def test_array_tasks_are_shards_or_worlds(cluster, array: Sequence[int], num_shards: str, override: str, added: list):
    overrides = ["model.path=/models/a b", override]
    environment = {**cluster, **array_variables(array, 3), "NUM_SHARDS": num_shards}
    subprocess.run(["bash", str(ARRAY), *overrides], env=environment, check=True, timeout=LIMIT_S)
    arguments = Path(f"{cluster['CALLS']}.torchrun").read_text().splitlines()
    assert arguments[:2] == LAUNCHER
    options = get_args_parser().parse_args(arguments[2:])
    assert (options.standalone, options.nproc_per_node) == (True, "4")
    assert options.training_script == f"{cluster['SPMD_WORKER_HOME']}/launch.py"
    assert options.training_script_args == [*overrides, *added]


@pytest.mark.parametrize("array", [(3, 5), (0, 6), (1, 2, 3)])
def test_part_of_an_array_names_its_shards(cluster: dict[str, str], array: Sequence[int]):
    """A third of the rows would have been computed as one of two shards."""
    environment = {**cluster, **array_variables(array, 3)}
    done = subprocess.run(["bash", str(ARRAY)], env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 1
    assert "set NUM_SHARDS to the number of shards of the whole job" in done.stderr
    assert not Path(f"{cluster['CALLS']}.torchrun").exists()


def test_task_without_an_array_is_rejected(cluster: dict[str, str]):
    """Regression: bash's `SLURM_ARRAY_TASK_COUNT: unbound variable` was all that the log had."""
    environment = {name: value for name, value in cluster.items() if not name.startswith("SLURM_ARRAY_TASK_")}
    done = subprocess.run(["bash", str(ARRAY)], env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.returncode, "start it by sbatch --array=0-6" in done.stderr) == (1, True)


def test_shards_are_merged_when_all_have_ended(cluster: dict[str, str], tmp_path: Path):
    output = tmp_path / "my answers.v2.jsonl.zst"
    for shard in range(3):
        (tmp_path / f"my answers.v2-{shard:05d}-of-00003.jsonl.zst.run").mkdir()
    (tmp_path / "my answers.v2-00000-of-00002.jsonl.zst.run").mkdir()
    command = ["bash", str(SUBMIT_SHARDS), "3", "model.path=/models/M", f"job.output={output}"]
    subprocess.run(command, env=cluster, check=True, timeout=LIMIT_S)
    words = Path(f"{cluster['CALLS']}.sbatch").read_text().splitlines()
    first, second = words[: words.index("--parsable", 1)], words[words.index("--parsable", 1) :]
    assert first == ["--parsable", "--array=0-2", str(ARRAY), "model.path=/models/M", f"job.output={output}"]
    # The number that the first sbatch has printed, without its cluster.
    assert f"--dependency=afterok:{len(first)}" in second
    subprocess.run(["bash", "-c", second[second.index("--wrap") + 1]], env=cluster, check=True, timeout=LIMIT_S)
    folders = [f"{tmp_path}/my answers.v2-{shard:05d}-of-00003.jsonl.zst.run" for shard in range(3)]
    merge = Path(f"{cluster['CALLS']}.torchrun").read_text().splitlines()
    assert merge == ["-m", "spmd_worker.tools.collect", "--merge", *folders, "--output", str(output)]


@pytest.mark.parametrize("folder", ["s3://bucket/a b/", "./"])
def test_shards_in_parts_are_merged(cluster: dict[str, str], tmp_path: Path, folder: str):
    """Regression: run directories of remote outputs, and of parts, were not found."""
    names = [f"my part-{shard:05d}-of-00002.jsonl.zst.run" for shard in range(2)]
    for name in [*names, "my part-00000-of-00003.jsonl.zst.run"]:
        (tmp_path / name).mkdir()
    output = f"{folder}my part-*.jsonl.zst"
    command = ["bash", str(SUBMIT_SHARDS), "2", "model.path=/models/M", f"job.output={output}"]
    subprocess.run(command, env=cluster, check=True, timeout=LIMIT_S)
    words = Path(f"{cluster['CALLS']}.sbatch").read_text().splitlines()
    merge = words[words.index("--wrap") + 1]
    subprocess.run(["bash", "-c", merge], env=cluster, cwd=tmp_path, check=True, timeout=LIMIT_S)
    prefix = "" if "://" in folder else folder
    assert Path(f"{cluster['CALLS']}.torchrun").read_text().splitlines() == [
        *("-m", "spmd_worker.tools.collect", "--merge", *(f"{prefix}{name}" for name in names), "--output", output)
    ]


@pytest.mark.parametrize("arguments", [["job.output=/a"], ["0", "job.output=/a"], ["3"], ["3", "job.pool=/p"]])
def test_shards_without_number_or_output_are_rejected(cluster: dict[str, str], arguments: list[str]):
    done = subprocess.run(["bash", str(SUBMIT_SHARDS), *arguments], env=cluster, capture_output=True, timeout=LIMIT_S)
    assert done.returncode == 1
    assert done.stderr
    assert not Path(f"{cluster['CALLS']}.sbatch").exists()


def test_kubernetes_pool_knows_preemption_by_exit_code():
    job = yaml.safe_load(KUBERNETES_POOL.read_text())
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert (spec["completionMode"], spec["parallelism"]) == ("Indexed", spec["completions"])
    # What the API server requires of a job with a podFailurePolicy.
    assert (pod["restartPolicy"], spec["podReplacementPolicy"]) == ("Never", "Failed")
    actions = {}
    for rule in spec["podFailurePolicy"]["rules"]:
        codes = rule.get("onExitCodes", {"values": []})
        assert codes.get("containerName", container["name"]) == container["name"]
        actions |= dict.fromkeys(codes["values"], rule["action"])
    assert actions == {128 + signal.SIGTERM: "Ignore", 1: "Count", DIVERGED_EXIT_CODE: "Count", 128 + 9: "Count"}
    assert spec["podFailurePolicy"]["rules"][0]["onPodConditions"][0]["type"] == "DisruptionTarget"
    assert [*container["command"][1:]] == LAUNCHER
    options = get_args_parser().parse_args(container["args"])
    assert int(options.nproc_per_node) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert (options.standalone, options.training_script) == (True, "launch.py")
    check_overrides(options.training_script_args)


def test_skypilot_worlds_join_one_pool(cluster: dict[str, str], tmp_path: Path):
    pool, job = (yaml.safe_load((SKYPILOT / f"{name}.yaml").read_text()) for name in ("pool", "job"))
    assert pool["resources"]["accelerators"] == job["resources"]["accelerators"]
    assert job["resources"]["job_recovery"]["recover_on_exit_codes"] == [137, 143]
    (tmp_path / "sky_workdir").symlink_to(tmp_path / "home")
    environment = {**cluster, **job["envs"], "HOME": str(tmp_path), "SKYPILOT_NUM_GPUS_PER_NODE": "8"}
    subprocess.run(["bash", "-c", job["run"]], env=environment, check=True, timeout=LIMIT_S)
    arguments = Path(f"{cluster['CALLS']}.torchrun").read_text().splitlines()
    assert arguments[:2] == LAUNCHER
    options = get_args_parser().parse_args(arguments[2:])
    assert (options.nproc_per_node, options.training_script) == ("8", "launch.py")
    assert f"job.pool={job['envs']['POOL']}" in options.training_script_args
    check_overrides(options.training_script_args)


@pytest.mark.parametrize(("flavor", "num_gpus"), [("h200x8", 8), ("a100-large", 1), ("rtx-pro-6000x2", 2), ("h200", 1)])
def test_hugging_face_jobs_are_worlds_of_a_pool(cluster: dict[str, str], flavor: str, num_gpus: int):
    overrides = ["model.path=a b", "job.pool=s3://bucket/pool"]
    environment = {**cluster, "FLAVOR": flavor, "HF_TOKEN": "hf_secret", "HF_JOBS_OPTIONS": "--dry-run"}
    subprocess.run(["bash", str(HF_JOBS), "2", *overrides], env=environment, check=True, timeout=LIMIT_S)
    text = Path(f"{cluster['CALLS']}.hf").read_text()
    assert "hf_secret" not in text
    words = text.splitlines()
    assert words[: len(words) // 2] == [
        word.replace("spmd-worker-1", "spmd-worker-0") for word in words[len(words) // 2 :]
    ]
    world = words[: len(words) // 2]
    assert shlex.join(["--flavor", flavor]) in shlex.join(world)
    options = get_args_parser().parse_args(world[world.index(LAUNCHER[1]) + 1 :])
    assert int(options.nproc_per_node) == num_gpus
    assert options.training_script_args == [f"parallel.data_parallel_size={num_gpus}", *overrides]


def test_hugging_face_jobs_need_a_bucket(cluster: dict[str, str]):
    command = ["bash", str(HF_JOBS), "2", "job.pool=/data/pool"]
    assert subprocess.run(command, env=cluster, capture_output=True, timeout=LIMIT_S).returncode == 1
    assert not Path(f"{cluster['CALLS']}.hf").exists()
