"""The job on one rank, in this process: its reading, writing, counts and errors. Answers are not checked."""

import json
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bad_rows import BAD_ROWS
from jobs_of_rows import job_config, read_rows, run_here, write_rows
from ranks import IMPORT_PATH, REPOSITORY, run_script
from waiting import LIMIT_S

from spmd_worker.base.config.schema import (
    CacheConfig,
    ModelOptions,
    RunConfig,
    SamplingConfig,
    SchedulerConfig,
)
from spmd_worker.base.errors import ConfigError, JobError
from spmd_worker.frontends.batch import answer_rows, row_runner
from spmd_worker.frontends.batch import job as job_module
from spmd_worker.frontends.batch.progress import Progress
from spmd_worker.frontends.openai import row_parser
from spmd_worker.frontends.openai.row import TextPrompt

MODEL = REPOSITORY / "scripts" / "demo" / "model"
METRIC_KEYS = (
    *("load_s", "generate_s", "wall_s", "rows", "error_rows", "prompt_tokens", "cached_prompt_tokens"),
    *("computed_prompt_tokens", "output_tokens", "preemptions", "steps", "peak_memory_bytes", "computed_tokens"),
    *("recomputed_tokens", "preemptions_by_swap", "tier_stored_blocks", "tier_loaded_blocks"),
    *("prefix_hits_verified", "prefix_hits_unverified"),
)

config_of = partial(job_config, model=MODEL, num_blocks=256, sampling={"max_tokens": 3})


def read_metrics(folder: Path) -> dict[str, Any]:
    metrics: dict[str, Any] = json.loads((folder / "out.jsonl.run" / "metrics.json").read_text())
    return metrics


def error_result(config: RunConfig) -> str:
    with pytest.raises(ConfigError) as refused:
        run_here(config)
    return str(refused.value)


def test_every_row_has_a_line_and_metrics_agree(tmp_path: Path):
    write_rows(tmp_path, [{"prompt": "add 1 2 ="}, "not json", {"custom_id": "b", "prompt_token_ids": [65, 66]}])
    run_here(config_of(tmp_path))
    first, second, third = read_rows(tmp_path)
    assert (first["custom_id"], first["index"], first["error"]) == (None, 0, None)
    assert second["error"]["code"] == "invalid_json"
    assert (third["custom_id"], third["usage"]["prompt_tokens"]) == ("b", 2)
    metrics = read_metrics(tmp_path)
    assert set(METRIC_KEYS) <= set(metrics)
    assert (metrics["rows"], metrics["error_rows"], metrics["error_codes"]) == (3, 1, {"invalid_json": 1})
    assert metrics["prompt_tokens"] == first["usage"]["prompt_tokens"] + 2
    assert metrics["output_tokens"] == sum(row["usage"]["completion_tokens"] for row in (first, third))
    waits = metrics["thread_waits"]
    assert waits["waited_s"] >= 0 <= waits["lost_cores"]
    assert 0 <= waits["largest_share"] <= 1


def test_ten_kinds_of_bad_rows_have_ten_codes(tmp_path: Path):
    check_bad_rows(tmp_path)


def check_bad_rows(tmp_path: Path) -> None:
    write_rows(tmp_path, [{"custom_id": "row-0", "prompt": "add 1 2 ="}, *(make(1) for make in BAD_ROWS)])
    run_here(config_of(tmp_path))
    good, *bad = read_rows(tmp_path)
    assert good["error"] is None
    assert [row["error"]["code"] for row in bad] == [
        *("invalid_json", "missing_prompt", "conflicting_prompts", "invalid_value", "unknown_key"),
        *("prompt_too_long", "token_out_of_vocabulary", "duplicate_custom_id", "unsupported_url", "empty_prompt"),
    ]
    assert not any("outputs" in row for row in bad)
    assert all(row["error"]["message"] for row in bad)


@pytest.mark.control("A bad row is an error row, the job goes on")
@pytest.mark.parametrize(
    ("check", "without", "error"),
    [
        ("parse_json_object", lambda line, max_nesting: json.loads(line), json.JSONDecodeError),
        ("_plain_prompt", lambda fields: TextPrompt(fields["prompt"]), KeyError),
    ],
    ids=["what is no JSON", "no prompt"],
)
def test_bad_rows_test_detects_unchecked_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check: str, without: Any, error: type[Exception]
):
    """Negative control: the test of bad rows fails where one of them is read without its check."""
    monkeypatch.setattr(row_parser, check, without)
    with pytest.raises(error):
        check_bad_rows(tmp_path)
    assert not (tmp_path / "out.jsonl").exists()


