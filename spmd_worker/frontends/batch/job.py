"""The batch job: reads rows, answers them, and writes an output row for each, in input order.

Rank 0 reads, admits, writes and reports; the other ranks follow, or answer rows too if there are several replicas
(`shared_job.py`). Rows are admitted as the engine empties, so memory is bounded by the running rows, not by the file.
"""

import sys
import time
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from spmd_worker.base.config.schema import RunConfig
from spmd_worker.base.errors import JobError, ReplicaDivergedError
from spmd_worker.base.files import write_json
from spmd_worker.base.liveness.watchdog import Watchdog
from spmd_worker.base.metrics.stage_times import STAGE_TIMES_NAME, write_stage_times
from spmd_worker.base.metrics.step_stats import STEP_STATS_NAME, StepStatsWriter
from spmd_worker.engine.data_parallel.replicas import Replicas, open_replicas
from spmd_worker.engine.engine import Engine
from spmd_worker.engine.startup import NoWorkError, read_run, start_engine
from spmd_worker.frontends.batch.answer_rows import answer_alone
from spmd_worker.frontends.batch.job_metrics import (
    ReplicaCounts,
    chain_heads,
    job_metrics,
    report_of_rank,
    report_of_replica,
    stages_of,
)
from spmd_worker.frontends.batch.job_run import JobRun
from spmd_worker.frontends.batch.open_job import open_run
from spmd_worker.frontends.batch.output_file import WrittenOutput
from spmd_worker.frontends.batch.pool_world.open_world import open_world
from spmd_worker.frontends.batch.prefix_window import in_prefix_order
from spmd_worker.frontends.batch.progress import format_summary
from spmd_worker.frontends.batch.row_source import AnswerSink, RowSource
from spmd_worker.frontends.batch.run_dir.job_files import METRICS_NAME, check_job
from spmd_worker.frontends.batch.run_dir.provenance import write_provenance
from spmd_worker.frontends.batch.run_dir.run_records import open_step_log, write_last_records
from spmd_worker.frontends.batch.run_dir.shard import output_of, run_dir_of
from spmd_worker.frontends.batch.shared_job import help_shared_job, lead_shared_job
from spmd_worker.frontends.openai.engine_models import own_names
from spmd_worker.ranks.environment import RankEnvironment
from spmd_worker.ranks.topology import check_world_size
from spmd_worker.ranks.transport.channel import ControlChannel
from spmd_worker.resolved import ResolvedRun
from spmd_worker.worker.device import device_type
from spmd_worker.worker.memory.garbage import settled_objects


@dataclass(slots=True)
class Moments:
    """Moments of the job, by `time.perf_counter`."""

    started_s: float
    loaded_s: float = 0.0
    generated_s: float = 0.0


def run_job(
    config: RunConfig,
    environment: RankEnvironment,
    watchdog: Watchdog | None = None,
    resolved: ResolvedRun | None = None,
) -> None:
    """Run the job on this rank; returns when every input row has its output row.

    `resolved` is the run as read before torch could name the device; it is re-read for another device. Raises
    ConfigError, before anything is started, for a job that cannot run, OSError if files cannot be read or written, and
    JobError for more error rows than `job.max_error_rows` (the output is complete then).
    """
    moments = Moments(time.perf_counter())
    check_job(config.job)
    if resolved is None or resolved.device_type != device_type(config.device):
        resolved = read_run(config)
    own_names(resolved)
    if environment.is_launched:
        # Several engines would all read the same rows and write the same file.
        check_world_size(resolved.layout, environment.world_size)
    with ExitStack() as held:
        run = _open(resolved, held, watchdog) if environment.is_leader else None
        ended = None if run is None else run.earlier_output()
        try:
            if ended is None or environment.world_size > 1:
                _run(resolved, environment, watchdog, run, moments, has_ended=ended is not None)
        except NoWorkError:
            pass
        if ended is not None:
            _check_error_rows(ended.num_error_rows, config.job.max_error_rows)
        if run is not None:
            run.end()


def _open(resolved: ResolvedRun, held: ExitStack, watchdog: Watchdog | None) -> JobRun:
    open_ = open_run if resolved.config.job.pool is None else open_world
    return open_(resolved, held, watchdog)


