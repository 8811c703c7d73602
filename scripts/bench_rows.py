"""Memory and time of a job by its number of rows, with everything of rank 0 but the engine.

    python scripts/bench_rows.py WORK [--rows 100000,1000000,10000000] [--source fifo|file|parts|s3]
                                 [--without-custom-ids] [--quick-parser]

WORK is a folder for the input, the run directory and the output. Rows come from a process that writes lines into a FIFO
(`fifo`), from a file, or from an object in moto's S3, which is served by another process (`s3`); with `parts` the input
is a file and the output in parts, which are written while rows are answered. Rows are parsed and checked by the job's
own input, and go through its journal into its output; 256 are in flight, and end in random order, with a line made by
hand. Each number of rows is a process: `answer_mb` and `output_mb` are what its resident memory grew by at most while
rows were answered, and until the output was complete, in MiB; `us_a_row` is its time on a core by rows (user and
system; of the writer of the FIFO and of the server: none). With `--quick-parser` a row is not parsed but made of its
custom_id: parsing takes most of the time, and no memory that stays. The last line is one JSON object.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

ROOT = Path(__file__).resolve().parents[1]
IN_FLIGHT = 256
S3_FOLDER = "s3://rows"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="a folder for what is made")
    parser.add_argument("--rows", default="100000,1000000,10000000", help="numbers of rows")
    parser.add_argument("--source", choices=("fifo", "file", "parts", "s3"), default="fifo")
    parser.add_argument("--without-custom-ids", action="store_true")
    parser.add_argument("--quick-parser", action="store_true")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--write", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write:
        write_rows(options.work, int(options.rows), has_ids=not options.without_custom_ids)
        return 0
    if options.serve:
        serve(options.work)
        return 0
    if options.measure:
        print(json.dumps(measure(options.work, int(options.rows), options.source, is_quick=options.quick_parser)))
        return 0
    options.work.mkdir(parents=True, exist_ok=True)
    found = [start(options, int(number)) for number in options.rows.split(",")]
    print(json.dumps({"source": options.source, "custom_ids": not options.without_custom_ids, "runs": found}))
    return 0


def start(options: argparse.Namespace, num_rows: int) -> dict[str, Any]:
    """One measurement, in a process of its own."""
    source = options.work / f"rows-{num_rows}.jsonl"
    source.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--rows", str(num_rows), "--source", options.source]
    flags = ["--without-custom-ids"] * options.without_custom_ids + ["--quick-parser"] * options.quick_parser
    if options.source == "fifo":
        os.mkfifo(source)
    with subprocess.Popen([*command, *flags, "--write", str(source)]) as writer:
        if options.source != "fifo":
            writer.wait()
        with served(source) if options.source == "s3" else nullcontext(dict(os.environ)) as environment:
            measured = [*command, *flags, "--measure", str(source)]
            done = subprocess.run(measured, stdout=subprocess.PIPE, env=environment, check=False)
        if done.returncode:
            # It waits for a reader.
            writer.kill()
    source.unlink()
    done.check_returncode()
    found: dict[str, Any] = json.loads(done.stdout)
    print(json.dumps(found), flush=True)
    return found


@contextmanager
def served(source: Path) -> Iterator[dict[str, str]]:
    """The environment in which a file is an object in S3, served by another process."""
    command = [sys.executable, __file__, "--serve", str(source)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        yield os.environ | json.loads(server.stdout.readline())
        server.stdin.close()


def serve(source: Path) -> None:
    """Serve a file as an object of that name until standard input ends; the first line is the environment's JSON."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]
    import s3_server

    server = s3_server.S3Server()
    server.start()
    os.environ.update(server.environment())
    from spmd_worker.base.remote_store import open_store

    files = open_store(f"{S3_FOLDER}/{source.name}").fs
    files.call_s3("create_bucket", Bucket=S3_FOLDER.rpartition("/")[2])
    # One part at a time: the server is one thread of Python, and its own client would time out.
    files.put_file(str(source), f"{S3_FOLDER}/{source.name}", max_concurrency=1)
    print(json.dumps(server.environment()), flush=True)
    sys.stdin.read()


def write_rows(path: Path, num_rows: int, *, has_ids: bool) -> None:
    with open(path, "w", buffering=1 << 20) as file:
        for row in range(num_rows):
            name = f'"custom_id": "request {row}", ' if has_ids else ""
            file.write(f'{{{name}"prompt": "The {row % 997}th question of a list of many, as short as they are."}}\n')


