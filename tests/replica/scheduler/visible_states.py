"""Slots of recurrent states with contents one can see: each holds the tokens that were applied to it, in order.

A state is a number that stands for the state before it, the token and its position, so it tells how it came about:
a token that is applied twice, left out, or applied to another sequence's state gives another number. Knows plans as a
worker does. Knows nothing of schedulers.
"""

from collections.abc import Container

from kv_cache.state_ops import StateOps
from spmd_worker.replica.mirror.records import MirroredSequence
from spmd_worker.replica.sequence.hit_comparison import CachedCopy
from spmd_worker.replica.sequence.sequence import SequenceKey

ZEROS, RUBBISH = -1, -2

States = list[int]


class VisibleStates:
    """`run_step` for each step, `forget` where nothing old may be found later. Slots hold rubbish at first."""

    def __init__(self, num_slots: int, num_host_slots: int) -> None:
        self._device: States = [RUBBISH] * num_slots
        self._host: States = [RUBBISH] * num_host_slots
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
            state = self._device[row.state_slot] if first else ZEROS
            is_new = row.key in joined
            if is_new or self._right.get(row.key) != (state, first):
                self._check(state, row, first, is_new=is_new)
            for position, token_id in enumerate(row.token_ids(first, end), first):
                state = self._number((state, position, token_id, row.request.adapter, self._epoch))
            self._device[row.state_slot] = state
            self._right[row.key] = state, end

    def compare(self, row: MirroredSequence, copies: tuple[CachedCopy, ...]) -> None:
        """After a step: the state that it has computed again is the snapshot's, in another slot."""
        for copy in copies:
            assert copy.number != row.state_slot, f"slot {copy.number} is compared with itself"
            cached, computed = self._device[copy.number], self._device[row.state_slot]
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
