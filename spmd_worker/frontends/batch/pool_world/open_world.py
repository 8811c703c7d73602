"""A world of a pool: joins it with its job, answers leased rows, and merges if it is the last.

What others need to go on is in the pool; the run directory has this world's manifest, metrics and logs.
"""

import logging
import os
import socket
import time
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from spmd_worker.base.errors import ConfigError, PoolError
from spmd_worker.base.liveness.watchdog import Watchdog
from spmd_worker.base.metrics.prometheus import PrometheusFile, require_prometheus
from spmd_worker.base.remote_names import FilePath, RemotePath, file_path
from spmd_worker.base.remote_upload import remove_leftovers
from spmd_worker.engine.engine import Engine
from spmd_worker.frontends.batch.file_lock import ENDING
from spmd_worker.frontends.batch.input.input_files import is_stream
from spmd_worker.frontends.batch.input.input_index import RangeReader, read_index
from spmd_worker.frontends.batch.input.row_reader import RowReader
from spmd_worker.frontends.batch.input.stream_lines import StreamLines
from spmd_worker.frontends.batch.job_rows import JobInput, JobOutput
from spmd_worker.frontends.batch.job_run import WrittenOutput
from spmd_worker.frontends.batch.open_job import check_adapters, clear_run_dir, manifest_of, vectors_of
from spmd_worker.frontends.batch.output_file import own_partial, write_lines
from spmd_worker.frontends.batch.output_parts import is_parts
from spmd_worker.frontends.batch.pool.driver import Heartbeats, new_worker, run
from spmd_worker.frontends.batch.pool.lease_log import LeaseLog
from spmd_worker.frontends.batch.pool.members import Lease, Member, difference, join
from spmd_worker.frontends.batch.pool.object_store import open_pool_store
from spmd_worker.frontends.batch.pool.protocol import claim_merge, end_merge, still_holds
from spmd_worker.frontends.batch.pool.records import (
    JOB_NAME,
    MERGE_LOG,
    MERGED,
    WORKERS,
    Entry,
    Merged,
    PoolJob,
    free_record,
    read_free_record,
    worker_and_kind,
)
from spmd_worker.frontends.batch.pool.store import PoolStore
from spmd_worker.frontends.batch.pool_world.held_range import SpansDone
from spmd_worker.frontends.batch.pool_world.merge import MergedRows
from spmd_worker.frontends.batch.pool_world.pool_index import PoolIndex
from spmd_worker.frontends.batch.pool_world.pool_input import PoolInput
from spmd_worker.frontends.batch.pool_world.pool_worker import PoolWorker
from spmd_worker.frontends.batch.progress import Progress
from spmd_worker.frontends.batch.run_dir.job_files import check_files, is_job_file
from spmd_worker.frontends.batch.run_dir.manifest import (
    NOT_READ,
    end_manifest,
    set_arithmetic,
    set_input,
    write_manifest,
)
from spmd_worker.frontends.batch.run_dir.provenance import FORMAT_VERSION
from spmd_worker.frontends.batch.run_dir.run_lock import RunLock, make_folder
from spmd_worker.frontends.batch.run_dir.shard import run_dir_of
from spmd_worker.resolved import ResolvedRun

logger = logging.getLogger(__name__)

_SCAN_S: Final = 1.0
_POLL_S: Final = 0.5
_PROVENANCE: Final = f"{MERGED}/provenance.json"


