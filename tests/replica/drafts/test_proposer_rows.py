"""Rows of both proposers: samples of one prompt, preemption, the end, and ids beyond the vocabulary."""

import pytest

from spmd_worker.base.config.speculation import SpeculativeConfig
from spmd_worker.replica.drafts.making import make_proposer
from spmd_worker.replica.sequence.sequence import SequenceStatus
from tests.support.draft_rows import row

PROMPT = [1, 2, 3, 4, 5, 6, 1, 2]
METHODS = pytest.mark.parametrize("method", ["ngram", "suffix"])


def make(method: str, vocab_size: int = 100):
    config = SpeculativeConfig(method=method, num_speculative_tokens=4, prompt_lookup_min=2)
    proposer = make_proposer(config, vocab_size)
    assert proposer is not None
    return proposer


@METHODS
def test_samples_share_a_prompt_and_nothing_else(method: str):
    proposer = make(method)
    samples = [row(PROMPT, request_id=3, sample=sample, n=3) for sample in range(3)]
    for sample, sequence in enumerate(samples):
        sequence.output_token_ids += [3, 10 + sample, 20 + sample, 10 + sample, 20 + sample]
    drafts = [proposer.propose(sequence, 4) for sequence in samples]
    assert drafts == [
        make(method).propose(row(PROMPT, sequence.output_token_ids, request_id=9), 4) for sequence in samples
    ]
    assert all(draft[0] == 10 + sample for sample, draft in enumerate(drafts))


@METHODS
def test_ended_rows_are_forgotten(method: str):
    proposer = make(method)
    samples = [row(PROMPT, [3], request_id=3, sample=sample, n=3) for sample in range(3)]
    single = row(PROMPT, [3], request_id=4)
    for sequence in (*samples[:2], single):
        proposer.propose(sequence, 4)
    rows = proposer._proposer.rows
    assert (len(rows), rows.num_prompts) == (3, 1)
    for sequence in (*samples, single):
        proposer.forget(sequence)
        proposer.forget(sequence)
    assert (len(rows), rows.num_prompts) == (0, 0)


@METHODS
def test_preempted_row_goes_on_where_it_was(method: str):
    proposer, sequence = make(method), row(PROMPT, [3, 4])
    before = proposer.propose(sequence, 4)
    sequence.status, sequence.num_computed_tokens = SequenceStatus.PREEMPTED, 0
    assert proposer.propose(sequence, 4) == before
    sequence.output_token_ids += [5, 6]
    assert proposer.propose(sequence, 4) == make(method).propose(row(PROMPT, [3, 4, 5, 6]), 4)


@METHODS
def test_drafts_stop_before_ids_beyond_vocabulary(method: str):
    sequence = row([1, 2, 3, 4, 50, 6, 1, 2, 3])
    assert make(method).propose(sequence, 4)[:2] == (4, 50)
    assert make(method, vocab_size=50).propose(sequence, 4) == (4,)


@pytest.mark.parametrize("method", ["draft_model", "mtp", "eagle3"])
def test_workers_methods_have_no_proposer_here(method: str):
    assert make_proposer(SpeculativeConfig(method=method, num_speculative_tokens=4, model="/m"), 100) is None
