"""Suffix drafts against the definition, written out as a tree of counts over all substrings."""

from collections import Counter, deque

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from spmd_worker.replica.drafts.indexed_text import MAX_OCCURRENCES, RUN_LENGTHS, IndexedText
from spmd_worker.replica.drafts.suffix import SuffixProposer
from tests.support.draft_rows import row

DEPTH = 12
MIN_PROB = 0.1


def proposer_of(max_cached_requests: int = 100, factor: float = 1.0) -> SuffixProposer:
    return SuffixProposer(
        max_tree_depth=DEPTH,
        max_cached_requests=max_cached_requests,
        max_spec_factor=factor,
        min_token_prob=MIN_PROB,
    )


class Tree:
    """Counts of all substrings, at most DEPTH long, of some texts, and where each last ended."""

    def __init__(self, texts: list[list[int]]) -> None:
        self.counts: Counter[tuple[int, ...]] = Counter()
        self.last_end: dict[tuple[int, ...], int] = {}
        place = 0
        for text in texts:
            for start in range(len(text)):
                for end in range(start + 1, min(len(text), start + DEPTH) + 1):
                    self.counts[tuple(text[start:end])] += 1
                    self.last_end[tuple(text[start:end])] = place + end
            place += len(text)

    def best(self, context: list[int], most: int, factor: float) -> tuple[float, tuple[int, ...]]:
        best: tuple[float, tuple[int, ...]] = (0.0, ())
        for length in range(1, min(len(context), DEPTH)):
            path = tuple(context[-length:])
            if not self.counts[path]:
                break
            draft, score, share = list[int](), 0.0, 1.0
            while len(draft) < min(most, int(length * factor + 1e-6)):
                children = {t: self.counts[(*path, t)] for t in range(10) if self.counts[(*path, t)]}
                if not children:
                    break
                token = max(children, key=lambda t: (children[t], self.last_end[(*path, t)]))
                share *= children[token] / self.counts[path]
                if share < MIN_PROB:
                    break
                path = (*path, token)
                draft.append(token)
                score += share
            if score >= best[0]:
                best = (score, tuple(draft))
        return best


def definition(tokens: list[int], answers: list[list[int]], most: int, factor: float) -> tuple[int, ...]:
    own = Tree([tokens]).best(tokens, most, factor)
    others = Tree(answers).best(tokens, most, factor)
    return others[1] if others[0] > own[0] else own[1]


TOKENS = st.lists(st.integers(0, 4), min_size=1, max_size=36)


@given(TOKENS, st.lists(TOKENS, max_size=3), st.data())
def test_drafts_equal_the_tree_after_any_appends(tokens: list[int], answers: list[list[int]], data: st.DataObject):
    kept = [answer for answer in answers if len(answer) > 1]
    frequent = Counter(tokens) + Counter(), Counter(token for answer in kept for token in answer)
    assume(all(count <= MAX_OCCURRENCES for each in frequent for count in each.values()))
    most, factor = data.draw(st.integers(1, 8)), data.draw(st.sampled_from([0.5, 1.0, 2.5]))
    proposer, sequence = proposer_of(factor=factor), row(tokens[: data.draw(st.integers(1, 5))])
    for number, answer in enumerate(answers, 1):
        proposer.forget(row([0], answer, request_id=number))
    while True:
        now = tokens[: sequence.num_tokens]
        assert proposer.propose(sequence, most) == definition(now, kept, most, factor)
        if len(now) == len(tokens):
            break
        stop = len(now) + data.draw(st.integers(1, 9))
        sequence.output_token_ids[:] = tokens[sequence.num_prompt_tokens : stop]


@given(st.lists(st.integers(0, 1), min_size=1, max_size=120), st.integers(0, 3))
def test_matches_are_the_latest_of_each_run(tokens: list[int], num_less: int):
    """Places and lengths that `matches` is defined by, searched for one by one."""
    text, last = IndexedText(), tokens[-DEPTH:][1:]
    for start in range(0, len(tokens), 7):
        text.extend(tokens[start : start + 7])
    stop, expected = len(tokens) - 1 - num_less, {}
    for run in (length for length in RUN_LENGTHS if length <= len(last)):
        ends = [end for end in range(run - 1, stop) if tokens[end + 1 - run : end + 1] == last[-run:]]
        for end in ends[-MAX_OCCURRENCES:]:
            lengths = range(min(len(last), end + 1), 0, -1)
            expected[end] = next(m for m in lengths if tokens[end + 1 - m : end + 1] == last[-m:])
    found = [lengths for _, lengths in text.matches(text.token_ids[-DEPTH:][1:], stop)]
    assert (found[-1] if found else {}) == expected


def test_growing_text_finds_what_a_new_one_does():
    tokens = [number * number % 23 for number in range(3000)]
    grown, new = IndexedText(), IndexedText(len(tokens))
    for token in tokens:
        grown.extend([token])
    new.extend(tokens)
    last = grown.token_ids[-DEPTH:]
    assert list(grown.matches(last, 2990)) == list(new.matches(last, 2990))


def test_answered_rows_help_the_next():
    proposer = proposer_of()
    answered = row([1], [5, 6, 7, 8, 9], request_id=1)
    later = row([2], [5, 6], request_id=2)
    assert proposer.propose(later, 4) == ()
    proposer.forget(answered)
    assert proposer.propose(later, 4) == (7, 8)


def test_separate_answers_are_not_joined():
    """Negative control of the separator: 6 never followed 5."""
    proposer = proposer_of()
    proposer.forget(row([1], [4, 5], request_id=1))
    proposer.forget(row([1], [6, 7], request_id=2))
    assert proposer.propose(row([2], [4, 5], request_id=3), 4) == ()


@pytest.mark.parametrize("most", [0, 1, 2, 3, 7])
def test_answers_are_bounded_by_requests(most: int):
    proposer = proposer_of(max_cached_requests=most)
    sequence, kept = row([0], request_id=99), deque[int](maxlen=max(1, most // 2))
    for number in range(30):
        proposer.forget(row([0], [10 + number, 50 + number], request_id=number))
        kept.append(number)
        if number % 3:
            proposer.propose(sequence, 4)
        assert proposer.answered.num_requests <= most
    for number in kept if most else ():
        assert proposer.propose(row([0], [10 + number], request_id=100 + number), 4) == (50 + number,)


def test_answers_are_bounded_by_tokens():
    proposer = proposer_of()
    proposer.answered = type(proposer.answered)(100, max_tokens=40)
    for number in range(20):
        proposer.forget(row([0], range(number, number + 9), request_id=number))
        if number % 2:
            proposer.propose(row([0], request_id=99), 4)
        assert proposer.answered.num_tokens <= 40
    proposer.forget(row([0], range(100), request_id=50))
    assert proposer.answered.num_tokens <= 40
