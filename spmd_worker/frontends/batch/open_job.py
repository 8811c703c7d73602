"""Rank 0's state of a job, from its checked files to the complete output: locks, manifest, input, journal."""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final

from spmd_worker.base.config.schema import JobConfig
from spmd_worker.base.errors import ConfigError, JournalError
from spmd_worker.base.files import sync_folder
from spmd_worker.base.liveness.error_file import clear_records
from spmd_worker.base.liveness.watchdog import Watchdog
from spmd_worker.base.metrics.prometheus import PrometheusFile, require_prometheus
from spmd_worker.base.names import counted
from spmd_worker.engine.engine import Engine
from spmd_worker.engine.startup import package_versions
from spmd_worker.frontends.batch.file_lock import ENDING
from spmd_worker.frontends.batch.input.input_index import read_index
from spmd_worker.frontends.batch.input.input_scan import InputScan
from spmd_worker.frontends.batch.input.row_reader import RowReader
from spmd_worker.frontends.batch.input_check import InputCheck
from spmd_worker.frontends.batch.job_counts import LostRows
from spmd_worker.frontends.batch.job_rows import JobInput, JobOutput
from spmd_worker.frontends.batch.output_file import WrittenOutput, write_lines
from spmd_worker.frontends.batch.output_parts import PARTS_NAME, earlier_parts, is_parts
from spmd_worker.frontends.batch.parquet_rows import VectorColumns
from spmd_worker.frontends.batch.parts_thread import PartsThread
from spmd_worker.frontends.batch.progress import Progress
from spmd_worker.frontends.batch.run_dir.adapter_digests import adapter_digests, hex_digest
from spmd_worker.frontends.batch.run_dir.job_files import (
    METRICS_NAME,
    check_files,
    check_output,
    claim_output,
    is_job_file,
)
from spmd_worker.frontends.batch.run_dir.journal import RowJournal, has_rows, remove_journal
from spmd_worker.frontends.batch.run_dir.kept_digests import keep_digests
from spmd_worker.frontends.batch.run_dir.manifest import (
    check_manifest,
    end_manifest,
    make_manifest,
    set_arithmetic,
    weight_answers,
    write_manifest,
)
from spmd_worker.frontends.batch.run_dir.media_answers import media_answers
from spmd_worker.frontends.batch.run_dir.provenance import chained_digest
from spmd_worker.frontends.batch.run_dir.run_lock import RunLock
from spmd_worker.frontends.batch.run_dir.shard import output_of, prometheus_of, run_dir_of
from spmd_worker.model_config.adapter_folder import adapter_folders
from spmd_worker.model_config.pooling import TOKEN_TASKS, VECTORS
from spmd_worker.resolved import ResolvedRun

logger = logging.getLogger(__name__)

_LINES_PER_CALL: Final = 256
_SCAN_S: Final = 1.0
"""Time that a start waits for the scan of its input; then the scan continues in parallel."""


