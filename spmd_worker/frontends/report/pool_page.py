"""The page of a pool: its figures, rows over time, who held which rows when, takeovers, workers. One HTML file."""

from collections.abc import Iterator
from html import escape
from typing import Final

from spmd_worker.frontends.batch.pool.pool_history import PoolHistory
from spmd_worker.frontends.batch.pool.pool_progress import PoolProgress, WorkerProgress
from spmd_worker.frontends.report.drawing import NARROW_INCHES, WIDE_INCHES
from spmd_worker.frontends.report.html import explanation, figures_grid, html_page, table, warning
from spmd_worker.frontends.report.page import NO_CHARTS
from spmd_worker.frontends.report.pool_charts import KIND_LOOKS, Lane, PoolLife, make_life
from spmd_worker.frontends.report.pool_drawing import LEASES_TITLE, ROWS_TITLE, draw_leases, draw_rows
from spmd_worker.frontends.report.summary import Figure
from spmd_worker.frontends.report.text import count, count_and_noun, duration, share

MAX_TAKEOVERS: Final = 50
_NUM_TIMES: Final = {"picture": 300, "table": 12}
_TAKEOVER_HEADS: Final = ("range", "from", "to", "left at", "taken at", "rows done before")
_WORKER_HEADS: Final = (
    *(
        "worker",
        "state",
        "layout",
        "joined at",
        "last seen at",
        "rows",
        "rows/s",
        "output tokens",
        "tokens/s",
        "ranges",
    ),
)


def pool_page(name: str, progress: PoolProgress, history: PoolHistory, *, has_charts: bool) -> str:
    """The page as text. Charts need matplotlib: `has_charts` is the result of `can_draw`."""
    return html_page(f"Pool {name}", _body(progress, history, has_charts))


def _body(progress: PoolProgress, history: PoolHistory, has_charts: bool) -> Iterator[str]:
    life = make_life(progress, history, _NUM_TIMES["picture"])
    if not has_charts:
        yield warning(NO_CHARTS)
    if history.num_skipped:
        yield warning(f"The first {count(history.num_skipped, 'range')} are not in the charts: the pool has too many.")
    yield f'<p class="diagnosis">{escape(_diagnosis(progress, life))}</p>'
    yield figures_grid(summary_figures(progress, life))
    yield f"<section>\n<h2>{ROWS_TITLE}</h2>"
    yield explanation("Rows that were committed to the pool, by the worker that computed them.")
    if has_charts:
        for kind, width_inches in (("wide", WIDE_INCHES), ("narrow", NARROW_INCHES)):
            yield f'<div class="{kind}">\n{draw_rows(life, width_inches)}\n</div>'
        yield f"<details><summary>as a table</summary>\n{_rows_table(progress, history)}\n</details>\n</section>"
    else:
        yield f"{_rows_table(progress, history)}\n</section>"
    yield f"<section>\n<h2>{LEASES_TITLE}</h2>"
    others = f" {count(life.num_other_lanes, 'worker')} without events are not shown." if life.num_other_lanes else ""
    yield explanation("A bar is a range of rows, from its lease, or from the end of the worker's last one." + others)
    if has_charts:
        for kind, width_inches in (("wide", WIDE_INCHES), ("narrow", NARROW_INCHES)):
            yield f'<div class="{kind}">\n{draw_leases(life, width_inches)}\n</div>'
    else:
        yield _lanes_table(life.lanes)
    yield "</section>"
    if life.takeovers:
        yield _takeovers_section(life)
    heads, rows = _WORKER_HEADS, [_worker_cells(worker, progress, life) for worker in progress.workers]
    yield f"<section>\n<h2>Workers</h2>\n{table(heads, rows, (0, 1, 2))}\n</section>"
    yield "<footer>Times are the pool's server's, and begin when the first worker joined.</footer>"


def _diagnosis(progress: PoolProgress, life: PoolLife) -> str:
    state = progress.state
    dead, failed = len(progress.with_status("dead")), len(progress.with_status("failed"))
    if state.merged is not None:
        end = f"The pool has ended well after {duration(life.lived_s * 1e6)}: {state.job.output} has all rows."
    elif progress.with_status("alive", "slow"):
        end = "The pool is running." if progress.left_s else "The pool is running: the output is not merged yet."
    else:
        end = "The pool has not ended, and no worker is alive. Start one: it goes on with the rest."
    losses = [f"{count(number, 'worker')} {what}" for number, what in ((dead, "died"), (failed, "failed")) if number]
    if not losses and not life.takeovers:
        return f"{end} No worker died, and no range changed hands."
    text = " and ".join(losses) or "No worker died"
    kept = f"{count(len(life.takeovers), 'range')} went to another worker with the rows that were done"
    waiting = f"{count(len(progress.waiting_ranges), 'range')} wait for one"
    fates = [*([kept] if life.takeovers else []), *([waiting] if progress.waiting_ranges else [])]
    return f"{end} {'; '.join([text, *fates])}."


