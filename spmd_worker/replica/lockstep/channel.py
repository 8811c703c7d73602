"""The channel that carries a step's answers and message between the ranks of a replica, as `Lockstep` needs it.

The rank that leads collects the answers and sends the message; the others answer and receive. `ranks/transport` has
the implementations, over TCP and over a gloo group.
"""

from collections.abc import Callable
from typing import Protocol


class StepChannel(Protocol):
    """What both ends offer."""

    rank: int
    size: int

    def abort(self, text: str, is_divergence: bool) -> None:
        """Report to the ranks within reach why this rank leaves: it broke, or the replicas diverged. Never raises."""

    def received_abort(self) -> tuple[str, bool] | None:
        """Another rank's (text, is_divergence) from before it left, waiting a moment for it."""

    def close(self) -> None:
        """Leave. Idempotent."""


class LeaderChannel(StepChannel, Protocol):
    """Rank 0's end."""

    def collect(self, step: int) -> list[bytes]:
        """Every follower's answer to `step`, in rank order (followers only)."""

    def send(self, payload: bytes) -> None:
        """The step's message, to every follower."""

    def exchange_records(self, record: bytes) -> list[bytes]:
        """After a mismatch: rank 0's own record and every follower's, in rank order."""

    def send_diagnosis(self, text: str) -> None:
        """What the records showed, to every follower."""


class FollowerChannel(StepChannel, Protocol):
    """The end of every other rank."""

    def answer(self, step: int, payload: bytes) -> None:
        """What this rank has to say of `step`."""

    def receive(self) -> bytes:
        """The step's message."""

    def offer_record(self, record: Callable[[], bytes]) -> None:
        """What makes this rank's record of the step: asked only when rank 0 asks for it, which is hardly ever."""
