"""Files next to a job's output: provenance and Prometheus file, private and without leaks."""

import hashlib
import json
import os
import re
import stat
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ranks
from expert_checkpoints import expert_folder
from jobs_of_rows import job_config, write_rows

from spmd_worker.base.config.schema import RowLimits, RunConfig
from spmd_worker.base.errors import ConfigError
from spmd_worker.base.metrics.prometheus import PrometheusFile
from spmd_worker.frontends.batch import job as job_module
from spmd_worker.frontends.batch import row_runner
from spmd_worker.frontends.batch.job import run_job
from spmd_worker.ranks.environment import RankEnvironment

MODEL = ranks.REPOSITORY / "scripts" / "demo" / "model"
LIMIT_S = 240.0

config_of = partial(
    job_config, model=MODEL, options={"dtype": "float32"}, sampling={"max_tokens": 4, "temperature": 0.0}
)

LAUNCH = """
import os, sys
import launch
os.umask(0o022)
sys.exit(launch.main())
"""


def run_command(folder: Path, keys: list[str], env: dict[str, str] | None = None) -> ranks.CompletedRanks:
    script = folder / "launch_script.py"
    script.write_text(LAUNCH)
    return ranks.run_script([script, *keys], LIMIT_S, env).checked()


SIX_ROWS = [{"prompt": f"add {index} 7 ="} for index in range(6)]


def run(config: RunConfig) -> list[dict[str, Any]]:
    run_job(config, RankEnvironment())
    return [json.loads(line) for line in Path(config.job.output or "").read_text().splitlines()]


def provenance_of(config: RunConfig) -> dict[str, Any]:
    provenance: dict[str, Any] = json.loads(Path(f"{config.job.output}.run", "provenance.json").read_text())
    return provenance


def test_provenance_names_output_and_all_its_inputs(tmp_path: Path):
    write_rows(tmp_path, SIX_ROWS)
    config = config_of(tmp_path)
    run(config)
    provenance = provenance_of(config)
    output = (tmp_path / "out.jsonl").read_bytes()
    assert provenance["output"] == {
        "path": str(tmp_path / "out.jsonl"),
        "lines": 6,
        "bytes": len(output),
        "sha256": hashlib.sha256(output).hexdigest(),
    }
    assert provenance["seed"] == 0
    assert provenance["layout"] == {
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
        "pipeline_layers": None,
        "enable_expert_parallel": False,
        "expert_placement": "linear",
        "invariant_experts": False,
        "invariant_tensor_parallel": None,
        "max_leaves": 8,
    }
    assert re.fullmatch("[0-9a-f]{16,}", provenance["replicas"][0]["digest_chain_head"])
    assert provenance["replicas"][0]["steps"] > 0
    assert {"model.path", "job.input", "tokenizer", "version of torch", "version of the code"} <= set(
        provenance["answers"]
    )
    assert len(provenance["starts"]) == 1


def test_metrics_and_summary_report_expert_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_rows(tmp_path, [{"prompt_token_ids": [3 + row, 40, 9]} for row in range(5)])
    config = config_of(tmp_path)
    run(replace(config, model=replace(config.model, path=str(expert_folder("qwen2_moe")), max_model_len=64)))
    metrics = json.loads(Path(f"{config.job.output}.run", "metrics.json").read_text())
    experts = metrics["experts"]
    assert list(experts["tokens"]) == ["0", "1", "3"], "the dense layer has none"
    for counts in experts["tokens"].values():
        # Three experts a token; nobody is measured, and each row's last token is not computed.
        assert sum(counts) == 3 * metrics["computed_tokens"]
    busiest = experts["busiest"]
    counts = experts["tokens"][str(busiest["layer"])]
    assert counts[busiest["expert"]] == max(counts)
    assert busiest["over_mean"] == round(8 * max(counts) / sum(counts), 2)
    assert experts["never_used"] == sum(counts.count(0) for counts in experts["tokens"].values())
    assert f"(layer {busiest['layer']} expert {busiest['expert']}), never used" in capsys.readouterr().err


