"""The report tool writes page and timeline of a run directory, and reports missing files."""

import json
import sys
from pathlib import Path

import pytest
from json_files import edit
from tools_main import tool

from spmd_worker.base.metrics.step_stats import STEP_STATS_NAME, StepStats, StepStatsWriter
from spmd_worker.frontends.report.page import NO_CHARTS
from spmd_worker.frontends.tools.run_dir import WHERE

STEPS = [StepStats(step, step * 1_000, 10, 20, 600, 30, *[0] * 15) for step in range(1, 4)]
PROGRAM = "python -m spmd_worker.tools.report"


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]):
    """Run the script: (exit code, standard output, standard error)."""
    return tool("report", capsys)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "night"
    folder.mkdir(parents=True)
    with StepStatsWriter(folder / STEP_STATS_NAME) as writer:
        for stats in STEPS:
            writer.write(stats)
    (folder / "metrics.json").write_text(json.dumps({"rows": 7, "output_tokens": 21, "generate_s": 2.0}))
    return folder


def test_page_and_timeline_are_written_into_run_directory(report, run_dir: Path):
    code, out, err = report(run_dir)
    assert (code, err) == (0, "")
    assert "<h1>Run night</h1>" in (run_dir / "report.html").read_text(encoding="utf-8")
    events = json.loads((run_dir / "timeline.json").read_text())["traceEvents"]
    assert [event["name"] for event in events if event["name"].startswith("step ")] == ["step 1", "step 2", "step 3"]
    lines = out.splitlines()
    assert lines[:2] == [
        f"{run_dir / 'report.html'}: the report, for a browser",
        f"{run_dir / 'timeline.json'}: every step, for ui.perfetto.dev",
    ]
    assert "7 rows (no error rows)" in out


def test_page_has_tables_and_hint_without_matplotlib(report, run_dir: Path, monkeypatch: pytest.MonkeyPatch):
    report(run_dir)
    assert "<svg " in (run_dir / "report.html").read_text(encoding="utf-8")
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    code, out, err = report(run_dir)
    assert code == 0
    assert err == f"{NO_CHARTS}\n"
    assert json.loads(out.splitlines()[-1])["num_steps"] == 3
    page = (run_dir / "report.html").read_text(encoding="utf-8")
    assert "<svg " not in page
    assert "<h2>KV cache on the device: blocks in use</h2>" in page
    assert "pip install &#x27;spmd-worker[report]&#x27;" in page


def test_last_line_is_a_json_object(report, run_dir: Path):
    _, out, _ = report(run_dir)
    assert json.loads(out.splitlines()[-1]) == {
        "report": str(run_dir / "report.html"),
        "timeline": str(run_dir / "timeline.json"),
        "num_steps": 3,
        "wall_s": 0.00266,
        "num_blocks": 0,
        "max_blocks_used": 0,
        "max_host_blocks_used": 0,
        "preemptions_by_swap": 0,
        "preemptions_by_recompute": 0,
        "computed_tokens": 0,
        "cached_tokens": 0,
    }


def test_cached_inputs_of_an_encoder_are_named(report, run_dir: Path):
    """They are in the steps' numbers, and not in those of prompts."""
    edit(run_dir / "metrics.json", prompt_tokens=9, cached_prompt_tokens=0)
    with StepStatsWriter(run_dir / STEP_STATS_NAME) as writer:
        for stats in STEPS:
            writer.write(stats._replace(num_blocks_free=3, num_cached_tokens=16))
    assert "Inputs of the encoder were found in the prefix cache, and no tokens of prompts." in report(run_dir)[1]


def test_page_and_timeline_share_the_output_folder(report, run_dir: Path, tmp_path: Path):
    code, _, _ = report(run_dir, "--output", tmp_path / "night.html")
    assert code == 0
    assert {path.name for path in tmp_path.glob("*.*")} == {"night.html", "timeline.json"}
    assert {path.name for path in run_dir.iterdir()} == {"steps.csv", "metrics.json"}


def test_killed_run_is_reported_to_last_complete_line(report, run_dir: Path):
    (run_dir / "metrics.json").unlink()
    steps = run_dir / STEP_STATS_NAME
    steps.write_bytes(steps.read_bytes()[:-5])
    code, out, _ = report(run_dir)
    assert code == 0
    assert "the run was killed, or is still running" in out
    assert json.loads(out.splitlines()[-1])["num_steps"] == 2


def test_run_killed_before_first_step_is_reported(report, run_dir: Path):
    (run_dir / STEP_STATS_NAME).write_bytes(b"")
    code, out, _ = report(run_dir)
    assert code == 0
    assert json.loads(out.splitlines()[-1])["num_steps"] == 0
    assert "steps.csv has no steps" in (run_dir / "report.html").read_text(encoding="utf-8")


def test_missing_folder_is_named(report, tmp_path: Path):
    code, out, err = report(tmp_path / "nothing")
    assert (code, out) == (2, "")
    assert err == f"{PROGRAM}: {tmp_path / 'nothing'}: no such folder ({WHERE})\n"


def test_file_given_for_its_folder_is_reported(report, run_dir: Path):
    code, _, err = report(run_dir / STEP_STATS_NAME)
    assert code == 2
    assert "is a file: give its folder" in err


def test_folder_without_steps_says_whether_job_ran(report, run_dir: Path):
    (run_dir / STEP_STATS_NAME).unlink()
    code, _, err = report(run_dir)
    assert code == 2
    assert f"{run_dir} has no steps.csv: the job that wrote its metrics.json kept no step statistics" in err
    (run_dir / "metrics.json").unlink()
    code, _, err = report(run_dir)
    assert code == 2
    assert f"{run_dir} has no steps.csv: no job ran in this folder" in err


def test_damaged_files_are_named_with_line_and_remedy(report, run_dir: Path):
    (run_dir / "metrics.json").write_text('{"rows": ')
    code, _, err = report(run_dir)
    assert code == 2
    assert f"{run_dir / 'metrics.json'} is not JSON: " in err
    assert "remove it to see the steps without it" in err
    (run_dir / "metrics.json").write_text("[]")
    assert "must be a JSON object, not a list" in report(run_dir)[2]
    (run_dir / STEP_STATS_NAME).write_text("rows\n")
    assert f"{run_dir / STEP_STATS_NAME}: line 1 does not name the columns" in report(run_dir)[2]


def test_unwritable_page_is_reported_with_reason(report, run_dir: Path):
    code, _, err = report(run_dir, "--output", run_dir / "no folder" / "page.html")
    assert code == 2
    assert err == (
        f"{PROGRAM}: cannot write {run_dir / 'no folder' / 'page.html'}: No such file or directory: give --output FILE "
        f"in a folder where it can be written\n"
    )


def test_pool_that_cannot_be_read_is_not_called_unwritable(report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It was "cannot write" and the name of the pool."""
    monkeypatch.setattr("spmd_worker.base.remote_store._MAX_TRIES", 1)
    # A report waited ten minutes for the store, as worlds do.
    monkeypatch.setattr("spmd_worker.frontends.batch.pool.driver.time", None)
    code, out, err = report("http://me:planted@127.0.0.1:9/pool?planted", "--output", tmp_path / "a.html")
    assert (code, out) == (2, "")
    assert err.startswith(f"{PROGRAM}: cannot read the pool: http://127.0.0.1:9/pool")
    assert "planted" not in err


def test_page_is_not_written_to_a_remote_name(report, run_dir: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        report(run_dir, "--output", "s3://me:planted@bucket/a.html")
    assert "argument --output: s3://bucket/a.html is remote: give a local file" in capsys.readouterr().err
