"""A process reads config.json, generation_config.json and tokenizer.json once, whatever it starts: opens are
counted.
"""

import json
import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ranks

MODEL = ranks.REPOSITORY / "scripts" / "demo" / "model"
ONCE = {"config.json": 1, "generation_config.json": 1, "tokenizer.json": 1}

JOB = """
    import json, os, sys
    from opened_files import COUNTS
    import launch

    code = launch.main(sys.argv[1:])
    # In one piece: the ranks write to one pipe.
    os.write(1, f"{json.dumps([code, COUNTS])}\\n".encode())
    """

LLMS = """
    import json, sys
    from opened_files import COUNTS
    from spmd_worker import LLM, SamplingParams
    from spmd_worker.engine.startup import read_run

    model, backend = sys.argv[1:]
    settings = {"num_blocks": 64, "device": "cpu", "max_model_len": 64}
    with LLM(
        model, distributed_executor_backend=backend, worker_extension_cls="opened_files.OpenedFiles", **settings
    ) as llm:
        [output] = llm.generate(["copy a b ="], SamplingParams(max_tokens=2, stop=["z"]), use_tqdm=False)
        assert output.error is None and output.outputs[0].text, output
        print(json.dumps(COUNTS))
        print(json.dumps(llm.collective_rpc("opened_files")))
        read_run(llm.llm_engine.config)
        print(json.dumps(COUNTS))
    """


COPIES = """
    import os, sys
    from spmd_worker import LLM
    from spmd_worker.base.errors import RanksDisagreeError

    try:
        LLM(sys.argv[1 + int(os.environ["RANK"])], data_parallel_size=2, num_blocks=64, device="cpu").close()
    except RanksDisagreeError as error:
        os.write(1, f"{error}\\n".encode())
    """


def run_job(folder: Path, num_ranks: int, *settings: str) -> list[Any]:
    """The exit code and the counts of each rank."""
    (folder / "rows.jsonl").write_text(
        '{"prompt": "copy a b =", "max_tokens": 2}\n{"prompt_token_ids": [60], "max_tokens": 1}\n'
    )
    job = [f"job.input={folder / 'rows.jsonl'}", f"job.output={folder / 'out.jsonl'}", "device=cpu"]
    arguments = [f"model.path={MODEL}", "cache.num_blocks=64", *job, *settings]
    done = ranks.run_ranks(JOB, num_ranks, timeout_s=240, arguments=arguments).checked()
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]


def run_llm(folder: Path, backend: str) -> Sequence[Any]:
    script = folder / "script.py"
    script.write_text(textwrap.dedent(LLMS))
    done = ranks.run_script([script, MODEL, backend], timeout_s=240).checked()
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_job_reads_each_file_once_per_rank(tmp_path: Path):
    assert run_job(tmp_path, 2, "parallel.data_parallel_size=2", "job.step_log=true") == [[0, ONCE]] * 2
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 2


def test_a_plan_needs_no_tokenizer(tmp_path: Path):
    [[code, counts]] = run_job(tmp_path, 1, "plan=true")
    assert (code, counts) == (0, {"config.json": 1, "generation_config.json": 1})


def test_llm_reads_each_file_once(tmp_path: Path):
    started, worker, again = run_llm(tmp_path, "uniproc")
    assert started == ONCE
    # Its worker lives in the same process.
    assert worker == [ONCE]
    assert again == dict.fromkeys(ONCE, 2)


def test_worker_processes_read_no_model_files(tmp_path: Path):
    started, worker, _ = run_llm(tmp_path, "multiproc")
    assert started == ONCE
    assert worker == [{}]


def test_replicas_with_different_sampling_defaults_do_not_start(tmp_path: Path):
    for name in ("one", "other"):
        shutil.copytree(MODEL, tmp_path / name)
    advice = json.loads((MODEL / "generation_config.json").read_text())
    (tmp_path / "other" / "generation_config.json").write_text(json.dumps({**advice, "repetition_penalty": 1.25}))
    done = ranks.run_ranks(COPIES, 2, timeout_s=240, arguments=[tmp_path / "one", tmp_path / "other"])
    told = done.stdout.splitlines()
    assert len(told) == 2, done.output
    # Whoever comes first.
    for line in told:
        assert "default override_generation_config['repetition_penalty']" in line, done.output
        assert "1.25" in line, done.output
