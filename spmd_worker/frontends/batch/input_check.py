"""The input of a job while its scan runs: which rows are read, and when they may be."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from spmd_worker.base.config.schema import JobConfig
from spmd_worker.base.errors import ConfigError
from spmd_worker.frontends.batch.input.input_index import RangeReader
from spmd_worker.frontends.batch.input.input_scan import InputScan
from spmd_worker.frontends.batch.input.row_reader import RowReader
from spmd_worker.frontends.batch.input.stream_lines import StreamLines
from spmd_worker.frontends.batch.run_dir.manifest import set_input
from spmd_worker.frontends.batch.run_dir.shard import Shard


class InputCheck:
    """Records the scan of the input once it has ended, and calls `expect` with the number of rows. A resumed run reads
    no row before: its input must be the same. With `is_ranged` rows are read by the scan's index.
    """

    def __init__(
        self,
        job: JobConfig,
        reader: RowReader,
        scan: InputScan,
        run_dir: Path,
        manifest: dict[str, Any],
        *,
        is_resumed: bool,
        is_ranged: bool,
    ) -> None:
        self._job, self._reader, self._scan = job, reader, scan
        self._run_dir, self._manifest = run_dir, manifest
        self._shard, self._is_ranged, self._waits = Shard.of(job), is_ranged, is_resumed or is_ranged
        self._is_recorded = False
        self._rows = range(0)
        self.expect: Callable[[int | None], None] = lambda num_rows: None

    @property
    def first_row(self) -> int:
        """Index of the first row that is answered."""
        return self._rows.start

    def lines(self) -> Iterable[tuple[int, bytes]]:
        """The lines to answer, with the indices of their rows; to be read when `may_read`."""
        if self._reader.paths is None:
            return StreamLines(iter(self._reader))
        return self._range() if self._is_ranged else self._reader

    def _range(self) -> Iterator[tuple[int, bytes]]:
        found = self._scan.wait()
        assert found is not None
        assert found.index is not None
        yield from RangeReader(self._reader, found.index).rows(self._rows.start, self._rows.stop)

    def may_read(self) -> bool:
        """Whether rows may be read now. Raises as `is_recorded` does."""
        return self.is_recorded() or not self._waits

    def is_recorded(self, timeout_s: float = 0.0) -> bool:
        """Wait up to `timeout_s`; return whether the scan has ended and is in the manifest. Raises OSError for an
        unreadable input, ConfigError for one that has changed.
        """
        found = None if self._is_recorded else self._scan.wait(timeout_s)
        if found is not None:
            # Else the manifest would describe other rows than were answered.
            self.check_unchanged()
            num_rows = found.num_rows
            self._rows = range(num_rows or 0) if self._shard is None else self._shard.rows(num_rows or 0)
            set_input(self._run_dir, self._manifest, self._job.resume, found.digest, num_rows, self._rows)
            self._is_recorded = True
            self.expect(self._manifest["num_rows"])
        return self._is_recorded

    def check_unchanged(self) -> None:
        """Raise ConfigError if files changed while they were read: the manifest does not describe their rows."""
        if self._scan.has_changed():
            raise ConfigError(
                f"job.input={self._job.input} changed while the job read it. The answers are "
                f"kept: start the job again with the unchanged input, or give another job.run_dir"
            )
