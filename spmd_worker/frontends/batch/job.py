"""The batch job: reads rows, answers them, and writes an output row for each, in input order.

Rank 0 reads, admits, writes and reports; the other ranks follow, or answer rows too if there are several replicas
(`shared_job.py`). Rows are admitted as the engine empties, so memory is bounded by the running rows, not by the file.
"""

import logging
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from spmd_worker.base.config.schema import RunConfig
from spmd_worker.base.errors import ConfigError, JobError, JournalError, ReplicaDivergedError
from spmd_worker.base.files import sync_folder, write_json
from spmd_worker.base.liveness.error_file import clear_records
from spmd_worker.base.liveness.watchdog import Watchdog
from spmd_worker.base.metrics.prometheus import PrometheusFile, require_prometheus
from spmd_worker.base.metrics.stage_times import STAGE_TIMES_NAME, write_stage_times
from spmd_worker.base.metrics.step_stats import STEP_STATS_NAME, StepStatsWriter
from spmd_worker.engine.data_parallel.replicas import Replicas, open_replicas
from spmd_worker.engine.engine import Engine
from spmd_worker.engine.startup import package_versions, read_run, start_engine
from spmd_worker.engine.step_interval import TimeBudget, max_step_interval_s
from spmd_worker.frontends.batch.file_lock import ENDING
from spmd_worker.frontends.batch.input.input_scan import InputScan
from spmd_worker.frontends.batch.input.row_reader import RowReader
from spmd_worker.frontends.batch.job_metrics import (
    ReplicaCounts,
    chain_heads,
    job_metrics,
    report_of_rank,
    report_of_replica,
    stages_of,
)
from spmd_worker.frontends.batch.job_rows import JobInput, JobOutput
from spmd_worker.frontends.batch.media_window import MediaWindow
from spmd_worker.frontends.batch.output_file import OutputFile, VectorColumn
from spmd_worker.frontends.batch.prefix_window import PrefixWindow, in_prefix_order
from spmd_worker.frontends.batch.progress import Progress, format_summary
from spmd_worker.frontends.batch.row_runner import RowRunner
from spmd_worker.frontends.batch.run_dir.adapter_digests import adapter_digests, hex_digest
from spmd_worker.frontends.batch.run_dir.audio_answers import audio_answers
from spmd_worker.frontends.batch.run_dir.image_answers import image_answers
from spmd_worker.frontends.batch.run_dir.job_files import (
    METRICS_NAME,
    PROVENANCE_NAME,
    adapter_folders,
    check_files,
    check_job,
    check_output,
    is_job_file,
    run_dir_of,
)
from spmd_worker.frontends.batch.run_dir.journal import RowJournal, remove_journal
from spmd_worker.frontends.batch.run_dir.manifest import (
    check_manifest,
    end_manifest,
    make_manifest,
    set_arithmetic,
    set_input,
    write_manifest,
)
from spmd_worker.frontends.batch.run_dir.provenance import chained_digest, write_provenance
from spmd_worker.frontends.batch.run_dir.run_lock import RunLock
from spmd_worker.frontends.batch.run_dir.run_records import open_step_log, write_last_records
from spmd_worker.frontends.batch.shared_job import help_shared_job, lead_shared_job
from spmd_worker.frontends.openai.row import RowError
from spmd_worker.frontends.openai.row_writer import error_result
from spmd_worker.ranks.environment import RankEnvironment
from spmd_worker.ranks.topology import check_world_size
from spmd_worker.replica.scheduler.budget import MAX_COMPILE_BYTES
from spmd_worker.resolved import ResolvedRun
from spmd_worker.worker.device import device_type
from spmd_worker.worker.memory.garbage import settled_objects

logger = logging.getLogger(__name__)

_SCAN_S: Final = 1.0
"""Time that a start waits for the scan of its input; then the scan continues in parallel."""
_PAUSE_S: Final = 0.01


@dataclass(frozen=True, slots=True)
class OpenRun:
    """Rank 0's state while the job runs."""

    lock: RunLock
    journal: RowJournal
    manifest: dict[str, Any]
    reader: RowReader
    check: "InputCheck"

    def before_exit(self) -> None:
        """Commit finished rows, and record in the lock that it will be free."""
        self.lock.note(ENDING)
        self.journal.commit()


