"""Budget of one step: tokens, sequences, and grammars, which are compiled next to the forward pass."""

from dataclasses import dataclass, field
from typing import Final

from spmd_worker.replica.sequence.sequence import Sequence
from spmd_worker.replica.sequence.structured_outputs import MAX_GRAMMAR_BYTES

MOST_FORM_BYTES: Final = MAX_GRAMMAR_BYTES
"""Compile budget of a step (`compile_bytes`): the maximum of a single grammar, so each fits into some step. At most 64
are compiled in a step.
"""


def form_bytes(sequence: Sequence) -> int:
    """Compile cost of a sequence's grammar; 0 without one to compile."""
    form = sequence.request.sampling.structured_outputs
    return form.compile_bytes if sequence.begins_form and form is not None else 0


@dataclass(slots=True)
class StepBudget:
    """`num_tokens` may still be computed in this step, `num_sequences` may still join the running ones, and grammars of
    `num_form_bytes` in total may still be compiled.
    """

    num_tokens: int
    num_sequences: int
    num_form_bytes: int = field(default_factory=lambda: MOST_FORM_BYTES)
    has_skipped: bool = False
    """Whether a running sequence waits for its grammar: others may use the tokens that were counted for it."""

    def may_sample(self, sequence: Sequence) -> bool:
        """Whether the budget allows compiling the grammar that the sequence would begin."""
        return not sequence.begins_form or form_bytes(sequence) <= self.num_form_bytes

    def begin_form(self, sequence: Sequence) -> None:
        """The sequence samples: compile its grammar, if it has one that is not compiled. Call `may_sample` first."""
        self.num_form_bytes -= form_bytes(sequence)
        assert self.num_form_bytes >= 0, self.num_form_bytes
        sequence.begins_form = False

    def spend(self, num_tokens: int) -> None:
        """Use tokens; the caller checks first."""
        assert 0 < num_tokens <= self.num_tokens, (num_tokens, self.num_tokens)
        self.num_tokens -= num_tokens
