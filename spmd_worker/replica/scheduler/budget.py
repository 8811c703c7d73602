"""What one step may still take: tokens, sequences, and forms of answers, which are compiled beside the forward pass."""

from dataclasses import dataclass, field
from typing import Final

from spmd_worker.replica.sequence.sequence import Sequence
from spmd_worker.replica.sequence.structured_outputs import MAX_GRAMMAR_BYTES

MOST_FORM_BYTES: Final = MAX_GRAMMAR_BYTES
"""What forms compiled in one step may count for in all (`compile_bytes`): no less than one form may, so that each finds
its step. So at most 64 are compiled in a step.
"""


def form_bytes(sequence: Sequence) -> int:
    """What compiling the form of a sequence counts for; 0 where there is none to compile."""
    form = sequence.request.sampling.structured_outputs
    return form.compile_bytes if sequence.begins_form and form is not None else 0


@dataclass(slots=True)
class StepBudget:
    """`num_tokens` may still be computed in this step, `num_sequences` may still join those that run, and forms of
    `num_form_bytes` in all may still be compiled.
    """

    num_tokens: int
    num_sequences: int
    num_form_bytes: int = field(default_factory=lambda: MOST_FORM_BYTES)
    has_skipped: bool = False
    """Whether a running sequence waits for its form: others may take the tokens that were counted for it."""

    def may_sample(self, sequence: Sequence) -> bool:
        """Whether there is room for the form that it would begin."""
        return not sequence.begins_form or form_bytes(sequence) <= self.num_form_bytes

    def begin_form(self, sequence: Sequence) -> None:
        """The sequence samples: a form that it has and that is not compiled yet is compiled. The caller asked first."""
        self.num_form_bytes -= form_bytes(sequence)
        assert self.num_form_bytes >= 0, self.num_form_bytes
        sequence.begins_form = False

    def spend(self, num_tokens: int) -> None:
        """Take tokens; the caller asked first."""
        assert 0 < num_tokens <= self.num_tokens, (num_tokens, self.num_tokens)
        self.num_tokens -= num_tokens
