"""Paths of a job's input and output, checked before anything is started."""

import glob
import os
import stat
import sys
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Final, TextIO

from spmd_worker.base.config.schema import JobConfig
from spmd_worker.base.errors import ConfigError
from spmd_worker.base.files import OwnFileError, own_file_fault, partial_path
from spmd_worker.frontends.batch.input.input_files import find_inputs, is_stream
from spmd_worker.frontends.batch.output_file import OutputFile
from spmd_worker.frontends.batch.run_dir.file_names import (
    Claim,
    Name,
    matches,
    refuse_in_folder,
    refuse_one_file_twice,
    refuse_own_names,
    refuse_read_and_written,
)
from spmd_worker.frontends.batch.run_dir.run_lock import RunLock, make_folder
from spmd_worker.resolved import ResolvedRun

MANIFEST_NAME: Final = "manifest.json"
METRICS_NAME: Final = "metrics.json"
PROVENANCE_NAME: Final = "provenance.json"
OWN_NAMES: Final = (
    *("lock", "journal", "rows.part", MANIFEST_NAME, METRICS_NAME, PROVENANCE_NAME, "report.html", "timeline.json"),
    *("steps.csv", "stages.csv", "steps.log*", "records.*", "error.rank*", "stacks.rank*", "nccl_trace.rank*"),
    "*.partial",
)
"""Files in the run directory made by a job and its report."""
_REPORT_NAMES: Final = ("report.html", "timeline.json")


def check_job(job: JobConfig) -> None:
    """Raise ConfigError unless input and output are set: the same on every rank."""
    if not job.input:
        raise ConfigError("job.input is not set: give a JSONL or Parquet file of rows, or - for standard input")
    if not job.output:
        raise ConfigError("job.output is not set: give the file to write")


def run_dir_of(job: JobConfig) -> Path:
    """`job.run_dir`, else `<output>.run` next to the output."""
    return Path(job.run_dir) if job.run_dir else Path(f"{Path(job.output or '')}.run")


def own_files(job: JobConfig) -> Callable[[Path], bool]:
    """Test for files that the job makes next to its output: a pattern for its input may match them too."""
    partial = partial_path(Path(job.output or "")).resolve()
    run_dir = run_dir_of(job).resolve()

    def is_own(path: Path) -> bool:
        resolved = path.resolve()
        is_made_here = resolved.parent == run_dir and any(fnmatch(path.name, name) for name in OWN_NAMES)
        return resolved == partial or is_made_here

    return is_own


def check_files(resolved: ResolvedRun) -> None:
    """Check what exists, and change nothing; rank 0 only. Raises ConfigError for anything that would otherwise fail
    when the rows are done, or overwrite another file.
    """
    job, run_dir = resolved.config.job, run_dir_of(resolved.config.job)
    files = [_written("job.output", job.output or "", "give another file")]
    if job.prometheus_file:
        files.append(_written("job.prometheus_file", job.prometheus_file, "give another file"))
    run = Name(f"job.run_dir={run_dir}", run_dir, "give another job.run_dir")
    if os.path.lexists(run_dir) and not run_dir.is_dir():
        raise ConfigError(f"{run.key} exists and is not a folder: give another")
    model = Name(f"model.path={resolved.config.model.path}", resolved.model_folder)
    refuse_in_folder([*files, Claim(run, (run_dir,))], model)
    inputs = () if is_stream(job.input or "") else find_inputs(job.input or "", own_files(job))
    # The names in a model folder may be links to files elsewhere.
    read = [*(Name(f"job.input={job.input}", path) for path in inputs), *_model_files(resolved)]
    refuse_read_and_written(files, [*read, *_other_inputs(resolved)])
    refuse_one_file_twice([*files, Claim(run, (run_dir,), is_folder=True)])
    streams = tuple(_standard_streams())
    for stream in streams:
        for claim in files:
            refuse_one_file_twice([claim, stream])
    refuse_own_names([*files, *streams], run, OWN_NAMES)
    _check_pattern(job)
    check_run_dir(run)
    if job.resume == "never" and any((run_dir / name).exists() for name in (MANIFEST_NAME, METRICS_NAME)):
        raise ConfigError(
            f"job.run_dir={run_dir} holds a run already and job.resume=never: give another job.run_dir or remove it"
        )


