"""Protocol of the channel that carries a step's answers and message between the ranks of a replica.

Rank 0 collects the answers and sends the message; the others answer and receive. `ranks/transport` implements it over
TCP and over a gloo group.
"""

from collections.abc import Callable
from typing import Protocol


class StepChannel(Protocol):
    """Methods of both ends."""

    rank: int
    size: int

    def abort(self, text: str, is_divergence: bool) -> None:
        """Report to the reachable ranks why this rank leaves: an error, or divergence. Never raises."""

    def received_abort(self) -> tuple[str, bool] | None:
        """(text, is_divergence) of another rank that has left, waiting a moment for it."""

    def close(self) -> None:
        """Leave. Idempotent."""


class LeaderChannel(StepChannel, Protocol):
    """Rank 0's end."""

    def collect(self, step: int) -> list[bytes]:
        """Every follower's answer to `step`, in rank order (followers only)."""

    def send(self, payload: bytes) -> None:
        """Send the step's message to every follower."""

    def exchange_records(self, record: bytes) -> list[bytes]:
        """Rank 0's own record and every follower's, in rank order; called after a mismatch."""

    def send_diagnosis(self, text: str) -> None:
        """Send the difference of the records to every follower."""


class FollowerChannel(StepChannel, Protocol):
    """The end of every other rank."""

    def answer(self, step: int, payload: bytes) -> None:
        """Send this rank's answer to `step`."""

    def receive(self) -> bytes:
        """The step's message."""

    def offer_record(self, record: Callable[[], bytes]) -> None:
        """Register the function that makes this rank's record of the step; called only if rank 0 asks for it."""
