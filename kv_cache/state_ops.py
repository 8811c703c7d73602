"""Moves of recurrent states that run before a step's forward pass: a value sent from the scheduler to the workers."""

from dataclasses import dataclass
from typing import Final, NewType

SlotId = NewType("SlotId", int)
"""Index of one sequence's recurrent states in one memory (device or host), from 0: the same number on every rank."""


@dataclass(frozen=True, slots=True)
class StateOps:
    """Pairs (from, to) of one step, under the contract of `BlockOps`: the kinds run in the order swap_out, copy,
    swap_in; swap-outs and copies read the device as it was when the step began, swap-ins read the host after the
    swap-outs. No slot is a destination twice, and the copies of a chain a to b, b to c are (a, b) and (a, c).

    Nothing clears a slot: a sequence whose first position in a step is 0 starts from zeros, whatever its slot holds.
    """

    swap_in: tuple[tuple[SlotId, SlotId], ...] = ()
    """(host slot, device slot)."""
    swap_out: tuple[tuple[SlotId, SlotId], ...] = ()
    """(device slot, host slot)."""
    copy: tuple[tuple[SlotId, SlotId], ...] = ()
    """(device source, device destination)."""

    @property
    def is_empty(self) -> bool:
        return not (self.copy or self.swap_in or self.swap_out)


NO_STATE_OPS: Final = StateOps()
