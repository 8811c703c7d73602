"""Merges the outputs of a job's shards into the bytes of the job in one piece, with bounded memory."""

from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any

from spmd_worker.base.config.schema import JobConfig
from spmd_worker.base.errors import ConfigError
from spmd_worker.base.files import write_json
from spmd_worker.base.remote_names import FilePath, RemotePath
from spmd_worker.frontends.batch.merge.merged_lines import is_duplicate, later_duplicates, merged_lines
from spmd_worker.frontends.batch.merge.shard_runs import ShardRun, read_shard_runs
from spmd_worker.frontends.batch.output_file import read_lines, write_lines
from spmd_worker.frontends.batch.output_parts import PART_ROWS, files_of, is_parts, last_path
from spmd_worker.frontends.batch.parquet_rows import VectorColumns
from spmd_worker.frontends.batch.run_dir.job_files import (
    MANIFEST_NAME,
    PROVENANCE_NAME,
    check_merge,
    is_reserved,
)
from spmd_worker.frontends.batch.run_dir.kept_digests import (
    CUSTOM_IDS_NAME,
    MEDIA_NAME,
    KeptDigest,
    KeptDigestsError,
    read_kept,
)
from spmd_worker.frontends.batch.run_dir.manifest import merged_manifest, read_manifest, write_manifest
from spmd_worker.frontends.batch.run_dir.provenance import chained_digest, merged_provenance
from spmd_worker.frontends.batch.run_dir.run_lock import LOCK_NAME, RunLock
from spmd_worker.frontends.batch.run_dir.shard import is_of_a_shard, run_dir_of


def merge_shards(folders: Sequence[Path], output: FilePath) -> dict[str, Any]:
    """Write the output of all shards, which replaces an existing file when it is complete, and its provenance in
    `<output>.run`. Returns the provenance. Raises ConfigError for run directories that are not all shards of one job,
    or whose outputs have changed; OSError. The former output and its provenance are unchanged then, and by a kill
    before the output is replaced. A kill after that leaves the new output: another merge writes its provenance.
    """
    runs = read_shard_runs(folders)
    run_dir = run_dir_of(JobConfig(output=output.raw if isinstance(output, RemotePath) else str(output)))
    _check_output(runs, output, run_dir)
    with RunLock(run_dir, output, "--output") as lock:
        lock.note("merges shards")
        try:
            duplicates = later_duplicates(_kept(runs, CUSTOM_IDS_NAME), run_dir)
            media = _kept(runs, MEDIA_NAME)
            images = chained_digest(
                (each.row, each.digest.hex()) for each in media if not is_duplicate(duplicates, each.row)
            )
        except KeptDigestsError as error:
            raise ConfigError(f"--merge: {error}: remove the shard's run directory and run it again") from None
        vectors = runs[0].record["vectors"]
        manifest, key = merged_manifest([run.manifest for run in runs], output), "--output"
        lines, columns = _lines(runs, duplicates), None if vectors is None else VectorColumns(*vectors)
        # As the job in one piece; runs of an earlier version have no such number.
        part_rows = manifest["config"]["job"].get("part_rows", PART_ROWS)
        written = write_lines(lines, output, columns, part_rows, run=manifest["run"], key=key)
        provenance = merged_provenance(
            manifest, {"path": str(output), **written}, [run.provenance for run in runs], len(duplicates), images
        )
        # Last: until then the former output's is there, whose digest says that it is not the new one's.
        _remove_earlier_run(run_dir)
        write_manifest(run_dir, manifest)
        write_json(run_dir / PROVENANCE_NAME, provenance)
    return provenance


def _remove_earlier_run(run_dir: Path) -> None:
    """Remove what an ended job of the same output left; its manifest and provenance are replaced."""
    for path in list(run_dir.iterdir()):
        if path.name not in (LOCK_NAME, MANIFEST_NAME, PROVENANCE_NAME) and is_reserved(path):
            path.unlink()


def _check_output(runs: Sequence[ShardRun], output: FilePath, run_dir: Path) -> None:
    """Raise ConfigError if the output is a shard's, is read, or is that of a job that has not ended."""
    for run in runs:
        is_same = any(_is_same(output, each) for each in [run.output, last_path(run.output), *files_of(run.output)])
        if is_same or run_dir.absolute() == run.folder.absolute():
            raise ConfigError(f"--output {output} is the output of shard {run.shard}, which is read: give another file")
    check_merge(output, runs[0].manifest, [run.folder for run in runs])
    whole = runs[0].shard.whole(runs[0].output)
    if is_of_a_shard(JobConfig(output=whole.raw if isinstance(whole, RemotePath) else str(whole)), output):
        raise ConfigError(
            f"--output {output} is a name of a shard's files (job.shard), which other merges read: give another"
        )
    manifest = None
    with suppress(NotADirectoryError):
        # The lock explains it.
        manifest = read_manifest(run_dir / MANIFEST_NAME, "give another --output, or remove that file")
    if manifest is not None and not manifest["has_ended"]:
        raise ConfigError(
            f"--output {output}: {run_dir} holds a job that has not ended: give another file, or remove that folder"
        )


def _is_same(one: FilePath, other: FilePath) -> bool:
    if isinstance(one, RemotePath) or isinstance(other, RemotePath):
        return one == other
    if is_parts(other):
        return one.resolve() == other.resolve()
    return one.exists() and other.exists() and one.samefile(other)


def _kept(runs: Sequence[ShardRun], name: str) -> Iterator[KeptDigest]:
    """Digests of all rows, in order."""
    for run in runs:
        yield from read_kept(run.folder / name, run.record["kept"][name])


def _lines(runs: Sequence[ShardRun], duplicates: "array[int]") -> Iterator[bytes]:
    try:
        yield from merged_lines((pair for run in runs for pair in _checked_lines(run)), duplicates)
    except (ValueError, LookupError, TypeError):
        # A line that is no answer: an output has changed, which its digest shows at its end.
        for run in runs:
            deque(_checked_lines(run), maxlen=0)
        raise


def _checked_lines(run: ShardRun) -> Iterator[tuple[int, bytes]]:
    """(row, line) of a shard's output. Raises ConfigError at the end unless they are those of its provenance."""
    digest, row = sha256(), run.rows.start
    for line in chain.from_iterable(map(read_lines, files_of(run.output))):
        digest.update(line)
        if row < run.rows.stop:
            yield row, line
        row += 1
    expected = run.provenance["output"]
    if row != run.rows.stop or digest.hexdigest() != expected["sha256"]:
        raise ConfigError(
            f"--merge: {run.output} has changed since shard {run.shard} wrote it ({row - run.rows.start} lines, sha256 "
            f"{digest.hexdigest()}; {expected['lines']} and {expected['sha256']} in its {PROVENANCE_NAME}): restore "
            f"it, or remove {run.folder} and run the shard again"
        )