def summary_figures(progress: PoolProgress, life: PoolLife) -> list[Figure]:
    """Figures of the summary, in reading order."""
    state, done = progress.state, progress.state.num_rows_done
    alive, slow = progress.with_status("alive", "slow"), progress.with_status("slow")
    tokens = sum(worker.num_output_tokens for worker in progress.workers)
    is_over = not alive
    rows_per_s = done / life.lived_s if is_over else progress.rows_per_s
    tokens_per_s = tokens / life.lived_s if is_over else progress.tokens_per_s
    when = "on average" if is_over else "now"
    left_s = progress.left_s
    wall = duration(life.lived_s * 1e6)
    time = Figure("unknown" if left_s is None else duration(left_s * 1e6), "left", f"after {wall}")
    if is_over:
        time = Figure(wall, "from the first worker to the last", "")
    num_others = len(progress.workers) - len(alive)
    workers = Figure(count(len(alive)), "workers alive", f"{num_others:,} others; {len(slow):,} slow")
    if is_over:
        workers = Figure(
            *count_and_noun(len(progress.workers), "worker"), f"{len(progress.with_status('dead')):,} died"
        )
    sizes = f"of up to {state.job.lease_rows // 2:,} rows"
    return [
        Figure(share(done, state.job.num_rows), "of the rows done", f"{done:,} of {state.job.num_rows:,}"),
        Figure(count(rows_per_s), "rows per second", when),
        Figure(count(tokens_per_s), "output tokens per second", when),
        time,
        workers,
        Figure(*count_and_noun(state.num_ranges, "range"), sizes),
        Figure(count(len(life.takeovers)), "went to another worker", f"{len(progress.waiting_ranges):,} wait for one"),
        Figure(*count_and_noun(tokens, "output token"), "according to the heartbeats"),
    ]


def _rows_table(progress: PoolProgress, history: PoolHistory) -> str:
    life = make_life(progress, history, _NUM_TIMES["table"])
    heads = ("time", *(layer.label for layer in life.layers))
    columns = [[duration(time_s * 1e6) for time_s in life.times_s]]
    columns += [[f"{rows:,}" for rows in layer.rows] for layer in life.layers]
    return table(heads, zip(*columns), ())


def _lanes_table(lanes: tuple[Lane, ...]) -> str:
    """Number of leases of each worker by their end."""
    rows = [(lane.worker, *(f"{duration(_seconds(lane, kind) * 1e6)}" for kind in KIND_LOOKS)) for lane in lanes]
    return table(("worker", *(label for _, label in KIND_LOOKS.values())), rows, (0,))


def _seconds(lane: Lane, kind: str) -> float:
    return sum(bar.end_s - bar.start_s for bar in lane.bars if bar.kind == kind)


def _takeovers_section(life: PoolLife) -> str:
    shown = sorted(life.takeovers, key=lambda each: each.taken_s)[:MAX_TAKEOVERS]
    rows = [
        (
            f"{each.number:,}",
            each.former,
            each.worker,
            duration(each.left_s * 1e6),
            duration(each.taken_s * 1e6),
            f"{each.num_rows_before:,}",
        )
        for each in shown
    ]
    rest = len(life.takeovers) - len(shown)
    more = f"\n<p>and {rest:,} more</p>" if rest else ""
    return f"<section>\n<h2>Ranges that changed hands</h2>\n{table(_TAKEOVER_HEADS, rows, (1, 2))}{more}\n</section>"


def _worker_cells(worker: WorkerProgress, progress: PoolProgress, life: PoolLife) -> tuple[str, ...]:
    first_age_s = max((each.state.joined_age_s for each in progress.workers), default=0.0)
    return (
        *(worker.name, worker.status, worker.layout),
        *(duration((first_age_s - age_s) * 1e6) for age_s in (worker.state.joined_age_s, worker.state.age_s)),
        f"{worker.num_rows:,}",
        f"{worker.rows_per_s:,.1f}",
        f"{worker.num_output_tokens:,}",
        count(worker.tokens_per_s),
        f"{worker.num_ranges:,}",
    )
