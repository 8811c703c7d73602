"""An engine in this process that answers rows of other tools' pipelines with the bytes of a job's output lines.

Rows are parsed, encoded, admitted and written by a job's code. Answers depend on the row, its index and custom_id, and
not on batches: a row that is sampled at random needs one of these, or a seed. An engine that fails (a worker process
dies) is replaced by a new one, which answers what was not answered.
"""

import atexit
import json
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Final

from spmd_worker.base.errors import CacheMismatchError, ConfigError, ReplicaDivergedError, StepMismatchError
from spmd_worker.engine.life import State
from spmd_worker.engine.step_interval import TimeBudget
from spmd_worker.frontends.batch.media_window import MediaWindow
from spmd_worker.frontends.batch.row_runner import RowRunner
from spmd_worker.frontends.openai.row import Row, RowError
from spmd_worker.frontends.openai.row_parser import parse_row
from spmd_worker.frontends.openai.row_writer import RowAnswer, error_result
from spmd_worker.llm import LLM
from spmd_worker.media.sent_audio import PreparedMedia
from spmd_worker.ranks.environment import read_rank_environment
from spmd_worker.replica.scheduler.budget import MAX_COMPILE_BYTES
from spmd_worker.replica.sequence.request import RequestId

logger = logging.getLogger(__name__)

_MAX_RESTARTS: Final = 3
"""Failures in succession, without an answer between them, after which the error is raised."""
_PAUSE_S: Final = 0.01
_WRONG: Final = (ReplicaDivergedError, CacheMismatchError, StepMismatchError)
"""Errors of a machine that computes wrongly: a new engine would hide them."""


@dataclass(frozen=True, slots=True)
class KeyedRow:
    """A line of a job's input. `index` is its row's number there, None: unknown, the row is one of its own.
    `problem`: why it has no answer but an error row, whose code is `code`.
    """

    index: int | None
    line: bytes
    problem: str = ""
    code: str = "invalid_key"


Placed = tuple[int, KeyedRow]
"""A row and its number in the caller's order."""
Give = Callable[[int, RowAnswer], None]


class PlacedRunner(RowRunner):
    """Row runner whose answers come with the numbers of the rows: indices may be equal."""

    def __init__(self, llm: LLM) -> None:
        super().__init__(llm.llm_engine, llm.llm_engine.resolved.location.name)
        self._places: dict[RequestId, int] = {}

    def admit_at(self, place: int, row: Row, media: Sequence[PreparedMedia] | None) -> RowAnswer | None:
        """`admit` of the row with number `place`."""
        requests = self._engine.requests
        first = requests.num_requests
        answer = self.admit(row, media)
        self._places |= dict.fromkeys(map(RequestId, range(first, requests.num_requests)), place)
        return answer

    def step_at(self) -> Iterator[tuple[int, RowAnswer]]:
        """Run a step; its answers, without those of requests that an earlier runner has left behind."""
        for output in self._engine.step():
            place = self._places.pop(RequestId(int(output.request_id)), None)
            answer = None if place is None else self._answer(output)
            if place is not None and answer is not None:
                yield place, answer