@pytest.mark.guarantee("provenance.json: head of the chained digest", is_control_inside=True)
def test_chain_head_is_equal_only_for_equal_jobs(tmp_path: Path):
    heads = []
    for number, rows in enumerate((SIX_ROWS, SIX_ROWS, [{"prompt": "add 1 2 ="}])):
        folder = tmp_path / str(number)
        folder.mkdir()
        write_rows(folder, rows)
        config = config_of(folder)
        run(config)
        heads.append(provenance_of(config)["replicas"][0]["digest_chain_head"])
    assert heads[0] == heads[1] != heads[2]


@pytest.mark.parametrize("name", ["out.jsonl.gz", "out.jsonl.zst", "out.parquet"])
def test_provenance_of_compressed_output_covers_its_lines(tmp_path: Path, name: str):
    write_rows(tmp_path, SIX_ROWS)
    config = config_of(tmp_path)
    run(config)
    plain = provenance_of(config)["output"]
    packed = config_of(tmp_path, output=str(tmp_path / name))
    run_job(packed, RankEnvironment())
    assert provenance_of(packed)["output"] | {"path": ""} == plain | {"path": ""}


def read_prometheus(path: Path) -> dict[str, float]:
    lines = path.read_text().splitlines()
    assert path.read_text().endswith("\n")
    named = [line for line in lines if not line.startswith("#")]
    for line in named:
        name = line.split()[0]
        assert f"# TYPE {name} gauge" in lines
        assert any(each.startswith(f"# HELP {name} ") for each in lines)
    return {line.split()[0].removeprefix("spmd_worker_job_"): float(line.split()[1]) for line in named}


def test_prometheus_file_reports_how_the_job_ended(tmp_path: Path):
    write_rows(tmp_path, [{"prompt": "add 1 2 ="}, {"prompt": 3}])
    path = tmp_path / "job.prom"
    run(config_of(tmp_path, prometheus_file=str(path)))
    values = read_prometheus(path)
    assert (values["rows"], values["rows_done"], values["error_rows"]) == (2, 2, 1)
    assert (values["running"], values["complete"], values["rows_resumed"]) == (0, 1, 0)
    assert 0 < values["start_time_seconds"] <= values["update_time_seconds"]
    assert values["output_tokens"] > 0


