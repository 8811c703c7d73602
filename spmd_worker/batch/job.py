"""The batch job: rows in, rows out, in input order, whatever single rows do.

Rank 0 reads, admits, writes and reports; the other ranks follow. Rows are admitted as the engine empties, so memory is
bounded by what runs and not by the file. Knows files and rows. Knows nothing about steps' insides.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from spmd_worker.batch.job_files import METRICS_NAME, check_job, prepare_files, run_dir_of, write_json
from spmd_worker.batch.progress import Progress, format_summary
from spmd_worker.batch.row import EncodedRow, RowError, shape_of
from spmd_worker.batch.row_parser import CustomIds, parse_row, resolve
from spmd_worker.batch.row_reader import RowReader
from spmd_worker.batch.row_writer import OrderedWriter, format_error, format_result
from spmd_worker.batch.run_records import open_step_log, write_last_records
from spmd_worker.config import JobConfig, RunConfig
from spmd_worker.engine import LLMEngine
from spmd_worker.engine_start import read_run, start_engine
from spmd_worker.lockstep.errors import ReplicaDivergedError
from spmd_worker.memory import host
from spmd_worker.model_shape import read_generation_config
from spmd_worker.observability.step_stats import STEP_STATS_NAME, StepStatsWriter
from spmd_worker.parallel.environment import RankEnvironment
from spmd_worker.parallel.layout import check_world_size
from spmd_worker.sequence.defaults import default_sampling
from spmd_worker.sequence.request import RequestId

_MAX_WAITING_LINES: Final = 100_000
"""Finished rows that may wait for an earlier one before no more are admitted."""


class JobError(RuntimeError):
    """The job ran to its end and is a failure all the same."""


@dataclass(slots=True)
class _Counts:
    """What rows came to."""

    rows: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    output_tokens: int = 0
    error_codes: dict[str, int] = field(default_factory=dict)

    @property
    def error_rows(self) -> int:
        return sum(self.error_codes.values())


def run_job(config: RunConfig, environment: RankEnvironment) -> None:
    """Run the job on this rank; returns when every input row has its output row.

    Raises ConfigError before anything is started for what cannot run, OSError where files cannot be read or written,
    and JobError for more error rows than `job.max_error_rows` (the output is complete then).
    """
    started_s = time.perf_counter()
    check_job(config.job)
    _, layout = read_run(config)
    if environment.is_launched:
        # Several engines would all read the same rows and write the same file.
        check_world_size(layout, environment.world_size)
    default_sampling(config.sampling, read_generation_config(Path(config.model.path or "")))
    run_dir = prepare_files(config.job) if environment.is_leader else None
    engine = start_engine(config, environment)
    loaded_s = time.perf_counter()
    try:
        if run_dir is None:
            engine.follow()
            engine.channel.gather(_peak_memory())
        else:
            _lead(engine, config, run_dir, started_s, loaded_s)
    except ReplicaDivergedError:
        write_last_records(engine, run_dir_of(config.job))
        raise
    finally:
        engine.shutdown()


def _lead(engine: LLMEngine, config: RunConfig, run_dir: Path, started_s: float, loaded_s: float) -> None:
    leader = _Leader(engine, config)
    with (
        open_step_log(engine, run_dir) if config.job.step_log else nullcontext(),
        StepStatsWriter(run_dir / STEP_STATS_NAME) as stats,
    ):
        engine.watch_steps(stats.write)
        leader.run()
        generated_s = time.perf_counter()
        engine.close_followers()
    peak_memory_bytes = sum(int.from_bytes(each, "little") for each in engine.channel.gather(_peak_memory()))
    metrics = _metrics(engine, leader.counts) | {
        "load_s": loaded_s - started_s,
        "generate_s": generated_s - loaded_s,
        "wall_s": time.perf_counter() - started_s,
        "peak_memory_bytes": peak_memory_bytes,
    }
    write_json(run_dir / METRICS_NAME, metrics)
    print(format_summary(metrics), file=sys.stderr)
    most = config.job.max_error_rows
    if most is not None and leader.counts.error_rows > most:
        raise JobError(f"{leader.counts.error_rows} error rows are more than job.max_error_rows={most}")


class _Leader:
    """Rank 0's side: rows into the engine, outputs into the file."""

    def __init__(self, engine: LLMEngine, config: RunConfig) -> None:
        self.counts = _Counts()
        self._engine, self._config = engine, config
        self._rows_by_request: dict[RequestId, EncodedRow] = {}
        self._custom_ids = CustomIds()
        # Enough to fill the next steps, few enough that a file of any size fits in memory.
        self._most_unfinished = 2 * config.scheduler.max_num_seqs
        self._num_done = 0
        self._shown = (0, 0)

    def run(self) -> None:
        job = self._config.job
        assert job.input is not None, "check_job comes first"
        assert job.output is not None, "check_job comes first"
        progress = Progress(count_rows(job))
        lines = iter(RowReader(job.input))
        try:
            with OrderedWriter.open(Path(job.output)) as writer:
                while self._admit(lines, writer) or self._engine.has_unfinished_requests():
                    self._collect(writer)
                    self._show(progress)
                self._show(progress)
        finally:
            progress.close()

    def _admit(self, lines: Iterator[tuple[int, bytes]], writer: OrderedWriter) -> bool:
        """Admit rows until enough are under way; False when there are no more."""
        most_rows = self._config.job.max_rows
        while len(self._rows_by_request) < self._most_unfinished and writer.num_waiting < _MAX_WAITING_LINES:
            if most_rows is not None and self.counts.rows >= most_rows:
                return False
            index, line = next(lines, (-1, b""))
            if index < 0:
                return False
            self.counts.rows += 1
            row = self._prepare(index, line)
            if isinstance(row, RowError):
                self._refuse(row, writer)
        return True

    def _prepare(self, index: int, line: bytes) -> EncodedRow | RowError:
        engine = self._engine
        row = self._custom_ids.check(parse_row(index, line, engine.default_sampling))
        if isinstance(row, RowError):
            return row
        encoded = resolve(row, engine.tokenizer, vocab_size=engine.shape.vocab_size, max_model_len=engine.max_model_len)
        if isinstance(encoded, RowError):
            return encoded
        try:
            request_id = engine.add_request(
                encoded.prompt_token_ids,
                encoded.sampling,
                prompt=encoded.prompt,
                custom_id=encoded.custom_id,
                index=index,
            )
        except ValueError as error:
            return RowError(index, row.custom_id, shape_of(row.kind), "request_refused", str(error))
        self._rows_by_request[request_id] = encoded
        return encoded

    def _refuse(self, row: RowError, writer: OrderedWriter) -> None:
        self.counts.error_codes[row.code] = self.counts.error_codes.get(row.code, 0) + 1
        self._num_done += 1
        writer.write(row.index, format_error(row))

    def _collect(self, writer: OrderedWriter) -> None:
        if not self._engine.has_unfinished_requests():
            return
        for output in self._engine.step():
            row = self._rows_by_request.pop(RequestId(int(output.request_id)))
            self.counts.prompt_tokens += len(output.prompt_token_ids)
            self.counts.cached_prompt_tokens += output.num_cached_tokens
            self.counts.output_tokens += sum(len(completion.token_ids) for completion in output.outputs)
            self._num_done += 1
            writer.write(row.index, format_result(row, output, Path(self._config.model.path or "").name))

    def _show(self, progress: Progress) -> None:
        """Once a step, also while no row has ended: tokens are counted as they are generated."""
        now = (self._num_done, self._engine.counters.num_output_tokens)
        progress.update(now[0] - self._shown[0], now[1] - self._shown[1])
        self._shown = now


