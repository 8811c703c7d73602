"""A pool in words: how much is done, its workers as a table, and what needs attention. At most 100 columns."""

import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Final

from spmd_worker.base.standard_streams import has_reader
from spmd_worker.frontends.batch.pool.pool_history import Holding, read_history
from spmd_worker.frontends.batch.pool.pool_progress import PoolProgress, WorkerProgress, make_progress
from spmd_worker.frontends.batch.pool.store import PoolStore
from spmd_worker.frontends.batch.pool.view import RangeState, read_pool
from spmd_worker.frontends.report.text import compact, count, duration, share, shortened
from spmd_worker.frontends.tools.run_dir import is_missing

_MIN_COLUMNS: Final = 80
_MAX_WORKERS: Final = 20
"""Rows of the table; those that need attention come first."""
_MAX_NOTES: Final = 5
_HEADS: Final = ("worker", "state", "rows", "rows/s", "tokens/s", "ranges", "heartbeat")
_ORDER: Final = ("dead", "failed", "slow", "alive", "left", "ended")
"""Order of the table."""


def watch_pool(store: PoolStore, every_s: float | None) -> bool:
    """Print the state of a pool, once, or until the pool or the reader of the reports has ended; on a terminal each
    report replaces the one before. Returns whether the pool has ended well. Raises as `read_pool` does.
    """
    clear = "\x1b[H\x1b[2J" if every_s is not None and sys.stdout.isatty() else ""
    columns = max(_MIN_COLUMNS, shutil.get_terminal_size((100, 0)).columns)
    with suppress(KeyboardInterrupt):
        while True:
            # One report is not worth ten minutes of waiting.
            progress = make_progress(read_pool(store, is_patient=every_s is not None))
            has_deaths = bool(progress.with_status("dead", "failed"))
            holdings = read_history(store).holdings if has_deaths else ()
            print(clear + "\n".join(pool_lines(progress, holdings, columns)), flush=True)
            has_ended = progress.state.merged is not None
            if every_s is None or has_ended or not has_reader():
                return has_ended and not is_missing(progress.state.job.output)
            time.sleep(every_s)
    return False


def pool_lines(progress: PoolProgress, holdings: Sequence[Holding], columns: int = _MIN_COLUMNS) -> list[str]:
    """`holdings` are the pool's history, or empty if no worker has died."""
    lines = [_headline(progress), _pace(progress), _workers_line(progress)]
    if progress.workers:
        lines += ["", *_table(progress, columns)]
    notes = [*_death_notes(progress, holdings), *_range_notes(progress)]
    return [*lines, *(["", *notes] if notes else []), *_merge_lines(progress)]


def _headline(progress: PoolProgress) -> str:
    state = progress.state
    ranges = count(state.num_ranges, "range")
    done = f"{state.num_rows_done:,} of {count(state.job.num_rows, 'row')} are done"
    done = f"{done} ({share(state.num_rows_done, state.job.num_rows)}), in {ranges}"
    if state.merged is not None:
        end = ", but its output is missing" if is_missing(state.job.output) else " well"
        return f"The pool has ended{end}: {done}."
    if progress.with_status("alive", "slow"):
        return f"The pool is running: {done}."
    return f"The pool has not ended: {done}."


def _pace(progress: PoolProgress) -> str:
    state = progress.state
    if state.merged is not None and is_missing(state.job.output):
        return f"Restore {state.job.output}, or remove the pool to compute it again."
    if state.merged is not None:
        return f"Output: {state.job.output}, {count(state.merged.lines, 'line')}, {count(state.merged.bytes, 'byte')}."
    if not progress.with_status("alive", "slow"):
        return "No worker is alive. Start the same command again: it goes on with the rest."
    if not progress.rows_per_s:
        return "No worker that is alive has finished a row yet."
    rates = f"{_rate(progress.rows_per_s)} rows and {_rate(progress.tokens_per_s)} output tokens per second"
    if not progress.left_s:
        return f"{rates}; the outputs are not merged yet."
    return f"{rates}; about {duration(progress.left_s * 1e6)} left."


def _workers_line(progress: PoolProgress) -> str:
    numbers = {status: len(progress.with_status(status)) for status in _ORDER}
    numbers["alive"] += numbers["slow"]
    slow = f" ({numbers['slow']} slow)" if numbers["slow"] else ""
    words = [f"{numbers['alive']} alive{slow}"]
    words += [f"{numbers[status]} {status}" for status in ("dead", "failed", "left", "ended") if numbers[status]]
    return f"{count(len(progress.workers), 'worker')}: {', '.join(words)}."


