"""Compiled kernels of recurrent states: the reference's bits or near them, in whatever steps a sequence is computed."""

import pytest
import torch
from native_builds import library_for
from native_libraries import each_vector_library
from state_segments import CHUNKS, segments_of, steps_of

from spmd_worker.ops.kernels.cpu.recurrent import NativeRecurrentKernels
from spmd_worker.ops.kernels.reference_recurrent import ReferenceRecurrentKernels

NAN = float("nan")
reference = ReferenceRecurrentKernels()
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def kernels_for(instruction_set: str) -> NativeRecurrentKernels:
    return NativeRecurrentKernels(library_for(instruction_set))


def numbers(*shape, dtype, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def cut_convolution(kernels, inputs, weight, bias, chunk, *, silu=True):
    """Outputs of each sequence, and all tails, if its tokens come in steps; slots are full of NaN before."""
    tails = torch.full((len(inputs) + 1, weight.shape[1] - 1, len(weight)), NAN, dtype=weight.dtype)
    found = [[] for _ in inputs]
    for step in steps_of([len(each) for each in inputs], chunk):
        x = torch.cat([inputs[row][first : first + count] for row, first, count in step])
        segments = segments_of(*((row + 1, count, first) for row, first, count in step))
        y = kernels.short_conv(x, weight, bias, tails, segments, has_silu=silu)
        for (row, _, count), outputs in zip(step, y.split([count for _, _, count in step])):
            assert len(outputs) == count
            found[row].append(outputs)
    return [torch.cat(each) for each in found], tails[1:]


@each_vector_library
@each_dtype
@pytest.mark.parametrize(("num_taps", "num_channels"), [(3, 5), (7, 200)])
def test_convolutions_agree_with_plain_torch(instruction_set, dtype, num_taps, num_channels):
    kernels, segments = kernels_for(instruction_set), segments_of((4, 1, 9), (3, 70, 0), (-1, 2, 5), (0, 2, 3))
    x = numbers(75, num_channels + 3, dtype=dtype)[:, 1 : num_channels + 1]
    weight, bias = numbers(num_channels, num_taps, dtype=dtype, seed=1), numbers(num_channels, dtype=dtype, seed=2)
    for added in (None, bias):
        for silu in (False, True):
            tails = numbers(6, num_taps - 1, num_channels, dtype=dtype, seed=3)
            tails[3], expected_tails = NAN, tails.clone()
            expected_tails[3] = NAN
            found = kernels.short_conv(x, weight, added, tails, segments, has_silu=silu)
            expected = reference.short_conv(x, weight, added, expected_tails, segments, has_silu=silu)
            assert torch.equal(tails, expected_tails)
            if silu:
                torch.testing.assert_close(found, expected)
            else:
                assert torch.equal(found, expected)


@each_dtype
def test_convolution_steps_do_not_change_bits(dtype):
    kernels = kernels_for("native")
    weight, bias = numbers(70, 4, dtype=dtype, seed=1), numbers(70, dtype=dtype, seed=2)
    inputs = [numbers(count, 70, dtype=dtype, seed=count) for count in (130, 1, 66)]
    expected, tails = cut_convolution(kernels, inputs, weight, bias, 130)
    assert not tails.isnan().any()
    for chunk in CHUNKS:
        found, found_tails = cut_convolution(kernels, inputs, weight, bias, chunk)
        assert all(map(torch.equal, found, expected)), chunk
        assert torch.equal(found_tails, tails), chunk
    for row, each in enumerate(inputs):
        alone, tail = cut_convolution(kernels, [each], weight, bias, 130)
        assert torch.equal(alone[0], expected[row])
        assert torch.equal(tail[0], tails[row])
    # Control: a convolution that forgets what came before.
    first, second = inputs[0].split(65)
    parts = [cut_convolution(kernels, [part], weight, bias, 130)[0][0] for part in (first, second)]
    assert not torch.equal(torch.cat(parts), expected[0])


def test_convolution_keeps_subnormal_inputs_and_signed_zeros():
    """A processor's own rounding to bfloat16 flushes the smallest numbers: tails are copied."""
    x = torch.tensor([[1e-39], [-0.0], [1.0]]).to(torch.bfloat16)
    tails = torch.zeros(1, 3, 1, dtype=torch.bfloat16)
    weight = torch.ones(1, 4, dtype=torch.bfloat16)
    kernels_for("native").short_conv(x, weight, None, tails, segments_of((0, 3, 0)), has_silu=False)
    assert torch.equal(tails[0].view(torch.int16), x.view(torch.int16))


def test_convolution_rejects_slots_that_do_not_exist():
    x, weight, tails = torch.zeros(2, 4), torch.zeros(4, 3), torch.zeros(2, 2, 4)
    for segments in (segments_of((2, 2, 0)), segments_of((0, 3, 0))):
        with pytest.raises(AssertionError):
            kernels_for("native").short_conv(x, weight, None, tails, segments, has_silu=False)


def test_threads_do_not_change_convolutions():
    weight, x = numbers(300, 3, dtype=torch.float32), numbers(90, 300, dtype=torch.float32)
    found = []
    before = torch.get_num_threads()
    for count in (1, 3):
        torch.set_num_threads(count)
        found.append(cut_convolution(kernels_for("native"), [x, x[:7]], weight, None, 90))
    torch.set_num_threads(before)
    assert all(map(torch.equal, found[0][0], found[1][0]))
