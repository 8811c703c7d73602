"""Counts the rows of an input, and digests its bytes, in a thread next to the job, which does not wait for a large
input.

Streams are read only once, by the job: nothing about them is known before.
"""

import threading
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Final

from spmd_worker.base.remote_files import state_of
from spmd_worker.base.remote_names import FilePath, RemotePath
from spmd_worker.frontends.batch.input.input_index import InputIndex, index_input
from spmd_worker.frontends.batch.input.row_reader import RowReader

_LEAVE_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class ScannedInput:
    """Number of rows to answer, and the index of the files; None for a stream."""

    num_rows: int | None = None
    index: InputIndex | None = None

    @property
    def digest(self) -> str | None:
        """Digest of all bytes of the files."""
        return None if self.index is None else self.index.digest


class InputScan:
    """Scan of the first `max_rows` rows (None: all), started at once. `close` ends it early. A given `index` is the
    scan's result. `reads_are_checked`: rows are read by the index, which notices what changes later.
    """

    def __init__(
        self,
        reader: RowReader,
        max_rows: int | None,
        index: InputIndex | None = None,
        *,
        reads_are_checked: bool = False,
    ) -> None:
        self._reader, self._max_rows, self._index = reader, max_rows, index
        self._reads_are_checked = reads_are_checked
        # The result is None if the scan was stopped.
        self._future: Future[ScannedInput | None] = Future()
        # Before anybody reads a row.
        self._states = {path: _state_of(path) for path in reader.paths or ()}
        self._has_changed = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="spmd-scan", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> ScannedInput | None:
        """The result; None when the timeout has passed. Raises the error of reading: OSError, ConfigError."""
        if timeout_s is None or timeout_s > 0:
            wait([self._future], timeout_s)
        return self._future.result() if self._future.done() else None

    def has_changed(self) -> bool:
        """Whether the files differ from the scanned ones, or may have changed before or while they were scanned; an
        unreadable file counts as unchanged.
        """
        found = self.wait(0)
        if self._has_changed or found is None or self._reads_are_checked or not self._differ():
            return self._has_changed
        if any(isinstance(path, RemotePath) for path in self._states):
            # Another version; it is not downloaded to be compared.
            return True
        try:
            return index_input(self._reader).digest != found.digest
        except OSError:
            return False

    def close(self) -> None:
        """Stop reading, without waiting for a file system that does not answer."""
        self._stop.set()
        self._thread.join(_LEAVE_S)

    def _run(self) -> None:
        try:
            self._future.set_result(self._scan())
        except Exception as error:  # any error is raised in the thread that waits
            self._future.set_exception(error)

    def _scan(self) -> ScannedInput | None:
        if self._reader.paths is None:
            return ScannedInput()
        index = index_input(self._reader, self._stop.is_set) if self._index is None else self._index
        self._has_changed = self._index is None and self._differ()
        if self._stop.is_set():
            return None
        return ScannedInput(index.num_rows if self._max_rows is None else min(index.num_rows, self._max_rows), index)

    def _differ(self) -> bool:
        """Whether a file has another size or time than when the scan was started."""
        return any(_state_of(path) not in (state, None) for path, state in self._states.items())


def _state_of(path: FilePath) -> object:
    """Size and modification time, or version, which change with the content; None if they cannot be read."""
    try:
        if isinstance(path, RemotePath):
            return state_of(path.raw)
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns
