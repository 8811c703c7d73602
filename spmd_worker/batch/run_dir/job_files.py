"""The places of a job: what it reads, what it writes, checked before anything is started."""

from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

from spmd_worker.batch.input.input_files import find_inputs, is_stream
from spmd_worker.batch.output.output_file import OutputFile
from spmd_worker.batch.run_dir.run_lock import RunLock, make_folder
from spmd_worker.config.schema import JobConfig
from spmd_worker.errors import ConfigError
from spmd_worker.files import partial_path

MANIFEST_NAME: Final = "manifest.json"
METRICS_NAME: Final = "metrics.json"
PROVENANCE_NAME: Final = "provenance.json"
OWN_NAMES: Final = (
    *("lock", "journal", "rows.part", MANIFEST_NAME, METRICS_NAME, PROVENANCE_NAME, "report.html", "timeline.json"),
    *("steps.csv", "stages.csv", "steps.log*", "records.*", "error.rank*", "stacks.rank*", "nccl_trace.rank*"),
    "*.partial",
)
"""What a job, and the report of it, makes in its run directory."""


def check_job(job: JobConfig) -> None:
    """Raise ConfigError unless there is something to read and somewhere to write: the same on every rank."""
    if not job.input:
        raise ConfigError("job.input is not set: give a JSONL or Parquet file of rows, or - for standard input")
    if not job.output:
        raise ConfigError("job.output is not set: give the file to write")


def run_dir_of(job: JobConfig) -> Path:
    """`job.run_dir`, else `<output>.run` beside the output."""
    return Path(job.run_dir) if job.run_dir else Path(f"{job.output}.run")


def own_files(job: JobConfig) -> Callable[[Path], bool]:
    """Tells the files that the job makes beside its output: a pattern for its input may match them too."""
    partial = partial_path(Path(job.output or "")).resolve()
    run_dir = run_dir_of(job).resolve()

    def is_own(path: Path) -> bool:
        resolved = path.resolve()
        is_made_here = resolved.parent == run_dir and any(fnmatch(path.name, name) for name in OWN_NAMES)
        return resolved == partial or is_made_here

    return is_own


def check_files(job: JobConfig) -> None:
    """Look at what is there, and change nothing; rank 0 only. Raises ConfigError now for what would otherwise fail when
    the rows are there.
    """
    output = Path(job.output or "")
    if output.exists() and not output.is_file():
        raise ConfigError(f"job.output={output} exists and is not a regular file: give another file to write")
    inputs = () if is_stream(job.input or "") else find_inputs(job.input or "", own_files(job))
    # A hard link of the input has a path of its own.
    if output.exists() and any(path.samefile(output) for path in inputs):
        raise ConfigError(
            f"job.output={job.output} is read too (job.input={job.input}), and would be replaced: give another file"
        )
    run_dir = run_dir_of(job)
    if job.resume == "never" and any((run_dir / name).exists() for name in (MANIFEST_NAME, METRICS_NAME)):
        raise ConfigError(
            f"job.run_dir={run_dir} holds a run already and job.resume=never: give another job.run_dir or remove it"
        )


def take_files(job: JobConfig) -> RunLock:
    """Make the folders and try the output; rank 0 only. Returns the job's locks, to be held while it runs.

    Raises ConfigError for what cannot be made or written; entered, the locks do too.
    """
    output = Path(job.output or "")
    make_folder("the folder of job.output", output.parent)
    return RunLock(run_dir_of(job), output)


def try_output(job: JobConfig) -> None:
    """Begin the output as it will be begun; with the locks held. Raises ConfigError."""
    path = Path(job.output or "")
    try:
        OutputFile.open(path).abandon()
    except OSError as error:
        raise ConfigError(f"job.output={path} cannot be written ({error.strerror}): give another file") from None
