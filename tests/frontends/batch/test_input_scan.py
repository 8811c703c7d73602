"""Counting and digesting of an input next to the job; streams are not counted."""

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ranks
from jobs_of_rows import job_config, read_rows, run_here
from waiting import LIMIT_S, wait_until

import spmd_worker.frontends.batch.media_window as media_window
import spmd_worker.frontends.batch.open_job as open_job
from spmd_worker.base.config.schema import RunConfig
from spmd_worker.base.errors import ConfigError
from spmd_worker.engine.requests import Requests
from spmd_worker.frontends.batch.input import stream_lines
from spmd_worker.frontends.batch.input.input_files import is_stream
from spmd_worker.frontends.batch.input.input_scan import InputScan
from spmd_worker.frontends.batch.input.row_reader import RowReader
from spmd_worker.frontends.batch.input.stream_lines import StreamLines
from spmd_worker.frontends.batch.job_rows import JobOutput
from spmd_worker.frontends.batch.open_job import InputCheck
from spmd_worker.frontends.batch.run_dir.job_files import is_job_file
from spmd_worker.frontends.batch.run_dir.manifest import NOT_READ

MODEL = ranks.REPOSITORY / "scripts" / "demo" / "model"
NUM_ROWS = 6


def config_of(tmp_path: Path, name: str = "rows.jsonl") -> RunConfig:
    return job_config(tmp_path, MODEL, input=str(tmp_path / name), commit_rows=1)


def content(number: int = 0) -> str:
    rows = [{"prompt": f"add {number} {index} =", "max_tokens": 3} for index in range(NUM_ROWS)]
    return "".join(json.dumps(row) + "\n" for row in rows)


def manifest(tmp_path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((tmp_path / "out.jsonl.run" / "manifest.json").read_text())
    return found


@pytest.fixture
def slow_scan(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """No scan ends before the event is set."""
    may_end, scan = threading.Event(), InputScan._scan

    def late(self: InputScan) -> Any:
        may_end.wait()
        return scan(self)

    monkeypatch.setattr(InputScan, "_scan", late)
    monkeypatch.setattr(open_job, "_SCAN_S", 0.01)
    yield may_end
    may_end.set()


def after_rows(monkeypatch: pytest.MonkeyPatch, num_rows: int, action: Callable[[], object]) -> None:
    add = JobOutput.add

    def counted(self: JobOutput, answer: Any) -> None:
        add(self, answer)
        if self.counts.rows == num_rows:
            action()

    monkeypatch.setattr(JobOutput, "add", counted)


def test_ended_job_leaves_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The scan's takes its time to leave."""
    scan = InputScan._run
    monkeypatch.setattr(InputScan, "_run", lambda self: (scan(self), time.sleep(0.3)))
    (tmp_path / "rows.jsonl").write_text(content())
    before = threading.enumerate()
    run_here(config_of(tmp_path))
    assert "spmd-scan" not in [thread.name for thread in threading.enumerate() if thread not in before]


def test_rows_are_answered_before_they_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow_scan: threading.Event
):
    (tmp_path / "rows.jsonl").write_text(content())
    seen: list[Any] = []

    def end_scan() -> None:
        seen.append((manifest(tmp_path)["answers"]["job.input"], manifest(tmp_path)["num_rows"]))
        slow_scan.set()

    after_rows(monkeypatch, NUM_ROWS, end_scan)
    run_here(config_of(tmp_path))
    assert seen == [(NOT_READ, None)]
    assert len(read_rows(tmp_path)) == NUM_ROWS
    assert manifest(tmp_path)["num_rows"] == NUM_ROWS
    assert "bytes in 1 file" in manifest(tmp_path)["answers"]["job.input"]


class Ended(BaseException):
    """As a kill would."""


def end_job(config: RunConfig, num_rows: int) -> None:
    def end() -> None:
        raise Ended

    with pytest.MonkeyPatch.context() as monkeypatch:
        after_rows(monkeypatch, num_rows, end)
        with pytest.raises(Ended):
            run_here(config)


@pytest.mark.parametrize("resume", ["auto", "force"])
def test_resumed_run_reads_no_row_before_input_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume: str):
    (tmp_path / "rows.jsonl").write_text(content())
    config = config_of(tmp_path)
    end_job(config, 3)
    # As long as before; the rows that were answered are as they were.
    (tmp_path / "rows.jsonl").write_text("".join([*content().splitlines(True)[:5], content(7).splitlines(True)[5]]))
    may_end, scan = threading.Event(), InputScan._scan
    monkeypatch.setattr(InputScan, "_scan", lambda self: (may_end.wait(), scan(self))[1])
    monkeypatch.setattr(open_job, "_SCAN_S", 0.01)
    sleep, admitted = media_window.time.sleep, []
    admit = Requests.admit

    def pause(seconds: float) -> None:
        assert not admitted
        may_end.set()
        sleep(seconds)

    def noting(self: Requests, *given: Any, **named: Any) -> Any:
        admitted.append(named["index"])
        may_end.set()
        return admit(self, *given, **named)

    monkeypatch.setattr(media_window.time, "sleep", pause)
    monkeypatch.setattr(Requests, "admit", noting)
    config = replace(config, job=replace(config.job, resume=resume))
    if resume == "force":
        run_here(config)
        assert admitted == [3, 4, 5]
        assert [list(each) for each in manifest(tmp_path)["overridden"]] == [["job.input"]]
        return
    with pytest.raises(ConfigError, match=r"^job\.input is .*bytes.* 1 file, .*job\.run_dir="):
        run_here(config)
    assert not admitted
    # Negative control: without the gate rows are admitted before.
    monkeypatch.setattr(InputCheck, "may_read", lambda self: True)
    may_end.clear()
    monkeypatch.setattr(media_window.time, "sleep", sleep)
    with pytest.raises(ConfigError, match=r"^job\.input is"):
        run_here(config)
    assert admitted