class OpenRun:
    """The `JobRun` of a local job, whose answers are in a journal."""

    def __init__(
        self,
        job: JobConfig,
        lock: RunLock,
        journal: RowJournal,
        manifest: dict[str, Any],
        check: InputCheck,
    ) -> None:
        self.lock, self.manifest, self.run_dir = lock, manifest, journal.folder
        self._job, self._journal, self._check = job, journal, check
        self._rows: JobInput | None = None
        self._parts: PartsThread | None = None

    def earlier_output(self) -> WrittenOutput | None:
        return None

    def before_exit(self) -> None:
        """Commit finished rows, and record in the lock that it will be free."""
        self.lock.note(ENDING)
        self._journal.commit()

    def agree(self, engine: Engine) -> None:
        """Raise ConfigError if the engine computes other answers than the run has, or other adapters."""
        arithmetic, policy = engine.executor.reports()[0].arithmetic, engine.numerical_policy()
        set_arithmetic(self.run_dir, self.manifest, self._job.resume, arithmetic, policy)
        check_loaded(engine, self.manifest)

    def open_rows(self, engine: Engine) -> tuple[JobInput, JobOutput]:
        """The rows that are not done, and the answers' way into the journal."""
        job, model = self._job, engine.config.model
        adapters = (*(model.adapters or ()), *(model.prompt_adapters or ()))
        rows = JobInput(
            *(self._check.lines(), job, engine.config.limits, engine.default_sampling, self._journal, adapters),
            folder=self.run_dir,
        )
        rows.may_read = self._check.may_read
        path = prometheus_of(job)
        prometheus = None if path is None else PrometheusFile(path)
        num_rows = self.manifest["num_rows"]
        progress = Progress(num_rows, rows_before=self._journal.num_rows)
        output = JobOutput(self._journal, rows.keys, progress, num_rows, prometheus)
        self._check.expect = output.expect
        self._rows, self._output = rows, output
        if is_parts(output_of(job)):
            write = partial(write_lines, path=output_of(job), vectors=vectors_of(engine), part_rows=job.part_rows)
            write = partial(write, run_dir=self.run_dir, run=self.manifest["run"])
            self._parts = PartsThread(self._journal, lambda: rows.first_row, job.part_rows, write)
        return rows, output

    def commit(self) -> None:
        """Make all answers durable. Raises OSError."""
        self._journal.commit()

    def write_output(self, engine: Engine) -> WrittenOutput:
        """Write the output once the input is known to be unchanged. Raises OSError, ConfigError for a changed input."""
        while not self._check.is_recorded(timeout_s=_SCAN_S):
            engine.times.heartbeat.enter("reading the input")
        self._check.check_unchanged()
        self.lock.note("writes the output")
        vectors, advance = vectors_of(engine), partial(engine.times.heartbeat.enter, "writing the output")
        if self.manifest["shard"] is not None:
            kept = keep_digests(self.run_dir, self._journal.in_order)
            self.manifest["shard"] |= {"kept": kept, "vectors": vectors}
        if self._parts is None:
            digest = write_lines(self._lines(advance), output_of(self._job), vectors)
        else:
            digest = self._parts.end(self._num_rows(), advance)
        return WrittenOutput(digest, chained_digest(self._journal.media_digests()), self._output.counts.error_rows)

    def close(self) -> None:
        """Stop reading, and writing parts, with the last one discarded if it is not complete."""
        if self._rows is not None:
            self._rows.close()
            self._rows.forget()
        if self._parts is not None:
            self._parts.close()

    def _lines(self, advance: Callable[[], object]) -> Iterator[bytes]:
        num_lines = 0
        for line in self._journal.lines(self._check.first_row):
            if num_lines % _LINES_PER_CALL == 0:
                # A remote output may wait for its network as long as it gets on.
                advance()
            num_lines += 1
            yield line
        assert num_lines == self._num_rows(), (num_lines, self._num_rows())

    def _num_rows(self) -> int:
        assert self._rows is not None, "the rows are not open"
        return self._rows.num_rows

    def lost_rows(self) -> LostRows:
        return LostRows()

    def end(self) -> None:
        """Mark the job as ended, when nothing is left that could fail or be interrupted: starting an ended run
        recomputes it. Raises OSError.
        """
        end_manifest(self.run_dir, self.manifest)
        self._journal.close()
        remove_journal(self.run_dir)


