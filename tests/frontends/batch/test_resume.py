"""A resumed job keeps finished rows and rejects changed settings. One rank, in this process."""

import json
import os
import shutil
import textwrap
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from cut_jobs import Ended, end_after
from jobs_of_rows import job_config, read_rows, run_here, write_rows
from ranks import REPOSITORY, CompletedRanks, run_forked, run_script
from tools_main import tool
from waiting import LIMIT_S, wait_until

import spmd_worker.frontends.batch.job as job_module
from spmd_worker.base.config.parallel import ParallelConfig
from spmd_worker.base.config.schema import (
    CacheConfig,
    ModelOptions,
    RunConfig,
    SamplingConfig,
    SchedulerConfig,
)
from spmd_worker.base.errors import ConfigError, JobError
from spmd_worker.base.numerical_policy import NumericalPolicy, Region
from spmd_worker.engine.engine import Engine
from spmd_worker.engine.requests import Requests
from spmd_worker.frontends.batch import answer_rows, job_rows, open_job
from spmd_worker.frontends.batch.job_rows import JobInput
from spmd_worker.frontends.batch.run_dir import journal as journal_module
from spmd_worker.frontends.batch.run_dir import manifest as manifest_module
from spmd_worker.frontends.batch.run_dir.job_files import MANIFEST_NAME
from spmd_worker.frontends.batch.run_dir.journal import JOURNAL_NAME, RowJournal, read_journal
from spmd_worker.frontends.batch.run_dir.manifest import write_manifest
from spmd_worker.frontends.batch.run_dir.run_lock import RunLock
from spmd_worker.frontends.tools import collect as collect_module
from spmd_worker.frontends.tools.doctor import examine
from spmd_worker.frontends.tools.verify import main as verify
from spmd_worker.worker.backends.cpu import CpuDevice

MODEL = REPOSITORY / "scripts" / "demo" / "model"
NUM_ROWS = 40
NUM_DONE = 10

config_of = partial(job_config, model=MODEL, sampling={"max_tokens": 8, "temperature": 0.9}, commit_rows=1)


def write_input(folder: Path) -> None:
    rows = [{"prompt": f"add {index} 7 =", "custom_id": f"row {index}"} for index in range(NUM_ROWS)]
    rows[5] = {"prompt": 7}
    rows[9] = {"prompt": "again", "custom_id": "row 3"}
    write_rows(folder, rows)


def run(config: RunConfig) -> dict[str, Any]:
    run_here(config)
    metrics: dict[str, Any] = json.loads((run_dir(config) / "metrics.json").read_text())
    return metrics


def run_dir(config: RunConfig) -> Path:
    return Path(f"{config.job.output}.run")


def ended_job(folder: Path, num_rows: int, **job: Any) -> RunConfig:
    write_input(folder)
    config = config_of(folder, **job)
    with pytest.MonkeyPatch.context() as monkeypatch:
        end_after(monkeypatch, num_rows)
        with pytest.raises(Ended):
            run(config)
    return config


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, dict[str, Any]]:
    """The output and the metrics of an uninterrupted job."""
    folder = tmp_path_factory.mktemp("whole")
    write_input(folder)
    metrics = run(config_of(folder))
    return (folder / "out.jsonl").read_bytes(), metrics


def test_ended_run_is_never_resumed_from_its_leftovers(tmp_path: Path):
    """Killed at its end, it left its journal; the next run, of another seed, was killed when it had its manifest."""
    write_input(tmp_path)
    config = config_of(tmp_path, max_rows=4)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(open_job, "remove_journal", lambda folder: None)
        run(config)
    assert (run_dir(config) / JOURNAL_NAME).exists()
    config, write = replace(config, seed=1), open_job.write_manifest

    def write_and_end(*arguments: Any) -> None:
        write(*arguments)
        raise Ended

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(open_job, "write_manifest", write_and_end)
        with pytest.raises(Ended):
            run(config)
    assert run(config)["resumed_rows"] == 0


