"""Rank 0's state of a job in a pool: the world, its engine's arithmetic, and its run directory."""

import os
import socket
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final

from spmd_worker.base.errors import ConfigError
from spmd_worker.base.liveness.watchdog import Watchdog
from spmd_worker.base.metrics.prometheus import PrometheusFile, require_prometheus
from spmd_worker.base.remote_names import file_path
from spmd_worker.engine.engine import Engine
from spmd_worker.frontends.batch.file_lock import ENDING
from spmd_worker.frontends.batch.input.input_files import is_stream
from spmd_worker.frontends.batch.input.input_index import read_index
from spmd_worker.frontends.batch.input.row_reader import RowReader
from spmd_worker.frontends.batch.job_counts import LostRows
from spmd_worker.frontends.batch.job_rows import JobOutput
from spmd_worker.frontends.batch.open_job import check_loaded, clear_run_dir, manifest_of, vectors_of
from spmd_worker.frontends.batch.output_file import WrittenOutput
from spmd_worker.frontends.batch.output_parts import claim_folder, is_parts
from spmd_worker.frontends.batch.pool.driver import run
from spmd_worker.frontends.batch.pool.members import put_once
from spmd_worker.frontends.batch.pool.object_store import open_pool_store
from spmd_worker.frontends.batch.pool.pool_metrics import PoolValues
from spmd_worker.frontends.batch.pool.records import OUTPUT_NAME, free_record, read_free_record
from spmd_worker.frontends.batch.pool_world.pool_index import PoolIndex
from spmd_worker.frontends.batch.pool_world.pool_input import PoolInput
from spmd_worker.frontends.batch.pool_world.world import World
from spmd_worker.frontends.batch.run_dir.job_files import check_files, is_job_file
from spmd_worker.frontends.batch.run_dir.manifest import end_manifest, set_arithmetic, set_input, write_manifest
from spmd_worker.frontends.batch.run_dir.provenance import FORMAT_VERSION
from spmd_worker.frontends.batch.run_dir.run_lock import RunLock, make_folder
from spmd_worker.frontends.batch.run_dir.shard import prometheus_of, run_dir_of
from spmd_worker.resolved import ResolvedRun

_SCAN_S: Final = 1.0
"""Time that a start waits for the input's index; then it is made in parallel."""


class PoolRun:
    """The `JobRun` of a job in a pool."""

    def __init__(
        self,
        world: World,
        lock: RunLock,
        run_dir: Path,
        manifest: dict[str, Any],
        prometheus: PrometheusFile | None,
    ) -> None:
        self.lock, self.run_dir, self.manifest = lock, run_dir, manifest
        self._world, self._prometheus = world, prometheus
        world.set_input = self._set_input

    def _set_input(self, digest: str, num_rows: int) -> None:
        set_input(self.run_dir, self.manifest, "auto", digest, num_rows, range(num_rows))

    def earlier_output(self) -> WrittenOutput | None:
        """The output of a pool that has ended."""
        return self._world.earlier_output()

    def agree(self, engine: Engine) -> None:
        """Raise ConfigError if the engine computes other answers than the pool has, or has other adapters."""
        arithmetic, policy = engine.executor.reports()[0].arithmetic, engine.numerical_policy()
        set_arithmetic(self.run_dir, self.manifest, "auto", arithmetic, policy)
        check_loaded(engine, self.manifest)
        self._world.check_equal()

    def open_rows(self, engine: Engine) -> tuple[PoolInput, JobOutput]:
        """The rows that this world will lease, and their answers' way into the pool."""
        config = engine.config
        adapters = (*(config.model.adapters or ()), *(config.model.prompt_adapters or ()))
        return self._world.open_rows(engine.default_sampling, adapters, prometheus=self._prometheus)

    def before_exit(self) -> None:
        """Commit finished rows, and hand back the leases."""
        self.lock.note(ENDING)
        self._world.leave("signalled")

    def commit(self) -> None:
        """Every row of the pool is done, and committed."""
        self._world.wait_for_end()

    def write_output(self, engine: Engine) -> WrittenOutput:
        """Merge, or wait until another world has merged."""

        def advance(doing: str) -> None:
            self.lock.note(doing)
            engine.times.heartbeat.enter(doing)

        answers = {key: self.manifest[key] for key in ("version", "config_hash", "answers")}
        record = {"format_version": FORMAT_VERSION, "seed": engine.config.seed, **answers}
        return self._world.write_output(vectors_of(engine), record, advance, self.run_dir)

    def lost_rows(self) -> LostRows:
        return self._world.lost_rows()

    def end(self) -> None:
        end_manifest(self.run_dir, self.manifest)
        self._world.leave("ended")


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
    own_index = None if job.input_index is None else read_index(Path(job.input_index), reader)
    store, output = open_pool_store(job.pool or ""), file_path(job.output or "")
    if isinstance(output, Path):
        make_folder("the folder of job.output", output.parent)
    run_dir = run_dir_of(job)
    lock = held.enter_context(RunLock(run_dir, None))
    if watchdog is not None:
        watchdog.before_exit = partial(lock.note, ENDING)
    lock.note("reads the input")
    manifest = manifest_of(resolved, reader) | {"overridden": []}
    write_manifest(run_dir, manifest)
    clear_run_dir(run_dir)
    index = PoolIndex(store, reader, own_index)
    held.callback(index.close)
    about = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "layout": asdict(config.parallel),
        "run_dir": str(run_dir.absolute()),
        "began": manifest["starts"][-1]["began"],
    }
    world = World(store, job, config.limits, reader, index, manifest["answers"], about)
    held.callback(world.close)
    world.check_equal()
    world.check_output()
    if is_parts(output):
        # Unless another world has named the pool.
        name = run(store, put_once(OUTPUT_NAME, free_record({"run": f"pool {manifest['run']}"})))
        claim_folder(output, run=read_free_record(name)["run"])
    # Most inputs are read quickly: their errors are raised before anything is loaded.
    index.wait(_SCAN_S)
    path, values = prometheus_of(job), PoolValues(store, job.lease_s / 4)
    prometheus = None if path is None else PrometheusFile(path, more=held.enter_context(values))
    return PoolRun(world, lock, run_dir, manifest, prometheus)