def test_run_ended_before_input_scan_can_resume(tmp_path: Path, slow_scan: threading.Event):
    (tmp_path / "rows.jsonl").write_text(content())
    config = config_of(tmp_path)
    end_job(config, 3)
    assert manifest(tmp_path)["answers"]["job.input"] == NOT_READ
    slow_scan.set()
    run_here(config)
    assert len(read_rows(tmp_path)) == NUM_ROWS
    assert json.loads((tmp_path / "out.jsonl.run" / "metrics.json").read_text())["resumed_rows"] == 3


def test_scan_error_ends_the_job(tmp_path: Path):
    (tmp_path / "rows.jsonl.gz").write_bytes(b"\x1f\x8b\x08\x00 and no more")
    with pytest.raises(OSError, match=r"rows\.jsonl\.gz .*damaged or truncated"):
        run_here(config_of(tmp_path, "rows.jsonl.gz"))
    assert not (tmp_path / "out.jsonl").exists()


JOIN = """
import sys, threading
from pathlib import Path
import spmd_worker.frontends.batch.job as job
from spmd_worker.frontends.batch.input.input_scan import InputScan
from spmd_worker.base.config.compose import compose_run
from spmd_worker.ranks.environment import read_rank_environment

joined, scan, lead = threading.Event(), InputScan._scan, job._lead

def late(self):
    joined.wait()
    return scan(self)

def lead_then(*given):
    joined.set()
    return lead(*given)

InputScan._scan, job._lead = late, lead_then
job.run_job(compose_run(Path(sys.argv[1]), sys.argv[2:]), read_rank_environment())
"""


