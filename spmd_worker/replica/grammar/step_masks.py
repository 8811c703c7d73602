"""Masks of one step's rows with a grammar or rules, computed in parallel with its forward pass.

Every rank that samples has the states of its rows, and computes the same masks from the same tokens. A state is
compiled in the step in which its sequence first samples, or, after a fork, first samples on its own: the scheduler
bounds the number per step (`replica/scheduler/budget.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from threading import Thread
from typing import Final, NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from spmd_worker.base.errors import ConfigError
from spmd_worker.replica.grammar.compiler import GrammarCompiler
from spmd_worker.replica.grammar.llguidance_input import GrammarError
from spmd_worker.replica.grammar.row_grammar import RowGrammar, is_allowed
from spmd_worker.replica.grammar.rule_masks import allowed_tokens
from spmd_worker.replica.sequence.request import RequestId
from spmd_worker.replica.sequence.sequence import SequenceKey
from spmd_worker.replica.sequence.structured_outputs import StructuredOutputsParams
from spmd_worker.replica.sequence.token_rules import TokenRules

MAX_FORCED_TOKENS: Final = 32
"""Maximum number of forced tokens that a row appends in one step. Answers do not depend on it."""


class ConstrainedRow(NamedTuple):
    """A row that samples: its index among those that do, its sequence, and its output tokens. `may_force`: it forbids
    no tokens itself; `takes_several`: it needs only the id of a token. `rules` are of an answer of `max_tokens` to
    `prompt_token_ids`. With `draft_token_ids` the row samples at each of them too, with the numbers after its index.
    """

    row_index: int
    key: SequenceKey
    constraint: StructuredOutputsParams | None
    output_token_ids: Sequence[int]
    may_force: bool = True
    takes_several: bool = True
    rules: TokenRules | None = None
    prompt_token_ids: Sequence[int] = ()
    max_tokens: int | None = None
    draft_token_ids: tuple[int, ...] = ()


class DraftMasks(NamedTuple):
    """Masks at the drafts of a row with a grammar, int32 [drafts, words], computed ahead of its own state, which has
    `output_token_ids`. There are fewer than drafts if the grammar forbids one, or a limit was reached.
    """

    key: SequenceKey
    output_token_ids: tuple[int, ...]
    allowed: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepMasks:
    """`allowed` int32 [M, words], a bit a token (`row_grammar.BITS`): row m is that of sampling row `indices[m]`. Rows
    in `failed` allow no token, or used up a limit. `forced` has the tokens that follow in any case for some other rows;
    their masks allow only the first. `checksum` is a CRC-32 of the masks of all rows, the failed ones included.
    `drafted` has the masks at drafts, by the row that they follow.
    """

    indices: tuple[int, ...]
    allowed: NDArray[np.int32]
    checksum: int
    failed: tuple[int, ...] = ()
    forced: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    drafted: Mapping[int, DraftMasks] = field(default_factory=dict)

    def appended(self, token_ids: Sequence[int]) -> list[tuple[int, ...]]:
        """Tokens appended to each row of a step, given the sampled ids: its own, and the forced ones after it."""
        return [
            forced if (forced := self.forced.get(index, ()))[:1] == (token_id,) else (token_id,)
            for index, token_id in enumerate(token_ids)
        ]


class GrammarMasks:
    """`begin`, then `end`, in each step with constrained rows. One thread: the forward pass has the other cores.

    Masks at drafts are those of a second state, compiled for each row that has drafts: the engine counts the work of a
    row, and that for drafts that turn out wrong must not count against an answer. `confirm` makes the row's own masks
    for those that are right.
    """

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._states: dict[SequenceKey, RowGrammar] = {}
        self._ahead: dict[SequenceKey, RowGrammar] = {}
        self._running: tuple[Thread, list[StepMasks | BaseException]] | None = None

    def __len__(self) -> int:
        return len(self._states)

    def begin(self, rows: Sequence[ConstrainedRow]) -> None:
        """Start; the rows' tokens must not change until `end`."""
        assert self._running is None, "call `end` for the last step first"
        if not rows:
            return
        found: list[StepMasks | BaseException] = []

        def run() -> None:
            try:
                found.append(self._masks(rows))
            except BaseException as error:  # a panic of the engine is not an Exception; re-raised in `end`
                found.append(error)

        thread = Thread(target=run, name="grammar masks", daemon=True)
        self._running = thread, found
        thread.start()

    def end(self) -> StepMasks | None:
        """Wait for the masks; None if the step has no constrained row."""
        if self._running is None:
            return None
        (thread, found), self._running = self._running, None
        thread.join()
        if isinstance(found[0], BaseException):
            raise found[0]
        return found[0]

    def forget(self, sequences: Sequence[SequenceKey], request_ids: Sequence[RequestId]) -> None:
        """Drop ended sequences, and requests with all of theirs."""
        if not self._states:
            return
        ended = dict.fromkeys(request_ids)
        for key in [*sequences, *[key for key in self._states if key.request_id in ended]]:
            self._states.pop(key, None)
            self._ahead.pop(key, None)

    def confirm(self, masks: StepMasks, row_index: int, token_ids: Sequence[int]) -> int:
        """Number of the leading ids of a row that were sampled with the masks that its own state makes: at least one.
        All but the last are its drafts. Call once, after `end` and before the next `begin`.
        """
        drafted = masks.drafted.get(row_index)
        if drafted is None:
            return len(token_ids)
        state, own = self._states[drafted.key], self._compiler.new_bits(1)[0]
        for number in range(1, len(token_ids)):
            if number > len(drafted.allowed):
                return number
            state.advance([*drafted.output_token_ids, *token_ids[:number]])
            state.fill(own)
            if state.problem or not np.array_equal(own, drafted.allowed[number - 1]):
                return number
        return len(token_ids)

    def _masks(self, rows: Sequence[ConstrainedRow]) -> StepMasks:
        owners = _owners(rows)
        states = [self._state(key, row) for key, row in zip(owners, rows, strict=True)]
        starts = [*accumulate([1 + len(row.draft_token_ids) for row in rows], initial=0)]
        bits = self._compiler.new_bits(starts[-1])
        filled: dict[SequenceKey, int] = {}
        drafted: dict[int, DraftMasks] = {}
        # Rows of `bits`, by the row that is sampled with them.
        places: dict[int, int] = {}
        failed: list[int] = []
        for row, key, state, start, stop in zip(rows, owners, states, starts, starts[1:]):
            if state is not None and filled.setdefault(key, start) == start:
                state.fill(bits[start])
            elif state is not None:
                bits[start] = bits[filled[key]]
            num_known = stop - start
            if state is not None and row.draft_token_ids:
                num_known = 1 + self._fill_ahead(key, row, bits[start:stop])
                own = bits[start + 1 : start + num_known].copy()
                drafted[row.row_index] = DraftMasks(key, tuple(row.output_token_ids), own)
            if row.rules is not None:
                for number in range(num_known):
                    self._apply(row, row.rules, number, bits[start + number])
            num_known = 0 if state is not None and state.problem else num_known
            places |= {row.row_index + number: start + number for number in range(num_known)}
            failed += range(row.row_index + num_known, row.row_index + stop - start)
        forced = {
            row.row_index: token_ids
            for row, state in zip(rows, states, strict=True)
            if row.takes_several and state is not None and not state.problem
            if len(token_ids := state.forced(MAX_FORCED_TOKENS)) > 1
        }
        allowed = bits[list(places.values())] if failed else bits
        return StepMasks(tuple(places), allowed, crc32(bits.data), tuple(failed), forced, drafted)

    def _fill_ahead(self, key: SequenceKey, row: ConstrainedRow, bits: NDArray[np.int32]) -> int:
        """Fill the masks at a row's drafts, after its own in `bits[0]`; returns how many are known."""
        assert row.constraint is not None, row
        ahead, first = self._ahead.get(key), np.zeros_like(bits[0])
        if ahead is None:
            ahead = self._ahead[key] = self._compiler.start(row.constraint, row.may_force)
        ahead.advance(row.output_token_ids)
        ahead.fill(first)
        if ahead.problem or not np.array_equal(first, bits[0]):
            # The work for wrong drafts has reached a limit: the next one begins anew.
            del self._ahead[key]
            return 0
        probe, outputs = ahead.copied(), list(row.output_token_ids)
        for number, token_id in enumerate(row.draft_token_ids):
            if not is_allowed(bits[number], token_id):
                return number
            outputs.append(token_id)
            probe.advance(outputs)
            probe.fill(bits[number + 1])
            if probe.problem or probe.can_force != ahead.can_force:
                bits[number + 1] = 0
                return number
        return len(row.draft_token_ids)

    def _apply(self, row: ConstrainedRow, rules: TokenRules, num_drafts: int, bits: NDArray[np.int32]) -> None:
        """Combine the mask of a row's grammar, if it has one, behind some of its drafts, with its rules; the grammar
        wins where they exclude each other.
        """
        outputs = [*row.output_token_ids, *row.draft_token_ids[:num_drafts]] if num_drafts else row.output_token_ids
        own = allowed_tokens(
            *(rules, row.prompt_token_ids, outputs),
            max_tokens=row.max_tokens,
            vocab_size=self._compiler.vocab_size,
            eos_token_ids=self._compiler.eos_token_ids,
        )
        if row.constraint is None:
            bits[: len(own)] = own
        elif (both := bits[: len(own)] & own).any():
            bits[: len(own)] = both

    def _state(self, key: SequenceKey, row: ConstrainedRow) -> RowGrammar | None:
        """State of `key`, after the row's output tokens; None without a grammar."""
        if row.constraint is None:
            return None
        state = self._states.get(key)
        if state is None:
            try:
                state = self._states[key] = self._compiler.start(row.constraint, row.may_force)
            except GrammarError as error:
                # Rows are admitted with grammars that compile: this rank's packages or files differ from the engine's.
                message = f"structured_outputs: an admitted grammar cannot be compiled on this rank: {error}"
                raise ConfigError(message) from None
        state.advance(row.output_token_ids)
        return state


def _owners(rows: Sequence[ConstrainedRow]) -> list[SequenceKey]:
    """Key of each row's state: its own; samples without tokens that fork in this step share the first one's."""
    firsts: dict[RequestId, SequenceKey] = {}
    return [row.key if row.output_token_ids else firsts.setdefault(row.key.request_id, row.key) for row in rows]
