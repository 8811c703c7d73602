"""The masks of one step's constrained rows, computed beside its forward pass.

Every rank that samples has the states of its rows, and makes the same masks of the same tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Thread
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from spmd_worker.grammar.compiler import GrammarCompiler
from spmd_worker.grammar.forms import GrammarError
from spmd_worker.grammar.row_grammar import RowGrammar, forbidden_of
from spmd_worker.sequence.request import RequestId
from spmd_worker.sequence.sequence import SequenceKey
from spmd_worker.sequence.structured_outputs import StructuredOutputsParams


class ConstrainedRow(NamedTuple):
    """A row that samples: its index among those that do, whose it is, and its output tokens so far."""

    row_index: int
    key: SequenceKey
    form: StructuredOutputsParams
    output_token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class StepMasks:
    """`forbidden` bool [M, vocabulary]: row m is that of sampling row `indices[m]`. Those in `failed` have no token
    that may follow, or used up a limit.
    """

    indices: tuple[int, ...]
    forbidden: NDArray[np.bool_]
    failed: tuple[int, ...] = ()


class GrammarMasks:
    """`begin`, then `end`, in each step that has constrained rows; `forget` what has ended.

    One thread computes, whatever the number of cores: the forward pass has the others.
    """

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._states: dict[SequenceKey, RowGrammar] = {}
        self._running: tuple[Thread, list[StepMasks | BaseException]] | None = None

    def __len__(self) -> int:
        """How many states are held."""
        return len(self._states)

    def begin(self, rows: Sequence[ConstrainedRow]) -> None:
        """Start; the tokens of the rows stay as they are until `end`."""
        assert self._running is None, "the masks of the last step were never taken"
        if not rows:
            return
        found: list[StepMasks | BaseException] = []

        def run() -> None:
            try:
                found.append(self._masks(rows))
            except BaseException as error:  # a panic of the engine is no Exception; raised again where it is waited for
                found.append(error)

        thread = Thread(target=run, name="grammar masks", daemon=True)
        self._running = thread, found
        thread.start()

    def end(self) -> StepMasks | None:
        """Wait for them; None where no row of the step is constrained."""
        if self._running is None:
            return None
        (thread, found), self._running = self._running, None
        thread.join()
        if isinstance(found[0], BaseException):
            raise found[0]
        return found[0]

    def forget(self, sequences: Sequence[SequenceKey], request_ids: Sequence[RequestId]) -> None:
        """Sequences that ended, and requests with all of theirs."""
        if not self._states:
            return
        ended = dict.fromkeys(request_ids)
        for key in [*sequences, *[key for key in self._states if key.request_id in ended]]:
            self._states.pop(key, None)

    def _masks(self, rows: Sequence[ConstrainedRow]) -> StepMasks:
        states = [self._state(row) for row in rows]
        bits = self._compiler.new_bits(len(rows))
        for state, own in zip(states, bits, strict=True):
            if state is not None:
                state.fill(own)
        failed = [row.row_index for row, state in zip(rows, states, strict=True) if state is None or state.problem]
        answerable = [place for place, row in enumerate(rows) if row.row_index not in failed]
        indices = tuple([rows[place].row_index for place in answerable])
        return StepMasks(indices, forbidden_of(bits[answerable], self._compiler.vocab_size), tuple(failed))

    def _state(self, row: ConstrainedRow) -> RowGrammar | None:
        """After the row's tokens so far."""
        state = self._states.get(row.key)
        if state is None:
            try:
                state = self._states[row.key] = self._compiler.start(row.form)
            except GrammarError:
                # Rows are admitted with forms that compile; no other can be answered.
                return None
        state.take(row.output_token_ids)
        return state