@pytest.mark.gate("tensor_parallel_size")
@pytest.mark.parametrize(
    "layout", ["tensor_parallel_size", pytest.param("data_parallel_size", marks=pytest.mark.matrix)]
)
def test_joining_does_not_wait_for_reading(tmp_path: Path, layout: str):
    """The scan ends when the ranks have joined, and not before."""
    (tmp_path / "rows.jsonl").write_text(content())
    settings = [f"model.path={MODEL}", f"job.input={tmp_path}/rows.jsonl", f"job.output={tmp_path}/out.jsonl"]
    settings += [f"parallel.{layout}=2", "cache.num_blocks=64", "device=cpu"]
    ranks.run_ranks(JOIN, 2, 120, [ranks.REPOSITORY / "conf", *settings]).checked()
    assert len(read_rows(tmp_path)) == NUM_ROWS


# Streams.


def write_fifo(path: Path, data: bytes) -> threading.Thread:
    os.mkfifo(path)
    thread = threading.Thread(target=path.write_bytes, args=(data,), daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("name", ["rows", "rows.jsonl.gz"])
def test_fifo_is_read_once_like_standard_input(tmp_path: Path, name: str):
    data = content().encode()
    thread = write_fifo(tmp_path / name, gzip.compress(data) if name.endswith("gz") else data)
    run_here(config_of(tmp_path, name))
    thread.join()
    assert [answer["index"] for answer in read_rows(tmp_path)] == list(range(NUM_ROWS))
    assert manifest(tmp_path)["answers"]["job.input"] is None
    assert manifest(tmp_path)["num_rows"] is None


def test_stream_is_recognised_by_its_kind(tmp_path: Path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "link").symlink_to(tmp_path / "fifo")
    names = {"-": True, "fifo": True, "link": True, "file": False, "nothing": False, ".": False}
    assert {name: is_stream(name if name == "-" else str(tmp_path / name)) for name in names} == names
    assert not is_stream("/dev/zero"), "it has no end"
    with pytest.raises(ConfigError, match="is not a file"):
        RowReader.of("/dev/zero")


def test_parquet_file_through_fifo_is_rejected(tmp_path: Path):
    os.mkfifo(tmp_path / "rows.parquet")
    with pytest.raises(ConfigError, match=r"rows\.parquet .*FIFO.* regular file"):
        list(RowReader.of(str(tmp_path / "rows.parquet")))


@pytest.mark.parametrize("kind", ["file", "pipe"])
def test_device_of_standard_input_is_its_target(tmp_path: Path, kind: str):
    (tmp_path / "rows.jsonl").write_text(content())
    source = """
        import sys
        from spmd_worker.frontends.batch.input.row_reader import RowReader
        reader = RowReader.of("/dev/stdin")
        print(reader.paths is None, len(list(reader)))
        """
    script = tmp_path / "script.py"
    script.write_text("\n".join(line[8:] for line in source.splitlines()))
    given: dict[str, Any] = {"input": content()} if kind == "pipe" else {"stdin": (tmp_path / "rows.jsonl").open()}
    environment = {**os.environ, "PYTHONPATH": str(ranks.REPOSITORY)}
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=True, env=environment, **given
    )
    assert done.stdout.split() == [str(kind == "pipe"), str(NUM_ROWS)]


WAITS_IN_STANDARD_INPUT = """
import sys
import time
from spmd_worker.frontends.batch.input import row_reader
from spmd_worker.frontends.batch.input.stream_lines import StreamLines
if "control" in sys.argv:
    row_reader.open_stream = lambda name: sys.stdin.buffer
stream = StreamLines(iter(row_reader.RowReader.of("-")))
print(next(stream))
num_waiting = 0
while num_waiting < 10:  # looks in a row that found the thread where it reads
    time.sleep(0.01)
    names = {frame.f_code.co_name for frame in sys._current_frames().values()}
    num_waiting = num_waiting + 1 if "_bounded_lines" in names else 0
"""


