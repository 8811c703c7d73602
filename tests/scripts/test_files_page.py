"""docs/reference/files.md and errors.md are complete: keys, columns, files, codes, statuses, exceptions of the code."""

import ast
import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from ranks import REPOSITORY

from spmd_worker.base import errors
from spmd_worker.base.metrics import prometheus
from spmd_worker.base.metrics.stage_times import StageSpan
from spmd_worker.base.metrics.step_stats import StepStats
from spmd_worker.frontends.batch.job_counts import JobCounts
from spmd_worker.frontends.batch.job_metrics import job_metrics
from spmd_worker.frontends.batch.run_dir.job_files import RESERVED_NAMES
from spmd_worker.frontends.batch.run_dir.provenance import write_provenance
from spmd_worker.frontends.openai import openai_stream
from spmd_worker.frontends.openai.row import RowError
from spmd_worker.frontends.openai.row_writer import REJECTED
from spmd_worker.frontends.serve import http_protocol
from spmd_worker.media import source
from spmd_worker.replica.scheduler.counters import SchedulerCounters
from spmd_worker.replica.sequence import outputs

PACKAGE = REPOSITORY / "spmd_worker"
FILES = (REPOSITORY / "docs" / "reference" / "files.md").read_text(encoding="utf-8")
ERRORS = (REPOSITORY / "docs" / "reference" / "errors.md").read_text(encoding="utf-8")
OPERATIONS = (REPOSITORY / "docs" / "guides" / "operations.md").read_text(encoding="utf-8")
POOL_PROGRESS = (REPOSITORY / "docs" / "guides" / "pool_progress.md").read_text(encoding="utf-8")

CODE_ARGUMENTS = {
    "InvalidRequestError": 1,
    "RequestError": 0,
    "JsonError": 0,
    "GrammarError": 0,
    "row_error": 1,
    "MediaError": 0,
}
"""Calls that name a code, and the argument that it is."""
FREE_KEYS = ("error_codes", "experts.tokens")
"""Records of metrics.json whose keys are data."""


def section(page: str, heading: str) -> str:
    return page.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def first_cells(text: str) -> list[str]:
    """Names in backticks in the first cell of each row of the tables of `text`."""
    return [name for cell in re.findall(r"(?m)^\| (`[^|]*) \|", text) for name in re.findall(r"`([^`]+)`", cell)]


def keys_of(record: Any, prefix: str = "") -> Iterator[str]:
    """`replicas`, `replicas[].rows`, `thread_waits.waited_s`: each key of a record and of those in it."""
    for key, value in record.items():
        name = f"{prefix}{key}"
        yield name
        if isinstance(value, dict) and name not in FREE_KEYS:
            yield from keys_of(value, f"{name}.")
        if isinstance(value, list) and value and isinstance(value[0], dict):
            yield from keys_of(value[0], f"{name}[].")


COUNTED = dict.fromkeys(("num_images", "num_videos", "num_recordings", "num_drafts"), 1)


def all_metrics() -> dict[str, Any]:
    """Metrics of jobs that have everything: two replicas of two stages, with experts, media and compiled kernels."""
    stages = [{"stage": stage, "busy_us": 1, "first_us": 1, "last_us": 3, "spans": [[1, 1, 2]]} for stage in (0, 1)]
    common = {
        "peak_memory_bytes": 1,
        "stages": stages,
        "expert_loads": [{"0": [1, 0]}],
        "thread_waits": [{"waited_s": 0.5, "num_lost": 1}],
        "computed_s": 1.0,
        "encode_s": 0.5,
        "replica": {"rows": 1, "output_tokens": 1, "busy_s": 1.0},
        "media_wait_s": 0.5,
        "counters": asdict(SchedulerCounters(**COUNTED, num_drafts_by_position=[1])),
        "times": dict.fromkeys(("schedule_s", "lockstep_s", "execute_s", "apply_s"), 1.0),
    }
    metrics = job_metrics(JobCounts(), [json.dumps(common).encode()] * 2)
    return metrics | dict.fromkeys(keys_that_the_job_adds(), 1.0)


def keys_that_the_job_adds() -> list[str]:
    """Keys of `job_metrics(...) | {"load_s": ...}` in the job."""
    tree = ast.parse((PACKAGE / "frontends" / "batch" / "job.py").read_text(encoding="utf-8"))
    (added,) = [
        each.right
        for each in ast.walk(tree)
        if isinstance(each, ast.BinOp) and isinstance(each.left, ast.Call) and isinstance(each.right, ast.Dict)
    ]
    return [key.value for key in added.keys if isinstance(key, ast.Constant)]


def check_metrics(page: str) -> None:
    named = first_cells(section(page, "metrics.json"))
    assert len(named) == len(set(named))
    assert set(named) == set(keys_of(all_metrics()))


def test_every_metric_is_named_once():
    check_metrics(FILES)


