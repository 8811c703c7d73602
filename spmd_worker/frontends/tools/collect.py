"""Print the finished rows of a job that has not ended, in the order of the rows; or merge the outputs of its shards.

    python -m spmd_worker.tools.collect RUN_DIR > partial.jsonl
    python -m spmd_worker.tools.collect runs/demo | head
    python -m spmd_worker.tools.collect --merge answers-*-of-00007.jsonl.run --output answers.jsonl

RUN_DIR is job.run_dir, by default <job.output>.run. Reads the journal of a job that was killed or is still running, and
changes nothing. Unfinished rows are left out; the number of finished ones is written to standard error. Exits with 2
without a journal, also for a job that has ended: its rows are in its output.

--merge writes one output of all shards of a job (job.shard), with the bytes of the job without shards, in the format of
its suffix, and <output>.run/provenance.json. Exits with 2, and changes no output, unless every shard has ended, all are
of one job, and their outputs are as they wrote them.
"""

import sys
from pathlib import Path

from spmd_worker.base.errors import ConfigError, JournalError
from spmd_worker.base.names import counted
from spmd_worker.base.remote_names import FilePath, file_path
from spmd_worker.base.standard_streams import has_reader, is_full
from spmd_worker.frontends.batch.merge.merge_shards import merge_shards
from spmd_worker.frontends.batch.run_dir.job_files import MANIFEST_NAME
from spmd_worker.frontends.batch.run_dir.journal import read_journal
from spmd_worker.frontends.tools.pools import without_job
from spmd_worker.frontends.tools.program import (
    ends_without_its_reader,
    local_folder,
    make_parser,
    output_name,
    print_error,
)
from spmd_worker.frontends.tools.run_dir import RunDirError, RunState, check_folder, is_missing, look_at_run

EXIT_DONE, EXIT_CANNOT_TELL = 0, 2


@ends_without_its_reader
def main(arguments: list[str] | None = None) -> int:
    parser = make_parser("collect", __doc__)
    help_text = "a run's directory, such as runs/demo"
    parser.add_argument("run_dir", type=local_folder, metavar="RUN_DIR", nargs="?", help=help_text)
    parser.add_argument(
        "--merge", type=local_folder, metavar="RUN_DIR", nargs="+", help="run directories of all shards of a job"
    )
    parser.add_argument("--output", type=output_name, metavar="FILE", help="the merged output")
    options = parser.parse_args(arguments)
    if (options.run_dir is None) == (options.merge is None) or (options.merge is None) != (options.output is None):
        parser.error("give RUN_DIR, or --merge RUN_DIR... --output FILE")
    return print_rows(options.run_dir) if options.merge is None else merge(options.merge, file_path(options.output))


def merge(folders: list[Path], output: FilePath) -> int:
    """Merge shards; returns the exit code."""
    try:
        found = merge_shards(folders, output)
    except (ConfigError, OSError) as error:
        print_error("collect", error)
        return EXIT_CANNOT_TELL
    rows, duplicates = found["output"]["lines"], found["duplicate_custom_ids"]
    text = f", {duplicates} of them with the custom_id of an earlier row" if duplicates else ""
    print(f"{counted(rows, 'row')} of {counted(len(folders), 'shard')}{text}", file=sys.stderr)
    for key in sorted({key for entry in found["overridden"] for key in entry}):
        print_error("collect", f"warning: a shard was resumed with another {key} (job.resume=force)")
    return EXIT_DONE


def print_rows(run_dir: Path) -> int:
    """Print a job's finished rows; returns the exit code."""
    num_rows, last_row = 0, -1
    try:
        check_folder(run_dir)
        reject_ended(run_dir)
        for last_row, line in read_journal(run_dir):  # noqa: B007  # the last is reported below
            sys.stdout.buffer.write(line)
            num_rows += 1
            if not has_reader():
                return EXIT_DONE
        sys.stdout.buffer.flush()
    except FileNotFoundError:
        has_job = (run_dir / MANIFEST_NAME).exists()
        print_error(
            "collect", f"{run_dir}: {'the job has not finished a row yet' if has_job else without_job(run_dir)}"
        )
        return EXIT_CANNOT_TELL
    except (RunDirError, JournalError, OSError) as error:
        if isinstance(error, OSError) and is_full(error):
            raise
        print_error("collect", error)
        return EXIT_CANNOT_TELL
    last = f", the last of them is row {last_row}" if num_rows else ""
    print(f"{counted(num_rows, 'row')} {'is' if num_rows == 1 else 'are'} finished{last}", file=sys.stderr)
    return EXIT_DONE


def reject_ended(run_dir: Path) -> None:
    """Raise RunDirError for a job whose rows are in its output. An unreadable manifest is only a warning."""
    try:
        run = look_at_run(run_dir)
    except RunDirError as error:
        print_error("collect", f"warning: {error}")
        return
    if run.state is RunState.ENDED and run.output and is_missing(run.output):
        raise RunDirError(
            f"{run_dir}: the job has ended and its output {run.output} is missing: restore it, or start the same "
            f"command again, which computes it again"
        )
    if run.state is RunState.ENDED:
        raise RunDirError(f"{run_dir}: the job has ended and its output is complete: read {run.output or 'job.output'}")
