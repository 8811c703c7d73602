"""The compiled recurrence of Mamba2: near the reference, with the same bits in whatever steps a row is computed."""

from functools import partial

import pytest
import torch
from native_builds import library_for
from native_libraries import each_vector_library
from state_segments import check_nan_of_others, check_scan_steps, segments_of, steps_of
from torch import Tensor

from spmd_worker.model_config.layer_config import MambaConfig
from spmd_worker.ops.kernels.cpu.recurrent import NativeRecurrentKernels
from spmd_worker.ops.kernels.recurrent import MambaRates
from spmd_worker.ops.kernels.reference_recurrent import ReferenceRecurrentKernels

NAN = float("nan")
SMALL = MambaConfig(8, 8, 2, 12, 1e-5)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def kernels_for(instruction_set: str = "native") -> NativeRecurrentKernels:
    return NativeRecurrentKernels(library_for(instruction_set))


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def heads(config: MambaConfig) -> tuple[Tensor, ...]:
    return tuple(numbers(config.num_heads, seed=seed) for seed in (1, 2, 3))


def tokens(config: MambaConfig, count: int, dtype: torch.dtype, seed: int = 4) -> tuple[Tensor, Tensor]:
    """Columns of wider tensors, as projections give them."""
    given = numbers(count, config.num_channels + config.num_heads + 3, seed=seed).to(dtype)
    return given[:, : config.num_channels], given[:, config.num_channels : -3]


def scanned(kernels: NativeRecurrentKernels, inputs: list[tuple[Tensor, Tensor]], chunk: int) -> list[Tensor]:
    """Outputs of each sequence, then all states, if its tokens come in steps; slots are full of NaN before."""
    states = torch.full((len(inputs) + 1, SMALL.num_heads, SMALL.head_size, SMALL.state_size), NAN)
    found: list[list[Tensor]] = [[] for _ in inputs]
    for step in steps_of([len(mixed) for mixed, _ in inputs], chunk):
        parts = [[each[first : first + count] for each in inputs[row]] for row, first, count in step]
        segments = segments_of(*((row + 1, count, first) for row, first, count in step))
        mixed, dt = map(torch.cat, zip(*parts))
        y = kernels.scan_mamba(mixed, MambaRates(dt, *heads(SMALL)), states, segments, SMALL)
        for (row, _, _), outputs in zip(step, y.split([count for _, _, count in step])):
            found[row].append(outputs)
    return [*map(torch.cat, found), states[1:]]


@each_vector_library
@each_dtype
@pytest.mark.parametrize(
    "config",
    [
        MambaConfig(8, 8, 2, 12, 1e-5, dt_limits=(0.3, 1.2)),
        MambaConfig(2, 64, 1, 128, 1e-5),
        MambaConfig(3, 21, 3, 33, 1e-5),
    ],
    ids=["bounded", "large", "odd"],
)
def test_scans_agree_with_plain_torch(instruction_set: str, dtype: torch.dtype, config: MambaConfig):
    segments = segments_of((4, 1, 9), (3, 30, 0), (-1, 2, 5), (0, 2, 3))
    states = numbers(5, config.num_heads, config.head_size, config.state_size, seed=9)
    states[3] = NAN
    expected_states = states.clone()
    inputs = (*tokens(config, 35, dtype), *heads(config))
    found = kernels_for(instruction_set).scan_mamba(inputs[0], MambaRates(*inputs[1:]), states, segments, config)
    expected = ReferenceRecurrentKernels().scan_mamba(
        inputs[0], MambaRates(*inputs[1:]), expected_states, segments, config
    )
    torch.testing.assert_close(states, expected_states, atol=1e-5, rtol=1e-5)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@each_dtype
def test_scan_steps_do_not_change_bits(dtype: torch.dtype):
    inputs = [tokens(SMALL, count, dtype, count) for count in (130, 1, 66)]
    check_scan_steps(partial(scanned, kernels_for()), inputs)


def test_other_rows_of_nan_change_nothing():
    inputs = [tokens(SMALL, count, torch.float32, count) for count in (20, 9)]
    check_nan_of_others(partial(scanned, kernels_for()), inputs)


def test_threads_do_not_change_scans():
    inputs, found, before = [tokens(SMALL, 90, torch.float32)], [], torch.get_num_threads()
    for count in (1, 3):
        torch.set_num_threads(count)
        found.append(scanned(kernels_for(), inputs, 90))
    torch.set_num_threads(before)
    assert all(map(torch.equal, *found))


def test_scan_rejects_slots_that_do_not_exist():
    states = torch.zeros(2, SMALL.num_heads, SMALL.head_size, SMALL.state_size)
    inputs = (*tokens(SMALL, 2, torch.float32), *heads(SMALL))
    for segments in (segments_of((2, 2, 0)), segments_of((0, 3, 0))):
        with pytest.raises(AssertionError):
            kernels_for().scan_mamba(inputs[0], MambaRates(*inputs[1:]), states, segments, SMALL)


def test_scan_of_no_tokens_is_empty():
    states = torch.full((2, SMALL.num_heads, SMALL.head_size, SMALL.state_size), NAN)
    for kernels in (ReferenceRecurrentKernels(), kernels_for()):
        inputs = tokens(SMALL, 0, torch.float32)
        found = kernels.scan_mamba(
            inputs[0], MambaRates(inputs[1], *heads(SMALL)), states, segments_of((1, 0, 5)), SMALL
        )
        assert found.shape == (0, SMALL.num_heads * SMALL.head_size)
    assert states.isnan().all()
