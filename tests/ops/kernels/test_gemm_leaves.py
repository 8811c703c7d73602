"""GEMMs in leaves: the bits of a plain model, for every instruction set, number of rows and split over ranks.

The model is the compiled GEMM, by one leaf at a time, and the tree of `ranks/leaves.py` over the results.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest
import torch
from native_builds import EMULATED, HAS_AMX, NATIVE, WITHOUT_AMX, library_for
from native_libraries import each_library
from torch import Tensor

from spmd_worker.ops.kernels.cpu.linear import PackedKernels
from spmd_worker.ops.kernels.cpu.native import CpuKernels
from spmd_worker.ops.kernels.cpu.panels import are_panels
from spmd_worker.ranks.leaves import leaf_bounds, tree_sum

# Around the ends of blocks; emulated, and the last of them, where leaves are several parts.
FEW_ROWS = (1, 2, 6, 7, 14, 15, 31, 33, 70, 140)
MANY_ROWS = (*range(1, 71), 140, 300)
NUM_OUTPUTS = 80  # a last panel is alone
# Inputs whose rows share sets of a cache, and outputs for which rows are copied therefore.
SHARING_INPUTS, MANY_OUTPUTS = 4096, 272
# Inputs and leaves. 44 granules: 6, 6, 6, 6, 5, 5, 5, 5. In tiles, leaves of 704 inputs are two parts; in vectors, a
# part of the last has four leaves or, of float32, two.
SHAPES = [(64, 1), (128, 2), (352, 4), (44 * 32, 8), (44 * 32, 2), (512, 16), (2048, 64), (SHARING_INPUTS, 8)]
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def numbers(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Product:
    """Operands of one row-parallel product."""

    def __init__(self, kernels: CpuKernels, num_inputs: int, count: int, dtype: torch.dtype) -> None:
        self.kernels, self.bounds = kernels, leaf_bounds(num_inputs, count)
        num_outputs = MANY_OUTPUTS if num_inputs == SHARING_INPUTS else NUM_OUTPUTS
        self.weight = numbers(num_outputs, num_inputs, dtype=dtype, seed=1)
        self.bias = numbers(num_outputs, dtype=dtype, seed=2)
        self.x = numbers(MANY_ROWS[-1], num_inputs, dtype=dtype, seed=3)
        self.packed = kernels.pack_leaves(self.weight)
        assert are_panels(self.packed)

    def whole(self, num_rows: int, bias: Tensor | None, dtype: torch.dtype, ends: Sequence[int] = ()) -> Tensor:
        ends = ends or self.bounds[1:]
        return self.kernels.linear_of_leaves(self.x[:num_rows], self.packed, bias, ends, dtype)

    def part(self, num_rows: int, bias: Tensor | None, first: int, last: int) -> Tensor:
        """Float32 sum of the leaves from `first` up to `last`, by a weight that has no others."""
        start, *ends = self.bounds[first : last + 1]
        packed = self.kernels.pack_leaves(self.weight[:, start : ends[-1]].contiguous())
        own_bias = bias if first == 0 else None
        x, own_ends = self.x[:num_rows, start : ends[-1]], [end - start for end in ends]
        return self.kernels.linear_of_leaves(x, packed, own_bias, own_ends, torch.float32)

    def parts(self, num_rows: int, bias: Tensor | None, num_ranks: int) -> list[Tensor]:
        each = (len(self.bounds) - 1) // num_ranks
        return [self.part(num_rows, bias, rank * each, (rank + 1) * each) for rank in range(num_ranks)]


@pytest.fixture
def operands(instruction_set: str, num_inputs: int, count: int, dtype: torch.dtype) -> Product:
    kernels = CpuKernels(library_for(instruction_set))
    if not kernels.has_gemm(dtype):
        pytest.skip("oneDNN multiplies")
    return Product(kernels, num_inputs, count, dtype)


@pytest.fixture
def threads_restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def check_bits(operands: Product, rows: Sequence[int], dtype: torch.dtype) -> None:
    """Against leaves one by one, with and without bias, by one thread and two, as a part and rounded."""
    count = len(operands.bounds) - 1
    for bias in (None, operands.bias):
        expected = tree_sum(operands.parts(rows[-1], bias, count))
        for num_rows in rows:
            torch.set_num_threads(1 + num_rows % 2)
            assert torch.equal(operands.whole(num_rows, bias, torch.float32), expected[:num_rows]), num_rows
        torch.set_num_threads(2)
        for num_rows in rows[-3:]:
            assert torch.equal(operands.whole(num_rows, bias, torch.float32), expected[:num_rows]), num_rows
            assert torch.equal(operands.whole(num_rows, bias, dtype), expected[:num_rows].to(dtype)), num_rows


@pytest.mark.gate("4096-8-*-native", "64-*", "128-*", "352-*", "512-*", "2048-*", "1408-*-native", "1408-8-*AMX")
@each_library
@each_dtype
@pytest.mark.parametrize(("num_inputs", "count"), SHAPES)
def test_result_is_tree_over_chains_of_leaves(
    operands: Product, instruction_set: str, dtype: torch.dtype, threads_restored: None
):
    check_bits(operands, FEW_ROWS, dtype)


@each_library
@each_dtype
@pytest.mark.stress
@pytest.mark.parametrize(("num_inputs", "count"), SHAPES)
def test_every_number_of_rows_has_these_bits(operands: Product, dtype: torch.dtype, threads_restored: None):
    check_bits(operands, MANY_ROWS, dtype)


@each_library
@each_dtype
@pytest.mark.parametrize(("num_inputs", "count"), [(64, 1), (352, 4)])
def test_leaf_has_the_chain_of_linear(operands: Product, instruction_set: str, dtype: torch.dtype):
    for first, (start, stop) in enumerate(pairwise(operands.bounds)):
        bias = operands.bias if first == 0 else None
        plain = operands.kernels.pack(operands.weight[:, start:stop].contiguous())
        expected = operands.kernels.linear(operands.x[:33, start:stop], plain, bias)
        assert torch.equal(operands.part(33, bias, first, first + 1).to(dtype), expected)


@each_library
@each_dtype
@pytest.mark.parametrize(("num_inputs", "count"), [(44 * 32, 8)])
@pytest.mark.parametrize("num_rows", [1, 33, 140])
def test_parts_of_ranks_sum_to_one_rank(operands: Product, num_rows: int):
    expected = operands.whole(num_rows, operands.bias, torch.float32)
    for num_ranks in (2, 4, 8):
        assert torch.equal(tree_sum(operands.parts(num_rows, operands.bias, num_ranks)), expected)
    # Controls: a boundary moved by a granule, parts added in order, and the bias added to each.
    moved = (operands.bounds[1] + 32, *operands.bounds[2:])
    assert not torch.equal(operands.whole(num_rows, operands.bias, torch.float32, moved), expected)
    in_order = sum(operands.parts(num_rows, operands.bias, 8)[1:], operands.part(num_rows, operands.bias, 0, 1))
    assert not torch.equal(in_order, expected)
    biased = tree_sum([part + operands.bias.float() for part in operands.parts(num_rows, None, 2)])
    assert not torch.equal(biased, expected)


@each_dtype
@pytest.mark.parametrize(("num_inputs", "count"), [(128, 2)])
@pytest.mark.parametrize("instruction_set", ["native"])
def test_no_rows_strided_rows_and_given_memory(operands: Product, dtype: torch.dtype):
    assert operands.whole(0, None, torch.float32).shape == (0, NUM_OUTPUTS)
    expected, out = operands.whole(5, None, dtype), torch.empty(5, NUM_OUTPUTS, dtype=dtype)
    strided = torch.cat([operands.x[:5], operands.x[:5]], dim=1)[:, :128]
    ends = operands.bounds[1:]
    assert operands.kernels.linear_of_leaves(strided, operands.packed, None, ends, dtype, out) is out
    assert torch.equal(out, expected)


@pytest.mark.parametrize(("num_inputs", "count"), [(128, 1)])
@pytest.mark.parametrize(("instruction_set", "dtype"), [("native", torch.float32)])
@pytest.mark.parametrize("ends", [(32, 64, 128), (48, 128), (64, 64), (64, 96)])
def test_impossible_leaves_are_refused(operands: Product, ends: tuple[int, ...]):
    """Three of them, not at granules, an empty one, and inputs left over."""
    with pytest.raises(AssertionError):
        operands.whole(1, None, torch.float32, ends)


@each_dtype
def test_plain_leaves_have_same_bits_on_ranks(dtype: torch.dtype):
    """Without compiled GEMMs: whole rows by themselves, parts by the tree."""
    kernels, bounds = PackedKernels(), leaf_bounds(352, 4)
    weight, x = numbers(NUM_OUTPUTS, 352, dtype=dtype, seed=1), numbers(33, 352, dtype=dtype, seed=3)
    packed, bias = kernels.pack_leaves(weight), numbers(NUM_OUTPUTS, dtype=dtype, seed=2)
    expected = kernels.linear_of_leaves(x, packed, bias, bounds[1:], torch.float32)
    for num_rows in (1, 2, 17):
        found = kernels.linear_of_leaves(x[:num_rows], packed, bias, bounds[1:], torch.float32)
        assert torch.equal(found, expected[:num_rows])
    parts = [
        kernels.linear_of_leaves(
            x[:, bounds[first] : bounds[first + 2]],
            kernels.pack_leaves(weight[:, bounds[first] : bounds[first + 2]]),
            bias if first == 0 else None,
            [bound - bounds[first] for bound in bounds[first + 1 : first + 3]],
            torch.float32,
        )
        for first in (0, 2)
    ]
    assert torch.equal(tree_sum(parts), expected)


def test_tiles_and_vectors_have_other_chains():
    """Control: the emulation is not the native library over again."""
    if not library_for(EMULATED).has_amx:
        pytest.skip("the emulation is made of AVX-512 and its bfloat16 instructions")
    results = [
        Product(CpuKernels(library_for(each)), 352, 4, torch.float32).whole(33, None, torch.float32)
        for each in (EMULATED, WITHOUT_AMX if HAS_AMX else NATIVE)
    ]
    assert not torch.equal(*results)