def reset_peak() -> float:
    """Resident MiB now, from which the peak is counted on."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_mb()


def peak_mb() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def measure(source: Path, num_rows: int, kind: str, *, is_quick: bool) -> dict[str, Any]:
    sys.path.insert(0, str(ROOT))
    from spmd_worker.base.config.schema import JobConfig, RowLimits
    from spmd_worker.frontends.batch.input.input_scan import InputScan
    from spmd_worker.frontends.batch.input.row_reader import RowReader
    from spmd_worker.frontends.batch.input_check import InputCheck
    from spmd_worker.frontends.batch.open_job import OpenRun
    from spmd_worker.frontends.batch.run_dir.journal import RowJournal, remove_journal
    from spmd_worker.frontends.batch.run_dir.manifest import NOT_READ
    from spmd_worker.replica.sequence.sampling_params import SamplingParams

    if is_quick:
        parse_quickly()
    name = "part-*.jsonl" if kind == "parts" else "answers.jsonl"
    run_dir, output = source.with_suffix(".run"), source.with_suffix(".out") / name
    run_dir.mkdir(exist_ok=True)
    output.parent.mkdir(exist_ok=True)
    remove_journal(run_dir)
    address = f"{S3_FOLDER}/{source.name}" if kind == "s3" else str(source)
    job = JobConfig(input=address, output=str(output), run_dir=str(run_dir))
    reader = RowReader.of(address)
    no_engine = SimpleNamespace(
        config=SimpleNamespace(model=SimpleNamespace(adapters=None, prompt_adapters=None), limits=RowLimits()),
        default_sampling=SamplingParams(),
        limits=SimpleNamespace(pooling=None),
        times=SimpleNamespace(heartbeat=SimpleNamespace(enter=lambda doing: None)),
    )
    manifest = {"num_rows": None, "shard": None, "answers": {"job.input": NOT_READ}}
    check = InputCheck(job, reader, InputScan(reader, None), run_dir, manifest, is_resumed=False, is_ranged=False)
    # Without syncs, whose time is the disk's.
    journal = RowJournal(run_dir, job.commit_rows, job.commit_s, lambda descriptor: None)
    run = OpenRun(job, cast(Any, SimpleNamespace(note=lambda doing: None)), journal, manifest, check)
    rows, answers = run.open_rows(cast(Any, no_engine))
    start_mb, start_s, start_cpu_s = reset_peak(), time.perf_counter(), time.process_time()
    answer_all(rows, answers)
    run.commit()
    answer_mb, answer_cpu_s = peak_mb(), time.process_time()
    written = run.write_output(cast(Any, no_engine))
    output_mb, end_cpu_s = peak_mb(), time.process_time()
    assert written.digest["lines"] == num_rows, written
    run.close()
    journal.close()
    remove_journal(run_dir)
    return {
        "rows": num_rows,
        "answer_mb": round(answer_mb - start_mb, 1),
        "output_mb": round(output_mb - start_mb, 1),
        "us_a_row": round((answer_cpu_s - start_cpu_s) / num_rows * 1e6, 1),
        "output_us_a_row": round((end_cpu_s - answer_cpu_s) / num_rows * 1e6, 1),
        "wall_s": round(time.perf_counter() - start_s, 1),
        "sha256": written.digest["sha256"],
    }


def parse_quickly() -> None:
    """Replace the parser of rows, which are all alike."""
    from spmd_worker.frontends.batch import job_rows
    from spmd_worker.frontends.openai.row_parser import parse_row
    from spmd_worker.replica.sequence.sampling_params import SamplingParams

    like: Any = parse_row(0, b'{"prompt": "x"}', SamplingParams())

    def parse(index: int, line: bytes, *_: Any) -> Any:
        row = object.__new__(type(like))
        for name in like.__dataclass_fields__:
            object.__setattr__(row, name, getattr(like, name))
        object.__setattr__(row, "index", index)
        has_id = line.startswith(b'{"custom_id')
        object.__setattr__(row, "custom_id", line[15 : line.index(b'"', 15)].decode() if has_id else None)
        return row

    cast(Any, job_rows).parse_row = parse


def answer_all(rows: Any, answers: Any) -> None:
    """Answer every row as an engine would, with 256 rows in flight."""
    from spmd_worker.frontends.openai.row_writer import RowAnswer

    chosen, flying = random.Random(1), []
    while not rows.has_ended:
        found = rows.next_row()
        if found is None:
            time.sleep(0.0005)
            answers.show(0)
            continue
        flying.append(found.row)
        if len(flying) == IN_FLIGHT:
            place = chosen.randrange(IN_FLIGHT)
            flying[place], flying[-1] = flying[-1], flying[place]
            answers.add(answer_of(flying.pop(), RowAnswer))
    for row in flying:
        answers.add(answer_of(row, RowAnswer))


def answer_of(row: Any, make: Any) -> Any:
    line = (
        f'{{"custom_id": {json.dumps(row.custom_id)}, "index": {row.index}, "outputs": [{{"index": 0, "text": " answer '
        f'{row.index % 991}", "token_ids": [{row.index % 991}], "finish_reason": "length", "stop_reason": null}}], '
        f'"usage": {{"prompt_tokens": 12, "completion_tokens": 1, "total_tokens": 13}}, "error": null}}\n'
    )
    return make(row.index, line.encode(), None, 12, 0, 1)


if __name__ == "__main__":
    sys.exit(main())