class PoolRun:
    """The `JobRun` of a world: `close` hands back what it holds, however it ends."""

    def __init__(
        self,
        resolved: ResolvedRun,
        lock: RunLock,
        store: PoolStore,
        manifest: dict[str, Any],
        reader: RowReader,
        index: PoolIndex,
    ) -> None:
        self.lock, self.manifest, self.run_dir = lock, manifest, run_dir_of(resolved.config.job)
        self._config, self._job, self._store = resolved.config, resolved.config.job, store
        self._reader, self._index = reader, index
        self._id = new_worker()
        self._worker = PoolWorker(store, self._join, self._open_range, self._job.commit_rows, self._job.commit_s)
        self._heartbeats: Heartbeats | None = None

    def earlier_output(self) -> WrittenOutput | None:
        """The output of a pool that has ended. Raises ConfigError for another job, PoolError, OSError."""
        self.check_equal()
        merged = _merged_of(self._store)
        if merged is None:
            return None
        self._report_end(merged)
        return self._written(merged)

    def check_equal(self) -> None:
        """Raise ConfigError naming the first difference between the pool's job and this one, as far as it is known."""
        data = self._store.read(JOB_NAME)
        if data is None:
            return
        pool = PoolJob.from_bytes(data)
        known = {key: value for key, value in self.manifest["answers"].items() if value != NOT_READ}
        answers = {key: known.get(key, value) for key, value in pool.answers.items()} | known
        num_rows = pool.num_rows if self.manifest["num_rows"] is None else self.manifest["num_rows"]
        text = difference(pool, self._pool_job(answers, num_rows))
        if text is not None:
            raise ConfigError(text)

    def _pool_job(self, answers: dict[str, Any], num_rows: int) -> PoolJob:
        path = file_path(self._job.output or "")
        output = str(path) if isinstance(path, RemotePath) else os.path.abspath(path)
        return PoolJob(answers, num_rows, output, self._job.lease_s, self._job.lease_rows)

    def agree(self, engine: Engine) -> None:
        """Raise ConfigError if the engine computes other answers than the pool has, or has other adapters."""
        arithmetic, policy = engine.executor.reports()[0].arithmetic, engine.numerical_policy()
        set_arithmetic(self.run_dir, self.manifest, self._job.resume, arithmetic, policy)
        check_adapters(engine, self.manifest)
        self.check_equal()

    def open_rows(self, engine: Engine) -> tuple[PoolInput, JobOutput]:
        """The rows of the pool that this world will lease, and their answers' way into it."""
        model, path = self._config.model, self._job.prometheus_file
        self._defaults = engine.default_sampling
        rows = PoolInput(self._worker, (*(model.adapters or ()), *(model.prompt_adapters or ())))
        prometheus = PrometheusFile(Path(path)) if path else None
        self._rows, self._output = rows, JobOutput(self._worker, rows.keys, Progress(None), None, prometheus)
        self._worker.start()
        return rows, self._output

    def before_exit(self) -> None:
        """Commit finished rows, and hand back the leases: others go on at once."""
        self.lock.note(ENDING)
        self._worker.hand_back()
        self._worker.leave({"how": "signalled"})

    def commit(self) -> None:
        """Every row of the pool is done, and committed."""
        self._worker.stop()

    def write_output(self, engine: Engine) -> WrittenOutput:
        """Merge, or wait until another world has merged. Raises PoolError, OSError."""
        member = self._worker.member
        while not isinstance(found := run(self._store, claim_merge(member)), Merged):
            if found is None:
                self.lock.note("waits for the world that writes the output")
                engine.times.heartbeat.enter("waiting for the output")
                time.sleep(min(_POLL_S, self._job.lease_s))
                continue
            self.lock.note("writes the output")
            self._merge(engine, found)
        self._report_end(found)
        return self._written(found)

    def _merge(self, engine: Engine, lease: Lease) -> None:
        member, output = self._worker.member, file_path(self._job.output or "")
        rows = MergedRows(self._store, member, partial(engine.times.heartbeat.enter, "writing the output"))
        try:
            digest = write_lines(rows, output, vectors_of(engine), self._job.part_rows, writer=member.worker)
        except OSError:
            if run(self._store, still_holds(lease)):
                raise
            # Another world writes the same output, and has removed what this one had.
            return
        record = {
            "format_version": FORMAT_VERSION,
            "output": {"path": str(output), **digest},
            "images": rows.images.value(),
            "error_codes": dict(rows.error_codes),
            "version": self.manifest["version"],
            "seed": self._config.seed,
            "answers": self.manifest["answers"],
            "merged_by": member.worker,
        }
        self._store.touch(_PROVENANCE, free_record(record))
        if run(self._store, end_merge(member, lease, Merged(**digest))):
            self._remove_partials(output)

    def _remove_partials(self, output: FilePath) -> None:
        """Remove what worlds left that died while they merged."""
        if isinstance(output, RemotePath):
            remove_leftovers(output.raw)
            return
        for listed in self._store.list(f"{WORKERS}/"):
            worker, kind = worker_and_kind(listed.name) or ("", "")
            if kind == "json":
                own = own_partial(output, worker)
                for path in output.parent.glob(own.name) if is_parts(output) else [own]:
                    path.unlink(missing_ok=True)

    def _report_end(self, merged: Merged) -> None:
        logger.info("job.pool=%s has ended: %s has %d rows", self._job.pool, self._job.output, merged.lines)

    def _written(self, merged: Merged) -> WrittenOutput:
        record = read_free_record(self._store.read(_PROVENANCE))
        error_codes = record.get("error_codes", {})
        return WrittenOutput(asdict(merged), record.get("images"), sum(error_codes.values()))

    def end(self) -> None:
        end_manifest(self.run_dir, self.manifest)
        self._worker.leave({"how": "ended"})

    def close(self) -> None:
        """Commit and hand back what is left, however the job ended. Idempotent; an OSError is logged."""
        try:
            self._worker.hand_back()
            self._worker.leave({"how": "failed"})
        except (OSError, PoolError) as error:
            logger.warning("the pool's leases could not be handed back, and end by themselves: %s", error)
        if self._heartbeats is not None:
            self._heartbeats.__exit__(None, None, None)
            self._heartbeats = None

    def _join(self) -> Member | None:
        """Join the pool once its input is known. In the worker's thread."""
        index = self._index.wait()
        if index is None:
            return None
        most = self._job.max_rows
        num_rows = index.num_rows if most is None else min(index.num_rows, most)
        set_input(self.run_dir, self.manifest, self._job.resume, index.digest, num_rows, range(num_rows))
        self._ranges = RangeReader(self._reader, index)
        about = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "layout": asdict(self._config.parallel),
            "run_dir": str(self.run_dir.absolute()),
            "began": self.manifest["starts"][-1]["began"],
        }
        member = run(self._store, join(self._pool_job(self.manifest["answers"], num_rows), self._id, about))
        self._heartbeats = Heartbeats(self._store, member, self._counts, self._worker.suspect)
        self._heartbeats.__enter__()
        return member

    def _counts(self) -> dict[str, int]:
        counts = self._output.counts
        sums = {"rows": counts.rows, "error_rows": counts.error_rows, "output_tokens": counts.output_tokens}
        return {**sums, "prompt_tokens": counts.prompt_tokens, "ranges": self._worker.num_ranges}

    def _open_range(self, log: LeaseLog) -> JobInput:
        lines = StreamLines(self._ranges.rows(log.start, log.stop))
        # A range's rows, however many the job has.
        job = replace(self._job, max_rows=None)
        return JobInput(lines, job, self._config.limits, self._defaults, SpansDone(log.spans))