def test_rejected_output_names_the_running_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The check of the output emptied the file that names the job."""
    write_input(tmp_path)

    def look(*_: Any) -> None:
        with pytest.raises(ConfigError) as caught, RunLock(tmp_path / "new", tmp_path / "out.jsonl"):
            pass
        assert f" is in use by a running job (process {os.getpid()}, started " in str(caught.value)
        raise Ended

    monkeypatch.setattr(open_job, "write_manifest", look)
    with pytest.raises(Ended):
        run(config_of(tmp_path))


@pytest.mark.gate("7")
@pytest.mark.parametrize("num_rows", [1, 7, 20, NUM_ROWS])
def test_interrupted_job_resumes_without_repeating_a_row(
    tmp_path: Path, whole: tuple[bytes, dict[str, Any]], num_rows: int, monkeypatch: pytest.MonkeyPatch
):
    """The output has the same bytes."""
    config = ended_job(tmp_path, num_rows)
    assert not (tmp_path / "out.jsonl").exists()
    asked: list[str | None] = []
    admit = Requests.admit

    def noting(requests: Requests, *arguments: Any, **named: Any) -> Any:
        asked.append(named["custom_id"])
        return admit(requests, *arguments, **named)

    monkeypatch.setattr(Requests, "admit", noting)
    metrics = run(config)
    output, expected = whole
    assert (tmp_path / "out.jsonl").read_bytes() == output
    assert metrics["resumed_rows"] == num_rows
    for key in ("rows", "error_rows", "error_codes", "prompt_tokens", "output_tokens"):
        assert metrics[key] == expected[key], key
    # Two of the rows are none.
    assert NUM_ROWS - num_rows - 2 <= len(asked) <= NUM_ROWS - num_rows


def test_job_may_be_interrupted_several_times(tmp_path: Path, whole: tuple[bytes, dict[str, Any]]):
    for num_rows in (3, 4, 11, 30):
        config = ended_job(tmp_path, num_rows)
    assert run(config)["resumed_rows"] == 30
    assert (tmp_path / "out.jsonl").read_bytes() == whole[0]


def test_job_interrupted_in_shutdown_computes_nothing_again(
    tmp_path: Path, whole: tuple[bytes, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
):
    """Its output is complete, but it has said that the same command goes on."""
    write_input(tmp_path)
    config, shutdown = config_of(tmp_path), Engine.shutdown

    def shutdown_and_interrupt(engine: Engine) -> None:
        shutdown(engine)
        raise KeyboardInterrupt

    with monkeypatch.context() as interrupted:
        interrupted.setattr(Engine, "shutdown", shutdown_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(config)
    assert run(config)["resumed_rows"] == NUM_ROWS
    assert (tmp_path / "out.jsonl").read_bytes() == whole[0]
    # The control: that start has ended, and another computes everything.
    assert run(config)["resumed_rows"] == 0


def test_ended_run_keeps_no_journal_and_starts_over(tmp_path: Path):
    write_input(tmp_path)
    for _ in range(2):
        assert run(config_of(tmp_path))["resumed_rows"] == 0
        names = sorted(path.name for path in (tmp_path / "out.jsonl.run").iterdir())
        assert names == ["lock", "manifest.json", "metrics.json", "provenance.json", "steps.csv"]


def test_failed_job_leaves_the_former_provenance(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Regression: a start over an ended run removed it, and the former output stood without."""
    # Both start within one second, which is all that tells their `starts` apart.
    monkeypatch.setattr(manifest_module.time, "strftime", lambda *_: "2026-01-01T00:00:00+0000")
    write_input(tmp_path)
    config, provenance = config_of(tmp_path), tmp_path / "out.jsonl.run" / "provenance.json"
    run(config)
    before = provenance.read_bytes()
    ended_job(tmp_path, 5)
    assert json.loads(before)["output"]["sha256"] == sha256((tmp_path / "out.jsonl").read_bytes()).hexdigest()
    assert provenance.read_bytes() == before
    # It is not taken for that of the job which has not ended.
    assert verify(["--images", str(tmp_path / "out.jsonl.run")]) == 2
    assert "provenance.json is of an earlier job, and this one has not ended" in capsys.readouterr().err
    run(config)
    assert json.loads(provenance.read_bytes())["run"] != json.loads(before)["run"]
    assert verify(["--images", str(tmp_path / "out.jsonl.run")]) == 0