class InputCheck:
    """Records the scan of the input once it has ended, and calls `expect` with the number of rows. A resumed run reads
    no row before: its input must be the same.
    """

    def __init__(self, scan: InputScan, run_dir: Path, manifest: dict[str, Any], resume: str, is_resumed: bool) -> None:
        self._scan, self._run_dir, self._manifest = scan, run_dir, manifest
        self._resume, self._is_resumed = resume, is_resumed
        self._is_recorded = False
        self.expect: Callable[[int | None], None] = lambda num_rows: None

    def may_read(self) -> bool:
        """Whether rows may be read now. Raises as `is_recorded` does."""
        return self.is_recorded() or not self._is_resumed

    def is_recorded(self, timeout_s: float = 0.0) -> bool:
        """Wait up to `timeout_s`; return whether the scan has ended and is in the manifest. Raises OSError for an
        unreadable input, ConfigError for one that has changed.
        """
        found = None if self._is_recorded else self._scan.wait(timeout_s)
        if found is not None:
            # Else the manifest would describe other rows than were answered.
            self.check_unchanged()
            set_input(self._run_dir, self._manifest, self._resume, found.digest, found.num_rows)
            self._is_recorded = True
            self.expect(found.num_rows)
        return self._is_recorded

    def check_unchanged(self) -> None:
        """Raise ConfigError if files changed while they were read: the manifest does not describe their rows."""
        if self._scan.has_changed():
            raise ConfigError(
                f"job.input={self._manifest['config']['job']['input']} changed while the job read it. The answers are "
                f"kept: start the job again with the unchanged input, or give another job.run_dir"
            )


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
    started_s = time.perf_counter()
    check_job(config.job)
    if resolved is None or resolved.device_type != device_type(config.device):
        resolved = read_run(config)
    if environment.is_launched:
        # Several engines would all read the same rows and write the same file.
        check_world_size(resolved.layout, environment.world_size)
    with ExitStack() as held:
        run = _open_run(resolved, held, watchdog) if environment.is_leader else None
        _run(resolved, environment, watchdog, run, started_s)
        if run is not None:
            # Only when nothing is left that could fail or be interrupted: starting an ended run recomputes it.
            end_manifest(run.journal.folder, run.manifest)
            run.journal.close()
            remove_journal(run.journal.folder)


def _open_run(resolved: ResolvedRun, held: ExitStack, watchdog: Watchdog | None) -> OpenRun:
    """Open the run directory until `held` ends; its journal has the finished rows, also of an earlier start."""
    config = resolved.config
    check_files(resolved)
    if config.job.prometheus_file:
        require_prometheus(config.job.prometheus_file)
    run_dir = run_dir_of(config.job)
    lock = held.enter_context(RunLock(run_dir, Path(config.job.output or "")))
    if watchdog is not None:
        watchdog.before_exit = partial(lock.note, ENDING)
    check_output(config.job)
    lock.note("reads the input")
    fingerprint = None if resolved.tokenizer is None else resolved.tokenizer.fingerprint()
    is_own = partial(is_job_file, config.job)
    reader = RowReader.of(config.job.input or "", config.limits.num_line_bytes, is_own)
    scan = InputScan(reader, config.job.max_rows)
    held.callback(scan.close)
    adapters = adapter_digests(config.model)
    manifest = make_manifest(
        *(resolved, package_versions(), fingerprint),
        inputs=reader.paths,
        adapters=adapters,
        media=image_answers(resolved) | audio_answers(resolved),
    )
    # Most inputs are read quickly: their errors are raised before anything is loaded.
    scan.wait(_SCAN_S)
    is_resumed = check_manifest(run_dir, manifest, config.job.resume)
    check = InputCheck(scan, run_dir, manifest, config.job.resume, is_resumed)
    if not is_resumed:
        # Left by an ended run. Removed before the manifest is written, which identifies the journal next to it.
        remove_journal(run_dir)
        sync_folder(run_dir)
    write_manifest(run_dir, manifest)
    check.is_recorded()
    clear_records(run_dir)
    for name in (METRICS_NAME, PROVENANCE_NAME):
        (run_dir / name).unlink(missing_ok=True)
    try:
        journal = RowJournal(run_dir, config.job.commit_rows, config.job.commit_s)
    except JournalError as error:
        raise ConfigError(f"{error}: remove the run directory to start over, or give another job.run_dir") from None
    held.callback(journal.close)
    if journal.num_rows:
        logger.info("the job is resumed: %d rows were answered before this start", journal.num_rows)
    return OpenRun(lock, journal, manifest, reader, check)


