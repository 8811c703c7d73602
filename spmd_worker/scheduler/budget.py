"""What one step may still take: tokens and sequences."""

from dataclasses import dataclass


@dataclass(slots=True)
class StepBudget:
    """`num_tokens` may still be computed in this step, `num_sequences` may still join those that run."""

    num_tokens: int
    num_sequences: int

    def spend(self, num_tokens: int) -> None:
        """Take tokens; the caller asked first."""
        assert 0 < num_tokens <= self.num_tokens, (num_tokens, self.num_tokens)
        self.num_tokens -= num_tokens