@pytest.mark.gate("seed", "sampling.temperature", "model.dtype")
@pytest.mark.guarantee("A changed job is refused, with the key")
@pytest.mark.parametrize(
    "change",
    [
        *("seed", "sampling.temperature", "job.max_rows", "model.dtype", "scheduler.policy", "cache.dtype"),
        pytest.param("model.quantization", marks=pytest.mark.matrix),
    ],
)
def test_changed_answer_settings_are_rejected(tmp_path: Path, change: str):
    config = ended_job(tmp_path, 5)
    changed = {
        "seed": replace(config, seed=1),
        "sampling.temperature": replace(config, sampling=SamplingConfig(max_tokens=8, temperature=0.5)),
        "job.max_rows": replace(config, job=replace(config.job, max_rows=30)),
        "model.dtype": replace(config, model=ModelOptions(path=str(MODEL), dtype="bfloat16")),
        "model.quantization": replace(config, model=ModelOptions(path=str(MODEL), quantization="int8")),
        # Rows with a priority are error rows without it.
        "cache.dtype": replace(config, cache=replace(config.cache, dtype="fp8")),
        "scheduler.policy": replace(config, scheduler=SchedulerConfig(policy="priority")),
    }[change]
    with pytest.raises(ConfigError, match=rf"^{change} is \S+, and \S+ .*job\.run_dir=.*job\.resume=force"):
        run(changed)
    # Nothing is lost by the refusal.
    assert run(config)["resumed_rows"] == 5


