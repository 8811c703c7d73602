"""Interface to what rank 0 has open while a job runs: files of a local run, or a pool."""

from pathlib import Path
from typing import Any, Protocol

from spmd_worker.engine.engine import Engine
from spmd_worker.frontends.batch.job_counts import LostRows
from spmd_worker.frontends.batch.job_rows import JobOutput
from spmd_worker.frontends.batch.output_file import WrittenOutput
from spmd_worker.frontends.batch.row_source import RowSource
from spmd_worker.frontends.batch.run_dir.run_lock import RunLock


class JobRun(Protocol):
    """Rank 0's state while the job runs. The methods are called in this order; each raises ConfigError or OSError."""

    @property
    def lock(self) -> RunLock: ...

    @property
    def run_dir(self) -> Path: ...

    @property
    def manifest(self) -> dict[str, Any]: ...

    def earlier_output(self) -> WrittenOutput | None:
        """The output, if it is complete before this start: there is nothing to do."""

    def agree(self, engine: Engine) -> None:
        """Raise ConfigError if the engine computes other answers than the run has, or has other adapters."""

    def open_rows(self, engine: Engine) -> tuple[RowSource, JobOutput]:
        """The rows to answer, and where their answers go."""

    def before_exit(self) -> None:
        """Save finished rows: the process ends. In any thread, after `open_rows`."""

    def commit(self) -> None:
        """Make all answers durable."""

    def write_output(self, engine: Engine) -> WrittenOutput:
        """Return when the output is complete."""

    def lost_rows(self) -> LostRows:
        """Rows of leases that were lost; a job without a pool has none."""

    def end(self) -> None:
        """Mark the job as ended, when nothing is left that could fail or be interrupted."""
