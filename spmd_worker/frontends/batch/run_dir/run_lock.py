"""Locks: one writer per run directory, and per output of a job."""

from contextlib import ExitStack
from pathlib import Path
from typing import Final

from spmd_worker.base.errors import ConfigError
from spmd_worker.base.files import make_folder_durably, partial_path
from spmd_worker.base.remote_names import FilePath, RemotePath
from spmd_worker.frontends.batch.file_lock import FileLock

LOCK_NAME: Final = "lock"


class RunLock:
    """The locks of a job, held from `__enter__` to `__exit__`; on rank 0. `output` is None if others may write it too.

    `__enter__` makes the folders. It raises ConfigError naming the process that holds a lock, with nothing changed in
    the run directory, or a folder that cannot be made.
    """

    def __init__(self, run_dir: Path, output: FilePath | None, key: str = "job.output") -> None:
        """`key` is the user's word for the output; only a job's run directory has one of its own."""
        # Remote stores have no locks.
        self._run_dir, self._output, self._key = run_dir, None if isinstance(output, RemotePath) else output, key
        self._run_key = "job.run_dir" if key == "job.output" else f"the run directory of {key}"
        way_out = f"give another {'job.run_dir' if key == 'job.output' else key}"
        self._lock = FileLock(run_dir / LOCK_NAME, f"{self._run_key}={run_dir}", way_out)
        self._held = ExitStack()
        self._output_lock: FileLock | None = None

    def __enter__(self) -> "RunLock":
        if self._output is not None:
            make_folder(f"the folder of {self._key}", self._output.parent)
        with ExitStack() as held:
            has_lock = (self._run_dir / LOCK_NAME).exists()
            if has_lock:
                held.enter_context(self._lock)
            if self._output is not None:
                # The output's partial file is its lock: no other file is left next to the output.
                partial, owned = partial_path(self._output), f"{self._key}={self._output}"
                lock = held.enter_context(FileLock(partial, owned, "give another file", is_temporary=True))
                self._output_lock = lock
                self.name_holder()
            if not has_lock:
                make_folder(self._run_key, self._run_dir)
                held.enter_context(self._lock)
            self._lock.note("starting")
            self._held = held.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def name_holder(self) -> None:
        """Write this process into the output's lock, again after a check that emptied the file."""
        if self._output_lock is not None:
            self._output_lock.note("runs the job")

    def note(self, doing: str) -> None:
        """Write the job's current activity, for rejected processes to read."""
        # Not into the output's lock, which becomes the output.
        self._lock.note(doing)


def make_folder(key: str, path: Path) -> None:
    """Make a folder, durably, unless it exists. Raises ConfigError naming the key."""
    try:
        make_folder_durably(path)
    except FileExistsError:
        raise ConfigError(f"{key}={path} exists and is not a folder: give another") from None
    except OSError as error:
        raise ConfigError(f"{key}={path} cannot be made ({error.strerror}): give another") from None