def open_world(resolved: ResolvedRun, held: ExitStack, watchdog: Watchdog | None) -> PoolRun:
    """Open the pool and this world's run directory, until `held` ends. Raises ConfigError for another job than the
    pool's, PoolError, OSError.
    """
    config, job = resolved.config, resolved.config.job
    if is_stream(job.input or ""):
        raise ConfigError(
            f"job.input={job.input} is a stream, which one job reads once: give job.pool={job.pool} files, or leave "
            f"out job.pool"
        )
    check_files(resolved)
    if job.prometheus_file:
        require_prometheus(job.prometheus_file)
    reader = RowReader.of(job.input or "", config.limits.num_line_bytes, partial(is_job_file, job))
    own = None if job.input_index is None else read_index(Path(job.input_index), reader)
    store, output = open_pool_store(job.pool or ""), file_path(job.output or "")
    if not isinstance(output, RemotePath):
        make_folder("the folder of job.output", output.parent)
    run_dir = run_dir_of(job)
    lock = held.enter_context(RunLock(run_dir, None))
    if watchdog is not None:
        watchdog.before_exit = partial(lock.note, ENDING)
    lock.note("reads the input")
    manifest = manifest_of(resolved, reader) | {"overridden": []}
    write_manifest(run_dir, manifest)
    clear_run_dir(run_dir)
    index = PoolIndex(store, reader, own)
    held.callback(index.close)
    run = PoolRun(resolved, lock, store, manifest, reader, index)
    held.callback(run.close)
    run.check_equal()
    # Most inputs are read quickly: their errors are raised before anything is loaded.
    index.wait(_SCAN_S)
    return run


def _merged_of(store: PoolStore) -> Merged | None:
    """The end of a pool, if it has ended."""
    log = LeaseLog(MERGE_LOG)
    while not log.is_over and (data := store.read(log.entry_name)) is not None:
        log.apply(Entry.from_bytes(log.entry_name, data))
    return log.merged
