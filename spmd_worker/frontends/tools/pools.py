"""Pools for the tools: whether an argument is one, and its store. Changes nothing but a name for the server's clock."""

from pathlib import Path

from spmd_worker.base.errors import ConfigError
from spmd_worker.base.remote_files import is_remote
from spmd_worker.frontends.batch.pool.object_store import ObjectStore
from spmd_worker.frontends.batch.pool.posix_store import PosixStore
from spmd_worker.frontends.batch.pool.records import FOLDERS, INPUT_INDEX_NAME, JOB_NAME, OUTPUT_NAME, WORLDS
from spmd_worker.frontends.batch.pool.store import PoolStore
from spmd_worker.frontends.tools.run_dir import NO_JOB


def is_pool(name: str) -> bool:
    """Whether it is a folder with a pool, begun or not, or a name in an object store, where no run directory can be."""
    try:
        folder = Path(name)
        has_record = is_remote(name) or any((folder / each).is_file() for each in (JOB_NAME, INPUT_INDEX_NAME))
        # Folders alone: the first worker was killed before it had joined.
        return has_record or all((folder / each).is_dir() for each in FOLDERS)
    except OSError:
        # A folder that may not be entered: who reads its files names them.
        return False


def without_job(folder: Path) -> str:
    """Reason for which a tool of runs finds nothing in a folder without a manifest."""
    if not is_pool(str(folder)):
        return NO_JOB
    return f"it is a pool, which doctor and report read: give a worker's run directory, inside {folder / WORLDS}"


def open_pool(name: str) -> PoolStore:
    """The store of a pool that exists; unlike a world's it need not be writable."""
    return ObjectStore(name) if is_remote(name) else PosixStore(Path(name))


def check_pool_report(name: str, page_path: Path | None, default: str) -> Path:
    """The path of a pool's page. Raises ConfigError for one that is a file of the pool, or needs --output."""
    if page_path is None:
        if is_remote(name):
            raise ConfigError(f"{name} is not a folder: give the page with --output FILE")
        return Path(name) / default
    folder = Path(name).resolve()
    inside = page_path.resolve().relative_to(folder).parts if page_path.resolve().is_relative_to(folder) else ()
    if inside and inside[0] in {JOB_NAME, INPUT_INDEX_NAME, OUTPUT_NAME, *FOLDERS}:
        raise ConfigError(f"--output {page_path} is a file of the pool: give another")
    return page_path
