"""Means over rows by halves: near torch's, and with the bits that a row has alone."""

import pytest
import torch
from torch import Tensor

from spmd_worker.model.layers.row_means import row_lengths, row_means

SIZES = (1, 2, 3, 40, 56, 257, 8192)


@pytest.mark.guarantee("A row's answer depends on the row alone")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_means_and_lengths_are_those_of_each_row(size: int, dtype: torch.dtype):
    rows = (torch.randn(9, size, generator=torch.Generator().manual_seed(3)) + 0.1).to(dtype)
    wide = rows.double()
    right = {row_means: wide.mean(-1, keepdim=True), row_lengths: wide.square().mean(-1, keepdim=True).sqrt()}
    for of, expected in right.items():
        found = of(rows)
        assert (found.dtype, found.shape) == (torch.float32, (9, 1))
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-7)
        # Also rows of a wider tensor, as a stream of several has.
        beside = torch.cat((rows, rows), dim=1)[:, size:]
        assert torch.equal(of(beside), found)
        assert all(torch.equal(of(row[None]), one[None]) for row, one in zip(rows, found, strict=True))


def test_no_rows_have_no_means():
    empty: Tensor = torch.empty(0, 40)
    assert row_means(empty).shape == row_lengths(empty).shape == (0, 1)