def test_run_without_rows_binds_no_later_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Regression: a job that failed before its first row, for a wrong setting, refused the corrected one."""
    write_input(tmp_path)
    config = config_of(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("spmd_worker.frontends.batch.job.start_engine", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(config)
    before = json.loads((run_dir(config) / MANIFEST_NAME).read_text())
    assert run(replace(config, seed=1, job=replace(config.job, max_rows=3)))["rows"] == 3
    manifest = json.loads((run_dir(config) / MANIFEST_NAME).read_text())
    assert (manifest["overridden"], manifest["run"], len(manifest["starts"])) == ([], before["run"], 1)


@pytest.mark.control("A changed job is refused, with the key")
def test_force_resumes_and_records_the_overridden_keys(tmp_path: Path):
    config = ended_job(tmp_path, 5)
    forced = replace(config, seed=1, job=replace(config.job, resume="force"))
    assert run(forced)["resumed_rows"] == 5
    manifest = json.loads((run_dir(config) / MANIFEST_NAME).read_text())
    assert manifest["overridden"] == [{"seed": [0, 1]}]


def test_layout_memory_and_batch_sizes_may_change(tmp_path: Path, whole: tuple[bytes, dict[str, Any]]):
    config = ended_job(tmp_path, 5)
    scheduler = replace(config.scheduler, max_num_seqs=3, max_num_batched_tokens=64)
    assert run(replace(config, cache=CacheConfig(num_blocks=32), scheduler=scheduler))["resumed_rows"] == 5
    assert (tmp_path / "out.jsonl").read_bytes() == whole[0]


def test_changed_input_is_rejected_also_on_standard_input(tmp_path: Path):
    config = ended_job(tmp_path, 5)
    rows = (tmp_path / "rows.jsonl").read_text()
    (tmp_path / "rows.jsonl").write_text(rows.replace('{"prompt": 7}', '{"prompt": 8}'))
    with pytest.raises(ConfigError, match=r"^job\.input is .*bytes.* 1 file, .*job\.run_dir="):
        run(config)
    forced = replace(config, job=replace(config.job, resume="force"))
    with pytest.raises(ConfigError, match="row 5"):
        run(forced)


def test_unfinished_run_is_rejected_with_resume_never(tmp_path: Path):
    config = ended_job(tmp_path, 5)
    with pytest.raises(ConfigError, match=r"^job\.run_dir=.* holds .*job\.resume=never"):
        run(replace(config, job=replace(config.job, resume="never")))


def test_second_job_is_kept_out_of_run_directory(tmp_path: Path):
    write_input(tmp_path)
    config = config_of(tmp_path)
    run_dir(config).mkdir()
    with (
        RunLock(run_dir(config), tmp_path / "other.jsonl"),
        pytest.raises(ConfigError, match=rf"^job\.run_dir=.* in use .*\(process {os.getpid()}, "),
    ):
        run(config)
    run(config)


def test_too_many_error_rows_fail_again_without_computing(tmp_path: Path):
    write_input(tmp_path)
    config = config_of(tmp_path, max_error_rows=1)
    for resumed_rows in (0, NUM_ROWS):
        with pytest.raises(JobError, match=r"^2 error rows .*job\.max_error_rows=1\b"):
            run(config)
        metrics = json.loads((run_dir(config) / "metrics.json").read_text())
        assert metrics["resumed_rows"] == resumed_rows


def test_journal_damage_is_reported_and_loses_nothing(tmp_path: Path):
    config = ended_job(tmp_path, 5)
    journal = run_dir(config) / JOURNAL_NAME
    journal.write_bytes(b"something else")
    with pytest.raises(ConfigError, match=r"not .*journal .*version: .*job\.run_dir"):
        run(config)
    assert journal.read_bytes() == b"something else"


def watch_idle_steps(monkeypatch: pytest.MonkeyPatch, action: Callable[[int], object]) -> None:
    """Idle steps return at once, and `action` gets the number of rows read."""
    made: list[JobInput] = []

    class Noted(JobInput):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            made.append(self)

    step = Engine.step

    def noting(engine: Engine) -> Any:
        if not made[0].keys:
            action(made[0].num_rows)
        return step(engine)

    monkeypatch.setattr(open_job, "JobInput", Noted)
    monkeypatch.setattr(answer_rows, "max_step_interval_s", lambda timeout_s: 0.0)
    monkeypatch.setattr(Engine, "step", noting)


def test_steps_run_while_finished_rows_are_skipped(
    tmp_path: Path, whole: tuple[bytes, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
):
    """The other ranks wait for them, and there may be millions of such rows."""
    config = ended_job(tmp_path, NUM_ROWS)
    monkeypatch.setattr(job_rows, "_MAX_SKIPPED_ROWS", 8)
    # Eight rows may take longer on a busy machine.
    monkeypatch.setattr(job_rows, "_MAX_SKIP_S", LIMIT_S)
    stepped_at: set[int] = set()
    watch_idle_steps(monkeypatch, stepped_at.add)
    assert run(config)["resumed_rows"] == NUM_ROWS
    assert stepped_at >= {8, 16, 24, 32, 40}
    assert (tmp_path / "out.jsonl").read_bytes() == whole[0]


def ended_job_of_a_stream(folder: Path) -> RunConfig:
    """Its first rows were answered."""
    threads = threading.enumerate()
    os.mkfifo(folder / "fifo")
    write_input(folder)
    path = folder / "rows.jsonl"
    thread = threading.Thread(target=(folder / "fifo").write_bytes, args=(path.read_bytes(),), daemon=True)
    thread.start()
    # One after another.
    config = replace(config_of(folder, input=str(folder / "fifo")), scheduler=SchedulerConfig(max_num_seqs=1))
    with pytest.MonkeyPatch.context() as monkeypatch:
        end_after(monkeypatch, NUM_DONE + 2)
        with pytest.raises(Ended):
            run(config)
    thread.join()
    # The thread that reads it would take rows of whoever writes next, until it has seen the end.
    reading = [each for each in threading.enumerate() if each.name == "spmd-input" and each not in threads]
    wait_until(lambda: not any(each.is_alive() for each in reading))
    return config


def write_in_two_parts(folder: Path, pause: Callable[[], object]) -> threading.Thread:
    """The stream again: rows that were answered, then after `pause` the others."""
    lines = (folder / "rows.jsonl").read_text().splitlines(True)

    def write() -> None:
        with (folder / "fifo").open("w") as fifo:
            fifo.write("".join(lines[:NUM_DONE]))
            fifo.flush()
            pause()
            fifo.write("".join(lines[NUM_DONE:]))

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    return thread


def test_steps_run_while_resumed_stream_is_silent(
    tmp_path: Path, whole: tuple[bytes, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
):
    config = ended_job_of_a_stream(tmp_path)
    has_stepped, in_time = threading.Event(), []
    watch_idle_steps(monkeypatch, lambda num_rows: has_stepped.set() if num_rows == NUM_DONE else None)
    # What is broken takes no step before more rows come.
    thread = write_in_two_parts(tmp_path, lambda: in_time.append(has_stepped.wait(LIMIT_S)))
    assert run(config)["resumed_rows"] == NUM_DONE + 2
    thread.join()
    assert in_time == [True]
    assert (tmp_path / "out.jsonl").read_bytes() == whole[0]


def go_on_with_a_silent_stream(folder: Path, layout: str) -> CompletedRanks:
    thread = write_in_two_parts(folder, lambda: time.sleep(21))
    arguments = [
        *(f"model.path={MODEL}", "device=cpu", "cache.num_blocks=64", "sampling.max_tokens=8"),
        *("sampling.temperature=0.9", "job.commit_rows=1", f"job.input={folder / 'fifo'}"),
        *(f"job.output={folder / 'out.jsonl'}", "executor.timeout_s=10", f"parallel.{layout}=2"),
    ]
    done = run_forked([REPOSITORY / "launch.py", *arguments], 2, timeout_s=240)
    thread.join(timeout=0 if done.returncode else None)
    return done


@pytest.mark.stress
def test_ranks_resume_stream_silent_beyond_the_timeout(tmp_path: Path, whole: tuple[bytes, dict[str, Any]]):
    """Both layouts at once: they wait."""
    folders = {layout: tmp_path / layout for layout in ("data_parallel_size", "tensor_parallel_size")}
    for folder in folders.values():
        folder.mkdir()
        ended_job_of_a_stream(folder)
    with ThreadPoolExecutor() as pool:
        started = {layout: pool.submit(go_on_with_a_silent_stream, folders[layout], layout) for layout in folders}
    for layout, job in started.items():
        assert job.result().returncode == 0, (layout, job.result().output)
        assert (folders[layout] / "out.jsonl").read_bytes() == whole[0], layout


def check_finished(text: str, whole: bytes) -> None:
    """Of 12 rows, their lines of the whole output, in its order."""
    lines = text.encode().splitlines(keepends=True)
    assert len(lines) == 12
    assert [line for line in whole.splitlines(keepends=True) if line in lines] == lines


@pytest.mark.guarantee("spmd-worker-collect prints what is finished, in order")
def test_finished_rows_are_readable_before_the_job_ends(tmp_path: Path, whole: tuple[bytes, dict[str, Any]]):
    config = ended_job(tmp_path, 12)
    script = ["-m", "spmd_worker.tools.collect", str(run_dir(config))]
    done = run_script(script, timeout_s=240).checked()
    check_finished(done.stdout, whole[0])
    assert done.stderr.startswith("12 rows are finished, the last of them is row ")
    run(config)
    done = run_script(script, timeout_s=240)
    assert (done.returncode, done.stdout) == (2, "")
    assert "the job has ended and its output is complete" in done.stderr


READ_WRONGLY: dict[str, Callable[[list[tuple[int, bytes]]], list[tuple[int, bytes]]]] = {
    "in another order": lambda rows: rows[::-1],
    "one twice and one not": lambda rows: [rows[0], *rows[:-1]],
    "one not": lambda rows: rows[1:],
    "one that is no row's": lambda rows: [*rows[:-1], (rows[-1][0], rows[-1][1].replace(b'"row ', b'"row -'))],
}


@pytest.mark.control("spmd-worker-collect prints what is finished, in order")
def test_finished_check_detects_wrongly_read_rows(
    tmp_path: Path,
    whole: tuple[bytes, dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    control,
):
    """Negative control."""
    folder, collect = run_dir(ended_job(tmp_path, 12)), tool("collect", capsys)
    check_finished(collect(folder)[1], whole[0])
    for how, read in READ_WRONGLY.items():
        monkeypatch.setattr(collect_module, "read_journal", lambda folder, read=read: read([*read_journal(folder)]))
        code, text, _ = collect(folder)
        assert code == 0, how
        with control():
            check_finished(text, whole[0])


@pytest.mark.control("Killed anywhere, the same command: the same bytes")
def test_resume_detects_records_written_before_their_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Negative control: a journal that writes in the other order, and ends in between."""
    write_input(tmp_path)
    config = config_of(tmp_path, commit_rows=4)
    write_all, held = journal_module._write_all, []

    def records_first(descriptor: int, data: bytes) -> None:
        is_header = data == journal_module._HEADER
        if is_header or len(held) == 1:
            write_all(descriptor, data)
        if not is_header:
            held.append(data)
        if len(held) > 1:
            raise Ended

    with monkeypatch.context() as planted:
        planted.setattr(journal_module, "_write_all", records_first)
        # Who is killed does not tidy up.
        planted.setattr(journal_module.os, "ftruncate", lambda *_: None)
        with pytest.raises(Ended):
            run(config)
    with pytest.raises(ConfigError, match=r"record 0 \(row \d+\) .*bytes 0 .*\d+ .*rows\.part"):
        run(config)


