"""Masks of rules: repetition, rules that exclude each other, and rules beside a grammar."""

import random

import numpy as np
import pytest
from constrained_rows import EOS, VOCAB_SIZE

from spmd_worker.replica.grammar.compiler import GrammarCompiler
from spmd_worker.replica.grammar.rule_masks import allowed_tokens, repeating_tokens
from spmd_worker.replica.grammar.step_masks import ConstrainedRow, GrammarMasks
from spmd_worker.replica.sequence.request import RequestId
from spmd_worker.replica.sequence.sequence import SequenceKey
from spmd_worker.replica.sequence.structured_outputs import StructuredOutputsParams
from spmd_worker.replica.sequence.token_rules import TimestampRules, TokenRules
from spmd_worker.tokenizer.tokenizer import Tokenizer


def allowed(rules: TokenRules, outputs: list[int], vocab_size: int = 40, eos: tuple[int, ...] = (4,)) -> list[int]:
    bits = allowed_tokens(rules, (), outputs, max_tokens=6, vocab_size=vocab_size, eos_token_ids=eos)
    return np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_repeating_tokens_are_those_of_every_position(size: int):
    rng = random.Random(size)
    for length in range(30):
        ids = [rng.randrange(3) for _ in range(length)]
        tail = ids[length - size + 1 :]
        expected = [ids[end] for end in range(size - 1, length) if ids[end - size + 1 : end] == tail]
        cut = rng.randrange(length + 1)
        assert repeating_tokens(size, ids[:cut], ids[cut:]) == expected, ids


def test_rule_that_leaves_no_token_is_ignored():
    every = tuple(range(40))
    assert allowed(TokenRules(suppress_tokens=every), []) == [*every]
    assert allowed(TokenRules(suppress_tokens=every[1:], begin_suppress_tokens=(0,)), []) == [0]
    # After a pair text is next, and all of it is suppressed.
    rules = TokenRules(suppress_tokens=every[:20], timestamps=TimestampRules(20, 4))
    assert allowed(rules, [20, 21]) == [*range(20, 40)]
    # A forced token comes whatever the others say.
    assert allowed(TokenRules(forced_tokens=(3,), suppress_tokens=(3,), min_new_tokens=5), []) == [3]
    assert allowed(TokenRules(forced_eos_token_id=4, suppress_tokens=(4,)), [1] * 5) == [4]


def test_end_waits_for_the_minimum():
    rules = TokenRules(min_new_tokens=2)
    assert 4 not in allowed(rules, [7])
    assert 4 in allowed(rules, [7, 7])


def test_grammar_and_rules_hold_together(tokenizer: Tokenizer):
    """Rows with both, one of them, and with rules that the grammar excludes."""
    choice = StructuredOutputsParams(choice=("ab", "cd"))
    first = {text: tokenizer.token_id(text) for text in "abcd"}
    suppressing, excluded = TokenRules(suppress_tokens=(first["a"],)), TokenRules(forced_tokens=(first["b"],))
    given = [(choice, suppressing), (choice, None), (None, suppressing), (choice, excluded)]
    masks = GrammarMasks(GrammarCompiler(lambda: tokenizer, VOCAB_SIZE, (EOS,)))
    masks.begin(
        [
            ConstrainedRow(index, SequenceKey(RequestId(index), 0), form, [], False, True, rules)
            for index, (form, rules) in enumerate(given)
        ]
    )
    found = masks.end()
    assert found is not None
    assert (found.indices, found.failed) == ((0, 1, 2, 3), ())
    sets = [np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist() for row in found.allowed]
    assert {first["a"], first["c"]} <= {*sets[1]}
    assert sets[0] == [each for each in sets[1] if each != first["a"]]
    assert sets[2] == [each for each in range(VOCAB_SIZE) if each != first["a"]]
    assert sets[3] == sets[1]