def open_run(resolved: ResolvedRun, held: ExitStack, watchdog: Watchdog | None) -> OpenRun:
    """Open the run directory until `held` ends; its journal has the finished rows, also of an earlier start."""
    config = resolved.config
    check_files(resolved)
    if config.job.prometheus_file:
        require_prometheus(config.job.prometheus_file)
    reader = RowReader.of(config.job.input or "", config.limits.num_line_bytes, partial(is_job_file, config.job))
    index = None if config.job.input_index is None else read_index(Path(config.job.input_index), reader)
    run_dir = run_dir_of(config.job)
    lock = held.enter_context(RunLock(run_dir, output_of(config.job)))
    if watchdog is not None:
        watchdog.before_exit = partial(lock.note, ENDING)
    check_output(config.job)
    lock.name_holder()
    lock.note("reads the input")
    is_ranged = index is not None or config.job.shard is not None
    scan = InputScan(reader, config.job.max_rows, index, reads_are_checked=is_ranged)
    held.callback(scan.close)
    manifest = manifest_of(resolved, reader)
    # Most inputs are read quickly: their errors are raised before anything is loaded.
    scan.wait(_SCAN_S)
    is_resumed = check_manifest(run_dir, manifest, config.job.resume, has_rows=has_rows(run_dir))
    if is_parts(output := output_of(config.job)):
        # Before anything changes; claimed once this run's name is durable.
        earlier_parts(output, run=manifest["run"])
    check = InputCheck(config.job, reader, scan, run_dir, manifest, is_resumed=is_resumed, is_ranged=is_ranged)
    if not is_resumed:
        # Left by an ended run. Removed before the manifest is written, which identifies the journal next to it.
        remove_journal(run_dir)
        (run_dir / PARTS_NAME).unlink(missing_ok=True)
        sync_folder(run_dir)
    write_manifest(run_dir, manifest)
    claim_output(config.job, manifest["run"])
    check.is_recorded()
    clear_run_dir(run_dir)
    try:
        journal = RowJournal(run_dir, config.job.commit_rows, config.job.commit_s)
    except JournalError as error:
        raise ConfigError(f"{error}: remove the run directory to start over, or give another job.run_dir") from None
    held.callback(journal.close)
    if journal.num_rows:
        logger.info("the job is resumed: %s answered before this start", counted(journal.num_rows, "row"))
    run = OpenRun(config.job, lock, journal, manifest, check)
    held.callback(run.close)
    return run


def manifest_of(resolved: ResolvedRun, reader: RowReader) -> dict[str, Any]:
    """The manifest of this start; its input and arithmetic are added when they are known. Raises OSError."""
    fingerprint = None if resolved.tokenizer is None else resolved.tokenizer.fingerprint()
    return make_manifest(
        *(resolved, package_versions(), fingerprint),
        inputs=reader.paths,
        adapters=adapter_digests(resolved.config.model),
        media=media_answers(resolved),
    )


def clear_run_dir(run_dir: Path) -> None:
    """Remove the reports of an earlier start. Provenance stays with its output until both are replaced."""
    clear_records(run_dir)
    (run_dir / METRICS_NAME).unlink(missing_ok=True)


def check_loaded(engine: Engine, manifest: dict[str, Any]) -> None:
    """Raise ConfigError for weights, or an adapter, whose files changed before they were loaded: the manifest describes
    the others.
    """
    found = weight_answers(engine.resolved)
    if any(manifest["answers"].get(key) != digest for key, digest in found.items()):
        raise ConfigError(f"model.path={engine.resolved.location.path} changed while the job started: start it again")
    model, prompts = engine.config.model, engine.prompt_adapters
    loaded = {f"model.adapters.{name}": engine.adapters.digest_of_name(name) for name in model.adapters or ()}
    loaded |= {f"model.prompt_adapters.{name}": prompts.of_name(name).digest for name in model.prompt_adapters or ()}
    folders = adapter_folders(model)
    for key, digest in loaded.items():
        if manifest["answers"][key] != hex_digest(digest):
            raise ConfigError(f"{key}={folders[key]} changed while the job started: start it again")


def vectors_of(engine: Engine) -> VectorColumns | None:
    """Columns of the output's vectors; None for a model that generates."""
    pooling = engine.limits.pooling
    if pooling is None:
        return None
    name = "embedding" if pooling.task in VECTORS else "scores"
    return VectorColumns(name, 0 if pooling.task in TOKEN_TASKS else pooling.size, pooling.token_size)
