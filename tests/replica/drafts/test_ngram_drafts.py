"""N-gram drafts against vLLM's definition, searched for in the whole text."""

from hypothesis import given
from hypothesis import strategies as st

from spmd_worker.replica.drafts.ngram import NgramProposer
from tests.support.draft_rows import row

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=40)
VOCAB_SIZE = 8


def definition(tokens: list[int], shortest: int, longest: int, most: int) -> tuple[int, ...]:
    for length in range(longest, shortest - 1, -1):
        for start in range(len(tokens) - length):
            if tokens[start : start + length] == tokens[-length:]:
                return tuple(tokens[start + length : start + length + most])
    return ()


def test_vllm_example_is_drafted():
    proposer = NgramProposer(2, 3, VOCAB_SIZE)
    assert proposer.propose(row([1, 2, 3, 4, 2, 3]), 4) == (4, 2, 3)
    assert proposer.propose(row([1, 2, 3, 4, 5, 6], request_id=1), 4) == ()


@given(TOKENS, st.data())
def test_drafts_equal_definition_after_any_appends(tokens: list[int], data: st.DataObject):
    shortest = data.draw(st.integers(1, 3))
    longest = data.draw(st.integers(shortest, 5))
    most = data.draw(st.integers(1, 6))
    proposer, sequence = NgramProposer(shortest, longest, VOCAB_SIZE), row(tokens[: data.draw(st.integers(1, 5))])
    position = sequence.num_tokens
    while True:
        assert proposer.propose(sequence, most) == definition(tokens[:position], shortest, longest, most)
        if position >= len(tokens):
            break
        position += data.draw(st.integers(1, 4))
        sequence.output_token_ids[:] = tokens[sequence.num_prompt_tokens : position]
        position = sequence.num_tokens


def test_earliest_occurrence_wins_over_the_latest():
    """Negative control: the latest would draft 6."""
    proposer = NgramProposer(2, 2, VOCAB_SIZE)
    assert proposer.propose(row([1, 2, 5, 1, 2, 6, 1, 2]), 1) == (5,)
