"""Paths of a job's input and output, checked before anything is started."""

import contextlib
import errno
import glob
import logging
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch, fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Final, TextIO

from spmd_worker.base.config.schema import JobConfig
from spmd_worker.base.errors import ConfigError
from spmd_worker.base.files import JobFileError, job_file_fault, name_pattern, partial_path
from spmd_worker.base.remote_names import (
    FilePath,
    RemotePath,
    check_outlasting,
    check_writable,
    file_path,
    is_remote,
    shown_name,
)
from spmd_worker.base.remote_upload import check_creatable, remove_leftovers
from spmd_worker.frontends.batch.input.input_files import STANDARD_INPUT, check_format, find_inputs, is_stream
from spmd_worker.frontends.batch.output_file import OutputFile
from spmd_worker.frontends.batch.output_parts import MANIFEST_NAME as PARTS_MANIFEST_NAME
from spmd_worker.frontends.batch.output_parts import (
    PARTS_NAME,
    claim_folder,
    earlier_parts,
    is_parts,
    last_path,
    part_path,
)
from spmd_worker.frontends.batch.run_dir.file_names import (
    Claim,
    Name,
    is_named_by,
    matches,
    reject_in_folder,
    reject_read_and_written,
    reject_reserved_names,
    reject_same_file,
)
from spmd_worker.frontends.batch.run_dir.kept_digests import CUSTOM_IDS_NAME, MEDIA_NAME
from spmd_worker.frontends.batch.run_dir.shard import Shard, is_of_a_shard, output_of, prometheus_of, run_dir_of
from spmd_worker.frontends.batch.run_dir.world import check_pool
from spmd_worker.model_config.adapter_folder import adapter_folders
from spmd_worker.resolved import ResolvedRun

logger = logging.getLogger(__name__)

MANIFEST_NAME: Final = "manifest.json"
METRICS_NAME: Final = "metrics.json"
PROVENANCE_NAME: Final = "provenance.json"
_REPORT_NAMES: Final = ("report.html", "timeline.json")
_JOB_NAMES: Final = (
    *(
        "lock",
        "journal",
        "rows.part",
        CUSTOM_IDS_NAME,
        MEDIA_NAME,
        PARTS_NAME,
        MANIFEST_NAME,
        METRICS_NAME,
        PROVENANCE_NAME,
        "*.partial",
    ),
    *("steps.csv", "stages.csv", "steps.log*", "records.*", "error.rank*", "stacks.rank*", "nccl_trace.rank*"),
)
RESERVED_NAMES: Final = (*_JOB_NAMES, *_REPORT_NAMES)
"""Files in the run directory made by a job and its report, as patterns."""


def check_job(job: JobConfig) -> None:
    """Raise ConfigError unless input and output are set; the result is the same on every rank."""
    if not job.input:
        raise ConfigError("job.input is not set: give a JSONL or Parquet file of rows, or - for standard input")
    if not job.output:
        raise ConfigError("job.output is not set: give the file to write")
    if job.output == STANDARD_INPUT:
        raise ConfigError("job.output=-: rows are not written to standard output: give the file to write")
    check_names(job)
    Shard.of(job)
    check_pool(job)


def check_names(job: JobConfig) -> None:
    """Raise ConfigError for an output that cannot be written, and for remote names of what must be local."""
    check_output_name(output_of(job))
    for key, what in (("run_dir", "folder"), ("input_index", "file"), ("prometheus_file", "file")):
        name = getattr(job, key) or ""
        if is_remote(name):
            raise ConfigError(f"job.{key}={shown_name(name)} must be local: give a {what}")


def check_output_name(output: FilePath, key: str = "job.output") -> None:
    """Raise ConfigError for a remote name that cannot be written, or would be lost, another format, and parts
    that cannot be named.
    """
    if isinstance(output, RemotePath):
        check_writable(key, output.raw)
        check_outlasting(key, output.raw, "would be lost when this process ends")
    check_format(key, output)
    if str(output).count("*") > is_parts(output):
        raise ConfigError(
            f"{key}={output}: parts have one * in their file's name, for the number: give such as answers/part-*.jsonl"
        )


