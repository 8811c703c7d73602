"""Slots of recurrent states with contents one can see: each holds the tokens that were applied to it, in order.

A state is a number that stands for the state before it, the token and its position, so it tells how it came about:
a token that is applied twice, left out, or applied to another sequence's state gives another number. A step's drafts
are not applied but saved beside the state; the row's next step applies those that it says the state lags by. Knows
plans as a worker does. Knows nothing of schedulers.
"""

from collections.abc import Container

from kv_cache.state_ops import StateOps
from spmd_worker.replica.mirror.records import MirroredSequence
from spmd_worker.replica.sequence.hit_comparison import CachedCopy
from spmd_worker.replica.sequence.sequence import SequenceKey

ZEROS, RUBBISH = -1, -2

Inputs = tuple[tuple[int, int], ...]
"""Positions and tokens."""

States = list[tuple[int, Inputs]]
"""State of each slot, and the drafts that are saved beside it."""


class VisibleStates:
    """`run_step` for each step, `forget` where nothing old may be found later. Slots hold rubbish at first."""

    def __init__(self, num_slots: int, num_host_slots: int) -> None:
        self._device: States = [(RUBBISH, ())] * num_slots
        self._host: States = [(RUBBISH, ())] * num_host_slots
        # (state before, position, token, adapter, epoch) -> state, and the other way round.
        self._numbers: dict[tuple[int, int, int, int, int], int] = {}
        self._contents: list[tuple[int, int, int, int, int]] = []
        self._epoch = 0
        # By sequence: the state that its last step has left, if that was right, and the position after it.
        self._right: dict[SequenceKey, tuple[int, int]] = {}

    def forget(self) -> None:
        """What is computed from now on is told apart from what was."""
        self._epoch += 1

    def run_step(self, operations: StateOps, rows: list[MirroredSequence], joined: Container[SequenceKey]) -> None:
        """Moves, then rows; AssertionError where a row's slot does not hold exactly the tokens before its first.

        What those that `joined` did not compute themselves was found, so it must be of this epoch.
        """
        _assign(self._device, self._host, operations.swap_out)
        _assign(self._device, self._device, operations.copy)
        _assign(self._host, self._device, operations.swap_in)
        for row in rows:
            first, end = row.num_computed_tokens, row.num_computed_tokens + row.num_scheduled_tokens
            begin = first - row.num_lagging_tokens
            state, saved = self._device[row.state_slot] if begin else (ZEROS, ())
            is_new = row.key in joined
            if is_new or self._right.get(row.key) != (state, begin):
                self._check(state, row, begin, is_new=is_new)
            lagging = self._lagging(saved, row, begin, first)
            for position, token_id in (*lagging, *enumerate(row.token_ids(first, end), first)):
                state = self._number((state, position, token_id, row.request.adapter, self._epoch))
            self._device[row.state_slot] = state, tuple(enumerate(row.draft_token_ids, end))
            self._right[row.key] = state, end

    def num_tokens(self, slot: int) -> int:
        """Tokens that were applied to a slot's state."""
        state, count = self._device[slot][0], 0
        while state >= 0:
            state, count = self._contents[state][0], count + 1
        return count

    def _lagging(self, saved: Inputs, row: MirroredSequence, begin: int, first: int) -> Inputs:
        """The saved drafts that are the row's tokens before its first."""
        lagging = tuple(enumerate(row.token_ids(begin, first), begin))
        assert saved[: len(lagging)] == lagging, f"state in slot {row.state_slot} has {saved} saved, not {lagging}"
        return lagging

    def compare(self, row: MirroredSequence, copies: tuple[CachedCopy, ...]) -> None:
        """After a step: the state that it has computed again is the snapshot's, in another slot."""
        for copy in copies:
            assert copy.number != row.state_slot, f"slot {copy.number} is compared with itself"
            (cached, _), (computed, _) = self._device[copy.number], self._device[row.state_slot]
            assert cached == computed, f"slot {copy.number} has state {cached}, slot {row.state_slot} {computed}"

    def _check(self, state: int, row: MirroredSequence, first: int, *, is_new: bool) -> None:
        where = f"state in slot {row.state_slot} of request {row.request.request_id}, sample {row.sample_index}"
        for position, token_id in reversed(list(enumerate(row.token_ids(0, first)))):
            assert state >= 0, f"{where} before {first}: position {position} was not applied"
            before, *content, epoch = self._contents[state]
            expected = [position, token_id, row.request.adapter]
            assert content == expected, f"{where} before {first} has {content}, not {expected}"
            assert not is_new or epoch == self._epoch, f"{where}: found, but forgotten before"
            state = before
        assert state == ZEROS, f"{where} begins with {state}"

    def _number(self, content: tuple[int, int, int, int, int]) -> int:
        number = self._numbers.setdefault(content, len(self._contents))
        if number == len(self._contents):
            self._contents.append(content)
        return number


def _assign(source: States, destination: States, pairs: tuple[tuple[int, int], ...]) -> None:
    """One parallel assignment."""
    gathered = [source[index] for index, _ in pairs]
    for (_, index), state in zip(pairs, gathered):
        destination[index] = state