def _table(progress: PoolProgress, columns: int) -> list[str]:
    """A line for each worker; of many that work as usual only some."""
    ordered = sorted(progress.workers, key=lambda each: (_ORDER.index(each.status), -each.num_rows, each.name))
    shown = ordered[:_MAX_WORKERS]
    cells = [_HEADS, *map(_cells, shown)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    widths[0] = min(widths[0], columns - 2 - sum(widths[1:]) - 2 * (len(widths) - 1))
    lines = []
    for row in cells:
        name, status, *numbers = row
        texts = [shortened(name, widths[0]).ljust(widths[0]), status.ljust(widths[1])]
        lines.append("  " + "  ".join([*texts, *(text.rjust(width) for text, width in zip(numbers, widths[2:]))]))
    rest = ordered[_MAX_WORKERS:]
    if rest:
        statuses = ", ".join(
            f"{number} {status}" for status in _ORDER if (number := sum(each.status == status for each in rest))
        )
        rates = [each.rows_per_s for each in rest if each.status == "alive"]
        between = f", {_rate(min(rates))} to {_rate(max(rates))} rows/s" if rates else ""
        lines.append(f"  and {len(rest)} more: {statuses}{between}")
    return lines


def _cells(worker: WorkerProgress) -> tuple[str, ...]:
    rows, tokens = _rate(worker.rows_per_s), _rate(worker.tokens_per_s)
    is_gone = worker.state.end is not None
    heartbeat = "" if is_gone else f"{_age(worker.state.age_s)} ago"
    ranges = "" if is_gone and not worker.ranges else str(len(worker.ranges))
    return (worker.name, worker.status, compact(worker.num_rows), rows, tokens, ranges, heartbeat)


def _death_notes(progress: PoolProgress, holdings: Sequence[Holding]) -> list[str]:
    """Workers that died, and what became of their ranges."""
    dead = sorted(progress.with_status("dead", "failed"), key=lambda each: each.state.age_s)
    notes = []
    for worker in dead[:_MAX_NOTES]:
        reason = f"is dead: no heartbeat for {duration(worker.state.age_s * 1e6)}"
        if worker.status == "failed":
            reason = "failed, and handed back what it held"
        notes.append(f"{worker.name} {reason}. {_fate(worker.name, holdings)}")
    return [*notes, *_more(len(dead) - _MAX_NOTES, "more workers died")]


def _fate(worker: str, holdings: Sequence[Holding]) -> str:
    """The fate of the ranges that a worker left unfinished."""
    takers, num_waiting = [], 0
    for holding, following in zip(holdings, [*holdings[1:], None]):
        if holding.worker != worker or holding.end == "done":
            continue
        if following is not None and following.number == holding.number:
            takers.append(following.worker)
        else:
            num_waiting += 1
    if not takers and not num_waiting:
        return "It held no range."
    names = list(dict.fromkeys(takers))
    to = names[0] if len(names) == 1 else f"{len(names)} workers"
    parts = [f"{count(len(takers), 'range')} went to {to}"] if takers else []
    parts += (
        [f"{count(num_waiting, 'range')} {'waits' if num_waiting == 1 else 'wait'} for a worker"] if num_waiting else []
    )
    return f"{' and '.join(parts)}."


def _range_notes(progress: PoolProgress) -> list[str]:
    old = sorted(progress.old_ranges, key=lambda each: -each.age_s)
    notes = [
        f"{_range_text(each)} made no progress for {duration(each.age_s * 1e6)}; {each.holder} holds it."
        for each in old[:_MAX_NOTES]
    ]
    return [*notes, *_more(len(old) - _MAX_NOTES, "more ranges made no progress for long")]


def _range_text(each: RangeState) -> str:
    return f"Range {each.number:,} (rows {each.start:,} to {each.stop - 1:,}, {each.num_rows_done:,} done)"


def _merge_lines(progress: PoolProgress) -> Iterable[str]:
    state = progress.state
    if state.merged is not None or state.merger is None:
        return []
    is_live = any(each.name == state.merger and each.state.is_live for each in progress.workers)
    return ["", f"{state.merger} {'merges' if is_live else 'merged, and is dead'}."]


def _more(number: int, text: str) -> list[str]:
    return [f"{number} {text}."] if number > 0 else []


def _rate(value: float) -> str:
    return compact(round(value)) if value >= 9.95 else f"{value:.1f}"


def _age(seconds: float) -> str:
    """Short age: `3 s`, `12 min`, `5 h`."""
    for limit_s, unit_s, name in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if seconds < limit_s:
            return f"{seconds / unit_s:.0f} {name}"
    return f"{seconds / 86400:.0f} d"
