"""Report the events of a run: blocks, batch, tokens, preemptions, cache hits and the slowest steps; or those of a pool.

    python -m spmd_worker.tools.report RUN_DIR
        writes RUN_DIR/report.html and RUN_DIR/timeline.json
    python -m spmd_worker.tools.report runs/demo --output night.html
        writes night.html, and timeline.json next to it
    python -m spmd_worker.tools.report POOL
        writes POOL/report.html: rows over time, leases, takeovers and workers of job.pool

RUN_DIR is job.run_dir, by default <job.output>.run. The page needs only a browser; its charts need matplotlib
(pip install 'spmd-worker[report]'), without which it has tables. The timeline opens in ui.perfetto.dev. Also for a run
or a pool that was killed, or is still running. Prints the paths of both and a summary; the last line is one JSON
object. Exits with 2 for files that cannot be read or written.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from spmd_worker.base.errors import ConfigError, PoolError, StepStatsError
from spmd_worker.base.files import describe_os_error, write_file
from spmd_worker.base.metrics.stage_times import STAGE_TIMES_NAME, StageSpan, read_stage_times
from spmd_worker.base.metrics.step_stats import STEP_STATS_NAME, StepStats, read_step_stats
from spmd_worker.base.metrics.timeline import TIMELINE_NAME, write_timeline
from spmd_worker.base.remote_names import shown_name
from spmd_worker.frontends.batch.pool.pool_history import read_history
from spmd_worker.frontends.batch.pool.pool_metrics import values
from spmd_worker.frontends.batch.pool.pool_progress import make_progress
from spmd_worker.frontends.batch.pool.view import read_pool
from spmd_worker.frontends.batch.run_dir.job_files import MANIFEST_NAME, METRICS_NAME, check_report
from spmd_worker.frontends.report.data import make_totals
from spmd_worker.frontends.report.drawing import can_draw
from spmd_worker.frontends.report.page import NO_CHARTS, report_page
from spmd_worker.frontends.report.pool_page import pool_page
from spmd_worker.frontends.report.summary import NO_METRICS, diagnosis, summary_figures
from spmd_worker.frontends.tools.pool_status import pool_lines
from spmd_worker.frontends.tools.pools import check_pool_report, is_pool, open_pool
from spmd_worker.frontends.tools.program import (
    add_run_dir_or_pool,
    ends_without_its_reader,
    local_output_name,
    make_parser,
    print_error,
)
from spmd_worker.frontends.tools.run_dir import NO_JOB, NO_STEP, RunDirError, check_folder, read_metrics

REPORT_NAME = "report.html"
EXIT_DONE, EXIT_CANNOT_TELL = 0, 2


@ends_without_its_reader
def main(arguments: list[str] | None = None) -> int:
    parser = make_parser("report", __doc__)
    add_run_dir_or_pool(parser)
    parser.add_argument(
        "--output", type=local_output_name, metavar="FILE", help="the page, instead of RUN_DIR/report.html"
    )
    options = parser.parse_args(arguments)
    output = None if options.output is None else Path(options.output)
    try:
        if is_pool(options.run_dir):
            report_pool(options.run_dir, output)
        else:
            run_dir = Path(options.run_dir)
            report_run(run_dir, output or run_dir / REPORT_NAME)
    except (RunDirError, StepStatsError, ConfigError, PoolError) as error:
        print_error("report", error)
        return EXIT_CANNOT_TELL
    except OSError as error:
        if error.filename is None:
            # Of standard output.
            raise
        way_out = "give --output FILE in a folder where it can be written"
        print_error("report", f"cannot write {error.filename}: {error.strerror}: {way_out}")
        return EXIT_CANNOT_TELL
    return EXIT_DONE


def report_run(run_dir: Path, page_path: Path) -> None:
    """Write the report of a run. Raises RunDirError or StepStatsError for unreadable files, ConfigError for a page that
    would overwrite another file of the run, OSError for files that cannot be written.
    """
    timeline_path = page_path.with_name(TIMELINE_NAME)
    check_folder(run_dir)
    check_report(run_dir, page_path, timeline_path)
    steps, metrics = read_steps(run_dir), read_metrics(run_dir)
    # A folder's name may contain bytes that are not text.
    name = os.fsencode(run_dir.resolve().name).decode("utf-8", "replace")
    has_charts = can_draw()
    stages = read_stages(run_dir)
    page = report_page(name, steps, metrics, has_charts=has_charts).encode("utf-8")
    write_file(page_path, page, is_durable=False)
    write_timeline(steps, timeline_path, name, stages)
    if not has_charts:
        print(NO_CHARTS, file=sys.stderr)
    print_result(steps, metrics, page_path, timeline_path)


def report_pool(name: str, page_path: Path | None) -> None:
    """Write the report of a pool. Raises ConfigError for a page that would overwrite a file of the pool, PoolError,
    OSError.
    """
    page_path = check_pool_report(name, page_path, REPORT_NAME)
    store = open_pool(name)
    try:
        progress, history = make_progress(read_pool(store, is_patient=False)), read_history(store)
    except OSError as error:
        raise PoolError(f"cannot read the pool: {describe_os_error(error)}") from None
    has_charts = can_draw()
    title = os.fsencode(shown_name(name).rstrip("/").rpartition("/")[2]).decode("utf-8", "replace")
    write_file(page_path, pool_page(title, progress, history, has_charts=has_charts).encode("utf-8"), is_durable=False)
    if not has_charts:
        print(NO_CHARTS, file=sys.stderr)
    print(f"{page_path}: the report, for a browser")
    print("\n".join(pool_lines(progress, history.holdings)))
    print(json.dumps({"report": str(page_path), **values(progress.state)}))


def read_steps(run_dir: Path) -> list[StepStats]:
    path = run_dir / STEP_STATS_NAME
    try:
        return read_step_stats(path)
    except FileNotFoundError:
        older = f"the job that wrote its {METRICS_NAME} kept no step statistics; run it again with this version"
        has_job = (run_dir / MANIFEST_NAME).exists()
        reason = older if (run_dir / METRICS_NAME).exists() else NO_STEP if has_job else NO_JOB
        raise RunDirError(f"{run_dir} has no {STEP_STATS_NAME}: {reason}") from None
    except OSError as error:
        raise RunDirError(f"cannot read {path}: {error.strerror}") from None


def read_stages(run_dir: Path) -> list[StageSpan]:
    """Stage times; empty without a pipeline, or if the run has not ended."""
    try:
        return read_stage_times(run_dir / STAGE_TIMES_NAME)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunDirError(f"cannot read {run_dir / STAGE_TIMES_NAME}: {error.strerror}") from None
    except ValueError as error:
        raise RunDirError(f"{error}: remove it to see the steps without it") from None


def print_result(steps: list[StepStats], metrics: dict[str, Any] | None, page_path: Path, timeline_path: Path) -> None:
    print(f"{page_path}: the report, for a browser")
    print(f"{timeline_path}: every step, for ui.perfetto.dev")
    if metrics is None:
        print(NO_METRICS)
    result: dict[str, Any] = {"report": str(page_path), "timeline": str(timeline_path), "num_steps": len(steps)}
    if steps:
        totals = make_totals(steps)
        figures = summary_figures(totals, metrics or {})
        width = max(len(figure.value) for figure in figures)
        print("\n".join(f"  {figure.value:>{width}} {figure.label} ({figure.note})" for figure in figures))
        print(diagnosis(totals, metrics or {}))
        result |= {
            "wall_s": totals.wall_us / 1e6,
            "num_blocks": totals.num_blocks,
            "max_blocks_used": totals.max_blocks_used,
            "max_host_blocks_used": totals.max_host_blocks,
            "preemptions_by_swap": totals.sums.num_swapped_out,
            "preemptions_by_recompute": totals.sums.num_recomputed,
            "computed_tokens": totals.sums.num_tokens,
            "cached_tokens": totals.sums.num_cached_tokens,
        }
    print(json.dumps(result))
