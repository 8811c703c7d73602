"""The compiled recurrence of Mamba: near the reference, with the same bits in whatever steps a row is computed."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from native_builds import library_for
from native_libraries import each_vector_library
from state_segments import check_nan_of_others, check_scan_steps, segments_of, steps_of
from torch import Tensor

from spmd_worker.ops.kernels.cpu.recurrent import NativeRecurrentKernels
from spmd_worker.ops.kernels.recurrent import MambaRates, RecurrentKernels
from spmd_worker.ops.kernels.reference_recurrent import ReferenceRecurrentKernels

NAN = float("nan")
SIZES = (37, 12)
"""Channels, and numbers of a channel's state."""
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def kernels_for(instruction_set: str = "native") -> NativeRecurrentKernels:
    return NativeRecurrentKernels(library_for(instruction_set))


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def gates(channels: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    return numbers(channels, size, seed=1), numbers(channels, seed=2), numbers(channels, seed=3)


def scan(kernels: RecurrentKernels, x: Tensor, dt: Tensor, shared: Tensor, *gates: Tensor) -> Callable[..., Tensor]:
    return partial(kernels.scan_mamba1, x, shared, MambaRates(dt, *gates))


def tokens(channels: int, size: int, count: int, dtype: torch.dtype, seed: int = 4) -> tuple[Tensor, ...]:
    """Columns of wider tensors, as projections give them."""
    given = numbers(count, 2 * channels + 2 * size + 3, seed=seed).to(dtype)
    return given.split_with_sizes((channels, channels, 2 * size, 3), dim=1)[:3]


def scanned(kernels: NativeRecurrentKernels, inputs: list[tuple[Tensor, ...]], chunk: int) -> list[Tensor]:
    """Outputs of each sequence, then all states, if its tokens come in steps; slots are full of NaN before."""
    states = torch.full((len(inputs) + 1, *SIZES), NAN)
    found: list[list[Tensor]] = [[] for _ in inputs]
    for step in steps_of([len(each[0]) for each in inputs], chunk):
        parts = [[each[first : first + count] for each in inputs[row]] for row, first, count in step]
        segments = segments_of(*((row + 1, count, first) for row, first, count in step))
        y = scan(kernels, *map(torch.cat, zip(*parts)), *gates(*SIZES))(states, segments)
        for (row, _, _), outputs in zip(step, y.split([count for _, _, count in step])):
            found[row].append(outputs)
    return [*map(torch.cat, found), states[1:]]


@each_vector_library
@each_dtype
@pytest.mark.parametrize("sizes", [(64, 16), (8, 128), SIZES, (5, 33)], ids=["mamba", "large", "small", "odd"])
def test_scans_agree_with_plain_torch(instruction_set: str, dtype: torch.dtype, sizes: tuple[int, int]):
    segments = segments_of((4, 1, 9), (3, 30, 0), (-1, 2, 5), (0, 2, 3))
    states = numbers(5, *sizes, seed=9)
    states[3] = NAN
    expected_states = states.clone()
    inputs = (*tokens(*sizes, 35, dtype), *gates(*sizes))
    found = scan(kernels_for(instruction_set), *inputs)(states, segments)
    expected = scan(ReferenceRecurrentKernels(), *inputs)(expected_states, segments)
    expected[31:33] = 0.0
    torch.testing.assert_close(states, expected_states, atol=1e-5, rtol=1e-5)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@each_dtype
def test_scan_steps_do_not_change_bits(dtype: torch.dtype):
    inputs = [tokens(*SIZES, count, dtype, count) for count in (130, 1, 66)]
    check_scan_steps(partial(scanned, kernels_for()), inputs)


def test_other_rows_of_nan_change_nothing():
    inputs = [tokens(*SIZES, count, torch.float32, count) for count in (20, 9)]
    check_nan_of_others(partial(scanned, kernels_for()), inputs)


def test_threads_and_shares_do_not_change_scans():
    """Ranks have channels, which know nothing of each other."""
    (x, dt, shared), (a_log, bias, skip) = tokens(*SIZES, 90, torch.float32), gates(*SIZES)
    found, before, segments = [], torch.get_num_threads(), segments_of((0, 90, 0))
    for count in (1, 3):
        torch.set_num_threads(count)
        found.append(scanned(kernels_for(), [(x, dt, shared)], 90))
    torch.set_num_threads(before)
    assert all(map(torch.equal, *found))
    half = slice(20, None)
    own = (x[:, half], dt[:, half], shared, a_log[half].contiguous(), bias[half].contiguous(), skip[half].contiguous())
    states = torch.zeros(1, SIZES[0] - 20, SIZES[1])
    assert torch.equal(scan(kernels_for(), *own)(states, segments), found[0][0][:, half])


def test_kept_tokens_are_those_of_two_segments():
    """A slot gets the state after some tokens; those behind get their results all the same."""
    (inputs, given) = tokens(*SIZES, 9, torch.float32), gates(*SIZES)
    for kernels in (ReferenceRecurrentKernels(), kernels_for()):
        whole, kept, first = (torch.zeros(1, *SIZES) for _ in range(3))
        expected = scan(kernels, *inputs, *given)(whole, segments_of((0, 9, 0)))
        plain = segments_of((0, 9, 0))
        segments = type(plain)(plain.slots, plain.starts, plain.firsts, torch.tensor([4], dtype=torch.int32))
        assert torch.equal(scan(kernels, *inputs, *given)(kept, segments), expected)
        scan(kernels, *(each[:4] for each in inputs), *given)(first, segments_of((0, 4, 0)))
        assert torch.equal(kept, first)
        assert not torch.equal(kept, whole)


def test_scan_of_no_tokens_is_empty():
    states = torch.full((2, *SIZES), NAN)
    for kernels in (ReferenceRecurrentKernels(), kernels_for()):
        inputs = tokens(*SIZES, 0, torch.float32)
        found = scan(kernels, *inputs, *gates(*SIZES))(states, segments_of((1, 0, 5)))
        assert found.shape == (0, SIZES[0])
    assert states.isnan().all()