def _run(
    resolved: ResolvedRun,
    environment: RankEnvironment,
    watchdog: Watchdog | None,
    run: OpenRun | None,
    started_s: float,
) -> None:
    config = resolved.config
    if run is not None:
        run.lock.note("joins the other ranks and loads the model")
    engine: Engine = start_engine(resolved, environment, watchdog)
    loaded_s = time.perf_counter()
    try:
        replicas = open_replicas(engine)
        with settled_objects():
            if run is None:
                _follow(engine, replicas)
            else:
                if watchdog is not None:
                    watchdog.before_exit = run.before_exit
                arithmetic = engine.executor.reports()[0].arithmetic
                policy = engine.numerical_policy()
                set_arithmetic(run.journal.folder, run.manifest, config.job.resume, arithmetic, policy)
                _check_adapters(engine, run.manifest)
                run.lock.note("answers rows")
                _lead(engine, replicas, config, run, started_s, loaded_s)
    except BaseException as error:  # reported to the other ranks, before anything is shut down, and re-raised
        if engine.watchdog is not None:
            engine.watchdog.fail(error)
        if isinstance(error, ReplicaDivergedError):
            write_last_records(engine, run_dir_of(config.job))
        raise
    finally:
        engine.shutdown()


def _check_adapters(engine: Engine, manifest: dict[str, Any]) -> None:
    """Raise ConfigError for an adapter whose files changed before it was loaded: the manifest describes the others."""
    model, prompts = engine.config.model, engine.prompt_adapters
    loaded = {f"model.adapters.{name}": engine.adapters.digest_of_name(name) for name in model.adapters or ()}
    loaded |= {f"model.prompt_adapters.{name}": prompts.of_name(name).digest for name in model.prompt_adapters or ()}
    folders = adapter_folders(model)
    for key, digest in loaded.items():
        if manifest["answers"][key] != hex_digest(digest):
            raise ConfigError(f"{key}={folders[key]} changed while the job started: start it again")


def _follow(engine: Engine, replicas: Replicas | None) -> None:
    """Run the part of every rank but 0."""
    if replicas is None:
        engine.follow()
    # None on a rank that leads no replica.
    counts = None if replicas is None else help_shared_job(replicas)
    engine.engine_channel.gather(report_of_rank(engine) if counts is None else report_of_replica(engine, counts))


def _lead(
    engine: Engine, replicas: Replicas | None, config: RunConfig, run: OpenRun, started_s: float, loaded_s: float
) -> None:
    job, run_dir = config.job, run.journal.folder
    num_rows, model_name = run.manifest["num_rows"], run.manifest["model_name"]
    adapters = (*(config.model.adapters or ()), *(config.model.prompt_adapters or ()))
    source = JobInput(run.reader, job, config.limits, engine.default_sampling, run.journal, adapters)
    source.may_read = run.check.may_read
    rows = in_prefix_order(source, config)
    prometheus = PrometheusFile(Path(job.prometheus_file)) if job.prometheus_file else None
    progress = Progress(num_rows, rows_before=run.journal.num_rows)
    output = JobOutput(run.journal, source.keys, progress, num_rows, prometheus)
    run.check.expect = output.expect
    with (
        output,
        open_step_log(engine, run_dir) if job.step_log else nullcontext(),
        StepStatsWriter(run_dir / STEP_STATS_NAME) as stats,
    ):
        engine.watch_steps(stats.write)
        if replicas is not None:
            counts = lead_shared_job(replicas, rows, output, model_name)
        else:
            media_wait_s = _answer_alone(engine, rows, output, model_name)
            num_answered = output.counts.rows - output.counts.resumed_rows
            counts = ReplicaCounts(num_answered, engine.counters.num_output_tokens, media_wait_s)
        run.journal.commit()
        generated_s = time.perf_counter()
        if not engine.is_closed:
            engine.close_followers()
        # The other ranks do not wait for the output, which may take long.
        reports = engine.engine_channel.gather(report_of_replica(engine, counts))
        if replicas is not None:
            replicas.forget_round()
        while not run.check.is_recorded(timeout_s=_SCAN_S):
            engine.times.heartbeat.enter("reading the input")
        run.check.check_unchanged()
        run.lock.note("writes the output")
        pooling = engine.limits.pooling
        vectors = None if pooling is None else ("embedding" if pooling.task == "embed" else "scores", pooling.size)
        digests = _write_output(run.journal, Path(job.output or ""), rows.num_rows, vectors)
        output.is_complete = True
    metrics = job_metrics(output.counts, reports) | {
        "load_s": loaded_s - started_s,
        "generate_s": generated_s - loaded_s,
        "wall_s": time.perf_counter() - started_s,
        "adapters": rows.num_rows_by_adapter,
    }
    write_json(run_dir / METRICS_NAME, metrics)
    images = chained_digest(run.journal.media_digests())
    write_provenance(run_dir, run.manifest, {"path": job.output or "", **digests}, chain_heads(reports), images)
    if "stages" in metrics:
        write_stage_times(run_dir / STAGE_TIMES_NAME, stages_of(reports), engine.times.first_began_us)
    print(format_summary(metrics), file=sys.stderr)
    error_rows, most = output.counts.error_rows, job.max_error_rows
    if most is not None and error_rows > most:
        # The journal is kept: a launcher that restarts the job must not recompute everything.
        raise JobError(
            f"{error_rows} error rows are more than job.max_error_rows={most}: correct those rows or raise the limit"
        )


