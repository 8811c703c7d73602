"""Run directories of a job's shards, checked before anything is merged: one job, every row in one shard."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from spmd_worker.base.errors import ConfigError
from spmd_worker.base.files import JsonError, read_json_object
from spmd_worker.base.remote_names import FilePath
from spmd_worker.frontends.batch.output_parts import last_path, size_of
from spmd_worker.frontends.batch.run_dir.job_files import MANIFEST_NAME, PROVENANCE_NAME
from spmd_worker.frontends.batch.run_dir.manifest import output_in, read_manifest
from spmd_worker.frontends.batch.run_dir.shard import Shard

_ABSENT = "absent"


@dataclass(frozen=True, slots=True)
class ShardRun:
    """An ended run of a shard: its folder, manifest and provenance, and the output that they describe."""

    folder: Path
    manifest: dict[str, Any]
    provenance: dict[str, Any]
    output: FilePath

    @property
    def record(self) -> dict[str, Any]:
        """The shard in the manifest."""
        record: dict[str, Any] = self.manifest["shard"]
        return record

    @property
    def shard(self) -> Shard:
        return Shard(self.record["index"], self.record["count"])

    @property
    def rows(self) -> range:
        return range(self.record["start"], self.record["stop"])


def read_shard_runs(folders: Sequence[Path]) -> list[ShardRun]:
    """The runs in order of their shards. Raises ConfigError naming the folder, the rule and the way out."""
    runs = sorted([_read(folder) for folder in folders], key=lambda run: run.shard.index)
    for run in runs[1:]:
        _check_same_job(runs[0], run)
    _check_complete(runs)
    return runs


def _read(folder: Path) -> ShardRun:
    where = f"--merge {folder}"
    try:
        manifest = read_manifest(folder / MANIFEST_NAME)
    except OSError as error:
        raise ConfigError(f"{where} cannot be read ({error.strerror}): give run directories of shards") from None
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    if manifest is None:
        raise ConfigError(
            f"{where} holds no job: give the run directory of each shard, by default <output of the shard>.run"
        )
    record = manifest.get("shard")
    if record is None:
        raise ConfigError(f"{where} is the run of all rows, without job.shard: its output is complete, leave it out")
    name = f"shard {record['index']}/{record['count']}"
    if not manifest["has_ended"]:
        raise ConfigError(f"{where}: {name} has not ended: start it again with its command, and it goes on")
    try:
        provenance = read_json_object(folder / PROVENANCE_NAME)
        lines = provenance["output"]["lines"]
    except (OSError, JsonError, LookupError, TypeError) as error:
        raise ConfigError(
            f"{where}: {PROVENANCE_NAME} of {name} cannot be read ({error}): remove the folder and run the shard again"
        ) from None
    if lines != record["stop"] - record["start"]:
        raise ConfigError(
            f"{where}: {name} has rows {record['start']} to {record['stop']}, and {lines} lines in its "
            f"{PROVENANCE_NAME}: remove the folder and run the shard again"
        )
    output = output_in(folder, manifest)
    assert output is not None
    if size_of(last_path(output)) is None:
        raise ConfigError(
            f"{where}: {output}, the output of {name}, is missing: restore it, or remove the folder and run the shard "
            f"again"
        )
    return ShardRun(folder, manifest, provenance, output)


def _check_same_job(first: ShardRun, other: ShardRun) -> None:
    mine, theirs = first.manifest["answers"], other.manifest["answers"]
    mine = {"number of shards of job.shard": first.shard.count, **mine}
    theirs = {"number of shards of job.shard": other.shard.count, **theirs}
    for key in dict.fromkeys([*mine, *theirs]):
        if mine.get(key, _ABSENT) != theirs.get(key, _ABSENT):
            values = [json.dumps(each.get(key, _ABSENT), ensure_ascii=False) for each in (mine, theirs)]
            raise ConfigError(
                f"--merge: {key} is {values[0]} in {first.folder} and {values[1]} in {other.folder}, so they are "
                f"shards of different jobs: give the run directories of one job, or run the other shard again"
            )


def _check_complete(runs: Sequence[ShardRun]) -> None:
    for run, following in pairwise(runs):
        if run.shard.index == following.shard.index:
            raise ConfigError(
                f"--merge: {run.folder} and {following.folder} are both shard {run.shard}: give each shard once"
            )
    count, found = runs[0].shard.count, {run.shard.index for run in runs}
    missing = [f"{index}/{count}" for index in range(count) if index not in found]
    if missing:
        rest = "" if len(missing) < 9 else f" and {len(missing) - 8} more"
        raise ConfigError(
            f"--merge: {', '.join(missing[:8])}{rest} of job.shard missing among {len(runs)} run directories: give all "
            f"{count}, each when it has ended"
        )
    num_rows = runs[0].record["num_job_rows"]
    for run in runs:
        if run.rows != run.shard.rows(num_rows):
            raise ConfigError(
                f"--merge: {run.folder} has rows {run.rows.start} to {run.rows.stop}, but shard {run.shard} of "
                f"{num_rows} rows has others: remove the folder and run the shard again"
            )
