"""Sums of float parts in shared memory are the tree over ranks of `leaves.py`, for any number of ranks.

Ranks are threads of one process that map the same memory: a compiled sum holds no lock of the interpreter.
"""

import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from thread_groups import in_rank_order
from torch import Tensor
from waiting import LIMIT_S

from spmd_worker.native.library import NativeLibrary, native_library
from spmd_worker.ops.kernels.cpu.native import cpu_kernels
from spmd_worker.ranks import shared_memory
from spmd_worker.ranks.communicator import GroupHandle
from spmd_worker.ranks.leaves import tree_sum
from spmd_worker.ranks.shared_memory import SharedMemoryGroup

SIZES = (2, 3, 4, 5, 7, 8, 13)
EPS = 1e-5
SMALL_SLOT_BYTES = 1 << 12

each_size = pytest.mark.parametrize("size", SIZES)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def parts_of(size: int, *shape: int) -> list[Tensor]:
    """Parts of so many ranks, far apart in magnitude: another order of additions has other bits."""
    generator = torch.Generator().manual_seed(size)
    return [torch.randn(shape, generator=generator) * 8.0 ** (rank % 3) for rank in range(size)]


def on_ranks(size: int, run: Callable[[SharedMemoryGroup, int], Tensor]) -> list[Tensor]:
    """Results of `run` with each rank's group and number, all at once."""
    library = native_library()
    assert isinstance(library, NativeLibrary), library
    header_bytes = library.functions["shared_header_bytes"](size)
    memory = mmap.mmap(-1, header_bytes + shared_memory._num_slots(size) * shared_memory.SLOT_BYTES)
    groups = [
        SharedMemoryGroup(
            library,
            GroupHandle(tuple(range(size)), rank, None, adds_by_tree=True),
            memory,
            [os.getpid()] * size,
            LIMIT_S,
            has_own_core=False,
        )
        for rank in range(size)
    ]
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, group, rank) for rank, group in enumerate(groups)]
        results = [future.result(timeout=LIMIT_S) for future in futures]
    for group in groups:
        group.close()
    return results


def in_buffer(group: SharedMemoryGroup, part: Tensor) -> Tensor:
    """The part as a product leaves it: in the rank's slot if it fits."""
    buffer = group.part_buffer((part.shape[0], part.shape[1]), torch.float32)
    return part.clone() if buffer is None else buffer.copy_(part)


@each_dtype
@each_size
def test_sum_of_parts_is_the_tree(size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    """Parts of no whole vector, in a slot, and in several rounds; the part is not changed."""
    monkeypatch.setattr(shared_memory, "SLOT_BYTES", SMALL_SLOT_BYTES)
    for count in (1, 17, 1000, 3000):
        parts = parts_of(size, 1, count)

        def run(group: SharedMemoryGroup, rank: int, parts: list[Tensor] = parts) -> Tensor:
            own = in_buffer(group, parts[rank])
            found = group.sum_parts(own, dtype)
            assert torch.equal(own, parts[rank])
            return found

        expected = tree_sum(parts).to(dtype)
        assert all(torch.equal(found, expected) for found in on_ranks(size, run)), count


@each_dtype
@each_size
@pytest.mark.parametrize(
    ("rows", "few_elements"), [(3, 1 << 30), (9, 1), (40, 1)], ids=["few rows", "rows shared out", "several rounds"]
)
def test_sum_with_norm_is_the_tree(
    size: int, dtype: torch.dtype, rows: int, few_elements: int, monkeypatch: pytest.MonkeyPatch
):
    """Also where half a slot would hold the elements of the last dtype, and no slot the parts."""
    monkeypatch.setattr(shared_memory, "SLOT_BYTES", SMALL_SLOT_BYTES)
    monkeypatch.setattr(shared_memory, "_FEW_ELEMENTS", few_elements)
    parts, weight = parts_of(size, rows, 50), torch.linspace(0.5, 1.5, 50).to(dtype)
    start = parts_of(size + 1, rows, 50)[-1].to(dtype)
    kernels, _ = cpu_kernels(dtype)
    residual = start.clone()
    expected = kernels.add_rms_norm(tree_sum(parts).to(dtype), residual, weight, EPS)

    def run(group: SharedMemoryGroup, rank: int) -> Tensor:
        own = start.clone()
        normed = group.all_reduce_add_rms_norm(in_buffer(group, parts[rank]), own, weight, EPS).clone()
        return torch.stack((normed, group.gather_rows(own)))

    assert all(torch.equal(found, torch.stack((expected, residual))) for found in on_ranks(size, run))


@pytest.mark.parametrize("size", [4, 5, 8])
def test_rank_order_has_other_bits(size: int):
    """Negative control. Two and three ranks have one order; rounding to bfloat16 hides most of the difference."""
    parts = parts_of(size, 1, 1000)
    found = on_ranks(size, lambda group, rank: group.sum_parts(parts[rank], torch.float32))[0]
    assert torch.equal(found, tree_sum(parts))
    assert not torch.equal(found, in_rank_order(parts))


def test_exact_sum_stays_in_rank_order():
    parts = parts_of(5, 300)
    found = on_ranks(5, lambda group, rank: group.all_reduce(parts[rank].clone()))
    assert all(torch.equal(each, in_rank_order(parts)) for each in found)


def test_part_of_another_dtype_is_rejected():
    """Bfloat16 parts would be rounded before they are added."""
    parts = [part.bfloat16() for part in parts_of(2, 2, 32)]
    weight = torch.ones(32, dtype=torch.bfloat16)

    def add(group: SharedMemoryGroup, rank: int) -> Tensor:
        return group.all_reduce_add_rms_norm(parts[rank], parts[rank].clone(), weight, EPS)

    for run in (lambda group, rank: group.sum_parts(parts[rank], torch.bfloat16), add):
        with pytest.raises(AssertionError, match="bfloat16"):
            on_ranks(2, run)


def test_sum_of_an_unknown_dtype_is_rounded_once():
    parts = parts_of(3, 2, 40)
    found = on_ranks(3, lambda group, rank: group.sum_parts(parts[rank], torch.float16))
    assert all(torch.equal(each, tree_sum(parts).half()) for each in found)