def is_job_file(job: JobConfig, path: Path) -> bool:
    """Whether the job makes the file, next to its output: a pattern for its input may match it too."""
    if job.pool is not None and not is_remote(job.pool) and Path(job.pool).resolve() in path.resolve().parents:
        return True
    output = output_of(job)
    if isinstance(output, RemotePath):
        return is_reserved(path) and path.resolve().parent == run_dir_of(job).resolve()
    partial = partial_path(output)
    if not is_reserved(path) and path.name != partial.name and not path.is_symlink():
        return False
    resolved = path.resolve()
    is_in_run_dir = resolved.parent == run_dir_of(job).resolve()
    return resolved == partial.resolve() or (is_in_run_dir and is_reserved(path))


def is_reserved(path: Path) -> bool:
    """Whether a file of a run directory has a name that jobs and their reports use."""
    return any(fnmatch(path.name, pattern) for pattern in RESERVED_NAMES)


def check_files(resolved: ResolvedRun) -> None:
    """Check existing files, on rank 0. Raises ConfigError if the job would fail late, or overwrite another file."""
    job, run_dir, model_path = (
        resolved.config.job,
        run_dir_of(resolved.config.job),
        shown_name(resolved.config.model.path or ""),
    )
    check_shard(job)
    output, prometheus, files = output_of(job), prometheus_of(job), []
    if not isinstance(output, RemotePath):
        paths = [output, *([output.with_name(PARTS_MANIFEST_NAME)] if is_parts(output) else [])]
        files += [_claim("job.output", job.output or "", path) for path in paths]
    if prometheus is not None:
        files.append(_claim("job.prometheus_file", job.prometheus_file or "", prometheus))
    # In a pool the run directory is in its folder by default.
    key = "job.run_dir" if job.pool is None or job.run_dir else "job.pool"
    run = Name(f"{key}={job.pool if key == 'job.pool' else run_dir}", run_dir, f"give another {key}")
    _look_up(run.key, run_dir, run.way_out)
    if os.path.lexists(run_dir) and not run_dir.is_dir():
        raise ConfigError(f"{run.key} exists and is not a folder: give another")
    folder = resolved.model_folder
    reject_in_folder([*files, Claim(run, (run_dir,))], Name(f"model.path={model_path}", folder))
    if is_stream(job.input or ""):
        read = [claim.name for claim in _redirected("job.input=-", "standard input", sys.stdin)]
    else:
        inputs = find_inputs(job.input or "", partial(is_job_file, job))
        _reject_remote_output(output, inputs)
        read = [Name(f"job.input={job.input}", path) for path in inputs if isinstance(path, Path)]
        if is_parts(output) and not isinstance(output, RemotePath):
            _reject_parts(output, read)
    # The names in a model folder may be links to files elsewhere; sentence-transformers has modules in subfolders.
    in_model = [path for pattern in ("*", "*/*") for path in folder.glob(pattern) if path.is_file()]
    read += [Name(f"{path.relative_to(folder)} of model.path={model_path}", path) for path in in_model]
    for key, adapter in adapter_folders(resolved.config.model).items():
        if not is_remote(adapter):
            reject_in_folder([*files, Claim(run, (run_dir,))], Name(f"{key}={adapter}", Path(adapter)))
    placement, index = resolved.config.parallel.expert_placement, job.input_index
    read += [] if index is None else [Name(f"job.input_index={index}", Path(index))]
    reject_read_and_written(files, [*read, Name(f"parallel.expert_placement={placement}", Path(placement))])
    reject_same_file([*files, Claim(run, (run_dir,), is_folder=True)])
    named_streams = {"standard output": sys.stdout, "standard error": sys.stderr}
    streams = [claim for name, stream in named_streams.items() for claim in _redirected(name, name, stream)]
    for stream in streams:
        for claim in files:
            reject_same_file([claim, stream])
    reject_reserved_names([*files, *streams], run, RESERVED_NAMES)
    _reject_found(job, "prometheus_file", prometheus)
    for path in dict.fromkeys((part_path(output, 0), last_path(output))):
        _reject_found(job, "output", path)
    check_run_dir(run)
    if is_parts(output):
        earlier_parts(output)
    if job.resume == "never" and any((run_dir / each).exists() for each in (MANIFEST_NAME, METRICS_NAME)):
        raise ConfigError(
            f"job.run_dir={run_dir} holds a run already and job.resume=never: give another job.run_dir or remove it"
        )


