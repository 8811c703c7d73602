"""Shards of a job: which rows are a shard's, and the names of its files.

job.output=answers.jsonl.zst job.shard=3/7    ->    answers-00003-of-00007.jsonl.zst, and its .run
job.output=a/part-*.jsonl    job.shard=3/7    ->    a/shard-00003-of-00007/part-*.jsonl, a/part-00003-of-00007.jsonl.run
"""

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from spmd_worker.base.config.schema import JobConfig
from spmd_worker.base.errors import ConfigError
from spmd_worker.base.remote_names import FilePath, RemotePath, file_path
from spmd_worker.frontends.batch.run_dir.world import world_dir, world_file

_SHARD: Final = re.compile(r"(\d{1,9})/(\d{1,9})", re.ASCII)
_COMPRESSED: Final = (".gz", ".zst")


@dataclass(frozen=True, slots=True)
class Shard:
    """Shard `index` of `count`, from 0."""

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    @staticmethod
    def of(job: JobConfig) -> "Shard | None":
        """The shard of `job.shard`; None without. Raises ConfigError."""
        if job.shard is None:
            return None
        found = _SHARD.fullmatch(job.shard)
        if found is None:
            raise ConfigError(
                f"job.shard={job.shard} is not i/n: give the number of the shard, from 0, and the number of shards, as "
                f"0/4"
            )
        shard = Shard(int(found[1]), int(found[2]))
        if shard.index >= shard.count:
            last = f"0/{shard.count} to {shard.count - 1}/{shard.count}" if shard.count else "0/1 for all rows"
            raise ConfigError(f"job.shard={job.shard}: shards are counted from 0: give {last}")
        return shard

    def rows(self, num_rows: int) -> range:
        """This shard's part of a job's rows: the same for all shards, but for one row."""
        return range(self.index * num_rows // self.count, (self.index + 1) * num_rows // self.count)

    def file(self, path: FilePath) -> FilePath:
        """Name of this shard's file: with its number before the suffix, `.jsonl.zst` too."""
        suffix = path.suffix
        inner = PurePosixPath(path.name.removesuffix(suffix)).suffix
        if suffix in _COMPRESSED and inner[1:].isalpha():
            suffix = inner + suffix
        return path.with_name(f"{path.name.removesuffix(suffix)}{self._mark}{suffix}")

    def output(self, path: FilePath) -> FilePath:
        """This shard's output: a file, or parts in a folder of the shard."""
        if "*" not in path.name:
            return self.file(path)
        inside = f"shard{self._mark}/{path.name}"
        return path.with_name(inside) if isinstance(path, RemotePath) else path.parent / inside

    def whole(self, path: FilePath) -> FilePath:
        """The output of all rows of which this shard's is `path`; parts of a remote one keep the shard's folder."""
        if "*" not in path.name:
            return path.with_name(path.name.replace(self._mark, ""))
        return path if isinstance(path, RemotePath) else path.parent.parent / path.name

    def run_of_parts(self, name: str) -> str:
        """Name of the run directory of an output in parts: with the shard's number for the `*`."""
        return f"{name.replace('*', self._mark[1:])}.run"

    def folder(self, path: Path) -> Path:
        """Name of this shard's folder."""
        return path.with_name(f"{path.name}{self._mark}")

    @property
    def _mark(self) -> str:
        return f"-{self.index:05d}-of-{self.count:05d}"


def output_of(job: JobConfig) -> FilePath:
    """The file that the job writes: `job.output`, or its shard's part of it; on this machine or not."""
    shard, path = Shard.of(job), file_path(job.output or "")
    return path if shard is None else shard.output(path)


def run_dir_of(job: JobConfig) -> Path:
    """`job.run_dir`, also with the shard's number, else `<output>.run`, of parts without their `*`, or with the shard's
    number for it: next to a local output, and in the working directory for a remote one; `world_dir` in a pool.
    """
    if job.pool is not None:
        return world_dir(job)
    shard = Shard.of(job)
    if not job.run_dir:
        output = output_of(job)
        if "*" in output.name:
            output, name = file_path(job.output or ""), f"{output.name.replace('*', '')}.run"
            name = name if shard is None else shard.run_of_parts(output.name)
            return Path(name) if isinstance(output, RemotePath) else output.with_name(name)
        # A name may be missing, or be that of a folder: it is checked later.
        return Path(f"{output.name if isinstance(output, RemotePath) else output}.run")
    return Path(job.run_dir) if shard is None else shard.folder(Path(job.run_dir))


def prometheus_of(job: JobConfig) -> Path | None:
    """`job.prometheus_file`, also with the shard's number or the name of a pool's world; None without."""
    if not job.prometheus_file:
        return None
    if job.pool is not None:
        return world_file(Path(job.prometheus_file))
    shard, path = Shard.of(job), Path(job.prometheus_file)
    return path if shard is None else path.with_name(shard.file(path).name)


def is_of_a_shard(job: JobConfig, path: FilePath) -> bool:
    """Whether the file is an output of a shard of the job, in any number of shards, or in the run directory of one."""
    given = file_path(job.output or "")
    output = Shard(0, 1).output(given)
    if isinstance(path, RemotePath):
        names = [each.raw for each in (output, path) if isinstance(each, RemotePath)]
        # Parts are known by their folder.
        names = [name.rpartition("/")[0] for name in names] if "*" in given.name else names
        return len(names) == 2 and _of_any_shard(names[0]).fullmatch(names[1]) is not None
    named = [output, *([Shard(0, 1).folder(Path(job.run_dir))] if job.run_dir else [])]
    if isinstance(output, Path) and "*" in given.name:
        named += [output.parent, output.parent.with_name(Shard(0, 1).run_of_parts(given.name))]
    patterns = [(_of_any_shard(each.name), each.resolve().parent) for each in named if isinstance(each, Path)]
    own = path.resolve()
    return any(
        pattern.fullmatch(each.name) is not None and each.parent == folder
        for pattern, folder in patterns
        for each in (own, own.parent)
    )


def _of_any_shard(name: str) -> re.Pattern[str]:
    """Pattern of the names that shards have instead of the first of one."""
    pattern = re.escape(name).replace("00000", r"\d{5,9}").replace("00001", r"\d{5,9}")
    return re.compile(rf"{pattern}(\.partial|\.run)?")