def _write_output(journal: RowJournal, path: Path, num_rows: int, vectors: VectorColumn | None) -> dict[str, Any]:
    """Write all lines, in the order of the rows, to a file that appears when it is complete. Returns a digest of the
    uncompressed lines: for plain JSONL as `sha256sum`.
    """
    digest, num_lines, num_bytes = sha256(), 0, 0
    with OutputFile.open(path, vectors) as output:
        for line in journal.lines():
            output.write(line)
            digest.update(line)
            num_lines, num_bytes = num_lines + 1, num_bytes + len(line)
        assert num_lines == num_rows, (num_lines, num_rows)
    return {"lines": num_lines, "bytes": num_bytes, "sha256": digest.hexdigest()}


def _answer_alone(engine: Engine, rows: JobInput | PrefixWindow, output: JobOutput, model_name: str) -> float:
    """Returns the seconds without a row to compute while images or audio were prepared."""
    runner, window = RowRunner(engine, model_name), MediaWindow.of(engine)
    # Enough to fill the next steps, few enough that a file of any size fits in memory.
    most_unfinished = 2 * engine.max_num_seqs
    timeout_s = engine.config.executor.timeout_s
    stepped_s = time.monotonic()
    while not rows.has_ended or runner.num_rows or len(window):
        _admit(rows, window, runner, output, most_unfinished, TimeBudget(timeout_s))
        if runner.num_rows or time.monotonic() - stepped_s > max_step_interval_s(timeout_s):
            output.add_all(runner.step())
            stepped_s = time.monotonic()
        elif len(window) or (not rows.has_ended and not rows.is_ready()):
            window.pause(_PAUSE_S)
        output.show(engine.counters.num_output_tokens)
    output.show(engine.counters.num_output_tokens)
    return window.wait_s


def _admit(
    rows: JobInput | PrefixWindow,
    window: MediaWindow,
    runner: RowRunner,
    output: JobOutput,
    most_unfinished: int,
    turn: TimeBudget,
) -> None:
    """Admit available rows, up to `most_unfinished`, MAX_COMPILE_BYTES of compiled grammars or the end of the turn."""
    most_form_bytes = runner.num_compile_bytes + MAX_COMPILE_BYTES
    while runner.num_requests < most_unfinished and runner.num_compile_bytes < most_form_bytes and not turn.is_over:
        ready = window.next_ready(runner.num_media_bytes)
        if ready is not None:
            row, media = ready
            answer = error_result(row) if isinstance(row, RowError) else runner.admit(row, media)
            if answer is not None:
                output.add(answer)
        elif not window.has_room or rows.has_ended or (found := rows.next_row()) is None:
            return
        elif isinstance(found.row, RowError):
            output.add(error_result(found.row))
        else:
            window.put(found.row)
