"""A job in several replicas writes the bytes of one rank, with files on rank 0 alone; the end of one replica ends all.

The ranks run several jobs each, because starting them takes seconds.
"""

import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ranks

from spmd_worker.base.config.compose import compose_run
from spmd_worker.frontends.batch.job import run_job
from spmd_worker.ranks.environment import RankEnvironment

CONF = ranks.REPOSITORY / "conf"
MODEL = ranks.REPOSITORY / "scripts" / "demo" / "model"
SETTINGS = (
    *(f"model.path={MODEL}", "model.dtype=float32", "device=cpu", "cache.num_blocks=128"),
    *("scheduler.max_num_seqs=6", "scheduler.max_num_batched_tokens=64", "sampling.max_tokens=12"),
)
CHAT = {"messages": [{"role": "user", "content": "add 1 2 ="}], "logprobs": True, "top_logprobs": 2}

JOBS = """
import json, sys
from pathlib import Path
from replica_parts import give_every_replica_a_part
from spmd_worker.frontends.batch.job import run_job
from spmd_worker.base.config.compose import compose_run
from spmd_worker.engine.requests import Requests
from spmd_worker.ranks.environment import read_rank_environment

conf, jobs = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
admit = Requests.admit

def named_by_order(self, *given, custom_id, index, **named):
    return admit(self, *given, **named)

give_every_replica_a_part(int(sys.argv[3]))
for name, overrides in jobs.items():
    Requests.admit = named_by_order if name == "control" else admit
    run_job(compose_run(conf, overrides), read_rank_environment())
"""


def mixed_rows() -> list[str]:
    """Every shape of row, bad ones between them, of very different lengths; the last repeats an early custom id."""
    rows: list[Any] = []
    for index in range(8):
        drawn = {"temperature": 1.0, "ignore_eos": True, "max_tokens": 1 + index * 5 % 37}
        rows += [
            {"prompt": f"copy {'a b ' * index}=", **drawn, "n": 1 + index % 3},
            {"prompt_token_ids": [60 + index] * (1 + index * 11 % 90), **drawn, "custom_id": f"tokens {index}"},
            {"custom_id": f"chat {index}", "method": "POST", "url": "/v1/chat/completions", "body": CHAT},
            {"prompt": "sort 21 87 57 =", "best_of": 3, "temperature": 0.9, "logprobs": 1, "prompt_logprobs": 1},
            {"prompt": "x " * 300} if index % 4 == 0 else {"prompt": "reverse h x a =", "seed": index, **drawn},
        ]
    rows.append({"custom_id": "tokens 0", "prompt": "add 1 2 ="})
    return [*map(json.dumps, rows[:7]), "not json", "{", *map(json.dumps, rows[7:])]


INPUTS = {"mixed": mixed_rows(), "empty": [], "one": mixed_rows()[:1], "bad only": ["bad"] * 700}
JOBS_OF_INPUTS = {
    **{name: (name, ()) for name in INPUTS},
    "some": ("mixed", ("job.max_rows=9",)),
    "some of many": ("bad only", ("job.max_rows=600",)),
    "control": ("mixed", ()),
}
"""By name of a job: its input and what is set for it."""


def overrides_of(folder: Path, job: str) -> list[str]:
    rows, settings = JOBS_OF_INPUTS[job]
    return [*SETTINGS, f"job.input={folder / rows}.jsonl", f"job.output={folder / job}.out.jsonl", *settings]


def write_inputs(folder: Path) -> None:
    for name, rows in INPUTS.items():
        (folder / f"{name}.jsonl").write_text("".join(f"{row}\n" for row in rows))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which one rank has run the jobs."""
    folder = tmp_path_factory.mktemp("alone")
    write_inputs(folder)
    for job in JOBS_OF_INPUTS:
        run_job(compose_run(CONF, overrides_of(folder, job)), RankEnvironment())
    return folder


def run_on_ranks(
    folder: Path, num_ranks: int, *settings: str, num_replicas: int = 1, names: Iterable[str] = JOBS_OF_INPUTS
) -> ranks.CompletedRanks:
    write_inputs(folder)
    settings = (*settings, f"parallel.data_parallel_size={num_replicas}")
    jobs = {job: [*overrides_of(folder, job), *settings] for job in names}
    (folder / "jobs.json").write_text(json.dumps(jobs))
    arguments = [CONF, folder / "jobs.json", num_replicas]
    return ranks.run_ranks(JOBS, num_ranks, timeout_s=240, arguments=arguments).checked()


def metrics_of(folder: Path, job: str) -> dict[str, Any]:
    metrics: dict[str, Any] = json.loads((folder / f"{job}.out.jsonl.run" / "metrics.json").read_text())
    return metrics


def check_same(folder: Path, alone: Path, num_replicas: int, names: Iterable[str] = JOBS_OF_INPUTS) -> None:
    for job in names:
        name = f"{job}.out.jsonl"
        is_same = (folder / name).read_bytes() == (alone / name).read_bytes()
        # In the control streams are named by the order in which a replica took the rows.
        assert is_same == (job != "control"), job
        ours, theirs = metrics_of(folder, job), metrics_of(alone, job)
        for key in ("rows", "error_rows", "error_codes", "prompt_tokens"):
            assert ours[key] == theirs[key], (job, key)
        replicas = ours["replicas"]
        assert len(replicas) == num_replicas
        assert sum(each["output_tokens"] for each in replicas) == ours["output_tokens"]
        files = sorted(path.name for path in (folder / f"{name}.run").iterdir())
        assert files == ["lock", "manifest.json", "metrics.json", "provenance.json", "steps.csv"]
    shared = metrics_of(folder, "mixed")
    assert min(each["rows"] for each in shared["replicas"]) > 0, "every replica had its part"
    assert shared["output_tokens"] == metrics_of(alone, "mixed")["output_tokens"]
    assert shared["computed_tokens"] >= shared["computed_prompt_tokens"] + shared["output_tokens"] // 2
    if "empty" in names:
        assert sum(each["rows"] for each in metrics_of(folder, "empty")["replicas"]) == 0


@pytest.mark.guarantee("Replicas: one rank's bits, in calls and jobs", is_control_inside=True)
@pytest.mark.matrix
def test_two_replicas_write_the_bytes_of_one_rank(tmp_path: Path, alone: Path):
    done = run_on_ranks(tmp_path, 2, num_replicas=2)
    check_same(tmp_path, alone, 2)
    assert done.stderr.count("total time") == len(JOBS_OF_INPUTS), "rank 0 alone speaks"
    assert "rows; busy" in done.stderr


@pytest.mark.stress
def test_two_replicas_of_two_ranks_equal_one_replica(tmp_path: Path, alone: Path):
    """Log-probabilities of two ranks may differ from one rank's in the last bits, so two ranks are the measure. How
    rows are read and shared out is no affair of a replica's ranks: the jobs about that are the other tests'.
    """
    names = ("mixed", "one", "control")
    pair, four = tmp_path / "pair", tmp_path / "four"
    pair.mkdir()
    four.mkdir()
    run_on_ranks(pair, 2, "parallel.tensor_parallel_size=2", names=names)
    run_on_ranks(four, 4, "parallel.tensor_parallel_size=2", num_replicas=2, names=names)
    check_same(four, pair, 2, names)


@pytest.mark.stress
def test_three_replicas_write_the_bytes_of_one_rank(tmp_path: Path, alone: Path):
    run_on_ranks(tmp_path, 3, num_replicas=3)
    check_same(tmp_path, alone, 3)


FAULT = """
import os, signal, sys
import launch
from spmd_worker.frontends.batch.row_exchange import RowClaimer
from spmd_worker.frontends.batch.row_runner import RowRunner

