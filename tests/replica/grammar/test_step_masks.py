"""Masks of a step: whose state each row has, and in which step it is compiled."""

from collections.abc import Sequence

import numpy as np
import pytest
from constrained_rows import EOS, FORMS, VOCAB_SIZE

from spmd_worker.replica.grammar import compiler
from spmd_worker.replica.grammar.compiler import GrammarCompiler
from spmd_worker.replica.grammar.row_grammar import RowGrammar
from spmd_worker.replica.grammar.step_masks import ConstrainedRow, GrammarMasks, StepMasks
from spmd_worker.replica.sequence.request import RequestId
from spmd_worker.replica.sequence.sequence import SequenceKey
from spmd_worker.replica.sequence.structured_outputs import StructuredOutputsParams
from spmd_worker.tokenizer.tokenizer import Tokenizer

FORM = StructuredOutputsParams(**FORMS["json"][0])


class CountingMasks:
    """`GrammarMasks`, and how many forms each step compiles."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.num_compiled = 0
        compiler = GrammarCompiler(lambda: tokenizer, VOCAB_SIZE, (EOS,))
        start = compiler.start

        def counted(form: StructuredOutputsParams, may_force: bool) -> object:
            self.num_compiled += 1
            return start(form, may_force)

        compiler.start = counted  # type: ignore[assignment,method-assign]  # counts, and is the same
        self._masks = GrammarMasks(compiler)

    def step(self, rows: Sequence[tuple[int, int, list[int]]]) -> tuple[StepMasks, int]:
        """Of (request, sample, tokens) each: the masks, and how many forms were compiled for them."""
        before = self.num_compiled
        self._masks.begin(
            [
                ConstrainedRow(index, SequenceKey(RequestId(request), sample), FORM, tokens)
                for index, (request, sample, tokens) in enumerate(rows)
            ]
        )
        masks = self._masks.end()
        assert masks is not None
        return masks, self.num_compiled - before


def test_samples_share_grammar_state_until_fork(tokenizer: Tokenizer):
    forked, alone = CountingMasks(tokenizer), CountingMasks(tokenizer)
    first, num_compiled = forked.step([(0, sample, []) for sample in range(3)])
    # Negative control: requests that are no samples of one.
    expected, num_compiled_alone = alone.step([(request, 0, []) for request in range(3)])
    assert (num_compiled, num_compiled_alone) == (1, 3)
    texts = [tokenizer.encode(each) for each in ('{"name":"a', '{"name":"', '{"name":"abc","age":1')]
    for _ in range(2):
        assert first.indices == expected.indices == (0, 1, 2)
        assert np.array_equal(first.allowed, expected.allowed)
        assert first.forced == expected.forced
        first, num_compiled = forked.step([(0, sample, text) for sample, text in enumerate(texts)])
        expected, _ = alone.step([(request, 0, text) for request, text in enumerate(texts)])
    assert forked.num_compiled == alone.num_compiled == 3


class ForcingAtFirst(GrammarCompiler):
    """Makes every state as one that forces, and says afterwards that it does not."""

    def start(self, form: StructuredOutputsParams, may_force: bool = True) -> RowGrammar:
        state = super().start(form)
        state.can_force = state.can_force and may_force
        return state


@pytest.mark.parametrize(("kind", "fails"), [(GrammarCompiler, False), (ForcingAtFirst, True)])
def test_forcing_limits_spare_masks_of_unforced_rows(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, kind: type[GrammarCompiler], fails: bool
):
    """A row with `bad_words` failed at the 2,000 items of a row that forces. Negative control: as it was made then."""
    form = StructuredOutputsParams(grammar='start: "<" (A|B)* ">"\nA: "a"\nB: /[ab ]/')
    monkeypatch.setattr(compiler, "FORCING_ITEMS", 16)
    masks = GrammarMasks(kind(lambda: tokenizer, VOCAB_SIZE, (EOS,)))
    found = []
    for text in ("", "<", "<ab"):
        key = SequenceKey(RequestId(0), 0)
        masks.begin([ConstrainedRow(0, key, form, tokenizer.encode(text) if text else [], may_force=False)])
        step = masks.end()
        assert step is not None
        found.append(step.failed)
    assert found == ([(), (0,), (0,)] if fails else [(), (), ()])