def test_openai_rows_get_openai_bodies(tmp_path: Path):
    messages = [{"role": "user", "content": "add 1 2 ="}]
    bodies = {
        "/v1/completions": {"model": "mine", "prompt": "add 1 2 =", "n": 2, "temperature": 1.0, "logprobs": 2},
        "/v1/chat/completions": {"messages": messages, "logprobs": True, "top_logprobs": 2},
    }
    write_rows(
        tmp_path,
        [{"custom_id": url, "method": "POST", "url": url, "body": body} for url, body in bodies.items()],
    )
    run_here(config_of(tmp_path))
    completion, chat = (row["response"]["body"] for row in read_rows(tmp_path))
    assert (completion["object"], completion["model"], completion["created"]) == ("text_completion", "mine", 0)
    assert [choice["index"] for choice in completion["choices"]] == [0, 1]
    assert completion["usage"] == {"prompt_tokens": 7, "completion_tokens": 6, "total_tokens": 13}
    assert len(completion["choices"][0]["logprobs"]["tokens"]) == 3
    assert (chat["object"], chat["model"]) == ("chat.completion", "model")
    assert chat["choices"][0]["message"]["role"] == "assistant"
    assert len(chat["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 2
    assert chat["usage"]["prompt_tokens"] > 7


@pytest.mark.stress
def test_preempted_rows_get_the_same_bytes(tmp_path: Path):
    rows = [{"prompt_token_ids": [60 + index] * 30, "max_tokens": 40, "ignore_eos": True} for index in range(12)]
    rows[3] |= {"n": 2, "best_of": 3, "temperature": 1.0}
    caches = {
        "roomy": CacheConfig(num_blocks=256),
        "tight": CacheConfig(num_blocks=16),
        "swap": CacheConfig(num_blocks=16, swap_space_gib=0.01),
        "tier": CacheConfig(num_blocks=16, swap_space_gib=0.01, host_tier_gib=0.01),
    }
    for name, cache in caches.items():
        folder = tmp_path / name
        folder.mkdir()
        write_rows(folder, rows)
        mode = "recompute" if name == "tight" else "swap"
        scheduler = SchedulerConfig(preemption_mode=mode)
        run_here(replace(config_of(folder), cache=cache, scheduler=scheduler))
    metrics = {name: read_metrics(tmp_path / name) for name in caches}
    assert metrics["roomy"]["preemptions"] == metrics["roomy"]["recomputed_tokens"] == 0
    assert metrics["tight"]["preemptions"] > metrics["tight"]["preemptions_by_swap"] == 0
    assert min(metrics["swap"]["preemptions_by_swap"], metrics["tier"]["tier_stored_blocks"]) > 0
    assert len({(tmp_path / name / "out.jsonl").read_bytes() for name in caches}) == 1


def test_rows_sharing_a_prefix_compute_it_once(tmp_path: Path):
    """Rows get the same bytes as without the cache."""
    rows = [{"prompt_token_ids": [*range(60, 92), 60 + index], "max_tokens": 4} for index in range(6)]
    for name, is_cached in (("cached", True), ("cold", False)):
        folder = tmp_path / name
        folder.mkdir()
        write_rows(folder, rows)
        run_here(replace(config_of(folder), cache=CacheConfig(num_blocks=64, enable_prefix_caching=is_cached)))
    cached, cold = (read_metrics(tmp_path / name) for name in ("cached", "cold"))
    assert (cached["cached_prompt_tokens"], cold["cached_prompt_tokens"]) == (5 * 32, 0)
    assert cached["computed_prompt_tokens"] == cold["computed_prompt_tokens"] - 5 * 32 == 33 + 5
    assert cached["computed_tokens"] == cold["computed_tokens"] - 5 * 32
    assert (tmp_path / "cached" / "out.jsonl").read_bytes() == (tmp_path / "cold" / "out.jsonl").read_bytes()


def test_second_run_writes_the_same_bytes(tmp_path: Path):
    write_rows(tmp_path, [{"prompt": "copy a b =", "temperature": 1.5} for _ in range(8)])
    run_here(config_of(tmp_path))
    first = (tmp_path / "out.jsonl").read_bytes()
    run_here(config_of(tmp_path))
    assert (tmp_path / "out.jsonl").read_bytes() == first
    run_here(replace(config_of(tmp_path), seed=1))
    assert (tmp_path / "out.jsonl").read_bytes() != first


COLLECTING = """
import gc, sys
from pathlib import Path
gc.unfreeze()
import test_job
from spmd_worker.frontends.batch.row_runner import RowRunner
from spmd_worker.worker.memory import garbage

garbage.has_frozen_objects = lambda: gc.get_freeze_count() > 0
step, frozen = RowRunner.step, []

def collecting(runner, *given):
    gc.collect()
    frozen.append(gc.get_freeze_count())
    return step(runner, *given)

RowRunner.step = collecting
test_job.run_here(test_job.config_of(Path(sys.argv[1])))
assert min(frozen) > 10_000, frozen
assert gc.get_freeze_count() == 0, "the process goes on"
"""


def test_full_collections_of_job_skip_earlier_survivors(tmp_path: Path):
    """Runs in a process without the objects of all tests, at which each collection would look for a second."""
    (tmp_path / "collecting.py").write_text(COLLECTING)
    write_rows(tmp_path, [{"prompt": "add 1 2 =", "max_tokens": 3}])
    folders = os.pathsep.join([*IMPORT_PATH, str(Path(__file__).parent)])
    run_script([tmp_path / "collecting.py", tmp_path], LIMIT_S, {"PYTHONPATH": folders}).checked()


def test_max_rows_takes_only_the_first_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_rows(tmp_path, [*({"prompt": "add 1 2 ="} for _ in range(3)), "bad", "bad too"])
    run_here(config_of(tmp_path, max_rows=4))
    assert [row["index"] for row in read_rows(tmp_path)] == [0, 1, 2, 3]
    assert "\n4 of 4 rows, " in "\n" + capsys.readouterr().err
    run_here(config_of(tmp_path, max_rows=0))
    assert read_rows(tmp_path) == []


def test_too_many_error_rows_fail_the_completed_job(tmp_path: Path):
    write_rows(tmp_path, [{"prompt": "add 1 2 ="}, "bad", "bad too", {"prompt": "add 3 4 ="}])
    run_here(config_of(tmp_path, max_error_rows=2))
    (tmp_path / "out.jsonl").unlink()
    with pytest.raises(JobError, match=r"job\.max_error_rows=1"):
        run_here(config_of(tmp_path, max_error_rows=1))
    assert [row["error"] is None for row in read_rows(tmp_path)] == [True, False, False, True]
    assert read_metrics(tmp_path)["error_rows"] == 2


def test_empty_input_has_an_empty_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for text in ("", "\n  \n"):
        (tmp_path / "rows.jsonl").write_text(text)
        run_here(config_of(tmp_path))
        assert (tmp_path / "out.jsonl").read_bytes() == b""
        assert "0 of 0 rows, 0 output tokens" in capsys.readouterr().err
    assert read_metrics(tmp_path)["rows"] == 0


def test_file_of_bad_rows_takes_no_model_step(tmp_path: Path):
    write_rows(tmp_path, ["bad"] * 2000)
    run_here(config_of(tmp_path))
    assert len(read_rows(tmp_path)) == 2000
    assert read_metrics(tmp_path)["output_tokens"] == 0


def test_rows_come_from_standard_input_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_rows(tmp_path, [{"prompt": "add 1 2 ="}, {"prompt": "add 3 4 ="}])
    with (tmp_path / "rows.jsonl").open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        run_here(config_of(tmp_path, input="-"))
    assert [row["index"] for row in read_rows(tmp_path)] == [0, 1]


def test_existing_run_is_rejected_with_resume_never(tmp_path: Path):
    write_rows(tmp_path, [{"prompt": "add 1 2 ="}])
    run_here(config_of(tmp_path, resume="never"))
    assert error_result(config_of(tmp_path, resume="never")) == (
        f"job.run_dir={tmp_path}/out.jsonl.run holds a run already and job.resume=never: "
        f"give another job.run_dir or remove it"
    )
    run_here(config_of(tmp_path, resume="never", run_dir=str(tmp_path / "another")))
    run_here(config_of(tmp_path, resume="force"))


def test_run_directory_is_made_at_its_path(tmp_path: Path):
    write_rows(tmp_path, [{"prompt": "add 1 2 ="}])
    run_here(
        config_of(tmp_path, run_dir=str(tmp_path / "deep" / "run"), output=str(tmp_path / "answers" / "out.jsonl"))
    )
    found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    names = ("lock", "manifest.json", "metrics.json", "provenance.json", "steps.csv")
    assert found == ["answers/out.jsonl", *(f"deep/run/{name}" for name in names), "rows.jsonl"]


def test_unusable_files_are_rejected_before_anything_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def must_not_start(*_: object, **__: object) -> None:
        raise AssertionError("the engine was started")

    monkeypatch.setattr(job_module, "start_engine", must_not_start)
    write_rows(tmp_path, [{"prompt": "add 1 2 ="}])
    rows, out = str(tmp_path / "rows.jsonl"), str(tmp_path / "out.jsonl")
    (tmp_path / "folder").mkdir()
    os.link(rows, tmp_path / "hard_link")
    os.symlink(rows, tmp_path / "symbolic_link")
    for job, message in (
        ({"input": None}, "job.input is not set: give a JSONL or Parquet file of rows, or - for standard input"),
        ({"output": None}, "job.output is not set: give the file to write"),
        # A file of that name was written.
        ({"output": "-"}, "job.output=-: rows are not written to standard output: give the file to write"),
        (
            {"input": "/no/such"},
            # Shards, pools and indices reject standard input, which was offered.
            "job.input=/no/such is not a file: give a JSONL or Parquet file of rows, or a pattern such as "
            "'rows/*.jsonl'",
        ),
        ({"input": "/no/such*"}, "job.input=/no/such* matches no file: give a pattern that does"),
        (
            {"input": "/no[1]/*"},
            "job.input=/no[1]/* matches no file: give a pattern that does ([ that is part of a name is [[] in a "
            "pattern)",
        ),
        (
            {"output": rows},
            f"job.output={rows} is also read (job.input={rows}) and would be replaced: give another file",
        ),
        *[
            (
                {"output": f"{tmp_path}/{link}"},
                f"job.output={tmp_path}/{link} is also read (job.input={rows}) and would be replaced: "
                f"give another file",
            )
            for link in ("hard_link", "symbolic_link")
        ],
        (
            {"output": str(tmp_path / "folder")},
            f"job.output={tmp_path}/folder exists and is not a regular file: give another file to write",
        ),
        ({"output": f"{rows}/out.jsonl"}, f"the folder of job.output={rows} exists and is not a folder: give another"),
        (
            {"output": "/proc/nosuch/out.jsonl"},
            "the folder of job.output=/proc/nosuch cannot be made (No such file or directory): give another",
        ),
        ({"run_dir": rows}, f"job.run_dir={rows} exists and is not a folder: give another"),
    ):
        assert error_result(config_of(tmp_path, **job)) == message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "hard_link", "rows.jsonl", "symbolic_link"]
    # The control: nothing is wrong with the rest.
    with pytest.raises(AssertionError, match=r"^the engine .*started$"):
        run_here(config_of(tmp_path, output=out))


def test_unusable_settings_are_rejected_before_anything_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(job_module, "start_engine", lambda *_, **__: pytest.fail("the engine was started"))
    write_rows(tmp_path, [{"prompt": "add 1 2 ="}])
    config = config_of(tmp_path)
    for changed, message in (
        (
            replace(config, cache=CacheConfig(num_blocks=3)),
            "cache.num_blocks=3 holds 48 tokens but model.max_model_len is 256: "
            "raise cache.num_blocks to at least 16 or lower max_model_len",
        ),
        (
            replace(config, sampling=SamplingConfig(temperature=-1.0)),
            "sampling.temperature=-1.0 must be 0 (greedy) or more",
        ),
        (
            replace(config, sampling=SamplingConfig(min_tokens=5, max_tokens=2)),
            "sampling.min_tokens=5 must not exceed max_tokens=2",
        ),
        (
            replace(config, model=ModelOptions(path=str(MODEL), max_model_len=1024)),
            "model.max_model_len=1024 is more than the model's 256 tokens: lower it or leave it null",
        ),
        (
            replace(
                config,
                scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, enable_chunked_prefill=False),
            ),
            "scheduler.max_num_batched_tokens=64 cannot hold a prompt of model.max_model_len=256 with "
            "scheduler.enable_chunked_prefill=false: raise it to 256 or enable chunked prefill",
        ),
    ):
        assert error_result(changed) == message


