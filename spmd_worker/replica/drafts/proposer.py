"""Seam of proposers: who drafts a sequence's next tokens from the tokens that every replica has.

A draft cannot change an answer: each position is sampled as without it, and drafts are kept as far as they are equal to
what was sampled. But replicas must draft alike: drafts are in the plan.
"""

from typing import Protocol

from spmd_worker.replica.sequence.sequence import Sequence


class Proposer(Protocol):
    """A pure function of the tokens of the sequences that it was given, in the order of the calls."""

    def propose(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        """Ids after the sequence's last token, at most `most`; none if nothing is likely."""

    def forget(self, sequence: Sequence) -> None:
        """Drop a sequence that ended, in any way; its tokens may be kept for later ones."""
