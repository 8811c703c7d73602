"""Pools for the tools: whether an argument is one, and its store. Changes nothing but a name for the server's clock."""

from pathlib import Path

from spmd_worker.base.errors import ConfigError
from spmd_worker.frontends.batch.pool.posix_store import PosixStore
from spmd_worker.frontends.batch.pool.records import FOLDERS, INPUT_INDEX_NAME, JOB_NAME
from spmd_worker.frontends.batch.pool.store import PoolStore


def is_pool(name: str) -> bool:
    """Whether it is a folder with a pool, begun or not, or a name in an object store, where no run directory can be."""
    return "://" in name or any((Path(name) / each).is_file() for each in (JOB_NAME, INPUT_INDEX_NAME))


def open_pool(name: str) -> PoolStore:
    return PosixStore(Path(name))


def check_pool_report(name: str, page_path: Path | None, default: str) -> Path:
    """The path of a pool's page. Raises ConfigError for one that is a file of the pool, or needs --output."""
    if page_path is None:
        if "://" in name:
            raise ConfigError(f"{name} is not a folder: give the page with --output FILE")
        return Path(name) / default
    known = {JOB_NAME, INPUT_INDEX_NAME, *FOLDERS}
    inside = page_path.resolve().parts[len(Path(name).resolve().parts) :]
    if page_path.resolve().is_relative_to(Path(name).resolve()) and inside[0] in known:
        raise ConfigError(f"--output {page_path} is a file of the pool: give another")
    return page_path