class RowEngine:
    """`options` are `LLM`'s; several ranks, tensor- or pipeline-parallel, are worker processes of this one. Any thread
    may call it; calls wait for one another. Raises ConfigError under a launcher, and for several replicas.
    """

    def __init__(self, model: str, *, max_restarts: int = _MAX_RESTARTS, **options: Any) -> None:
        if read_rank_environment().is_launched:
            raise ConfigError(
                "RANK and WORLD_SIZE are set: a pipeline's worker has an engine of its own, and torchrun's ranks share "
                "one; start the pipeline without torchrun"
            )
        if options.get("data_parallel_size") not in (None, 1):
            raise ConfigError(
                f"data_parallel_size={options['data_parallel_size']}: a pipeline worker has one replica; leave it out, "
                f"and have the pipeline start more workers"
            )
        self._new_llm = partial(LLM, model, **options)
        self._max_restarts, self._num_failures = max_restarts, 0
        self._lock, self._is_closing, self._owner = threading.Lock(), False, os.getpid()
        self._start()
        # Before the interpreter ends the engine under a thread that runs it.
        atexit.register(self.close)

    def _start(self) -> None:
        self.llm = self._new_llm()
        self._engine = self.llm.llm_engine
        self._forget()

    def _forget(self) -> None:
        self._runner, self._window = PlacedRunner(self.llm), MediaWindow.of(self._engine)
        self._waiting: deque[int] = deque()
        self._unanswered: dict[int, Row] = {}

    def close(self) -> None:
        """Release memory and worker processes; a call of another thread raises. Idempotent; no effect in a forked
        process.
        """
        if os.getpid() == self._owner:
            self._is_closing = True
            with self._lock:
                self.llm.close()
            atexit.unregister(self.close)

    def answer(self, rows: Iterable[KeyedRow]) -> list[RowAnswer]:
        """Answers in the rows' order; invalid rows get error rows. Raises ConfigError for a row that is sampled at
        random without a key, and the error of an engine that fails again and again.
        """
        answers: dict[int, RowAnswer] = {}
        self.run(enumerate(rows), answers.__setitem__)
        return [answers[place] for place in range(len(answers))]

    def run(self, rows: Iterable[Placed | None], give: Give) -> None:
        """Answer rows as they come, and `give` each answer, in any order. None among `rows`: none is there now. Returns
        when nothing runs and no row is there.
        """
        with self._lock:
            source: Iterator[tuple[int, Row] | None] = self._read(iter(rows), give)
            try:
                while True:
                    if self._is_closing:
                        raise RuntimeError("the engine of these rows was closed")
                    try:
                        if not self._turn(source, give):
                            return
                    except Exception as error:
                        source = chain(self._replace(error), source)
            except BaseException:
                self._abandon()
                raise

    def _turn(self, rows: Iterator[tuple[int, Row] | None], give: Give) -> bool:
        """Admit rows, and run a step or wait for media. Returns False when there was nothing to do."""
        may_have_more = self._admit(rows, give)
        if self._runner.num_rows:
            for place, answer in list(self._runner.step_at()):
                self._end(place, answer, give)
        elif self._waiting:
            self._window.pause(_PAUSE_S)
        else:
            return may_have_more
        return True

    def _read(self, rows: Iterator[Placed | None], give: Give) -> Iterator[tuple[int, Row] | None]:
        """The rows, parsed; invalid ones are answered."""
        engine = self._engine
        for found in rows:
            if found is None:
                yield None
                continue
            place, keyed = found
            row = parse_row(keyed.index or 0, keyed.line, engine.default_sampling, engine.config.limits)
            if keyed.problem:
                shape = row.shape if isinstance(row, RowError) else "plain" if row.kind == "plain" else "openai"
                row = RowError(keyed.index or 0, row.custom_id, shape, keyed.code, keyed.problem)
            if isinstance(row, RowError):
                give(place, error_result(row))
                continue
            if keyed.index is None:
                check_key(row)
            yield place, row

    def _admit(self, rows: Iterator[tuple[int, Row] | None], give: Give) -> bool:
        """Admit rows, as many as a job would. Returns False if no row is there; not if the turn has ended before."""
        runner, window = self._runner, self._window
        most_requests = 2 * self._engine.max_num_seqs
        most_bytes = runner.num_compile_bytes + MAX_COMPILE_BYTES
        turn = TimeBudget(self._engine.config.executor.timeout_s)
        while runner.num_requests < most_requests and runner.num_compile_bytes < most_bytes and not turn.is_over:
            ready = window.next_ready(runner.num_media_bytes)
            if ready is not None:
                place, (row, media) = self._waiting.popleft(), ready
                answer = error_result(row) if isinstance(row, RowError) else runner.admit_at(place, row, media)
                if answer is not None:
                    self._end(place, answer, give)
            elif not window.has_room:
                break
            elif (placed := next(rows, None)) is None:
                return False
            else:
                self._waiting.append(placed[0])
                self._unanswered[placed[0]] = placed[1]
                window.put(placed[1])
        return True

    def _replace(self, error: Exception) -> list[tuple[int, Row]]:
        """Replace the engine, if `error` is its failure; else raise. Returns the rows to answer again."""
        engine = self._engine
        if isinstance(error, _WRONG) or not (engine.executor.is_failed or engine.life.state is State.FAILED):
            raise error
        self._num_failures += 1
        if self._num_failures > self._max_restarts:
            raise error
        again = list(self._unanswered.items())
        logger.warning("the engine has failed, a new one answers %d rows again: %s", len(again), error)
        self.llm.close()
        self._start()
        return again

    def _end(self, place: int, answer: RowAnswer, give: Give) -> None:
        self._num_failures = 0
        del self._unanswered[place]
        give(place, answer)

    def _abandon(self) -> None:
        """Abort what still runs, so that the engine can be used again."""
        if not self._engine.is_closed:
            self._engine.requests.abort(self._engine.requests.open_ids)
            self._forget()


def check_key(row: Row) -> None:
    """Raise ConfigError for a row without an index that is sampled at random and has neither custom_id nor seed."""
    sampling = row.sampling
    if row.pooling is None and sampling.temperature > 0 and sampling.seed is None and row.custom_id is None:
        raise ConfigError(
            f"a row is sampled at random (temperature={json.dumps(sampling.temperature)}) and has no key: its answer "
            f"would depend on batches. Give rows a column 'index' of integers or 'custom_id' of texts (or name another "
            f"with key=), a seed, or temperature 0"
        )
