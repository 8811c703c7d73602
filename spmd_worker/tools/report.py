"""Draw what happened in a run: blocks, batch, tokens, preemptions, cache hits and the slowest steps.

    python -m spmd_worker.tools.report RUN_DIR
        writes RUN_DIR/report.html and RUN_DIR/timeline.json
    python -m spmd_worker.tools.report runs/demo --output night.html
        writes night.html, and timeline.json beside it

RUN_DIR is job.run_dir, or <job.output>.run where the job named none. The page needs nothing but a browser; its
charts are drawn by matplotlib (pip install 'spmd-worker[report]'), without which it has tables. The timeline opens in
ui.perfetto.dev. Also for a run that was killed, or is still running. Prints where both are and what the run came to;
the last line is one JSON object. Exits with 2 for what cannot be read or written.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from spmd_worker.batch.run_dir.job_files import METRICS_NAME
from spmd_worker.errors import StepStatsError
from spmd_worker.files import JsonError, read_json_object
from spmd_worker.metrics.report.data import make_totals
from spmd_worker.metrics.report.drawing import can_draw
from spmd_worker.metrics.report.page import NO_CHARTS, report_page
from spmd_worker.metrics.report.words import NO_METRICS, diagnosis, summary_figures
from spmd_worker.metrics.stage_times import STAGE_TIMES_NAME, StageSpan, read_stage_times
from spmd_worker.metrics.step_stats import STEP_STATS_NAME, StepStats, read_step_stats
from spmd_worker.metrics.timeline import TIMELINE_NAME, write_timeline
from spmd_worker.tools.program import make_parser, print_error

REPORT_NAME = "report.html"
EXIT_DONE, EXIT_CANNOT_TELL = 0, 2


class ReportError(Exception):
    """No report can be made; the message says why and what to do."""


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    try:
        report_run(options.run_dir, options.output or options.run_dir / REPORT_NAME)
    except (ReportError, StepStatsError) as error:
        print_error("report", error)
        return EXIT_CANNOT_TELL
    except OSError as error:
        print_error("report", f"cannot write {error.filename}: {error.strerror}")
        return EXIT_CANNOT_TELL
    return EXIT_DONE


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = make_parser("report", __doc__)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="a run's directory, such as runs/demo")
    parser.add_argument("--output", type=Path, metavar="FILE", help="the page, instead of RUN_DIR/report.html")
    return parser.parse_args(arguments)


def report_run(run_dir: Path, page_path: Path) -> None:
    """Raises ReportError or StepStatsError for what cannot be read, OSError for what cannot be written."""
    steps = read_steps(run_dir)
    metrics = read_metrics(run_dir)
    # A folder's name may hold bytes that are no text.
    name = os.fsencode(run_dir.resolve().name).decode("utf-8", "replace")
    timeline_path = page_path.with_name(TIMELINE_NAME)
    has_charts = can_draw()
    page_path.write_text(report_page(name, steps, metrics, has_charts=has_charts), encoding="utf-8")
    write_timeline(steps, timeline_path, name, read_stages(run_dir))
    if not has_charts:
        print(NO_CHARTS, file=sys.stderr)
    print_result(steps, metrics, page_path, timeline_path)


def read_steps(run_dir: Path) -> list[StepStats]:
    if not run_dir.is_dir():
        what = "is a file: give the folder it is in" if run_dir.exists() else "no such folder"
        raise ReportError(f"{run_dir}: {what} (a run's directory is job.run_dir, else <job.output>.run)")
    path = run_dir / STEP_STATS_NAME
    try:
        return read_step_stats(path)
    except FileNotFoundError:
        raise ReportError(f"{run_dir} has no {STEP_STATS_NAME}: {why_no_steps(run_dir)}") from None
    except OSError as error:
        raise ReportError(f"cannot read {path}: {error.strerror}") from None


def read_stages(run_dir: Path) -> list[StageSpan]:
    """None where there is no pipeline, or the run has not ended."""
    try:
        return read_stage_times(run_dir / STAGE_TIMES_NAME)
    except FileNotFoundError:
        return []
    except ValueError as error:
        raise ReportError(f"{error}: remove it to see the steps without it") from None


def why_no_steps(run_dir: Path) -> str:
    if (run_dir / METRICS_NAME).exists():
        return f"the job that wrote its {METRICS_NAME} kept no step statistics; run it again with this version"
    return "no job ran in this folder; give job.run_dir, or <job.output>.run where the job named none"


def read_metrics(run_dir: Path) -> dict[str, Any] | None:
    """None where there are none: they are written when a run ends."""
    path = run_dir / METRICS_NAME
    try:
        return read_json_object(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ReportError(f"cannot read {path}: {error.strerror}") from None
    except JsonError as error:
        raise ReportError(f"{error}: remove it to see the steps without it") from None


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


if __name__ == "__main__":
    sys.exit(main())