@pytest.mark.gate("2", "4")
@pytest.mark.parametrize("fails_at", [2, 3, 4, 7])
def test_failed_sync_ends_job_and_resume_completes(
    tmp_path: Path, whole: tuple[bytes, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, fails_at: int
):
    write_input(tmp_path)
    config = config_of(tmp_path)
    calls = [0]

    def sync(descriptor: int) -> None:
        calls[0] += 1
        if calls[0] == fails_at:
            raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(RowJournal.__init__, "__defaults__", (sync,))
        with pytest.raises(OSError, match="Input/output error"):
            run(config)
    assert not (tmp_path / "out.jsonl").exists()
    run(config)
    assert (tmp_path / "out.jsonl").read_bytes() == whole[0]


@pytest.mark.gate("manifest.json")
@pytest.mark.parametrize("file", ["manifest.json", ""])
def test_full_disk_ends_job_and_resume_completes(tmp_path: Path, whole: tuple[bytes, dict[str, Any]], file: str):
    """Limits the size of each file: the manifest; after the first row the lines, of which the last do not fit."""
    write_input(tmp_path)
    script = tmp_path / "on_a_small_disk.py"
    source = f"""
        import resource, signal, sys
        import launch
        from spmd_worker.frontends.batch.run_dir.journal import RowJournal
        def fill(num_bytes):
            resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        def append(*arguments):
            fill({len(whole[0]) - 200})
            real_append(*arguments)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        real_append, RowJournal.append = RowJournal.append, append
        if {bool(file)}:
            fill(1000)
        sys.exit(launch.main())
    """
    arguments = [
        *(f"model.path={MODEL}", "device=cpu", "cache.num_blocks=64", "sampling.max_tokens=8"),
        *("sampling.temperature=0.9", "job.commit_rows=1", f"job.input={tmp_path / 'rows.jsonl'}"),
        *(f"job.output={tmp_path / 'out.jsonl'}",),
    ]
    script.write_text(textwrap.dedent(source))
    done = run_script([script, *arguments], timeout_s=240)
    assert done.returncode == 1, done.output
    name = str(tmp_path / "out.jsonl.run" / file)
    # The file of standard error is full soon, too.
    assert f"error: {name}: File too large" in done.stderr
    assert not (tmp_path / "out.jsonl").exists()
    if not file:
        # It is a job of one rank: there was no record, and doctor said that it had been killed.
        lines, _ = examine(tmp_path / "out.jsonl.run")
        assert any(line.startswith("To blame: rank 0 raised OSError") and name in line for line in lines), lines
        assert any("Traceback" in line for line in lines)
    done = run_script([REPOSITORY / "launch.py", *arguments], timeout_s=240).checked()
    assert (tmp_path / "out.jsonl").read_bytes() == whole[0]


@pytest.mark.parametrize("place", ["a stream", "fewer rows are asked for"])
def test_input_with_fewer_rows_than_answered_is_rejected(tmp_path: Path, place: str):
    """With several replicas the job waited for ever, alone it ended in an AssertionError, or left rows out."""
    if place == "a stream":
        config = ended_job_of_a_stream(tmp_path)
        lines = (tmp_path / "rows.jsonl").read_bytes().splitlines(True)
        content = b"".join(lines[:4])
        threading.Thread(target=(tmp_path / "fifo").write_bytes, args=(content,), daemon=True).start()
    else:
        config = ended_job(tmp_path, 6)
        config = replace(config, job=replace(config.job, max_rows=4, resume="force"))
    with pytest.raises(ConfigError, match="has 4 rows now"):
        run(config)
    assert not (tmp_path / "out.jsonl").exists()


def test_job_resumes_only_with_the_same_arithmetic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Killed on one kind of machine and started again on another."""
    config = ended_job(tmp_path, 5)
    with monkeypatch.context() as there:
        there.setattr(CpuDevice, "arithmetic", lambda self, attention: "of another processor")
        expected = r"^arithmetic is \"of another processor; .*\", and \S.* in the run of .*job\.resume=force"
        with pytest.raises(ConfigError, match=expected):
            run(config)
        forced = replace(config, job=replace(config.job, resume="force"))
        assert run(forced)["resumed_rows"] == 5
    overridden = json.loads((run_dir(config) / MANIFEST_NAME).read_text())["overridden"]
    assert [*overridden[0]] == ["arithmetic"]


def test_job_resumes_only_with_the_same_numerical_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = ended_job(tmp_path, 5)
    other = NumericalPolicy({"norm": Region("of other sources", "1")})
    with monkeypatch.context() as there:
        there.setattr(Engine, "numerical_policy", lambda self: other)
        with pytest.raises(ConfigError, match=rf'^numerical policy is "{other.digest}", and \S.* in the run of '):
            run(config)
    assert run(config)["resumed_rows"] == 5
    manifest = json.loads((run_dir(config) / MANIFEST_NAME).read_text())
    assert manifest["numerical_policy"]["digest"] == manifest["answers"]["numerical policy"] != other.digest


def test_job_resumes_only_with_the_same_row_sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Refused before the model is loaded, in words: another order of this version, and that of a version before."""
    config = ended_job(tmp_path, 5)
    path = run_dir(config) / MANIFEST_NAME
    kept = path.read_bytes()
    whole = (run_dir(config) / JOURNAL_NAME).read_bytes()
    with monkeypatch.context() as unloaded:
        unloaded.setattr(job_module, "start_engine", lambda *_, **__: pytest.fail("loaded"))
        other = replace(config, parallel=ParallelConfig(max_leaves=2))
        expected = (
            r"^row-parallel sums are added in 2 leaves \(tensor_parallel_size 1 or 2\), and in 4 leaves "
            r"\(tensor_parallel_size 1, 2 or 4\) in the run of .* its parallel\.max_leaves, .*job\.resume=force"
        )
        with pytest.raises(ConfigError, match=expected):
            run(other)
        manifest = json.loads(kept)
        del manifest["checksum"], manifest["answers"]["row-parallel sums"]
        manifest["answers"]["version of the code"] = "of before"
        write_manifest(run_dir(config), manifest)
        with pytest.raises(
            ConfigError, match=r"a version that adds row-parallel sums in another order; .* in 4 leaves"
        ):
            run(config)
    assert (run_dir(config) / JOURNAL_NAME).read_bytes() == whole
    path.write_bytes(kept)
    assert run(replace(config, parallel=ParallelConfig(max_leaves=4)))["resumed_rows"] == 5


def test_model_name_in_answers_is_of_first_start(tmp_path: Path):
    model = tmp_path / "first"
    shutil.copytree(MODEL, model)
    row = {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": "add 1 2 =", "max_tokens": 3},
    }
    rows = "".join(json.dumps({**row, "custom_id": f"{index}"}) + "\n" for index in range(6))
    (tmp_path / "rows.jsonl").write_text(rows)
    config = replace(config_of(tmp_path), model=ModelOptions(path=str(model)))
    with pytest.MonkeyPatch.context() as monkeypatch:
        end_after(monkeypatch, 2)
        with pytest.raises(Ended):
            run(config)
    model.rename(tmp_path / "second")
    assert run(replace(config, model=ModelOptions(path=str(tmp_path / "second"))))["resumed_rows"] == 2
    answers = read_rows(tmp_path)
    assert {answer["response"]["body"]["model"] for answer in answers} == {"first"}
