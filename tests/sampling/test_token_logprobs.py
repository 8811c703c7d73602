"""Log-probabilities of chosen and likeliest tokens: values of log-softmax, ranks, order of equal ones."""

import pytest
import torch

from spmd_worker.sampling.logprobs import log_softmax, token_logprobs
from spmd_worker.sequence.outputs import Logprob

LOGPROBS = torch.tensor([-3.0, -1.0, -2.0, -1.0, -4.0])


@pytest.mark.parametrize(
    ("token_id", "count", "expected"),
    [
        (2, 0, {2: Logprob(-2.0, 3)}),
        (2, 1, {2: Logprob(-2.0, 3), 1: Logprob(-1.0, 1)}),
        (2, 2, {2: Logprob(-2.0, 3), 1: Logprob(-1.0, 1), 3: Logprob(-1.0, 2)}),
        (1, 2, {1: Logprob(-1.0, 1), 3: Logprob(-1.0, 2)}),
        (4, 3, {4: Logprob(-4.0, 5), 1: Logprob(-1.0, 1), 3: Logprob(-1.0, 2), 2: Logprob(-2.0, 3)}),
        (0, 99, {0: Logprob(-3.0, 4), 1: Logprob(-1.0, 1), 3: Logprob(-1.0, 2), 2: Logprob(-2.0, 3)}),
    ],
)
def test_the_chosen_token_comes_first_then_the_likeliest(token_id: int, count: int, expected: dict[int, Logprob]):
    entries = token_logprobs(LOGPROBS, token_id, count)
    if count == 99:
        expected = {**expected, 4: Logprob(-4.0, 5)}
    assert list(entries.items()) == list(expected.items())


def test_log_softmax_is_row_by_row():
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(0))
    expected = logits.double() - logits.double().exp().sum(dim=1, keepdim=True).log()
    torch.testing.assert_close(log_softmax(logits).double(), expected, rtol=1e-6, atol=1e-6)
    for index in range(4):
        assert torch.equal(log_softmax(logits[index : index + 1])[0], log_softmax(logits)[index])