fault, culprit, arguments = sys.argv[1], sys.argv[2], sys.argv[3:]
step, num_steps = RowRunner.step, 0
claim, num_claimed = RowClaimer.claim, 0

def fail(self):
    global num_steps
    num_steps += 1
    if num_steps == 5:
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("of a test")
    return step(self)

def claim_once(self):
    global num_claimed
    # What is left is the culprit's, which takes more steps than it has.
    rows = [] if num_claimed else claim(self)
    num_claimed += len(rows)
    return rows

if os.environ["RANK"] == culprit:
    RowRunner.step = fail
else:
    RowClaimer.claim = claim_once
sys.exit(launch.main(arguments))
"""


@pytest.mark.gate("replica-1-is-killed")
@pytest.mark.parametrize(
    ("fault", "culprit"),
    [
        pytest.param("raise", 1, id="replica-1-raises"),
        pytest.param("kill", 1, id="replica-1-is-killed", marks=pytest.mark.matrix),
        pytest.param("raise", 0, id="rank-0-raises", marks=pytest.mark.matrix),
        pytest.param("kill", 0, id="rank-0-is-killed", marks=pytest.mark.stress),
    ],
)
def test_end_of_one_replica_ends_all_with_name(tmp_path: Path, fault: str, culprit: int):
    write_inputs(tmp_path)
    (tmp_path / "mixed.out.jsonl").write_text("older\n")
    arguments = [*overrides_of(tmp_path, "mixed"), "parallel.data_parallel_size=2", "executor.timeout_s=600"]
    # Nobody waits for the timeout.
    done = ranks.run_ranks(FAULT, 2, timeout_s=240, arguments=[fault, str(culprit), *arguments])
    assert done.returncode != 0
    assert f"rank {culprit}" in done.stderr, done.output
    if fault == "raise":
        assert "of a test" in done.stderr, done.output
    assert (tmp_path / "mixed.out.jsonl").read_text() == "older\n"
    assert not (tmp_path / "mixed.out.jsonl.run" / "metrics.json").exists()


@pytest.mark.stress
def test_ranks_wait_for_rows_beyond_the_timeout(tmp_path: Path):
    """Standard input comes late, after twice the timeout. All layouts at once: they wait."""
    script, rows = tmp_path / "late.py", tmp_path / "rows.jsonl"
    script.write_text(LATE)
    rows.write_text("".join(f"{row}\n" for row in INPUTS["mixed"][:20]))

    def run(layout: str) -> ranks.CompletedRanks:
        arguments = [*SETTINGS, "job.input=-", f"job.output={tmp_path}/{layout}.jsonl", "executor.timeout_s=10"]
        return ranks.run_forked([script, rows, *arguments, f"parallel.{layout}=2"], 2, timeout_s=240)

    layouts = ("data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size")
    with ThreadPoolExecutor() as pool:
        for layout, done in zip(layouts, pool.map(run, layouts), strict=True):
            assert done.returncode == 0, (layout, done.output)
            assert len((tmp_path / f"{layout}.jsonl").read_text().splitlines()) == 20


LATE = """
import os, sys, threading, time
from pathlib import Path
import launch
from spmd_worker.frontends.batch.input import row_reader

receiving, sending = os.pipe()
sys.stdin = open(receiving)
is_asked, open_stream = threading.Event(), row_reader.open_stream

def noting(name):
    is_asked.set()
    return open_stream(name)

def write():
    is_asked.wait()
    time.sleep(21)
    with open(sending, "wb") as pipe:
        pipe.write(Path(sys.argv[1]).read_bytes())

row_reader.open_stream = noting
threading.Thread(target=write, daemon=True).start()
sys.exit(launch.main(sys.argv[2:]))
"""