def test_failed_job_is_not_complete_for_prometheus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_rows(tmp_path, SIX_ROWS)
    monkeypatch.setattr("spmd_worker.frontends.batch.open_job.write_lines", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(config_of(tmp_path, prometheus_file=str(tmp_path / "job.prom")))
    values = read_prometheus(tmp_path / "job.prom")
    assert (values["running"], values["complete"], values["rows_done"]) == (0, 0, 6)


def test_prometheus_file_is_rewritten_every_few_seconds(tmp_path: Path, caplog):
    """A file that cannot be written is one warning."""
    now = [100.0]
    file = PrometheusFile(tmp_path / "job.prom", lambda: now[0])
    file.update({"rows_done": 1, "rows": None})
    assert read_prometheus(tmp_path / "job.prom")["rows_done"] == 1
    assert "rows" not in read_prometheus(tmp_path / "job.prom")
    now[0] += 4
    file.update({"rows_done": 2})
    assert read_prometheus(tmp_path / "job.prom")["rows_done"] == 1
    now[0] += 2
    file.update({"rows_done": 3})
    assert read_prometheus(tmp_path / "job.prom") | {"rows_done": 3, "update_time_seconds": 106, "running": 1} == (
        read_prometheus(tmp_path / "job.prom")
    )
    file.end({"rows": 12345678901}, is_complete=True)
    assert read_prometheus(tmp_path / "job.prom")["rows"] == 12345678901
    assert [path.name for path in tmp_path.iterdir()] == ["job.prom"]
    absent = PrometheusFile(tmp_path / "no" / "job.prom", lambda: now[0])
    for _ in range(3):
        absent.end({}, is_complete=True)
    assert [record.message for record in caplog.records] == [
        f"job.prometheus_file={tmp_path}/no/job.prom cannot be written (No such file or directory)"
    ]


def test_prometheus_file_without_package_is_rejected_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_rows(tmp_path, SIX_ROWS)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    path = tmp_path / "job.prom"
    with pytest.raises(ConfigError) as caught:
        run(config_of(tmp_path, prometheus_file=str(path)))
    what = f"job.prometheus_file={path} needs prometheus-client, which is not installed"
    assert str(caught.value) == f"{what}: pip install 'spmd-worker[metrics]'"
    assert [each.name for each in tmp_path.iterdir()] == ["rows.jsonl"]
    # The control: a job that asks for no such file needs no such package.
    assert len(run(config_of(tmp_path))) == 6


LIMITED = {
    "max_nesting": ({"prompt": "add 1 2 =", "stop": [[[[["a"]]]]]}, "nested_too_deeply"),
    "max_prompt_tokens": ({"prompt": "add 111 222 = 333 add"}, "prompt_too_long"),
    "max_n": ({"prompt": "add 1 2 =", "n": 3}, "limit_exceeded"),
    "best_of": ({"prompt": "add 1 2 =", "best_of": 3}, "limit_exceeded"),
    "max_tokens": ({"prompt": "add 1 2 =", "max_tokens": 9}, "limit_exceeded"),
    "max_stop_strings": ({"prompt": "add 1 2 =", "stop": ["a", "b", "c"]}, "limit_exceeded"),
    "stop_token_ids": ({"prompt": "add 1 2 =", "stop_token_ids": [1, 2, 3]}, "limit_exceeded"),
    "max_logit_bias": ({"prompt": "add 1 2 =", "logit_bias": {"1": 1, "2": 1, "3": 1}}, "limit_exceeded"),
    "max_line_bytes": ({"prompt": "add 1 2 =", "stop": ["a" * 200]}, "line_too_long"),
}
LIMITS = RowLimits(
    max_line_bytes=120, max_nesting=4, max_prompt_tokens=9, max_n=2, max_tokens=8, max_stop_strings=2, max_logit_bias=2
)


@pytest.mark.guarantee("Rows are bounded by limits.*", is_control_inside=True)
def test_row_beyond_limit_is_error_row_naming_it(tmp_path: Path):
    """The rest is answered."""
    good = {"prompt": "add 1 2 =", "n": 2, "stop": ["a", "b"], "logit_bias": {"1": 1, "2": 1}, "max_tokens": 8}
    write_rows(tmp_path, [good, *(row for row, _ in LIMITED.values()), {"prompt": "add 1 2 =", "max_tokens": None}])
    answers = run(replace(config_of(tmp_path), limits=LIMITS))
    assert [answer["error"] and answer["error"]["code"] for answer in answers] == [
        None,
        *(code for _, code in LIMITED.values()),
        None,
    ]
    for name, answer in zip(LIMITED, answers[1:-1], strict=True):
        if name.startswith("max_") and name != "max_nesting":
            assert f"limits.{name}=" in answer["error"]["message"]
    assert len(answers[0]["outputs"]) == 2
    # Whoever asks for as much as there is gets as much as the limit.
    assert answers[-1]["usage"]["completion_tokens"] <= 8
    # The control: without limits all but the deepest and the wrong-typed run.
    free = run(config_of(tmp_path, output=str(tmp_path / "free.jsonl")))
    assert [answer["error"] is None for answer in free] == [True, False, *[True] * 9]


@pytest.mark.guarantee("job.private", is_control_inside=True)
@pytest.mark.parametrize("is_private", [True, False])
def test_private_job_writes_files_only_its_user_reads(tmp_path: Path, is_private: bool):
    write_rows(tmp_path, SIX_ROWS)
    command = [
        *(f"model.path={MODEL}", "device=cpu", "cache.num_blocks=64", "job.step_log=true"),
        *(f"job.input={tmp_path / 'rows.jsonl'}", f"job.output={tmp_path / 'deep' / 'out.jsonl'}"),
        *(f"job.prometheus_file={tmp_path / 'deep' / 'job.prom'}", f"job.private={str(is_private).lower()}"),
    ]
    run_command(tmp_path, command)
    paths = [tmp_path / "deep", *(tmp_path / "deep").rglob("*")]
    assert len(paths) > 7
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in paths}
    if is_private:
        assert {name: mode for name, mode in modes.items() if mode & 0o077} == {}
    else:
        assert [name for name, mode in modes.items() if mode & 0o044 != 0o044] == []


