"""Answers rows in one engine: admits them as it empties, runs steps, passes answers on."""

import time
from typing import Final

from spmd_worker.engine.engine import Engine
from spmd_worker.engine.step_interval import TimeBudget, max_step_interval_s
from spmd_worker.frontends.batch.media_window import MediaWindow
from spmd_worker.frontends.batch.row_runner import RowRunner
from spmd_worker.frontends.batch.row_source import AnswerSink, RowSource
from spmd_worker.frontends.openai.row import RowError
from spmd_worker.frontends.openai.row_writer import error_result
from spmd_worker.replica.scheduler.budget import MAX_COMPILE_BYTES

_PAUSE_S: Final = 0.01


def answer_alone(engine: Engine, rows: RowSource, output: AnswerSink, model_name: str) -> float:
    """Answer all rows. Returns the seconds without a row to compute while images or audio were prepared."""
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
    rows: RowSource,
    window: MediaWindow,
    runner: RowRunner,
    output: AnswerSink,
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
