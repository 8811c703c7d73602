"""The places of a job: what it reads, what it writes, checked before anything is started."""

from pathlib import Path
from typing import Final

from spmd_worker.batch.input.input_files import STANDARD_INPUT, find_inputs
from spmd_worker.batch.output.output_file import OutputFile
from spmd_worker.config.schema import JobConfig
from spmd_worker.errors import ConfigError

MANIFEST_NAME: Final = "manifest.json"
METRICS_NAME: Final = "metrics.json"
PROVENANCE_NAME: Final = "provenance.json"


def check_job(job: JobConfig) -> None:
    """Raise ConfigError unless there is something to read and somewhere to write: the same on every rank."""
    if not job.input:
        raise ConfigError("job.input is not set: give a JSONL or Parquet file of rows, or - for standard input")
    if not job.output:
        raise ConfigError("job.output is not set: give the file to write")


def run_dir_of(job: JobConfig) -> Path:
    """`job.run_dir`, else `<output>.run` beside the output."""
    return Path(job.run_dir) if job.run_dir else Path(f"{job.output}.run")


def prepare_files(job: JobConfig) -> Path:
    """Look at the input, make the run directory and try the output; rank 0 only. Returns the run directory.

    Raises ConfigError now for what would otherwise fail when the rows are there.
    """
    output = Path(job.output or "")
    if job.input != STANDARD_INPUT:
        found = [path for path in find_inputs(job.input or "") if path.resolve() == output.resolve()]
        if found:
            raise ConfigError(
                f"job.output={job.output} is read too (job.input={job.input}), and would be replaced: give another file"
            )
    run_dir = run_dir_of(job)
    if job.resume == "never" and any((run_dir / name).exists() for name in (MANIFEST_NAME, METRICS_NAME)):
        raise ConfigError(
            f"job.run_dir={run_dir} holds a run already and job.resume=never: give another job.run_dir or remove it"
        )
    _try_output(output)
    _make_folder("job.run_dir", run_dir)
    return run_dir


def _try_output(path: Path) -> None:
    _make_folder("the folder of job.output", path.parent)
    try:
        OutputFile.open(path).discard()
    except FileExistsError:
        raise ConfigError(f"job.output={path} exists and is not a regular file: give another file to write") from None
    except OSError as error:
        raise ConfigError(f"job.output={path} cannot be written ({error.strerror}): give another file") from None


def _make_folder(key: str, path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise ConfigError(f"{key}={path} exists and is not a folder: give another") from None
    except OSError as error:
        raise ConfigError(f"{key}={path} cannot be made ({error.strerror}): give another") from None
