"""Locks: one writer per run directory, and per output of a job."""

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Final

from spmd_worker.base.errors import ConfigError
from spmd_worker.base.files import make_folder_durably, partial_path
from spmd_worker.frontends.batch.file_lock import FileLock

LOCK_NAME: Final = "lock"


class RunLock:
    """The locks of a job, held from `__enter__` to `__exit__`. A start that a lock rejects has changed nothing.

    Makes the run directory. Raises ConfigError naming the process that holds a lock, or the folder that cannot be made.
    """

    def __init__(self, run_dir: Path, output: Path) -> None:
        self._run_dir, self._output = run_dir, output
        self._lock = FileLock(run_dir / LOCK_NAME, f"job.run_dir={run_dir}", "give another job.run_dir")
        self._held = ExitStack()

    def __enter__(self) -> "RunLock":
        with ExitStack() as held:
            has_lock = (self._run_dir / LOCK_NAME).exists()
            if has_lock:
                held.enter_context(self._lock)
            output = held.enter_context(self._lock_of_output())
            if not has_lock:
                make_folder("job.run_dir", self._run_dir)
                held.enter_context(self._lock)
            self._lock.note("starting")
            output.note("runs the job")
            self._held = held.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held.close()

    def note(self, doing: str) -> None:
        """Write the job's current activity, for rejected processes to read."""
        # Not into the output's lock, which becomes the output.
        self._lock.note(doing)

    def _lock_of_output(self) -> FileLock:
        # The output's partial file is the lock: no other file is left next to the output.
        owned, way_out = f"job.output={self._output}", "give another file"
        return FileLock(partial_path(self._output), owned, way_out, is_temporary=True)


def make_folder(key: str, path: Path) -> None:
    """Make a folder, durably, unless it exists. Raises ConfigError naming the key."""
    try:
        make_folder_durably(path)
    except FileExistsError:
        raise ConfigError(f"{key}={path} exists and is not a folder: give another") from None
    except OSError as error:
        raise ConfigError(f"{key}={path} cannot be made ({error.strerror}): give another") from None
