"""Adapters of layers whose inputs ranks share: A x is summed in leaves, so that any number of ranks has one's bits."""

import pytest
import torch
from native_builds import library_for
from native_libraries import each_vector_library
from thread_groups import in_rank_order
from torch import Tensor

from spmd_worker.ops.kernels.adapters import AdapterKernels, AdapterSizes, AdapterStack, ReferenceAdapterKernels
from spmd_worker.ops.kernels.cpu.adapters import NativeAdapterKernels
from spmd_worker.ranks.leaves import leaf_bounds, leaf_ends, tree_sum

NUM_TOKENS, NUM_OUTPUTS, NUM_LEAVES, MAX_RANK = 23, 40, 8, 36
RANKS = (20, 3, 36)
"""Of the adapters, by slot."""
INPUTS = {"granules": 352, "odd": 120}
"""Leaves of 64 and 32 inputs, and of 15, which end inside pairs of bfloat16."""
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
each_number = pytest.mark.parametrize("num_inputs", INPUTS.values(), ids=INPUTS)


def stack_of(
    kernels: AdapterKernels, num_inputs: int, bounds: tuple[int, int], dtype: torch.dtype, ends: tuple[int, ...]
) -> AdapterStack:
    """A rank's, which has inputs in `bounds`; the last slot is empty."""
    sizes = (len(RANKS) + 1, MAX_RANK, bounds[1] - bounds[0], ((0, NUM_OUTPUTS),), dtype, torch.device("cpu"), ends)
    stack, generator = kernels.new_stack(AdapterSizes(*sizes)), torch.Generator().manual_seed(3)
    for slot, rank in enumerate(RANKS):
        a = torch.randn(rank, num_inputs, generator=generator).to(dtype)
        b = (torch.randn(NUM_OUTPUTS, rank, generator=generator) / rank).to(dtype)
        stack.write(slot, stack.pack([(a[:, slice(*bounds)].contiguous(), b)]))
    return stack


def step_of(num_inputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Slots of tokens, some -1 and some of the empty slot, inputs and outputs."""
    generator = torch.Generator().manual_seed(4)
    slots = torch.arange(NUM_TOKENS, dtype=torch.int32) * 3 % 5 - 1
    x, y = (torch.randn(NUM_TOKENS, size, generator=generator).to(dtype) for size in (num_inputs, NUM_OUTPUTS))
    y[:, ::5] = -0.0
    return slots, x, y


def on_one(kernels: AdapterKernels, num_inputs: int, dtype: torch.dtype, ends: tuple[int, ...]) -> Tensor:
    slots, x, y = step_of(num_inputs, dtype)
    stack_of(kernels, num_inputs, (0, num_inputs), dtype, ends).add_(y, x, kernels.step(slots, len(RANKS) + 1))
    return y


def on_ranks(kernels: AdapterKernels, num_inputs: int, dtype: torch.dtype, size: int, add=tree_sum) -> Tensor:
    """The outputs of ranks that share inputs; the same on each."""
    slots, x, y = step_of(num_inputs, dtype)
    bounds, each = leaf_bounds(num_inputs, NUM_LEAVES), NUM_LEAVES // size
    shares = [(bounds[rank * each], bounds[(rank + 1) * each]) for rank in range(size)]
    stacks = [stack_of(kernels, num_inputs, share, dtype, leaf_ends(share, num_inputs, NUM_LEAVES)) for share in shares]
    step = kernels.step(slots, len(RANKS) + 1)
    sums = [stack.input_sums(x[:, slice(*share)], step) for stack, share in zip(stacks, shares, strict=True)]
    for each_sums in sums:
        assert each_sums.shape == (NUM_TOKENS, MAX_RANK)
        assert not each_sums[slots == 1, RANKS[1] :].any()
        assert not each_sums[(slots < 0) | (slots == len(RANKS))].any()
    found = [y.clone() for _ in stacks]
    for outputs, stack in zip(found, stacks, strict=True):
        stack.add_sums_(outputs, add(sums), step)
    assert all(torch.equal(outputs, found[0]) for outputs in found)
    return found[0]


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


@each_vector_library
@each_dtype
@each_number
def test_any_number_of_ranks_has_equal_bits(instruction_set: str, dtype: torch.dtype, num_inputs: int):
    ends, reference = leaf_bounds(num_inputs, NUM_LEAVES)[1:], ReferenceAdapterKernels()
    slots, x, y = step_of(num_inputs, dtype)
    for kernels in (NativeAdapterKernels(library_for(instruction_set)), reference):
        one = on_one(kernels, num_inputs, dtype, ends)
        for size in (1, 2, 4, 8):
            assert torch.equal(bits(on_ranks(kernels, num_inputs, dtype, size)), bits(one)), size
        assert torch.equal(bits(one[(slots < 0) | (slots == len(RANKS))]), bits(y[(slots < 0) | (slots == len(RANKS))]))
        stack = stack_of(kernels, num_inputs, (0, num_inputs), dtype, ends)
        for row in (1, 2, 5):
            alone = y[row : row + 1].clone()
            stack.add_(alone, x[row : row + 1], kernels.step(slots[row : row + 1], len(RANKS) + 1))
            assert torch.equal(alone[0], one[row])
        relative = 1e-5 if dtype == torch.float32 else 2**-7
        torch.testing.assert_close(one, on_one(reference, num_inputs, dtype, ()), rtol=relative, atol=relative)


@each_number
def test_comparison_detects_other_orders_and_boundaries(num_inputs: int):
    kernels, dtype = NativeAdapterKernels(library_for("native")), torch.float32
    ends = leaf_bounds(num_inputs, NUM_LEAVES)[1:]
    one = on_one(kernels, num_inputs, dtype, ends)
    assert not torch.equal(on_ranks(kernels, num_inputs, dtype, 4, in_rank_order), one)
    assert not torch.equal(on_one(kernels, num_inputs, dtype, (ends[0] + 1, *ends[1:])), one)
    assert not torch.equal(on_one(kernels, num_inputs, dtype, ()), one)