def _written(key: str, value: str, way_out: str) -> Claim:
    """A file and its partial file. Raises ConfigError if there can be no such file."""
    path = Path(value)
    if path.exists() and not path.is_file():
        raise ConfigError(f"{key}={value} exists and is not a regular file: {way_out} to write")
    if value.endswith(os.sep):
        raise ConfigError(f"{key}={value} names a folder: {way_out}")
    partial = partial_path(path)
    fault = own_file_fault(partial)
    if fault is not None:
        raise ConfigError(
            f"{key}={value} is written as {partial} before it is complete, which {fault}: remove that, or {way_out}"
        )
    return Claim(Name(f"{key}={value}", path, way_out), (path, partial))


def _model_files(resolved: ResolvedRun) -> Iterator[Name]:
    """Files in the model folder and its subfolders, where sentence-transformers has modules."""
    folder = resolved.model_folder
    for pattern in ("*", "*/*"):
        for path in folder.glob(pattern):
            if path.is_file():
                yield Name(f"{path.relative_to(folder)} of model.path={resolved.config.model.path}", path)


def _other_inputs(resolved: ResolvedRun) -> Iterator[Name]:
    placement = resolved.config.parallel.expert_placement
    yield Name(f"parallel.expert_placement={placement}", Path(placement))
    if is_stream(resolved.config.job.input or ""):
        yield from (claim.name for claim in _standard_stream("job.input=-", "standard input", sys.stdin))


def _standard_streams() -> Iterator[Claim]:
    """Files to which the shell redirects streams; a job's must not be among them."""
    yield from _standard_stream("standard output", "standard output", sys.stdout)
    yield from _standard_stream("standard error", "standard error", sys.stderr)


def _standard_stream(key: str, what: str, stream: TextIO | None) -> Iterator[Claim]:
    try:
        descriptor = stream.fileno() if stream is not None else -1
        is_file = descriptor >= 0 and stat.S_ISREG(os.fstat(descriptor).st_mode)
    except (OSError, ValueError):
        return
    if is_file:
        path = Path(f"/proc/self/fd/{descriptor}")
        yield Claim(Name(key, path, f"send {what} elsewhere"), (path,))


def _check_pattern(job: JobConfig) -> None:
    """Reject an overlap: a resumed run would read the first run's file."""
    pattern, name = job.input or "", job.prometheus_file
    if name and glob.has_magic(pattern) and matches(pattern, Path(name)):
        raise ConfigError(
            f"job.prometheus_file={name} matches job.input={pattern}, and would be read too: give another file"
        )


def check_report(run_dir: Path, page: Path, timeline: Path) -> None:
    """Raise ConfigError for a report that would overwrite other files of the run, OwnFileError for a link."""
    claims = [_written("--output", str(page), "give another file"), _written("--output", str(timeline), "give another")]
    for claim in claims:
        fault = own_file_fault(claim.name.path)
        if fault is not None:
            raise OwnFileError(claim.name.path, fault)
    refuse_one_file_twice(claims)
    others = [name for name in OWN_NAMES if name not in _REPORT_NAMES]
    refuse_own_names(claims, Name(f"RUN_DIR={run_dir}", run_dir), others)


def check_run_dir(run_dir: Name) -> None:
    """Raise ConfigError if something other than a regular file of the job has the name of one."""
    if not run_dir.path.is_dir():
        return
    for path in sorted(run_dir.path.iterdir()):
        fault = own_file_fault(path) if any(fnmatch(path.name, name) for name in OWN_NAMES) else None
        if fault is not None:
            raise ConfigError(
                f"{run_dir.key}: {path.name} {fault}, and what a job makes there are regular files with one link: "
                f"remove it, or {run_dir.way_out}"
            )


def take_files(job: JobConfig) -> RunLock:
    """Make the folders; rank 0 only. Returns the job's locks, to be held while it runs.

    Raises ConfigError for folders that cannot be made; so do the locks when entered.
    """
    output = Path(job.output or "")
    make_folder("the folder of job.output", output.parent)
    return RunLock(run_dir_of(job), output)


def try_output(job: JobConfig) -> None:
    """Begin the output as a test; with the locks held. Raises ConfigError."""
    path = Path(job.output or "")
    try:
        OutputFile.open(path).abandon()
    except OSError as error:
        raise ConfigError(f"job.output={path} cannot be written ({error.strerror}): give another file") from None
