"""An engine over worker processes: the tokens of one rank, in a script, in a job, after a change of world size."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forks_of_a_script
import pytest
import ranks
from plain_executors import errors_of_all
from scaled_norms import ScaledNorms, scale_norms

from spmd_worker import LLM, RequestOutput, SamplingParams
from spmd_worker.base.errors import ConfigError, WorkerError
from spmd_worker.executor.multiproc import MultiprocExecutor

pytestmark = pytest.mark.usefixtures("forked_workers_of_module")

MODEL = ranks.REPOSITORY / "scripts" / "demo" / "model"
PROMPTS = ["copy a m v s j l =", "reverse h x a f w =", "sort 21 87 57 15 =", "copy q =", "no such task"]
PARAMS = [
    SamplingParams(temperature=0.8, top_p=0.95, seed=0, max_tokens=16, logprobs=2, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=16, logprobs=3, prompt_logprobs=1, ignore_eos=True),
    SamplingParams(temperature=1.0, n=3, seed=5, max_tokens=8),
]
LOGPROB_TOLERANCE = 1e-4
KEYS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "num_blocks": 64, "seed": 0}


@pytest.fixture(scope="module")
def alone() -> list[list[RequestOutput]]:
    with LLM(MODEL, **KEYS) as llm:
        return answers(llm)


@pytest.fixture(scope="module")
def two(forked_workers_of_module: None) -> Iterator[LLM]:
    extension = f"{ScaledNorms.__module__}.{ScaledNorms.__name__}"
    with LLM(MODEL, **KEYS, tensor_parallel_size=2, worker_extension_cls=extension) as llm:
        yield llm


def answers(llm: LLM) -> list[list[RequestOutput]]:
    return [llm.generate(PROMPTS, params, use_tqdm=False) for params in PARAMS]


def ids(outputs: list[list[RequestOutput]]) -> list[list[list[list[int]]]]:
    return [[[one.token_ids for one in row.outputs] for row in rows] for rows in outputs]


def logprobs(outputs: list[list[RequestOutput]]) -> list[dict[int, float]]:
    """Every position's, of prompts and of outputs, one after another."""
    rows = [row for rows in outputs for row in rows]
    positions = [position for row in rows for position in row.prompt_logprobs or [] if position]
    positions += [position for row in rows for one in row.outputs for position in one.logprobs or []]
    return [{token: each.logprob for token, each in position.items()} for position in positions]


def check_same(mine: list[list[RequestOutput]], theirs: list[list[RequestOutput]]) -> None:
    assert ids(mine) == ids(theirs)
    assert len(logprobs(mine)) > 200
    for ours, other in zip(logprobs(mine), logprobs(theirs), strict=True):
        assert ours == pytest.approx(other, abs=LOGPROB_TOLERANCE)


@pytest.mark.guarantee("executor.backend=multiproc answers as one rank")
@pytest.mark.finding(number="D8")
def test_two_processes_equal_one_rank(two: LLM, alone: list[list[RequestOutput]]):
    assert isinstance(two.llm_engine.executor, MultiprocExecutor)
    check_same(answers(two), alone)
    check_same(answers(two), alone)


@pytest.mark.stress
@pytest.mark.control("executor.backend=multiproc answers as one rank")
def test_the_comparison_sees_other_weights_in_one_process(two: LLM, alone: list[list[RequestOutput]], control):
    """Negative control: for a while its norms are twice as large."""
    scale_norms(two, 1, 2.0)
    try:
        with control():
            check_same(answers(two), alone)
    finally:
        scale_norms(two, 1, 0.5)
    check_same(answers(two), alone)


