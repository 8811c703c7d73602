"""Running sums that do not depend on the order of adding, for devices whose own order follows the rows."""

import pytest
import torch
from torch import Tensor

import spmd_worker.sampling.filters as filters
import spmd_worker.sampling.sampler as sampler_module
from spmd_worker.distributed.communicator import single_group
from spmd_worker.sampling.row import SampleRow
from spmd_worker.sampling.running_sums import exact_running_sums, running_sums
from spmd_worker.sampling.sampler import Sampler
from spmd_worker.sequence.sampling_params import SamplingParams


def shares_of(num_rows: int, num_columns: int) -> Tensor:
    logits = 4 * torch.randn(num_rows, num_columns, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    shares = (logits - logits.amax(dim=1, keepdim=True)).exp()
    shares[:, ::7] = 0.0
    return shares


def in_another_order(shares: Tensor) -> Tensor:
    """The sum of all, from the halves' on."""
    while shares.shape[-1] > 1:
        shares = shares[..., ::2] + shares[..., 1::2]
    return shares.squeeze(-1)


@pytest.mark.parametrize("num_columns", [1, 512, 1 << 16])
def test_sums_are_the_same_in_any_order_and_never_fall(num_columns: int):
    shares = shares_of(3, num_columns)
    sums = exact_running_sums(shares)
    assert torch.allclose(sums, shares.cumsum(dim=-1), rtol=1e-12, atol=num_columns * 2.0**-46)
    assert (sums.diff() >= 0).all()
    assert not sums.diff()[:, 6::7].any(), "what has no share adds nothing"
    shuffled = shares[:, torch.randperm(num_columns, generator=torch.Generator().manual_seed(1))]
    assert torch.equal(exact_running_sums(shuffled)[:, -1], sums[:, -1])
    for row, alone in zip(shares, sums, strict=True):
        assert torch.equal(exact_running_sums(row), alone)
    if num_columns > 512:
        # Negative control: the same sums in float64.
        assert not torch.equal(in_another_order(shares), shares.cumsum(dim=-1)[:, -1])


def test_a_sum_of_all_ones_does_not_overflow():
    ones = torch.ones(1 << 18, dtype=torch.float64)
    assert exact_running_sums(ones)[-1] == 1 << 18
    assert exact_running_sums(ones[:-1])[-1] == (1 << 18) - 1


def test_on_the_cpu_sums_are_torchs_and_elsewhere_what_is_drawn_is_the_same_ids(monkeypatch: pytest.MonkeyPatch):
    shares, out = shares_of(2, 99), torch.empty(2, 99, dtype=torch.float64)
    assert torch.equal(running_sums(shares, out), torch.cumsum(shares, dim=-1))
    assert torch.equal(out, torch.cumsum(shares, dim=-1))
    logits = 3 * torch.randn(300, 211, generator=torch.Generator().manual_seed(5))
    rows = [
        SampleRow(SamplingParams(temperature=0.8, top_p=0.9 if number % 2 else 1.0), number, 0, 4, (1, 2, 3), [7])
        for number in range(300)
    ]

    def drawn() -> tuple[int, ...]:
        return Sampler(single_group(), 0, 211, (5,), "raw_logprobs").sample(logits.clone(), rows).token_ids

    expected = drawn()
    for module in (sampler_module, filters):
        monkeypatch.setattr(module, "running_sums", lambda given, into=None: _copied(exact_running_sums(given), into))
    assert drawn() == expected
    for module in (sampler_module, filters):
        monkeypatch.setattr(module, "running_sums", lambda given, into=None: _copied(given.flip(-1).cumsum(-1), into))
    assert drawn() != expected, "the test draws by these sums"


def _copied(sums: Tensor, into: Tensor | None) -> Tensor:
    return sums if into is None else into.copy_(sums)