def check_shard(job: JobConfig) -> None:
    """Raise ConfigError for an input that cannot be cut, or that has outputs of the job's shards."""
    keys = [f"job.{key}={value}" for key in ("shard", "input_index") if (value := getattr(job, key)) is not None]
    if not keys:
        return
    if is_stream(job.input or ""):
        raise ConfigError(
            f"{keys[0]} and job.input={job.input}: a stream is read once, from its beginning, so its rows cannot be "
            f"counted and cut: write them to a file, or leave out {' and '.join(keys)}"
        )
    for path in find_inputs(job.input or "", partial(is_job_file, job)):
        if job.shard is not None and is_of_a_shard(job, path):
            raise ConfigError(
                f"job.input={job.input} has {path}, which a shard of this job writes, so that shards would read "
                f"different rows: give another input, or job.output in another folder"
            )


def _reject_remote_output(output: FilePath, inputs: Sequence[FilePath], key: str = "job.output") -> None:
    """Raise ConfigError if a remote file that is read would be written."""
    names = name_pattern(output.raw) if isinstance(output, RemotePath) else ""
    for path in inputs:
        if isinstance(path, RemotePath) and fnmatchcase(path.raw, names):
            raise ConfigError(f"{key}={output} is also read ({path}) and would be replaced: give another")


def _reject_parts(output: Path, read: Sequence[Name], key: str = "job.output") -> None:
    """Raise ConfigError if a file that is read has a part's name."""
    for name in read:
        if is_named_by(output, name.path):
            raise ConfigError(f"{key}={output} would replace {name.path}, which is read: give another")


def _reject_found(job: JobConfig, key: str, path: FilePath | None) -> None:
    """Raise ConfigError for a file that the input's pattern finds: a resumed job, or the next world, would read it."""
    pattern, value = job.input or "", shown_name(getattr(job, key) or "")
    is_alike = path is not None and is_remote(pattern) == isinstance(path, RemotePath)
    own = Path(path.raw) if isinstance(path, RemotePath) else path or Path()
    if is_alike and glob.has_magic(pattern) and matches(pattern, own):
        raise ConfigError(
            f"job.{key}={value} matches job.input={shown_name(pattern)}, and would be read too: give another file, "
            f"such as one in another folder"
        )


def _look_up(named: str, path: Path, way_out: str) -> None:
    """Raise ConfigError for a path that the system cannot look up, such as one that is too long."""
    try:
        path.stat()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise ConfigError(f"{named} cannot be written ({error.strerror}): {way_out}") from None


def _claim(key: str, value: str, path: Path) -> Claim:
    """A file and its partial file. Raises ConfigError for a name that cannot be written."""
    way_out = "give another file"
    _look_up(f"{key}={value}", path, way_out)
    if path.exists() and not path.is_file():
        raise ConfigError(f"{key}={value} exists and is not a regular file: {way_out} to write")
    if value.endswith(os.sep):
        raise ConfigError(f"{key}={value} names a folder: {way_out}")
    fault = job_file_fault(partial_path(path))
    if fault is not None:
        raise ConfigError(
            f"{key}={value} is written as {partial_path(path)} before it is complete, which {fault}: remove that, or "
            f"{way_out}"
        )
    return Claim(Name(f"{key}={value}", path, way_out), (path, partial_path(path)))