def test_processes_split_the_model(two: LLM):
    shards = two.collective_rpc("get_model_inspection")
    assert [shard.count("qkv_proj: ColumnParallelLinear weight [128, 128] float32") for shard in shards] == [1, 1]
    assert two.llm_engine.executor.supported_tasks == ("generate",)
    two.llm_engine.executor.check_health()
    with pytest.raises(TypeError, match=r"^apply_model: .*type function .*cross"):
        two.apply_model(lambda model: None)
    with errors_of_all(), pytest.raises(WorkerError, match=r"^rank 0 .*TypeError .*get_model: .* \S+\.DecoderFor"):
        two.collective_rpc("get_model")


PLAIN_SCRIPT = """
import sys

from spmd_worker import LLM, SamplingParams

llm = LLM(sys.argv[1], tensor_parallel_size=2, num_blocks=64)
outputs = llm.generate(["copy q ="], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
print(len(llm.llm_engine.executor.worker_pids), len(outputs[0].outputs[0].token_ids))
"""


@pytest.mark.finding(number="D8")
@pytest.mark.stress
@pytest.mark.parametrize("how", ["file", "standard input"])
def test_plain_script_without_main_guard_starts_workers(tmp_path: Path, how: str):
    """A worker that imported the script would start workers of its own."""
    file = tmp_path / "script.py"
    file.write_text(PLAIN_SCRIPT)
    words = [sys.executable, str(file) if how == "file" else "-", str(MODEL)]
    variables = {name: value for name, value in os.environ.items() if name not in ranks.LAUNCHER_VARIABLES}
    done = subprocess.run(
        words, input=PLAIN_SCRIPT, env=variables, cwd=ranks.REPOSITORY, capture_output=True, text=True, timeout=180
    )
    assert (done.returncode, done.stdout) == (0, "2 3\n"), done.stderr


@pytest.mark.finding(number="D8")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"data_parallel_size": 2},
            "cannot run with distributed_executor_backend=multiproc, which runs one replica",
        ),
        (
            {"tensor_parallel_size": 2, "worker_extension_cls": "__main__.Mine"},
            "'__main__.Mine' is a class of a script, which worker processes cannot import: move it",
        ),
    ],
)
def test_what_workers_cannot_run_is_said(options: dict[str, Any], words: str):
    with pytest.raises((ConfigError, WorkerError)) as refused:
        LLM(MODEL, **KEYS, **options)
    assert words in str(refused.value)


@pytest.mark.matrix
def test_resized_world_keeps_the_tokens(alone: list[list[RequestOutput]]):
    with LLM(MODEL, **KEYS, tensor_parallel_size=2, distributed_executor_backend="multiproc") as llm:
        executor = llm.llm_engine.executor
        check_same(answers(llm), alone)
        first, _ = executor.worker_pids
        for size in (1, 2):
            llm.reinitialize_distributed(tensor_parallel_size=size)
            check_same(answers(llm), alone)
            assert len(executor.worker_pids) == size
            assert executor.worker_pids[0] == first


def test_evicted_prefixes_return_from_host_tier():
    prompts = [{"prompt_token_ids": [10 + 7 * row + token for token in range(48)]} for row in range(6)]
    sampling = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    keys = {**KEYS, "num_blocks": 16, "host_tier_gib": 0.01, "max_num_seqs": 2}
    expected: list[list[list[list[int]]]] = []
    for backend, size in (("uniproc", 1), ("multiproc", 2)):
        with LLM(MODEL, **keys, tensor_parallel_size=size, distributed_executor_backend=backend) as llm:
            got = [llm.generate(prompts, sampling, use_tqdm=False) for _ in range(3)]
            assert llm.llm_engine.counters.num_loaded_blocks > 0
            expected.append(ids(got))
    assert expected[0] == expected[1]