def _run(
    resolved: ResolvedRun,
    environment: RankEnvironment,
    watchdog: Watchdog | None,
    run: JobRun | None,
    moments: Moments,
    *,
    has_ended: bool,
) -> None:
    """`has_ended` on rank 0: there is nothing to do. Raises NoWorkError on every rank then."""
    if run is not None:
        run.lock.note("joins the other ranks and loads the model")
    # Only a pool can have ended.
    asks = resolved.config.job.pool is not None and environment.world_size > 1
    look = partial(_end_early, None if run is None else has_ended) if asks else None
    engine: Engine = start_engine(resolved, environment, watchdog, before_load=look)
    moments.loaded_s = time.perf_counter()
    try:
        replicas = open_replicas(engine)
        with settled_objects():
            if run is None:
                _follow(engine, replicas)
            else:
                if watchdog is not None:
                    watchdog.before_exit = run.before_exit
                run.agree(engine)
                run.lock.note("answers rows")
                _lead(engine, replicas, run, moments)
    except BaseException as error:  # reported to the other ranks, before anything is shut down, and re-raised
        if engine.watchdog is not None:
            engine.watchdog.fail(error)
        if isinstance(error, ReplicaDivergedError):
            write_last_records(engine, run_dir_of(resolved.config.job))
        raise
    finally:
        engine.shutdown()


def _end_early(has_ended: bool | None, channel: ControlChannel) -> None:
    """Raise NoWorkError on every rank if `has_ended` on rank 0; others give None."""
    if channel.broadcast(None if has_ended is None else bytes([has_ended])) == bytes([True]):
        raise NoWorkError


def _follow(engine: Engine, replicas: Replicas | None) -> None:
    """Run the part of every rank but 0."""
    if replicas is None:
        engine.follow()
    # None on a rank that leads no replica.
    counts = None if replicas is None else help_shared_job(replicas)
    engine.engine_channel.gather(report_of_rank(engine) if counts is None else report_of_replica(engine, counts))


def _lead(engine: Engine, replicas: Replicas | None, run: JobRun, moments: Moments) -> None:
    rows, output = run.open_rows(engine)
    with (
        output,
        open_step_log(engine, run.run_dir) if engine.config.job.step_log else nullcontext(),
        StepStatsWriter(run.run_dir / STEP_STATS_NAME) as stats,
    ):
        engine.watch_steps(stats.write)
        counts = _answer(engine, replicas, rows, output, run.manifest["model_name"])
        run.commit()
        moments.generated_s = time.perf_counter()
        if not engine.is_closed:
            engine.close_followers()
        # The other ranks do not wait for the output, which may take long.
        reports = engine.engine_channel.gather(report_of_replica(engine, counts))
        if replicas is not None:
            replicas.forget_round()
        written = run.write_output(engine)
        output.is_complete = True
    lost = run.lost_rows()
    metrics = job_metrics(output.counts, reports) | {
        "load_s": moments.loaded_s - moments.started_s,
        "generate_s": moments.generated_s - moments.loaded_s,
        "wall_s": time.perf_counter() - moments.started_s,
        "adapters": rows.num_rows_by_adapter,
        "lost_rows": lost.computed,
        "dropped_rows": lost.dropped,
    }
    _report(engine, run, metrics, reports, written)
    _check_error_rows(written.num_error_rows, engine.config.job.max_error_rows)


def _answer(
    engine: Engine, replicas: Replicas | None, rows: RowSource, output: AnswerSink, model_name: str
) -> ReplicaCounts:
    """Answer all rows, in one replica or several. Returns the work of this one."""
    rows = in_prefix_order(rows, engine.config)
    if replicas is not None:
        return lead_shared_job(replicas, rows, output, model_name)
    media_wait_s = answer_alone(engine, rows, output, model_name)
    num_answered = output.counts.rows - output.counts.resumed_rows
    return ReplicaCounts(num_answered, engine.counters.num_output_tokens, media_wait_s)


def _report(engine: Engine, run: JobRun, metrics: dict[str, Any], reports: list[bytes], written: WrittenOutput) -> None:
    """Write the run's metrics, provenance and stage times, and print the summary."""
    write_json(run.run_dir / METRICS_NAME, metrics)
    output = {"path": str(output_of(engine.config.job)), **written.digest}
    write_provenance(run.run_dir, run.manifest, output, chain_heads(reports), written.images)
    if "stages" in metrics:
        write_stage_times(run.run_dir / STAGE_TIMES_NAME, stages_of(reports), engine.times.first_began_us)
    print(format_summary(metrics), file=sys.stderr)


def _check_error_rows(error_rows: int, most: int | None) -> None:
    if most is not None and error_rows > most:
        # The journal is kept: a launcher that restarts the job must not recompute everything.
        raise JobError(
            f"{error_rows} error rows are more than job.max_error_rows={most}: correct those rows or raise the limit"
        )
