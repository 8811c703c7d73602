"""The kernels in plain torch: how many rows they compute at once makes no difference but to memory."""

import pytest
import torch

from spmd_worker.ops.kernels import reference
from spmd_worker.ops.kernels.reference import ReferenceKernels
from spmd_worker.ops.sampling.filters import filter_logits
from spmd_worker.replica.sequence.sampling_params import SamplingParams


@pytest.mark.parametrize(("device", "most"), [("cpu", 2**18), ("meta", 2**24)])
@pytest.mark.parametrize("num_rows", [0, 1, 300])
def test_row_blocks_have_bounded_size_on_every_device(device: str, most: int, num_rows: int):
    """Off the CPU all were one block: a step that sorted 256 rows of 150 thousand logits took gigabytes at once."""
    logits, beside = torch.empty(num_rows, 151936, device=device), torch.empty(num_rows, device=device)
    blocks = reference._row_blocks(logits, beside)
    assert all(rows.numel() <= most and len(rows) == len(other) for rows, other in blocks)
    assert sum(len(rows) for rows, _ in blocks) == num_rows


def cut(monkeypatch: pytest.MonkeyPatch, most: int) -> list[torch.Tensor]:
    monkeypatch.setattr(reference, "_MAX_BLOCK_ELEMENTS", most)
    kernels, logits = ReferenceKernels(), 3 * torch.randn(9, 500, generator=torch.Generator().manual_seed(3))
    samplings = [SamplingParams(top_p=0.9, top_k=40 * (row % 3), temperature=0.5 + row / 4) for row in range(9)]
    filter_logits(kernels, logits, samplings)
    largest, factors = logits.max(-1).values, torch.linspace(0.5, 2.0, 9)
    masses = kernels.prob_sums(logits, largest, factors)
    found = kernels.invert_cdf(logits, largest, factors, masses, masses.sum(-1) // 2)
    return [logits, masses, found, kernels.count_above(logits, largest - 1)]


def test_reference_row_independent_of_the_batch(monkeypatch: pytest.MonkeyPatch):
    whole = cut(monkeypatch, 2**18)
    for most in (1, 500, 1700):
        assert all(torch.equal(*each) for each in zip(cut(monkeypatch, most), whole, strict=True)), most
    assert whole[0].isinf().any(), "the filters dropped something"
