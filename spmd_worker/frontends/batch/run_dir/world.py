"""A world of a pool: its run directory, and keys that contradict a pool."""

import os
import re
import socket
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Final

from spmd_worker.base.config.schema import JobConfig
from spmd_worker.base.errors import ConfigError
from spmd_worker.base.process import node_name, start_time_of
from spmd_worker.base.remote_names import RemotePath, check_outlasting, is_remote
from spmd_worker.frontends.batch.pool.records import WORLDS

_MOST_CHARACTERS: Final = 84
_DIGEST_BYTES: Final = 6


def check_pool(job: JobConfig) -> None:
    """Raise ConfigError for keys that contradict a pool; the result is the same on every rank."""
    if job.pool is None:
        return
    if is_remote(job.pool):
        check_outlasting("job.pool", job.pool, "no other job could share it")
    if job.shard is not None:
        raise ConfigError(
            f"job.shard={job.shard} and job.pool={job.pool}: a pool divides the rows by itself: leave out one of them"
        )
    if job.resume != "auto":
        raise ConfigError(
            f"job.resume={job.resume} and job.pool={job.pool}: every job joins a pool that has the same job, and none "
            f"begins it again: leave out job.resume, or give another job.pool"
        )


def world_dir(job: JobConfig, variables: Mapping[str, str] = os.environ) -> Path:
    """Run directory of this launch: in `job.run_dir`, else in the pool's folder (of a remote pool in
    `<name>.run` in the working directory). The same on every rank of the launch,
    and of no other launch that runs.
    """
    assert job.pool is not None
    pool = Path(f"{RemotePath(job.pool).name}.run") if is_remote(job.pool) else Path(job.pool)
    return (Path(job.run_dir) if job.run_dir else pool / WORLDS) / _world_name(variables)


def world_file(path: Path, variables: Mapping[str, str] = os.environ) -> Path:
    """This launch's file of that name: each launch of a pool has the same command."""
    return path.with_name(f"{path.stem}-{_world_name(variables)}{path.suffix}")


def _world_name(variables: Mapping[str, str]) -> str:
    """Name from the launcher's variables; of a launch on one machine from its launcher's process. Containers may have
    the host names, process ids and ports of others, and of their predecessors: a digest identifies the process.
    """
    host, world_size = socket.gethostname(), variables.get("WORLD_SIZE", "1")
    port = variables.get("MASTER_PORT", "")
    if world_size == "1":
        words = [host, str(os.getpid())]
        process = _process(os.getpid())
    elif variables.get("LOCAL_WORLD_SIZE", world_size) == world_size:
        words = [host, str(os.getppid()), port]
        process = _process(os.getppid())
    else:
        words = [variables.get("MASTER_ADDR", ""), port, variables.get("TORCHELASTIC_RUN_ID", "")]
        process = ""
    text = "-".join(words)
    digest = blake2b(f"{text} {process}".encode(), digest_size=_DIGEST_BYTES).hexdigest()
    return f"{re.sub('[^A-Za-z0-9-]', '-', text)[:_MOST_CHARACTERS]}-{digest}"


def _process(pid: int) -> str:
    """A process, which no other has been or will be."""
    return f"{node_name()} {pid} {start_time_of(pid)}"
