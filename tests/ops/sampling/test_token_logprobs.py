"""Log-probabilities of chosen and likeliest tokens: values of log-softmax, ranks, order of equal ones."""

import pytest
import torch

from spmd_worker.ops.kernels.top_k import top_k
from spmd_worker.ops.sampling.sampler import Sampler
from spmd_worker.ranks.communicator import single_group
from spmd_worker.replica.sequence.sampling_params import ALL_LOGPROBS

LOGITS = torch.tensor([[-3.0, -1.0, -2.0, -1.0, -4.0]])


def sampler(vocab_size: int) -> Sampler:
    return Sampler(single_group(), 0, vocab_size, (), "raw_logprobs")


@pytest.mark.parametrize(
    ("token_id", "count", "expected"),
    [
        (2, 0, {2: 3}),
        (2, 1, {2: 3, 1: 1}),
        (2, 2, {2: 3, 1: 1, 3: 2}),
        (1, 2, {1: 1, 3: 2}),
        (4, 3, {4: 5, 1: 1, 3: 2, 2: 3}),
        (0, 99, {0: 4, 1: 1, 3: 2, 2: 3, 4: 5}),
        (0, ALL_LOGPROBS, {0: 4, 1: 1, 3: 2, 2: 3, 4: 5}),
    ],
)
def test_the_chosen_token_comes_first_then_the_likeliest(token_id: int, count: int, expected: dict[int, int]):
    (entries,) = sampler(5).report(LOGITS, [token_id], count)
    assert [(token, each.rank) for token, each in entries.items()] == list(expected.items())


def plainly_likeliest(logprobs: torch.Tensor, count: int) -> list[tuple[int, float]]:
    pairs = sorted(enumerate(logprobs.tolist()), key=lambda pair: (-pair[1], pair[0]))
    return pairs[: len(pairs) if count < 0 else count]


@pytest.mark.parametrize("num_kept", [0, 1, 3, 5, 6, 40, 300])
@pytest.mark.parametrize("count", [1, 5, 299, 300, 301, ALL_LOGPROBS])
def test_the_likeliest_are_those_of_a_stable_sort(num_kept: int, count: int):
    generator = torch.Generator().manual_seed(num_kept)
    logprobs = torch.full((300,), -torch.inf)
    kept = torch.randperm(300, generator=generator)[:num_kept]
    # Of few values, so that many are equal.
    logprobs[kept] = torch.randint(0, 4, (num_kept,), generator=generator).float()
    assert top_k(logprobs, count) == plainly_likeliest(logprobs, count)
    assert top_k(torch.zeros(300), count) == plainly_likeliest(torch.zeros(300), count)


@pytest.mark.parametrize("rest", [-torch.inf, 0.0])
def test_no_more_tokens_than_requested_are_listed(monkeypatch: pytest.MonkeyPatch, rest: float):
    """Where filters leave fewer tokens than are asked for, the whole vocabulary was listed and sorted for each row."""
    logprobs = torch.full((50_000,), rest)
    logprobs[[7, 40_000]] = torch.tensor([1.0, 2.0])
    listed: list[int] = []
    tolist = torch.Tensor.tolist

    def counted(tensor: torch.Tensor) -> list[object]:
        listed.append(tensor.numel())
        return tolist(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", counted)
    assert top_k(logprobs, 4) == [(40_000, 2.0), (7, 1.0), (0, rest), (1, rest)]
    assert listed == [4, 4]


def test_they_are_log_softmax_row_by_row():
    logits = 3 * torch.randn(4, 3000, generator=torch.Generator().manual_seed(0))
    expected = torch.log_softmax(logits.double(), dim=1)
    found = sampler(3000).report(logits, [7, 8, 9, 10], ALL_LOGPROBS)
    for index, entries in enumerate(found):
        ours = torch.tensor([entries[token].logprob for token in range(3000)])
        torch.testing.assert_close(ours.double(), expected[index], rtol=2e-7, atol=3e-7)
        assert sampler(3000).report(logits[index : index + 1], [7 + index], ALL_LOGPROBS) == [entries]
        assert sampler(3000).report(logits[index : index + 1], [7 + index], 0)[0][7 + index] == entries[7 + index]
