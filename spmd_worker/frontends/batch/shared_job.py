"""A job in several replicas: rank 0 reads, distributes rows, collects answers and writes; all replicas answer.

Replicas, rank 0's too, claim chunks when they have capacity, so none waits for another and a faster one does more.
Only rank 0 has the files: the others' rows and answers are sent through the launcher's store.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Final

from spmd_worker.engine.data_parallel.replicas import Replicas, num_wanted
from spmd_worker.engine.data_parallel.round import ReplicaRound
from spmd_worker.engine.engine import Engine
from spmd_worker.engine.step_interval import TimeBudget, max_step_interval_s
from spmd_worker.frontends.batch.job_metrics import ReplicaCounts
from spmd_worker.frontends.batch.media_window import MediaWindow
from spmd_worker.frontends.batch.row_exchange import RowClaimer, RowSender
from spmd_worker.frontends.batch.row_runner import RowRunner
from spmd_worker.frontends.batch.row_source import AnswerSink, RowSource
from spmd_worker.frontends.batch.row_window import NumberedLine, RowWindow
from spmd_worker.frontends.openai.row import Row, RowError
from spmd_worker.frontends.openai.row_parser import parse_row
from spmd_worker.frontends.openai.row_writer import RowAnswer, error_result
from spmd_worker.replica.scheduler.budget import MAX_COMPILE_BYTES

WAITS_FOR_RANKS: Final = True
"""Read by the watchdog, in the module of a frame."""

_MAX_CHUNK_ROWS: Final = 64
_CHUNKS_PER_REPLICA: Final = 8
"""Chunks that fill a replica."""
_CHUNKS_AHEAD: Final = 2
"""Chunks published ahead per replica, to be claimed while rank 0 runs a step."""
_PAUSE_S: Final = 0.002
_SEND_S = _RECEIVE_S = 0.05
_MAX_HELD_BYTES: Final = 1 << 20


class ReplicaWork:
    """One replica's part, on its leader: claim, step, pass answers to `deliver`. Call `advance` until `has_ended`."""

    def __init__(
        self,
        engine: Engine,
        round_: ReplicaRound,
        claimer: RowClaimer,
        model_name: str,
        deliver: Callable[[list[RowAnswer]], None],
    ) -> None:
        self.counts = ReplicaCounts()
        self.has_ended = False
        self._engine, self._round, self._claimer, self._deliver = engine, round_, claimer, deliver
        self._runner = RowRunner(engine, model_name)
        self._window = MediaWindow.of(engine)
        self._claimed: deque[NumberedLine] = deque()
        self._num_reported_tokens = 0
        self._last_step_s = time.monotonic()

    def advance(self) -> None:
        """Run one step, or pause without work. Raises RankFailedError when a replica has failed."""
        num_held = self._runner.num_sequences + len(self._window)
        if not self._claimed and num_wanted(self._engine, num_held) and not self.has_ended:
            self._claimed.extend(self._claimer.claim())
        # All of them may be rejected, and then the next are due at once.
        has_rows = bool(self._claimed) and self._window.has_room
        self._admit()
        if self._runner.num_rows:
            self._step()
        elif self._claimer.has_ended and not self._claimed and not len(self._window) and not self.has_ended:
            self.has_ended = True
            self._engine.close_followers()
            self._report_tokens()
        else:
            if not has_rows:
                self._window.pause(_PAUSE_S)
                self.counts.media_wait_s = self._window.wait_s
            is_due = time.monotonic() - self._last_step_s > max_step_interval_s(self._engine.config.executor.timeout_s)
            if is_due and self._engine.channel.size > 1 and not self.has_ended:
                self._step()
        if self._round.send_heartbeat():
            self._report_tokens()

    def _admit(self) -> None:
        """Admit claimed rows, up to MAX_COMPILE_BYTES of grammars or the end of the turn: a step may be due."""
        most_form_bytes = self._runner.num_compile_bytes + MAX_COMPILE_BYTES
        turn = TimeBudget(self._engine.config.executor.timeout_s)
        while self._runner.num_compile_bytes < most_form_bytes and not turn.is_over:
            ready = self._window.next_ready(self._runner.num_media_bytes)
            if ready is not None:
                given, media = ready
                answer = error_result(given) if isinstance(given, RowError) else self._runner.admit(given, media)
                if answer is not None:
                    self._count_and_deliver([answer])
            elif self._claimed and self._window.has_room:
                each = self._claimed.popleft()
                # Rank 0 has accepted its format, and checked its custom id.
                row = parse_row(each.index, each.line, self._engine.default_sampling, self._engine.config.limits)
                assert isinstance(row, Row), row
                self._window.put(row)
            else:
                return

    def _step(self) -> None:
        self._count_and_deliver(self._runner.step())
        self._last_step_s = time.monotonic()

    def _count_and_deliver(self, answers: list[RowAnswer]) -> None:
        self.counts.rows += len(answers)
        self.counts.output_tokens += sum(answer.num_output_tokens for answer in answers)
        self._deliver(answers)

    def _report_tokens(self) -> None:
        num_tokens = self._engine.counters.num_output_tokens
        self._round.count(num_tokens - self._num_reported_tokens)
        self._num_reported_tokens = num_tokens