def test_exception_leaves_older_output_and_no_partial_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_rows(tmp_path, [{"prompt": "add 1 2 ="}])
    (tmp_path / "out.jsonl").write_text("older\n")

    def fail(*_: object) -> bytes:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(row_runner, "format_result", fail)
    with pytest.raises(OSError, match=r"^\[Errno 28\]"):
        run_here(config_of(tmp_path))
    assert (tmp_path / "out.jsonl").read_text() == "older\n"
    assert not (tmp_path / "out.jsonl.partial").exists()
    assert not (tmp_path / "out.jsonl.run" / "metrics.json").exists()


def test_progress_is_shown_before_any_row_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shown: list[tuple[int, int]] = []
    monkeypatch.setattr(Progress, "update", lambda self, rows, tokens, *_: shown.append((rows, tokens)))
    # All rows begin in one step, however long it takes to read them.
    monkeypatch.setattr(answer_rows, "TimeBudget", lambda timeout_s: SimpleNamespace(is_over=False))
    write_rows(tmp_path, ["bad", *({"prompt": "add 1 2 =", "max_tokens": 5, "ignore_eos": True} for _ in range(4))])
    run_here(config_of(tmp_path))
    assert [sum(column) for column in zip(*shown, strict=True)] == [5, 20]
    assert shown[0][0] == 1
    assert (0, 4) in shown
    assert max(rows for rows, _ in shown) == 4
