"""Report how a run ended, and which rank caused its failure; or the workers and the progress of a pool.

    python -m spmd_worker.tools.doctor RUN_DIR
    python -m spmd_worker.tools.doctor runs/demo
    python -m spmd_worker.tools.doctor POOL --watch 10

RUN_DIR is job.run_dir, by default <job.output>.run. Rebuilds the rank status of the terminal from the ranks' files:
error.rank<N>.json, stacks.rank<N>.txt, metrics.json and steps.csv; also for a run of which every process was killed,
or that is still running. POOL is job.pool; --watch repeats its report until the pool has ended.

Exits with 0 for a run, or a pool, that ended well and has its output, 1 for one that did not, 2 if that is unknown.
"""

import argparse
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from spmd_worker.base.errors import ConfigError, PoolError, StepStatsError
from spmd_worker.base.files import describe_os_error
from spmd_worker.base.liveness.error_file import STACKS_NAME, ErrorRecord, read_records
from spmd_worker.base.liveness.failure_diagnosis import status_lines
from spmd_worker.base.metrics.step_stats import STEP_STATS_NAME, StepStats, read_step_stats
from spmd_worker.frontends.batch.run_dir.job_files import METRICS_NAME
from spmd_worker.frontends.batch.run_dir.run_lock import LOCK_NAME
from spmd_worker.frontends.tools.pool_status import watch_pool
from spmd_worker.frontends.tools.pools import is_pool, open_pool
from spmd_worker.frontends.tools.program import (
    add_run_dir_or_pool,
    ends_without_its_reader,
    make_parser,
    print_error,
    program_name,
)
from spmd_worker.frontends.tools.run_dir import (
    NO_STEP,
    WHERE,
    Run,
    RunDirError,
    RunState,
    is_missing,
    look_at_run,
    read_metrics,
)

EXIT_WELL, EXIT_FAILED, EXIT_CANNOT_TELL = 0, 1, 2

MAX_INTERVAL_S = 86_400
RUNNING_S = 30.0
"""A run whose step statistics grew in the last seconds may still be running."""

FULL_BYTES = 64 * 1024
"""A disk with less free space is full: an error record has this size."""

ADVICE = (
    (
        "No space left on device",
        "The disk is full: free some space, or give job.output and job.run_dir on another disk, and start the same "
        "command again.",
    ),
    (
        " gone: ",
        "Its process was killed or crashed. Check the kernel's log (dmesg) or the container's events for the "
        "out-of-memory killer; to use less memory lower cache.num_blocks or cache.gpu_memory_utilization, and "
        "cache.swap_space_gib. Stacks of a crash are on the terminal.",
    ),
    (
        " silent: ",
        "Its process was stopped, or its machine is overloaded or unreachable. Check that machine and the network "
        "between the nodes.",
    ),
    (
        " stuck: ",
        "Its main thread made no progress; its stacks show where. Raise executor.timeout_s if the work is only slow.",
    ),
    (" busy ", "The others waited for it longer than executor.timeout_s: raise it if the work is only slow."),
    (" waiting for ", "Ranks waited for each other. Compare their stacks; raise executor.timeout_s if a step is slow."),
    ("every rank received ", "The launcher, the scheduler of the cluster or Ctrl-C ended it: start it again."),
    (" received SIG", "Not all ranks received it, or the job has one rank: start the job again."),
    ("MemoryError", "A rank ran out of memory: lower cache.num_blocks, or give it more memory."),
    ("out of memory", "A rank ran out of memory: lower cache.gpu_memory_utilization or cache.num_blocks."),
    (" raised ", "Its traceback is below; an exception within a step is a fault of the program: please report it."),
    (" failed while ", "It could not start, for the reason in that sentence."),
)
"""Advice by a part of the diagnosis. The first match applies."""


@ends_without_its_reader
def main(arguments: list[str] | None = None) -> int:
    parser = make_parser("doctor", __doc__)
    add_run_dir_or_pool(parser)
    parser.add_argument(
        "--watch", type=interval_s, metavar="SECONDS", help="report a pool again and again, until it has ended"
    )
    options = parser.parse_args(arguments)
    try:
        if is_pool(options.run_dir):
            return EXIT_WELL if watch_pool(open_pool(options.run_dir), options.watch) else EXIT_FAILED
        if options.watch is not None:
            parser.error(f"--watch is for a pool: {options.run_dir} is not one")
        lines, exit_code = examine(Path(options.run_dir))
    except (RunDirError, ConfigError, PoolError, OSError) as error:
        print_error("doctor", error)
        return EXIT_CANNOT_TELL
    print("\n".join(lines))
    return exit_code


def interval_s(text: str) -> float:
    """`--watch`. Raises ArgumentTypeError for what is no time between two reports."""
    with suppress(ValueError):
        if 0 < float(text) <= MAX_INTERVAL_S:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text} must be a number of seconds, above 0 and at most {MAX_INTERVAL_S:,}")


