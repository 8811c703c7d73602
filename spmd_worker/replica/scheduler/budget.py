"""Budget of one step: tokens, sequences, and grammars, which are compiled next to the forward pass."""

from dataclasses import dataclass, field
from typing import Final

from spmd_worker.replica.sequence.sequence import Sequence
from spmd_worker.replica.sequence.structured_outputs import MAX_GRAMMAR_BYTES

MAX_COMPILE_BYTES: Final = MAX_GRAMMAR_BYTES
"""Compile budget of a step: the maximum of a single grammar, so each fits into some step, and 64 small ones."""


def compile_bytes(sequence: Sequence) -> int:
    """Compile cost of a sequence's grammar; 0 without one to compile."""
    constraint = sequence.request.sampling.structured_outputs
    return constraint.compile_bytes if sequence.must_compile and constraint is not None else 0


@dataclass(slots=True)
class StepBudget:
    """`num_tokens` may still be computed in this step, `num_sequences` may still join the running ones, and grammars of
    `num_compile_bytes` in total may still be compiled. `has_skipped`: a running sequence waits for its grammar, so
    others may use the tokens that were counted for it.
    """

    num_tokens: int
    num_sequences: int
    num_compile_bytes: int = field(default_factory=lambda: MAX_COMPILE_BYTES)
    has_skipped: bool = False

    def may_sample(self, sequence: Sequence) -> bool:
        """Whether the sequence's grammar, if it has one to compile, fits the budget."""
        return compile_bytes(sequence) <= self.num_compile_bytes

    def spend_grammar(self, sequence: Sequence) -> None:
        """Account for compiling the grammar of a sequence that samples. Call `may_sample` first."""
        self.num_compile_bytes -= compile_bytes(sequence)
        assert self.num_compile_bytes >= 0, self.num_compile_bytes
        sequence.must_compile = False
