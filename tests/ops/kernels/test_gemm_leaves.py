"""GEMMs in leaves: the bits of a plain model of themselves, for every instruction set, number of rows and split over ranks.

The model is the compiled GEMM itself, by one leaf at a time, and the tree of `ranks/leaves.py` over the results.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from native_libraries import EMULATED, NATIVE, each_library, library_for
from torch import Tensor

from spmd_worker.ops.kernels.cpu.native import CpuKernels
from spmd_worker.ops.kernels.cpu.panels import are_panels
from spmd_worker.ranks.leaves import leaf_bounds, tree_sum

ROWS = (*range(1, 71), 300)
FEW_ROWS = (1, 2, 5, 6, 7, 13, 14, 15, 29, 31, 32, 33, 70, 140)
"""Around the ends of blocks; the last has parts of leaves by tiles."""
NUM_OUTPUTS = 80
"""A last panel is alone."""
# Inputs, leaves; of 44 granules, leaves have 6, 6, 6, 6, 5, 5, 5, 5. Long ones are several parts by tiles.
SHAPES = [(64, 1), (128, 2), (352, 4), (44 * 32, 8), (1408, 2), (32 * 16, 16)]
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def numbers(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Product:
    """Operands of one product, whose weight is packed whole and leaf by leaf."""

    def __init__(self, kernels: CpuKernels, num_inputs: int, ends: Sequence[int], dtype: torch.dtype) -> None:
        self.kernels, self.ends, self.dtype = kernels, tuple(ends), dtype
        self.weight = numbers(NUM_OUTPUTS, num_inputs, dtype=dtype, seed=1)
        self.bias = numbers(NUM_OUTPUTS, dtype=dtype, seed=2)
        self.x = numbers(max(ROWS), num_inputs, dtype=dtype, seed=3)

    def part(self, x: Tensor, start: int, ends: Sequence[int], bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Columns from `start` on, as a rank has them."""
        stop = start + ends[-1]
        packed = self.kernels.pack_leaves(self.weight[:, start:stop].contiguous())
        assert are_panels(packed)
        return self.kernels.linear_of_leaves(x[:, start:stop], packed, bias, ends, dtype)

    def leaves(self, x: Tensor, bias: Tensor | None) -> list[Tensor]:
        """Sums of each, by the GEMM that has one chain."""
        bounds = list(pairwise((0, *self.ends)))
        return [
            self.part(x, start, (stop - start,), bias if start == 0 else None, torch.float32) for start, stop in bounds
        ]


def product(instruction_set: str, num_inputs: int, count: int, dtype: torch.dtype) -> Product:
    kernels = CpuKernels(library_for(instruction_set))
    if not kernels.has_gemm(dtype):
        pytest.skip("oneDNN multiplies")
    return Product(kernels, num_inputs, leaf_bounds(num_inputs, count)[1:], dtype)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@each_library
@each_dtype
@pytest.mark.parametrize(("num_inputs", "count"), SHAPES)
def test_sums_are_tree_over_chains_of_leaves(
    instruction_set: str, dtype: torch.dtype, num_inputs: int, count: int, two_threads: None
):
    made = product(instruction_set, num_inputs, count, dtype)
    for bias in (None, made.bias):
        expected = tree_sum(made.leaves(made.x[:140], bias))
        for num_rows in FEW_ROWS:
            torch.set_num_threads(1 + num_rows % 2)
            x = made.x[:num_rows]
            assert torch.equal(made.part(x, 0, made.ends, bias, torch.float32), expected[:num_rows]), num_rows
        torch.set_num_threads(2)
        rounded = made.part(x, 0, made.ends, bias, dtype)
        assert torch.equal(rounded, expected.to(dtype))


def test_dummy():
    assert np is not None and EMULATED and NATIVE
