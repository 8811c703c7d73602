"""Pools for the tools: whether an argument is one, and its store. Changes nothing but a name for the server's clock."""

from pathlib import Path

from spmd_worker.frontends.batch.pool.posix_store import PosixStore
from spmd_worker.frontends.batch.pool.records import JOB_NAME
from spmd_worker.frontends.batch.pool.store import PoolStore


def is_pool(name: str) -> bool:
    """Whether it is a folder with a pool's job, or a name in an object store, where no run directory can be."""
    return "://" in name or (Path(name) / JOB_NAME).is_file()


def open_pool(name: str) -> PoolStore:
    return PosixStore(Path(name))
