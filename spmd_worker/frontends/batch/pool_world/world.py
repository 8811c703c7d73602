"""A world in a pool: joins it with its job, leases rows and takes their answers, and merges if it is the last.

Knows no engine. What other worlds need to go on is in the pool's store.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from spmd_worker.base.config.schema import JobConfig, RowLimits
from spmd_worker.base.errors import ConfigError, PoolError
from spmd_worker.base.metrics.prometheus import PrometheusFile
from spmd_worker.base.remote_names import absolute_name, file_path, shown_name
from spmd_worker.frontends.batch.input.input_index import RangeReader
from spmd_worker.frontends.batch.input.row_reader import RowReader
from spmd_worker.frontends.batch.input.stream_lines import StreamLines
from spmd_worker.frontends.batch.job_counts import LostRows
from spmd_worker.frontends.batch.job_rows import JobInput, JobOutput
from spmd_worker.frontends.batch.output_file import WrittenOutput
from spmd_worker.frontends.batch.output_parts import is_parts, last_path, size_of
from spmd_worker.frontends.batch.parquet_rows import VectorColumns
from spmd_worker.frontends.batch.pool.driver import Heartbeats, new_worker, run
from spmd_worker.frontends.batch.pool.lease_log import LeaseLog
from spmd_worker.frontends.batch.pool.members import Member, check_remains, difference, join
from spmd_worker.frontends.batch.pool.protocol import claim_merge
from spmd_worker.frontends.batch.pool.records import (
    DONE,
    JOB_NAME,
    MERGE_LOG,
    MERGED,
    PARTS,
    RANGES,
    Entry,
    Merged,
    PoolJob,
    read_free_record,
)
from spmd_worker.frontends.batch.pool.store import PoolStore
from spmd_worker.frontends.batch.pool_world.held_range import SpansDone
from spmd_worker.frontends.batch.pool_world.merge import PROVENANCE, merge_pool
from spmd_worker.frontends.batch.pool_world.pool_index import PoolIndex
from spmd_worker.frontends.batch.pool_world.pool_input import PoolInput
from spmd_worker.frontends.batch.pool_world.pool_worker import PoolWorker
from spmd_worker.frontends.batch.progress import Progress
from spmd_worker.frontends.batch.run_dir.manifest import NOT_READ
from spmd_worker.replica.sequence.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

_POLL_S: Final = 0.5


class World:
    """`answers` are the manifest's, filled in as they become known; `about` describes this world. Call `open_rows`,
    `wait_for_end`, `write_output` and, however it ends, `close`.
    """

    def __init__(
        self,
        store: PoolStore,
        job: JobConfig,
        limits: RowLimits,
        reader: RowReader,
        index: PoolIndex,
        answers: Mapping[str, Any],
        about: Mapping[str, Any],
    ) -> None:
        self.set_input: Callable[[str, int], Any] = lambda digest, num_rows: None
        """Called with the input's digest and number of rows, before the pool is joined."""
        self._store, self._job, self._limits, self._reader, self._index = store, job, limits, reader, index
        self._answers, self._about = answers, about
        self._worker = PoolWorker(store, self._join, self._open_range, job.commit_rows, job.commit_s)
        self._heartbeats: Heartbeats | None = None
        self._output: JobOutput | None = None

    def check_equal(self) -> None:
        """Raise ConfigError naming the first difference between the pool's job and this one, as far as it is known, and
        PoolError for a pool of which job.json alone was removed.
        """
        data = self._store.read(JOB_NAME)
        if data is None:
            # Its end would be that of another job.
            run(self._store, check_remains((RANGES, PARTS, DONE, MERGED)))
            return
        pool = PoolJob.from_bytes(data)
        unknown = {key: pool.answers.get(key) for key, value in self._answers.items() if value == NOT_READ}
        text = difference(pool, self._pool_job({**self._answers, **unknown}, pool.num_rows))
        if text is not None:
            raise ConfigError(text)

    def check_output(self) -> None:
        """Raise PoolError if the pool has ended, but its output is missing."""
        last = last_path(file_path(self._job.output or ""))
        if self._merged() is not None and size_of(last) is None:
            raise PoolError(
                f"job.pool={self._job.pool} has ended, but {last} is missing: restore the output, or remove the pool "
                f"to compute it again"
            )

    def earlier_output(self) -> WrittenOutput | None:
        """The output, if the pool has ended: with this input, however long it takes to know that. Raises ConfigError,
        PoolError, OSError.
        """
        merged = self._merged()
        if merged is None:
            return None
        self._index.wait(None)
        return self._written(merged)

    def open_rows(
        self,
        defaults: SamplingParams,
        adapters: Iterable[str] = (),
        progress: Progress | None = None,
        prometheus: PrometheusFile | None = None,
    ) -> tuple[PoolInput, JobOutput]:
        """The rows that this world will lease, and their answers' way into the pool."""
        self._defaults = defaults
        self.rows = PoolInput(self._worker, adapters)
        self._output = JobOutput(self._worker, self.rows.keys, progress or Progress(None), None, prometheus)
        self._worker.start()
        return self.rows, self._output

    def lost_rows(self) -> LostRows:
        """Rows of leases that were lost."""
        return LostRows(self._worker.num_dropped_rows, self.rows.num_dropped_rows)

    def wait_for_end(self) -> None:
        """Return when every row of the pool is done, as `PoolInput.has_ended` has it."""
        self._worker.stop()

    def write_output(
        self,
        vectors: VectorColumns | None,
        record: Mapping[str, Any],
        advance: Callable[[str], Any],
        folder: Path | None = None,
    ) -> WrittenOutput:
        """Merge, or wait until another world has merged. `record` is a part of the provenance; `advance` is called now
        and then, with what is done; `folder` is for a temporary file. Raises PoolError, OSError.
        """
        member = self._worker.member
        while not isinstance(found := run(self._store, claim_merge(member)), Merged):
            if found is None:
                advance("waits for the world that writes the output")
                time.sleep(min(_POLL_S, self._job.lease_s / 4))
                continue
            advance("writes the output")
            output = file_path(self._job.output or "")
            merge_pool(
                *(self._store, member, found, output, vectors, record, lambda: advance("writes the output")),
                part_rows=self._job.part_rows,
                folder=folder,
            )
        return self._written(found)

    def leave(self, how: str) -> None:
        """Commit finished rows, hand the leases back, and leave. Other worlds go on at once. Idempotent, in any thread.
        Raises PoolError, OSError.
        """
        self._worker.hand_back()
        counts = {} if self._output is None else self._counts()
        self._worker.leave({"how": how, "counts": counts})

    def close(self) -> None:
        """Leave, as failed unless it has left, and end the threads; an error of the store is logged."""
        try:
            self.leave("failed")
        except (OSError, PoolError) as error:
            logger.warning("The leases could not be handed back to the pool, and end by themselves: %s", error)
        if self._heartbeats is not None:
            self._heartbeats.__exit__(None, None, None)
            self._heartbeats = None

    def _pool_job(self, answers: Mapping[str, Any], num_rows: int) -> PoolJob:
        path = file_path(self._job.output or "")
        output = absolute_name(path, follows_links=False)
        if is_parts(path):
            answers = {**answers, "job.part_rows": self._job.part_rows}
        return PoolJob(answers, num_rows, output, self._job.lease_s, self._job.lease_rows)

    def _merged(self) -> Merged | None:
        log = LeaseLog(MERGE_LOG)
        while not log.is_over and (data := self._store.read(log.entry_name)) is not None:
            log.apply(Entry.from_bytes(log.entry_name, data))
        return log.merged

    def _written(self, merged: Merged) -> WrittenOutput:
        pool, output = shown_name(self._job.pool or ""), shown_name(self._job.output or "")
        logger.info("job.pool=%s has ended: %s has %d rows", pool, output, merged.lines)
        record = read_free_record(self._store.read(PROVENANCE))
        return WrittenOutput(asdict(merged), record.get("images"), sum(record.get("error_codes", {}).values()))

    # The worker's thread.

    def _join(self) -> Member | None:
        """Join the pool once its input is known."""
        index = self._index.wait()
        if index is None:
            return None
        num_rows = index.num_rows if self._job.max_rows is None else min(index.num_rows, self._job.max_rows)
        self.set_input(index.digest, num_rows)
        self._ranges = RangeReader(self._reader, index)
        worker = new_worker()
        run(self._store, check_remains((RANGES, PARTS, DONE, MERGED)))
        member = run(self._store, join(self._pool_job(self._answers, num_rows), worker, self._about))
        self._heartbeats = Heartbeats(self._store, member, self._counts, self._worker.suspect)
        self._heartbeats.__enter__()
        return member

    def _counts(self) -> dict[str, int]:
        assert self._output is not None, "rows are opened before the pool is joined"
        counts = self._output.counts
        sums = {"rows": counts.rows, "error_rows": counts.error_rows, "output_tokens": counts.output_tokens}
        return {**sums, "prompt_tokens": counts.prompt_tokens, "ranges": self._worker.num_ranges}

    def _open_range(self, log: LeaseLog) -> JobInput:
        lines = StreamLines(self._ranges.rows(log.start, log.stop))
        # A range's rows, however many the job has.
        job = replace(self._job, max_rows=None)
        return JobInput(lines, job, self._limits, self._defaults, SpansDone(log.spans))
