"""States of rows in their forms: each its own, and made anew from a row's tokens what it was."""

import numpy as np
import pytest
from constrained_rows import EOS, FORMS, VOCAB_SIZE

from spmd_worker.replica.grammar import compiler
from spmd_worker.replica.grammar.compiler import GrammarCompiler
from spmd_worker.replica.grammar.row_grammar import RowGrammar
from spmd_worker.replica.sequence.structured_outputs import StructuredOutputsParams
from spmd_worker.tokenizer.tokenizer import Tokenizer


def compiler_of(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(lambda: tokenizer, VOCAB_SIZE, (EOS,))


def allowed(state: RowGrammar) -> list[int]:
    bits = np.zeros(-(-VOCAB_SIZE // 32), dtype=np.int32)
    state.fill(bits)
    return [each for each in range(VOCAB_SIZE) if bits[each // 32] >> each % 32 & 1]


@pytest.mark.parametrize("are_copies", [False, True])
def test_lexer_states_of_rows_are_counted_separately(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, are_copies: bool
):
    """Negative control: copies of the engine's have one lexer, and all rows' states are too many for it."""
    monkeypatch.setitem(compiler.LIMITS, "max_lexer_states", 300)
    grammars = compiler_of(tokenizer)
    form = StructuredOutputsParams(regex="x[ab]{150}|y[cd]{150}|z[ef]{150}")
    base = grammars.start(form)
    problems = []
    for text in ("x" + "a" * 150, "y" + "c" * 150, "z" + "f" * 150):
        state = grammars.start(form)
        if are_copies:
            # One that forces is made anew where it is too much for it.
            state._matcher, state.can_force = base._matcher.deep_copy(), False
        state.advance(tokenizer.encode(text))
        problems += [state.problem] if state.problem else []
    assert bool(problems) == are_copies
    assert all("too many states" in each for each in problems)


@pytest.mark.parametrize("name", FORMS)
def test_grammar_state_of_bulk_tokens_equals_single_tokens(tokenizer: Tokenizer, name: str):
    grammars, form = compiler_of(tokenizer), StructuredOutputsParams(**FORMS[name][0])
    generator = np.random.default_rng(3)
    state, taken = grammars.start(form), []
    num_forced = 0
    while not taken or taken[-1] != EOS:
        choices = allowed(state)
        again = grammars.start(form)
        again.advance(taken)
        assert allowed(again) == choices
        forced = state.forced(9)
        assert again.forced(9) == forced
        num_forced += len(forced)
        assert not forced or choices == [forced[0]]
        taken.append(int(generator.choice(choices)))
        state.advance(taken)
    assert FORMS[name][1](tokenizer.decode(taken[:-1]))
    assert num_forced or name in ("choice", "regex", "unicode")


def test_forced_tokens_match_tokenizer_for_any_continuation(tokenizer: Tokenizer):
    grammars = compiler_of(tokenizer)
    for text, behind in (
        ("hello worlds: text", ("x", " hello", "t", "s")),
        ("naïve 你好", ("a", " 世界", "!")),
    ):
        state = grammars.start(StructuredOutputsParams(choice=[f"{text}{each}" for each in behind]))
        allowed(state)
        forced = [*state.forced(100)]
        assert len(forced) > 1
        for each in behind:
            assert tokenizer.encode(text + each)[: len(forced)] == forced


def test_too_long_forced_text_leaves_row_unchanged(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch):
    grammars = compiler_of(tokenizer)
    for pattern in ("a{1000000}(b|c)", "[bc]a{1000000}(b|c)"):
        state = grammars.start(StructuredOutputsParams(regex=pattern))
        taken = tokenizer.encode("b")[:1] if pattern[0] == "[" else []
        # At the form's beginning it is known of the form, and not looked at again.
        assert state.can_force == bool(taken)
        state.advance(taken)
        assert allowed(state) == tokenizer.encode("a")
        assert (state.can_force, state.problem, state.forced(9)) == (False, "", ())


def test_text_around_grammar_is_part_of_answer(tokenizer: Tokenizer):
    grammars = compiler_of(tokenizer)
    form = StructuredOutputsParams(choice=["yes", "no"], around='start: "<" @form ">"')
    for text, is_right in (("<yes>", True), ("<no>", True), ("yes", False), ("<maybe>", False)):
        state = grammars.start(form)
        state.advance([*tokenizer.encode(text), EOS])
        assert (state.problem == "") == is_right, text
    with pytest.raises(ValueError, match="must contain @form"):
        StructuredOutputsParams(regex="a", around='start: "x"')


REPEATED = StructuredOutputsParams(grammar=f'start: "x" LIT{{2000}} ("y"|"z")\nLIT: "{"abcdefgh " * 100}"')


@pytest.mark.parametrize("is_bounded", [True, False])
def test_forcing_of_long_repeated_text_is_bounded(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, is_bounded: bool
):
    """Negative control: with the limit of masks the engine makes all of it, 1.8 MB."""
    if not is_bounded:
        monkeypatch.setattr(compiler, "FORCING_ITEMS", compiler.LIMITS["step_max_items"])
    grammars = compiler_of(tokenizer)
    state = grammars.start(REPEATED)
    assert not state.can_force
    text = state._new_matcher(True).compute_ff_bytes()
    assert (len(text) < 1_500_000) == is_bounded
    assert allowed(state) == tokenizer.encode("x")
    state.advance(tokenizer.encode("xabc"))
    assert set(tokenizer.encode("d")) <= {*allowed(state)}


def test_mask_beyond_forcing_cost_is_made_unforced(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch):
    """At the form's beginning and on the way: as if nothing had ever been forced."""
    for form, texts in (
        (StructuredOutputsParams(grammar='start: (A|B)*\nA: "a"\nB: /[ab ]/'), ("", "ab")),
        (StructuredOutputsParams(grammar='start: "<" (A|B)* ">"\nA: "a"\nB: /[ab ]/'), ("<", "<ab")),
    ):
        expected = compiler_of(tokenizer).start(form)
        with monkeypatch.context() as patched:
            patched.setattr(compiler, "FORCING_ITEMS", 2)
            state = compiler_of(tokenizer).start(form)
            for text in texts:
                for each in (state, expected):
                    each.advance(tokenizer.encode(text))
                assert (allowed(state), state.problem) == (allowed(expected), "")
            assert not state.can_force
        assert expected.can_force


def test_checked_bytes_count_each_grammar_once(tokenizer: Tokenizer):
    grammars = compiler_of(tokenizer)
    for pattern in ("abc", "a" * 1500, "abc"):
        grammars.check(StructuredOutputsParams(regex=pattern))
        grammars.start(StructuredOutputsParams(regex=pattern + "b"))
    # However short, a form counts for 1 KiB, as in a step.
    assert grammars.num_checked_bytes == 1024 + 1500