def count_rows(job: JobConfig) -> int | None:
    """Rows of the input, for the progress display; None for standard input, which can be read once only."""
    if job.input is None or job.input == "-":
        return None
    num_rows = sum(1 for _ in RowReader(job.input))
    return num_rows if job.max_rows is None else min(num_rows, job.max_rows)


def _metrics(engine: LLMEngine, counts: _Counts) -> dict[str, Any]:
    counters = engine.counters
    return {
        "rows": counts.rows,
        "error_rows": counts.error_rows,
        "error_codes": counts.error_codes,
        "prompt_tokens": counts.prompt_tokens,
        "cached_prompt_tokens": counts.cached_prompt_tokens,
        "computed_prompt_tokens": counts.prompt_tokens - counts.cached_prompt_tokens,
        "output_tokens": counts.output_tokens,
        "computed_tokens": counters.num_computed_tokens,
        "recomputed_tokens": counters.num_recomputed_tokens,
        "preemptions": counters.num_preemptions,
        "preemptions_by_swap": counters.num_swapped_out,
        "tier_stored_blocks": counters.num_stored_blocks,
        "tier_loaded_blocks": counters.num_loaded_blocks,
        "steps": counters.num_steps,
        "schedule_s": engine.times.schedule_s,
        "lockstep_s": engine.times.lockstep_s,
        "execute_s": engine.times.execute_s,
        "apply_s": engine.times.apply_s,
    }


def _peak_memory() -> bytes:
    return host.peak_resident_bytes().to_bytes(8, "little")