class JobSharer:
    """Rank 0's part for all replicas: rows out, answers in."""

    def __init__(self, engine: Engine, round_: ReplicaRound, rows: RowSource, output: AnswerSink) -> None:
        self._round, self._rows, self._output = round_, rows, output
        self._timeout_s = engine.config.executor.timeout_s
        self._sender = RowSender(round_)
        self._window = RowWindow(rows, lambda row: output.add(error_result(row)))
        self._most_rows = max(1, min(_MAX_CHUNK_ROWS, engine.max_num_seqs // _CHUNKS_PER_REPLICA))
        self._has_ended = False
        self._last_receive_s = float("-inf")

    @property
    def is_done(self) -> bool:
        return self._has_ended and not self._rows.keys

    def advance(self) -> None:
        # Also when all is published: `may_read` notices when the input is known.
        if self._rows.may_read() and not self._has_ended:
            turn = TimeBudget(self._timeout_s)
            self._window.read_on(lambda: turn.is_over)
            for _ in range(_CHUNKS_AHEAD * self._round.num_replicas - self._sender.num_ahead):
                rows = self._window.take(self._round.num_replicas, self._most_rows)
                if not rows:
                    break
                self._sender.publish(rows)
            if self._window.is_empty:
                self._has_ended = True
                self._sender.end()
        now_s = time.monotonic()
        if now_s - self._last_receive_s >= _RECEIVE_S:
            self._last_receive_s = now_s
            self._output.add_all(self._sender.receive())
            self._output.show(self._round.num_counted)

    def close(self) -> None:
        """Remove the keys of the store, once every replica has ended."""
        self._sender.forget()


def lead_shared_job(replicas: Replicas, rows: RowSource, output: AnswerSink, model_name: str) -> ReplicaCounts:
    """Run rank 0's part until every row is answered and every replica has ended. Returns its own replica's counts."""
    engine = replicas.engine
    with replicas.round() as round_:
        engine.engine_channel.broadcast(model_name.encode())
        sharer = JobSharer(engine, round_, rows, output)
        work = ReplicaWork(engine, round_, RowClaimer(round_), model_name, output.add_all)
        while not (sharer.is_done and work.has_ended):
            sharer.advance()
            work.advance()
        round_.finish()
        _wait_until_over(round_)
        output.show(round_.num_counted)
        sharer.close()
    return work.counts


def help_shared_job(replicas: Replicas) -> ReplicaCounts | None:
    """Run any other rank's part until the job has ended. Returns its replica's counts; None except on a leader."""
    engine = replicas.engine
    with replicas.round() as round_:
        model_name = engine.engine_channel.broadcast(None).decode()
        work = None
        if engine.is_leader and round_.replica:
            claimer = RowClaimer(round_)
            outbox = _Outbox(claimer)
            work = ReplicaWork(engine, round_, claimer, model_name, outbox.put)
            while not work.has_ended:
                work.advance()
                outbox.send_if_due()
            outbox.send()
            round_.finish()
        else:
            engine.follow()
        _wait_until_over(round_)
    return None if work is None else work.counts


def _wait_until_over(round_: ReplicaRound) -> None:
    # Rank 0 may wait for hours for a line of standard input; the watchdog detects a rank that hangs.
    for _ in round_.wait(lambda: round_.is_over, may_be_silent=True):
        continue


class _Outbox:
    """Buffer of answers to rank 0."""

    def __init__(self, claimer: RowClaimer) -> None:
        self._claimer = claimer
        self._answers: list[RowAnswer] = []
        self._num_bytes = 0
        self._last_sent_s = time.monotonic()

    def put(self, answers: list[RowAnswer]) -> None:
        self._answers += answers
        self._num_bytes += sum(len(answer.line) for answer in answers)

    def send_if_due(self) -> None:
        if self._num_bytes >= _MAX_HELD_BYTES or time.monotonic() - self._last_sent_s >= _SEND_S:
            self.send()

    def send(self) -> None:
        if self._answers:
            self._claimer.send(self._answers)
        self._answers, self._num_bytes, self._last_sent_s = [], 0, time.monotonic()