def examine(run_dir: Path) -> tuple[list[str], int]:
    """Lines to print, and the exit code. Raises RunDirError."""
    run = look_at_run(run_dir)
    try:
        records = read_records(run_dir)
        steps = read_steps(run_dir)
    except (OSError, ValueError) as error:
        raise RunDirError(f"cannot read the files of the run: {describe_os_error(error)}") from None
    metrics = read_metrics(run_dir)
    if records:
        return failure_lines(run_dir, records, steps), EXIT_FAILED
    if run.state is RunState.RUNNING:
        text = f"The run has not ended: {step_text(steps)}. Its process is running and holds {run_dir / LOCK_NAME}."
        return [text, *stacks_lines(run_dir)], EXIT_FAILED
    if run.state is RunState.COMPLETE:
        return [
            f"The output is complete, but the job failed: {row_counts(metrics or {})}.",
            "What to do: if those are more than job.max_error_rows, correct the rows or raise it. The same command "
            "started again computes no row twice.",
        ], EXIT_FAILED
    if run.state is RunState.ENDED and run.output and is_missing(run.output):
        return [
            f"The run ended well, but its output {run.output} is missing.",
            "What to do: restore it, or start the same command again, which computes it again.",
        ], EXIT_FAILED
    # A folder without a manifest is older than manifests.
    is_of_this_run = run.state is RunState.ENDED or (
        run.state is RunState.UNKNOWN and is_newer(run_dir / METRICS_NAME, run_dir / STEP_STATS_NAME)
    )
    if metrics is not None and is_of_this_run:
        codes = ", ".join(f"{count:,} {code}" for code, count in (metrics.get("error_codes") or {}).items())
        lines = [f"Error rows by code: {codes}."] if codes else []
        return [f"The run ended well: {row_counts(metrics)}.", *lines], EXIT_WELL
    if run.state is RunState.ENDED:
        # Merged shards have metrics of their own.
        return [f"The run ended well: its output {run.output} is complete."], EXIT_WELL
    last_records = sorted(run_dir.glob("records.rank*.log"))
    if last_records and is_newer(last_records[0], run_dir / STEP_STATS_NAME):
        return [
            "The run failed: its ranks diverged; the step and the field were reported on the terminal.",
            f"What to do: compare the last steps of two ranks with {program_name('replay')} --diff A B: "
            f"{', '.join(map(str, last_records))}",
        ], EXIT_FAILED
    if steps is None:
        if run.state is not RunState.UNKNOWN:
            return [f"The run did not end: {NO_STEP}. Start it again."], EXIT_FAILED
        raise RunDirError(f"{run_dir} has no step statistics, metrics or error records: {NO_STEP} ({WHERE})")
    return unfinished_lines(run, steps), EXIT_FAILED


def read_steps(run_dir: Path) -> list[StepStats] | None:
    """Step statistics; None if the file is missing or invalid."""
    try:
        return read_step_stats(run_dir / STEP_STATS_NAME)
    except (FileNotFoundError, StepStatsError):
        return None


def is_newer(path: Path, other: Path) -> bool:
    """Whether `path` was written after `other`, which may be missing."""
    if not path.exists() or not other.exists():
        return path.exists()
    return path.stat().st_mtime_ns >= other.stat().st_mtime_ns


def row_counts(metrics: dict[str, Any]) -> str:
    return f"{metrics.get('rows', 0):,} rows, {metrics.get('error_rows', 0):,} of them error rows"


def step_text(steps: list[StepStats] | None) -> str:
    return f"{len(steps):,} steps, the last is step {steps[-1].step}" if steps else "no complete step"


def failure_lines(run_dir: Path, records: list[ErrorRecord], steps: list[StepStats] | None) -> list[str]:
    """Lines of the first diagnosis, from the lowest rank's record that agrees with it, as on the terminal."""
    first = min(records, key=lambda each: (each.diagnosis is None, each.wall_s))
    record = next(each for each in records if ranks_to_blame(each) == ranks_to_blame(first))
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.wall_s))
    lines = [f"The run failed at {when}; rank status at the last heartbeats:"]
    lines += [f"  {line}" for line in status_lines(record.statuses)]
    if record.diagnosis is not None:
        lines += ["", f"To blame: {record.diagnosis.text}"]
        lines += [f"What to do: {text}" for part, text in ADVICE if part in record.diagnosis.text][:1]
    lines += [f"Steps recorded: {len(steps):,}, the last is step {steps[-1].step}."] if steps else []
    lines += stacks_lines(run_dir)
    found = [each for each in records if each.rank in (ranks_to_blame(record) or ()) and each.traceback]
    return lines + [line for each in found for line in ("", f"Rank {each.rank}:", each.traceback.rstrip())]


def stacks_lines(run_dir: Path) -> list[str]:
    paths = sorted(run_dir.glob(STACKS_NAME.format("*")))
    return [f"Stacks of ranks without progress: {', '.join(map(str, paths))}"] if paths else []


def ranks_to_blame(record: ErrorRecord) -> tuple[int, ...] | None:
    return None if record.diagnosis is None else record.diagnosis.ranks


def unfinished_lines(run: Run, steps: list[StepStats]) -> list[str]:
    run_dir, text = run.folder, step_text(steps)
    age_s = time.time() - (run_dir / STEP_STATS_NAME).stat().st_mtime
    disk = os.statvfs(run_dir)
    if disk.f_bavail * disk.f_frsize < FULL_BYTES:
        return [f"The run did not end: {text}, and no rank could write an error record.", f"What to do: {ADVICE[0][1]}"]
    # With a manifest, the lock has shown that no process holds it.
    if age_s < RUNNING_S and run.state is RunState.UNKNOWN:
        return [f"The run has not ended: {text}, recorded {age_s:.0f} s ago. It may still be running."]
    return [
        f"The run did not end: {text}, recorded {age_s:,.0f} s ago, and no rank wrote an error record.",
        "What to do: start it again. Ctrl-C interrupted it, or all processes were killed at once, for example by "
        "SIGKILL, the out-of-memory killer of a container or a machine that went down.",
        *stacks_lines(run_dir),
    ]