def test_rank_names_its_own_changed_byte():
    """Every rank compares its part of a block, once as it is and once with a byte that has changed on rank 1."""
    prompts, greedy = [{"prompt_token_ids": list(range(10, 50))}], SamplingParams(temperature=0.0, max_tokens=2)
    extension = f"{ScaledNorms.__module__}.{ScaledNorms.__name__}"
    keys = {**KEYS, "tensor_parallel_size": 2, "worker_extension_cls": extension, "verify_hits": 1}
    with LLM(MODEL, **keys) as llm:
        first, second = (ids([llm.generate(prompts, greedy, use_tqdm=False)]) for _ in range(2))
        assert first == second
        assert llm.llm_engine.counters.num_verified_hits == 1
        (block_id, *_) = llm.llm_engine.scheduler.cache._pool._index.values()
        assert llm.collective_rpc("change_block", args=(1, block_id)) == [False, True]
        with pytest.raises(
            WorkerError, match=rf"^rank 1 raised CacheMismatchError .*: rank 1, step \d+: block {block_id}"
        ):
            llm.generate(prompts, greedy, use_tqdm=False)


@pytest.mark.matrix
def test_job_writes_the_same_rows(tmp_path: Path):
    written = []
    for backend in ("uniproc", "multiproc"):
        (tmp_path / backend).mkdir()
        rows = write_rows(tmp_path / backend, [{"prompt": prompt, "max_tokens": 12} for prompt in PROMPTS])
        ranks.run_script([forks_of_a_script.__file__, *arguments(rows, backend)], timeout_s=240).checked()
        written.append((tmp_path / backend / "out.jsonl").read_bytes())
    assert written[0] == written[1]
    assert len(written[0].splitlines()) == len(PROMPTS)


@pytest.mark.matrix
def test_job_without_workers_exits_with_one(tmp_path: Path):
    rows = write_rows(tmp_path, [{"prompt": "x"}])
    given = arguments(rows, "multiproc", "executor.worker_extension_cls=no_such.Thing")
    done = ranks.run_script([forks_of_a_script.__file__, *given], timeout_s=240)
    assert done.returncode == 1
    # Both cannot; which of them is heard first is theirs.
    assert [re.sub("rank [01]", "rank N", line) for line in done.stderr.splitlines() if "error" in line] == [
        "error: rank N raised ConfigError in init_worker: executor.worker_extension_cls: 'no_such.Thing' cannot be "
        "imported: No module named 'no_such': install it, or add its folder to PYTHONPATH"
    ]


KILLED = """
import os, signal, sys
from pathlib import Path
from forks_of_a_script import fork_workers

fork_workers()
import launch
from spmd_worker.executor.multiproc import MultiprocExecutor

execute, steps, workers = MultiprocExecutor.execute_model, [], []

def killing(self, *given, **named):
    steps.append(self)
    if len(steps) == 9:
        workers.extend(self.worker_pids)
        os.kill(workers[1], signal.SIGKILL)
    return execute(self, *given, **named)

MultiprocExecutor.execute_model = killing
code = launch.main()
left = [pid for pid in workers if Path(f"/proc/{pid}").exists()]
print(*workers, "left", *left)
sys.exit(code)
"""


@pytest.mark.stress
def test_job_names_its_killed_worker(tmp_path: Path):
    rows = write_rows(tmp_path, [{"prompt": "copy q =", "max_tokens": 200, "ignore_eos": True}] * 600)
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    job = ranks.run_script([script, *arguments(rows, "multiproc")], timeout_s=240)
    assert job.returncode == 1
    _, victim, *left = job.stdout.split()
    assert left == ["left"]
    # Whether it was noticed in a step or between two.
    assert job.stderr.splitlines()[-1].startswith(f"error: worker rank 1 (pid {victim}) was killed by SIGKILL")


def write_rows(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def arguments(rows: Path, backend: str, *keys: str) -> list[str]:
    """Of launch.py. The output goes beside the rows."""
    size = 2 if backend == "multiproc" else 1
    return [
        *(f"model.path={MODEL}", f"job.input={rows}"),
        *(f"job.output={rows.parent / 'out.jsonl'}", "device=cpu", "cache.num_blocks=64"),
        *(f"executor.backend={backend}", f"parallel.tensor_parallel_size={size}", *keys),
    ]