@pytest.mark.gate("ours-0")
@pytest.mark.parametrize(("kind", "returncode"), [("ours", 0), ("control", -signal.SIGABRT)])
def test_process_ends_while_standard_input_is_open(kind: str, returncode: int):
    """Who was given `job.max_rows` rows waits for no end of the stream, and its thread waits on."""
    command = [sys.executable, "-c", WAITS_IN_STANDARD_INPUT, kind]
    environment = {**os.environ, "PYTHONPATH": str(ranks.REPOSITORY)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, text=True, **pipes) as process:
        assert process.stdin is not None
        process.stdin.write("{}\n")
        process.stdin.flush()
        # Not `communicate`, which closes the pipe.
        wait_until(lambda: process.poll() is not None)
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read() == "(0, b'{}')\n"
        assert process.returncode == returncode, process.stderr.read()


def one_by_one(monkeypatch: pytest.MonkeyPatch, path: Path) -> threading.Thread:
    """Writes a row into the FIFO when the one before has been answered, and not before."""
    answered = threading.Semaphore(0)
    for number in range(1, NUM_ROWS + 1):
        after_rows(monkeypatch, number, answered.release)

    def write() -> None:
        with path.open("w") as fifo:
            for line in content().splitlines(True):
                fifo.write(line)
                fifo.flush()
                # What is broken never answers: the stream ends then, and the test sees how few were.
                if not answered.acquire(timeout=LIMIT_S):
                    return

    os.mkfifo(path)
    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    return thread


def test_streamed_row_is_answered_before_next_arrives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    thread = one_by_one(monkeypatch, tmp_path / "rows")
    run_here(config_of(tmp_path, "rows"))
    thread.join()
    assert len(read_rows(tmp_path)) == NUM_ROWS


def test_max_rows_ends_job_before_stream_ends(tmp_path: Path):
    has_ended, in_time = threading.Event(), []

    def write() -> None:
        with (tmp_path / "rows").open("w") as fifo:
            fifo.write("".join(content().splitlines(True)[:2]))
            fifo.flush()
            # What is broken waits for the end of the stream, which comes then.
            in_time.append(has_ended.wait(LIMIT_S))

    os.mkfifo(tmp_path / "rows")
    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    config = config_of(tmp_path, "rows")
    run_here(replace(config, job=replace(config.job, max_rows=2)))
    has_ended.set()
    thread.join()
    assert in_time == [True]
    assert [answer["index"] for answer in read_rows(tmp_path)] == [0, 1]


def test_stream_is_read_ahead_up_to_limit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stream_lines, "_MOST_ROWS", 3)
    num_read = 0

    def lines() -> Iterator[tuple[int, bytes]]:
        nonlocal num_read
        for index in range(10):
            num_read += 1
            yield index, b"x"
        raise OSError("the pipe broke")

    stream = StreamLines(lines())
    assert num_read == 0, "nothing is read before it is asked for"
    wait_until(stream.is_ready)
    assert [next(stream) for _ in range(4)] == [(index, b"x") for index in range(4)]
    assert num_read <= 4 + 3
    assert [index for index, _ in zip(range(6), stream)] == list(range(6))
    with pytest.raises(OSError, match="the pipe broke"):
        next(stream)


CHANGES: dict[str, Callable[[Path], object]] = {
    "appended": lambda path: path.write_text(content() + content(1)),
    "another of the same size": lambda path: path.write_text(content(1)),
    "touched": lambda path: os.utime(path, ns=(0, 0)),
    "gone": Path.unlink,
}
"""Of an input while it is read; the last two leave it as it was read."""


@pytest.mark.gate("appended", "touched")
@pytest.mark.parametrize("change", CHANGES)
def test_input_changed_while_read_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str):
    path = tmp_path / "rows.jsonl"
    path.write_text(content())
    has_scanned, scan = threading.Event(), InputScan._run
    monkeypatch.setattr(InputScan, "_run", lambda self: (scan(self), has_scanned.set()))
    with monkeypatch.context() as during:
        after_rows(during, NUM_ROWS, lambda: has_scanned.wait(LIMIT_S) and CHANGES[change](path))
        if change in ("touched", "gone"):
            run_here(config_of(tmp_path))
        else:
            with pytest.raises(ConfigError, match=r"^job\.input=.*rows\.jsonl changed while .*read"):
                run_here(config_of(tmp_path))
            assert not (tmp_path / "out.jsonl").exists()
    if change not in ("touched", "gone"):
        path.write_text(content())
        run_here(config_of(tmp_path))
    assert len(read_rows(tmp_path)) == NUM_ROWS


