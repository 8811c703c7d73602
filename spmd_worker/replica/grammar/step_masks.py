"""The masks of one step's constrained rows, computed beside its forward pass.

Every rank that samples has the states of its rows, and makes the same masks of the same tokens. A state is compiled in
the step in which its sequence first samples, or, of one that forked, samples for the first time by itself: of those the
scheduler lets so many into a step (`replica/scheduler/budget.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from threading import Thread
from typing import Final, NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from spmd_worker.base.errors import ConfigError
from spmd_worker.replica.grammar.compiler import GrammarCompiler
from spmd_worker.replica.grammar.forms import GrammarError
from spmd_worker.replica.grammar.row_grammar import RowGrammar
from spmd_worker.replica.sequence.request import RequestId
from spmd_worker.replica.sequence.sequence import SequenceKey
from spmd_worker.replica.sequence.structured_outputs import StructuredOutputsParams

MOST_FORCED: Final = 32
"""Tokens that a row takes in one step where all are forced. Answers do not depend on it."""


class ConstrainedRow(NamedTuple):
    """A row that samples: its index among those that do, whose it is, and its output tokens so far. `may_force`: it
    forbids no tokens itself; `takes_several`: it wants nothing of a token but its id.
    """

    row_index: int
    key: SequenceKey
    form: StructuredOutputsParams
    output_token_ids: Sequence[int]
    may_force: bool = True
    takes_several: bool = True


@dataclass(frozen=True, slots=True)
class StepMasks:
    """`allowed` int32 [M, words], a bit a token (`row_grammar.BITS`): row m is that of sampling row `indices[m]`. Those
    in `failed` have no token that may follow, or used up a limit. `forced` has, of some other rows, the tokens that
    follow in any case, the first of which is all that the mask leaves. `checksum` is a CRC-32 of what every row may
    take, the failed ones included.
    """

    indices: tuple[int, ...]
    allowed: NDArray[np.int32]
    checksum: int
    failed: tuple[int, ...] = ()
    forced: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    def taken(self, token_ids: Sequence[int]) -> list[tuple[int, ...]]:
        """What each row of a step takes that was sampled these: beside its own token those forced behind it."""
        return [
            forced if (forced := self.forced.get(index, ()))[:1] == (token_id,) else (token_id,)
            for index, token_id in enumerate(token_ids)
        ]


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
        owners = _owners(rows)
        states = [self._state(key, row) for key, row in zip(owners, rows, strict=True)]
        bits = self._compiler.new_bits(len(rows))
        filled: dict[SequenceKey, int] = {}
        for place, (key, state) in enumerate(zip(owners, states, strict=True)):
            if filled.setdefault(key, place) == place:
                state.fill(bits[place])
            else:
                bits[place] = bits[filled[key]]
        failed = [row.row_index for row, state in zip(rows, states, strict=True) if state.problem]
        answerable = [place for place, row in enumerate(rows) if row.row_index not in failed]
        indices = tuple([rows[place].row_index for place in answerable])
        forced = {
            row.row_index: state.forced(MOST_FORCED)
            for row, state in zip(rows, states, strict=True)
            if row.takes_several and not state.problem
        }
        several = {index: token_ids for index, token_ids in forced.items() if len(token_ids) > 1}
        allowed = bits[answerable] if failed else bits
        return StepMasks(indices, allowed, crc32(bits.data), tuple(failed), several)

    def _state(self, key: SequenceKey, row: ConstrainedRow) -> RowGrammar:
        """That of `key`, after the row's tokens so far."""
        state = self._states.get(key)
        if state is None:
            try:
                state = self._states[key] = self._compiler.start(row.form, row.may_force)
            except GrammarError as error:
                # Rows are admitted with forms that compile: this rank's packages or files are not the engine's.
                raise ConfigError(f"structured_outputs: a form that was admitted cannot be compiled: {error}") from None
        state.take(row.output_token_ids)
        return state


def _owners(rows: Sequence[ConstrainedRow]) -> list[SequenceKey]:
    """Whose state each row takes its mask from: its own; but samples of a request that have no tokens yet, and fork in
    this step, have that of the first of them.
    """
    firsts: dict[RequestId, SequenceKey] = {}
    return [row.key if row.output_token_ids else firsts.setdefault(row.key.request_id, row.key) for row in rows]
