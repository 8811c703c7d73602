"""Print the finished rows of a job that has not ended, in the order of the rows.

    python -m spmd_worker.tools.collect RUN_DIR > partial.jsonl
    python -m spmd_worker.tools.collect runs/demo | head

RUN_DIR is job.run_dir, by default <job.output>.run. Reads the journal of a job that was killed or is still running, and
changes nothing. Unfinished rows are left out; the number of finished ones is written to standard error. Exits with 2
without a journal, also for a job that has ended: its rows are in its output.
"""

import sys
from pathlib import Path

from spmd_worker.base.errors import JournalError
from spmd_worker.frontends.batch.run_dir.job_files import MANIFEST_NAME
from spmd_worker.frontends.batch.run_dir.journal import read_journal
from spmd_worker.frontends.tools.program import add_run_dir, ends_with_its_reader, make_parser, print_error
from spmd_worker.frontends.tools.run_dir import NO_JOB, RunDirError, RunState, check_folder, look_at_run

EXIT_DONE, EXIT_CANNOT_TELL = 0, 2


@ends_with_its_reader
def main(arguments: list[str] | None = None) -> int:
    parser = make_parser("collect", __doc__)
    add_run_dir(parser)
    run_dir = parser.parse_args(arguments).run_dir
    num_rows, last_row = 0, -1
    try:
        check_folder(run_dir)
        reject_ended(run_dir)
        for last_row, line in read_journal(run_dir):  # noqa: B007  # the last is reported below
            sys.stdout.buffer.write(line)
            num_rows += 1
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        raise
    except FileNotFoundError:
        has_job = (run_dir / MANIFEST_NAME).exists()
        print_error("collect", f"{run_dir}: {'the job has not finished a row yet' if has_job else NO_JOB}")
        return EXIT_CANNOT_TELL
    except (RunDirError, JournalError, OSError) as error:
        print_error("collect", error)
        return EXIT_CANNOT_TELL
    last = f", the last of them is row {last_row}" if num_rows else ""
    print(f"{num_rows} rows are finished{last}", file=sys.stderr)
    return EXIT_DONE


def reject_ended(run_dir: Path) -> None:
    """Raise RunDirError for a job whose rows are in its output. An unreadable manifest is only a warning."""
    try:
        run = look_at_run(run_dir)
    except RunDirError as error:
        print_error("collect", f"warning: {error}")
        return
    if run.state is RunState.ENDED:
        raise RunDirError(f"{run_dir}: the job has ended and its output is complete: read {run.output or 'job.output'}")