@pytest.mark.gate("another of the same size")
@pytest.mark.parametrize("change", ["appended", "another of the same size", "touched"])
def test_input_changed_before_its_scan_is_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow_scan: threading.Event, change: str
):
    """The digest would be of other rows than were answered; of a file that was only touched nobody can know."""
    path = tmp_path / "rows.jsonl"
    path.write_text(content())
    with monkeypatch.context() as during:
        after_rows(during, NUM_ROWS, lambda: (CHANGES[change](path), slow_scan.set()))
        with pytest.raises(ConfigError, match=r"^job\.input=.*rows\.jsonl changed while .*read"):
            run_here(config_of(tmp_path))
    assert not (tmp_path / "out.jsonl").exists()
    path.write_text(content())
    run_here(config_of(tmp_path))
    assert len(read_rows(tmp_path)) == NUM_ROWS


def test_pattern_skips_files_the_job_writes(tmp_path: Path):
    """Rows of files after it would have other indexes, and with them other random streams."""
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "rows.jsonl").write_text(content())
    (folder / "z.jsonl").write_text(content(1))
    config, output = config_of(tmp_path), str(tmp_path / "out.jsonl.gz")
    job = replace(config.job, input=str(folder / "**"), output=output, run_dir=str(folder / "run"))
    run_here(replace(config, job=job))
    with gzip.open(tmp_path / "out.jsonl.gz", "rt") as stream:
        assert [json.loads(line)["error"] for line in stream] == [None] * 2 * NUM_ROWS


@pytest.mark.parametrize("name", ["rows.jsonl", "rows*"])
def test_rows_may_be_in_the_named_run_directory(tmp_path: Path, name: str):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "rows.jsonl").write_text(content())
    job = replace(config_of(tmp_path).job, input=str(tmp_path / "run" / name), run_dir=str(tmp_path / "run"))
    run_here(replace(config_of(tmp_path), job=job))
    assert len(read_rows(tmp_path)) == NUM_ROWS


def test_every_run_directory_file_counts_as_jobs_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "rows.jsonl").write_text(content())
    config = replace(config_of(tmp_path), job=replace(config_of(tmp_path).job, step_log=True))
    seen: list[Path] = []
    after_rows(monkeypatch, NUM_ROWS, lambda: seen.extend((tmp_path / "out.jsonl.run").iterdir()))
    run_here(config)
    seen += (tmp_path / "out.jsonl.run").iterdir()
    assert len({path.name for path in seen}) > 6
    assert [path.name for path in seen if not is_job_file(config.job, path)] == []


@pytest.mark.parametrize("output", [".", "/"])
def test_output_that_is_a_folder_is_rejected(tmp_path: Path, output: str):
    (tmp_path / "rows.jsonl").write_text(content())
    config = config_of(tmp_path)
    with pytest.raises(ConfigError, match=rf"^job\.output={re.escape(output)} .*not .*regular file"):
        run_here(replace(config, job=replace(config.job, output=output, run_dir=str(tmp_path / "run"))))


def test_input_the_job_would_overwrite_is_rejected(tmp_path: Path):
    path = tmp_path / "rows.jsonl.partial"
    path.write_text(content())
    config = config_of(tmp_path, "rows.jsonl.partial")
    with pytest.raises(ConfigError, match=r"rows\.jsonl\.partial matches only"):
        run_here(replace(config, job=replace(config.job, output=str(tmp_path / "rows.jsonl"))))
    assert path.read_text() == content()
