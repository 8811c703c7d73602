"""Kernels of adapters: the compiled ones are close to plain torch's, and each row is computed by itself."""

import pytest
import torch
from native_builds import library_for
from native_libraries import each_vector_library
from torch import Tensor

from spmd_worker.ops.kernels import adapters
from spmd_worker.ops.kernels.adapters import AdapterKernels, AdapterSizes, AdapterStack, ReferenceAdapterKernels
from spmd_worker.ops.kernels.cpu.adapters import NativeAdapterKernels

NUM_TOKENS, NUM_SLOTS = 37, 3
CASES = {
    "merged": (96, ((0, 64), (64, 96), (96, 128)), (16, 8, 3)),
    "odd": (33, ((0, 10), (10, 31)), (20, 64)),
    "largest_rank": (64, ((0, 48),), (512,)),
}
"""Inputs, outputs of the parts, and ranks of their matrices."""
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
each_case = pytest.mark.parametrize("case", CASES)


def new_stack(kernels: AdapterKernels, case: str, dtype: torch.dtype) -> AdapterStack:
    """All slots filled; of each adapter some parts have no matrices."""
    num_inputs, parts, ranks = CASES[case]
    stack = kernels.new_stack(AdapterSizes(NUM_SLOTS, 512, num_inputs, parts, dtype, torch.device("cpu")))
    generator = torch.Generator().manual_seed(3)
    for slot in range(NUM_SLOTS):
        matrices = []
        for number, ((start, stop), rank) in enumerate(zip(parts, ranks, strict=True)):
            a, b = (torch.randn(shape, generator=generator) for shape in ((rank, num_inputs), (stop - start, rank)))
            is_there = number == 0 or (slot + number) % 3 != 0
            matrices.append((a.to(dtype), (b / rank).to(dtype)) if is_there else None)
        stack.write(slot, stack.pack(matrices))
    return stack


def step_of(case: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Slots of tokens, some -1, inputs and outputs."""
    num_inputs, parts, _ = CASES[case]
    generator = torch.Generator().manual_seed(4)
    slots = torch.randint(-1, NUM_SLOTS, (NUM_TOKENS,), generator=generator, dtype=torch.int32)
    x, y = (torch.randn(NUM_TOKENS, size, generator=generator).to(dtype) for size in (num_inputs, parts[-1][1]))
    return slots, x, y


def added(kernels: AdapterKernels, stack: AdapterStack, slots: Tensor, x: Tensor, y: Tensor) -> Tensor:
    outputs = y.clone()
    stack.add_(outputs, x, kernels.step(slots, NUM_SLOTS))
    return outputs


@each_vector_library
@each_dtype
@each_case
def test_compiled_adapters_agree_with_plain_torch(instruction_set: str, dtype: torch.dtype, case: str):
    slots, x, y = step_of(case, dtype)
    kernels, reference = NativeAdapterKernels(library_for(instruction_set)), ReferenceAdapterKernels()
    found, expected = (added(each, new_stack(each, case, dtype), slots, x, y) for each in (kernels, reference))
    relative = 1e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(found, expected, rtol=relative, atol=relative)
    assert torch.equal(found[slots < 0], y[slots < 0])
    assert (found[slots >= 0, 0] != y[slots >= 0, 0]).all()


@each_vector_library
@each_dtype
@each_case
def test_row_has_equal_bits_alone_and_batched(instruction_set: str, dtype: torch.dtype, case: str):
    for kernels in (NativeAdapterKernels(library_for(instruction_set)), ReferenceAdapterKernels()):
        stack, (slots, x, y) = new_stack(kernels, case, dtype), step_of(case, dtype)
        batched = added(kernels, stack, slots, x, y)
        rows = [added(kernels, stack, slots[row : row + 1], x[row : row + 1], y[row : row + 1]) for row in range(12)]
        assert torch.equal(torch.cat(rows), batched[:12])


def test_comparison_detects_sums_that_depend_on_others(monkeypatch: pytest.MonkeyPatch):
    right = adapters._row_by_row
    monkeypatch.setattr(adapters, "_row_by_row", lambda x, matrix: right(x, matrix) * (1 + len(x) / 2**14))
    kernels, (slots, x, y) = ReferenceAdapterKernels(), step_of("merged", torch.float32)
    stack = new_stack(kernels, "merged", torch.float32)
    batched = added(kernels, stack, slots, x, y)
    row = int((slots >= 0).nonzero()[0])
    alone = added(kernels, stack, *(each[row : row + 1] for each in (slots, x, y)))
    assert not torch.equal(alone[0], batched[row])


@each_dtype
def test_cleared_slot_adds_nothing(dtype: torch.dtype):
    slots, x, y = step_of("merged", dtype)
    for kernels in (NativeAdapterKernels(library_for("native")), ReferenceAdapterKernels()):
        stack = new_stack(kernels, "merged", dtype)
        stack.clear(1)
        found = added(kernels, stack, slots, x, y)
        assert torch.equal(found[slots == 1], y[slots == 1])
        assert (found[slots == 2] != y[slots == 2]).any(1).all()
        assert not stack.is_empty
        for slot in (0, 2):
            stack.clear(slot)
        assert stack.is_empty
        assert torch.equal(added(kernels, stack, slots, x, y), y)


def test_step_divides_rows_of_adapters_into_blocks():
    slots = torch.tensor([1, -1, 0, *[1] * 9, -1, 0], dtype=torch.int32)
    step = NativeAdapterKernels(library_for("native")).step(slots, NUM_SLOTS)
    assert step.layout.rows.tolist() == [2, 13, 0, *range(3, 12)]
    assert step.layout.blocks.tolist() == [[0, 0, 2], [1, 2, 8], [1, 10, 2]]
    none = NativeAdapterKernels(library_for("native")).step(torch.full((3,), -1, dtype=torch.int32), NUM_SLOTS)
    assert not none.layout.structure.num_blocks