def _redirected(key: str, name: str, stream: TextIO | None) -> Iterator[Claim]:
    """The regular file to which the shell redirects the stream, if any."""
    try:
        descriptor = stream.fileno() if stream is not None else -1
        is_file = descriptor >= 0 and stat.S_ISREG(os.fstat(descriptor).st_mode)
    except (OSError, ValueError):
        return
    if is_file:
        path = Path(f"/proc/self/fd/{descriptor}")
        yield Claim(Name(key, path, f"redirect {name} to another file"), (path,))


def check_report(run_dir: Path, page: Path, timeline: Path) -> None:
    """Raise ConfigError for a report that would overwrite other files of the run, JobFileError for a link."""
    claims = [_claim("--output", str(page), page), _claim("--output", str(timeline), timeline)]
    for claim in claims:
        fault = job_file_fault(claim.name.path)
        if fault is not None:
            raise JobFileError(claim.name.path, fault)
    reject_same_file(claims)
    reject_reserved_names(claims, Name(f"RUN_DIR={run_dir}", run_dir), _JOB_NAMES)


def check_merge(output: FilePath, manifest: dict[str, Any], folders: Sequence[Path]) -> None:
    """Raise ConfigError for a merged output that would overwrite what the job reads, or files of its shards' runs in
    `folders`.
    """
    key = "--output"
    check_output_name(output, key)
    inputs = [file_path(name) for name in manifest["input"]]
    _reject_remote_output(output, inputs, key)
    if is_parts(output):
        earlier_parts(output, key)
    if isinstance(output, RemotePath):
        return
    claims = [_claim(key, str(output), output)]
    read = [Name("job.input", path) for path in inputs if isinstance(path, Path)]
    reject_read_and_written(claims, read)
    if is_parts(output):
        _reject_parts(output, read, key)
    model = Path(manifest["model"])
    reject_in_folder(claims, Name(f"model.path={model}", model))
    for folder in folders:
        reject_reserved_names(claims, Name(f"--merge {folder}", folder), RESERVED_NAMES)


def check_run_dir(run_dir: Name) -> None:
    """Raise ConfigError if something other than a regular file with one link has the name of one of the job's files."""
    if not run_dir.path.is_dir():
        return
    for path in sorted(run_dir.path.iterdir()):
        fault = job_file_fault(path) if is_reserved(path) else None
        if fault is not None:
            raise ConfigError(
                f"{run_dir.key}: {path.name} {fault}, and a job's own files are regular files with one link: remove "
                f"it, or {run_dir.way_out}"
            )


def check_output(job: JobConfig) -> None:
    """Begin and abandon the output file, with the locks held. Raises ConfigError for a file that cannot be written."""
    path = output_of(job)
    with _written(path):
        if isinstance(path, RemotePath):
            _check_remote(path)
        OutputFile.open(path).abandon()


def claim_output(job: JobConfig, run: str) -> None:
    """Claim the folder of parts for a run, whose manifest has its name. Raises ConfigError as `earlier_parts` does, and
    for a file that cannot be written.
    """
    path = output_of(job)
    if is_parts(path):
        with _written(path):
            claim_folder(path, run=run)


@contextlib.contextmanager
def _written(path: FilePath) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"job.output={path} cannot be written ({error.strerror}): give another file") from None


def _check_remote(path: RemotePath) -> None:
    """Begin a file in the store, after removing what killed writers left. Raises OSError."""
    try:
        num_left = remove_leftovers(path.raw)
    except PermissionError as error:
        logger.warning("incomplete uploads of killed jobs cannot be looked for: %s", error)
        num_left = 0
    if num_left:
        logger.info("job.output=%s: %d incomplete uploads of killed jobs were removed", path, num_left)
    check_creatable(path.raw)