@pytest.mark.parametrize(
    ("row", "broken"),
    [
        ("| `recomputed_tokens` |", "| recomputed_tokens |"),
        ("| `stages[].stage` |", "| `stages[].number` |"),
        ("| `wall_s` |", "| `wall_s` | s | |\n| `idle_s` |"),
    ],
    ids=["no row", "another name", "a row too many"],
)
def test_comparison_detects_other_metrics(row: str, broken: str):
    """Negative control: of the page's and of the code's."""
    assert FILES.count(row) == 1
    with pytest.raises(AssertionError):
        check_metrics(FILES.replace(row, broken))


def test_every_column_is_named_in_order():
    assert tuple(first_cells(section(FILES, "steps.csv"))) == StepStats._fields
    for column in StageSpan._fields:
        assert f"`{column}`" in section(FILES, "Run directory")


def test_every_file_of_a_run_is_named():
    rows = first_cells(section(FILES, "Run directory"))
    for pattern in RESERVED_NAMES:
        start = pattern.rstrip("*")
        assert any(name.startswith(start) for name in rows), pattern


def test_every_key_of_provenance_is_named(tmp_path: Path):
    manifest = {"config": {"seed": 0}, "starts": [{"layout": {}}]}
    manifest |= dict.fromkeys(("version", "config_hash", "answers", "overridden", "run", "shard"), "")
    write_provenance(tmp_path, manifest, {}, [])
    written = json.loads((tmp_path / "provenance.json").read_text())
    assert set(first_cells(section(FILES, "provenance.json"))) == set(written)


def test_every_prometheus_value_is_named():
    text = section(OPERATIONS, "Logs and metrics") + section(POOL_PROGRESS, "Prometheus")
    assert [name for name in prometheus._HELP if not re.search(rf"`(?:{prometheus._PREFIX})?{name}`", text)] == []


@cache
def raised_codes() -> dict[str, set[str]]:
    """Code -> modules that name it as the code of an error."""
    found: dict[str, set[str]] = {}
    names = re.compile(rf"\b({'|'.join(CODE_ARGUMENTS)})\(")
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for call in ast.walk(ast.parse(text)) if names.search(text) else ():
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
                continue
            position = CODE_ARGUMENTS.get(call.func.id, len(call.args))
            code = call.args[position] if position < len(call.args) else None
            if isinstance(code, ast.Constant) and isinstance(code.value, str):
                found.setdefault(code.value, set()).add(path.relative_to(PACKAGE).as_posix())
    return found


def row_codes() -> set[str]:
    ran = {outputs.NON_FINITE_LOGITS, outputs.NON_FINITE_VECTOR, outputs.GRAMMAR_FAILED}
    raised = {code for code, paths in raised_codes().items() if any("frontends/serve/" not in each for each in paths)}
    return raised | ran | source_codes() | {REJECTED, "duplicate_custom_id", "invalid_value"}


def source_codes() -> set[str]:
    """Codes that the reader of files makes for images and for audio alike."""
    kinds = re.findall(r'medium\.error\("(\w+)"', (PACKAGE / "media" / "source.py").read_text(encoding="utf-8"))
    assert kinds
    media = (source.IMAGE, source.VIDEO, source.AUDIO)
    codes = {f"{medium.name}_{kind}" for medium in media for kind in kinds}
    return codes | {f"{medium.plural}_unsupported" for medium in media}


def check_row_codes(page: str) -> None:
    named = first_cells(section(page, "Error rows"))
    assert len(named) == len(set(named))
    assert set(named) == row_codes()


def test_every_code_of_error_rows_is_named_once():
    check_row_codes(ERRORS)
    documented = re.findall(r"[a-z]+(?:_[a-z0-9]+)+", (RowError.__doc__ or "").split("Codes:")[1])
    assert set(documented) - {"snake_case"} == row_codes()


def test_comparison_detects_other_codes():
    """Negative control."""
    for row, broken in (("| `invalid_utf8` |", "| invalid_utf8 |"), ("| `invalid_utf8` |", "| `invalid_utf16` |")):
        with pytest.raises(AssertionError):
            check_row_codes(ERRORS.replace(row, broken))


def test_every_status_of_the_server_has_its_codes():
    rows = re.findall(r"(?m)^\| (\d{3}) \| ([^|]+) \|", section(ERRORS, "HTTP statuses"))
    named = {(int(status), code) for status, codes in rows for code in re.findall(r"`([a-z_]+)`", codes)}
    expected = {(status, code) for code, status in openai_stream._STATUSES.items()}
    expected |= {(status, code) for status, (code, _) in http_protocol._MESSAGES.items()}
    assert named == expected
    assert set(raised_codes()) <= row_codes() | {code for _, code in expected}


def test_every_exception_is_named():
    classes = [name for name, each in inspect.getmembers(errors, inspect.isclass) if each.__module__ == errors.__name__]
    assert len(classes) > 20
    assert set(first_cells(section(ERRORS, "Exceptions"))) | {"SpmdError"} == set(classes)