def test_row_values_never_become_paths(tmp_path: Path):
    (tmp_path / "in").mkdir()
    names = ["../../escaped", "/tmp/spmd_escaped", "a/b", "..", "out.jsonl.run/journal", "\x00", "~/x", "$(touch x)"]
    rows: list[dict[str, Any]] = [{"custom_id": name, "prompt": "add 1 2 ="} for name in names]
    rows += [
        {"custom_id": f"{name}#", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a", "model": name}}
        for name in names
    ]
    (tmp_path / "in" / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    config = config_of(tmp_path / "in", output=str(tmp_path / "in" / "out.jsonl"))
    answers = run(config)
    assert [answer["custom_id"] for answer in answers] == [row["custom_id"] for row in rows]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]
    assert sorted(path.name for path in (tmp_path / "in").iterdir()) == ["out.jsonl", "out.jsonl.run", "rows.jsonl"]
    assert not Path("/tmp/spmd_escaped").exists()


@pytest.mark.guarantee("After a job nothing but the output holds prompts, answers, variables")
def test_job_leaks_no_prompts_outputs_or_environment(tmp_path: Path):
    """Checks the run directory and both streams with default settings; the output has the requested text."""
    write_rows(tmp_path, SECRET_ROWS)
    keys = [
        *(f"model.path={MODEL}", "device=cpu", "cache.num_blocks=64"),
        *(f"job.input={tmp_path / 'rows.jsonl'}", f"job.output={tmp_path / 'out.jsonl'}"),
    ]
    done = run_command(tmp_path, keys, {"SOME_TOKEN": "secretvariable"})
    assert leaks_of(tmp_path, done.stdout, done.stderr) == []


# What the demo model reverses is long, and no part of its prompt.
SECRET_ROWS = [
    {"prompt": "reverse t p m o r c e s =", "max_tokens": 24},
    {"prompt": "copy secretprompt =", "max_tokens": 8},
    {"prompt": "copy secretprompt =", "n": -1},
]


def leaks_of(folder: Path, stdout: str, stderr: str) -> list[tuple[str, str]]:
    """Which file of the run directory, or stream, holds which secret; of a job of `SECRET_ROWS`."""
    answers = [json.loads(line).get("outputs") for line in (folder / "out.jsonl").read_text().splitlines()]
    texts = [outputs[0]["text"].strip() for outputs in answers if outputs]
    assert len(texts[0]) > 8, "there is an answer to look for"
    secrets = ["secretprompt", "secretvariable", *(text for text in texts if len(text) > 3)]
    written = {path.name: path.read_bytes().decode("utf-8", "replace") for path in (folder / "out.jsonl.run").iterdir()}
    written |= {"stdout": stdout, "stderr": stderr}
    assert {"manifest.json", "metrics.json", "provenance.json", "steps.csv"} <= set(written)
    return [(name, secret) for name, said in written.items() for secret in secrets if secret in said]


@pytest.mark.control("After a job nothing but the output holds prompts, answers, variables")
def test_leak_check_detects_prompt_answer_and_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Negative control: rows that are printed as they end, and metrics with the environment."""
    format_result, write_json = row_runner.format_result, job_module.write_json

    def print_and_format(row: Any, output: Any, model_name: str) -> bytes:
        print(row.content.text, output.outputs[0].text, file=sys.stderr)
        return format_result(row, output, model_name)

    monkeypatch.setenv("SOME_TOKEN", "secretvariable")
    monkeypatch.setattr(row_runner, "format_result", print_and_format)
    monkeypatch.setattr(
        job_module, "write_json", lambda path, values: write_json(path, values | {"environment": dict(os.environ)})
    )
    write_rows(tmp_path, SECRET_ROWS)
    answer = run(config_of(tmp_path))[0]["outputs"][0]["text"].strip()
    leaks = leaks_of(tmp_path, *capsys.readouterr())
    assert {("metrics.json", "secretvariable"), ("stderr", "secretprompt"), ("stderr", answer)} <= set(leaks)
