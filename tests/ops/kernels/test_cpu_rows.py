"""Compiled row operations: close to the plain-torch ones, bit for bit where those round, and one row at a time."""

import math

import pytest
import torch
from looped import looped
from native_builds import NATIVE, library_for
from native_libraries import each_vector_library

from spmd_worker.ops.kernels.cpu.native import CpuKernels
from spmd_worker.ops.kernels.reference import ReferenceKernels

EPS = 1e-6
SIZES = [7, 16, 64, 100, 576, 896]

reference = ReferenceKernels()
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def kernels_for(instruction_set: str) -> CpuKernels:
    return CpuKernels(library_for(instruction_set))


def numbers(*shape, dtype, seed=0):
    return (3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def assert_close(result, expected):
    """Float32 to a few roundings; bfloat16 to one step of its own."""
    assert result.shape == expected.shape
    assert result.dtype == expected.dtype
    relative = 1e-6 if expected.dtype == torch.float32 else 2**-7
    torch.testing.assert_close(result, expected, rtol=relative, atol=1e-7)


@each_vector_library
@each_dtype
@looped("size", SIZES)
def test_norms_agree_with_plain_torch(instruction_set, dtype, size):
    kernels = kernels_for(instruction_set)
    x, residual, weight = (numbers(*shape, dtype=dtype, seed=size) for shape in ((37, size), (37, size), (size,)))
    assert_close(kernels.rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS))
    total, expected_total = residual.clone(), residual.clone()
    expected = reference.add_rms_norm(x.clone(), expected_total, weight, EPS)
    assert_close(kernels.add_rms_norm(x.clone(), total, weight, EPS), expected)
    assert torch.equal(total, expected_total)


@each_vector_library
@each_dtype
@looped("size", SIZES)
@looped("is_centred", [False, True])
@looped("offset", [0.0, 1.0])
def test_full_norms_agree_with_plain_torch(instruction_set, dtype, size, is_centred, offset):
    kernels = kernels_for(instruction_set)
    x, weight, bias = (numbers(*shape, dtype=dtype, seed=size) for shape in ((37, size), (size,), (size,)))
    for each in (None, bias):
        ways = [
            one.full_norm(x, weight, each, 0.1, offset=offset, is_centred=is_centred) for one in (kernels, reference)
        ]
        assert ways[0].dtype == dtype
        torch.testing.assert_close(*ways, rtol=1e-5 if dtype == torch.float32 else 2**-7, atol=1e-5)
    if is_centred and not offset:
        theirs = torch.nn.functional.layer_norm(x.float(), (size,), weight.float(), bias.float(), 0.1).to(dtype)
        torch.testing.assert_close(ways[0], theirs, rtol=1e-5 if dtype == torch.float32 else 2**-7, atol=1e-5)


@each_vector_library
@each_dtype
@looped("head_size", [16, 64, 80, 128])
def test_strided_heads_are_normed_and_rotated(instruction_set, dtype, head_size):
    kernels = kernels_for(instruction_set)
    merged = numbers(37, 9 * head_size, dtype=dtype)
    heads = merged[:, 2 * head_size : 7 * head_size].unflatten(1, (5, head_size))
    weight = numbers(head_size, dtype=dtype)
    angles = torch.linspace(0, 40, 37 * head_size // 2).view(37, -1)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    assert_close(kernels.rms_norm(heads, weight, EPS), reference.rms_norm(heads, weight, EPS))
    whole = kernels.full_norm(heads.contiguous(), weight, None, EPS, offset=1.0, is_centred=False)
    assert torch.equal(kernels.full_norm(heads, weight, None, EPS, offset=1.0, is_centred=False), whole)
    assert torch.equal(kernels.rotate(heads, cos, sin), reference.rotate(heads, cos, sin))
    exact = (cos.float() + 2**-12, sin.float() - 2**-12)
    assert torch.equal(kernels.rotate_once(heads, *exact), reference.rotate_once(heads, *exact))


@each_vector_library
@each_dtype
@looped("size", SIZES)
def test_silu_and_mul_agrees_with_plain_torch(instruction_set, dtype, size):
    gate_up = numbers(37, 2 * size, dtype=dtype)
    assert_close(kernels_for(instruction_set).silu_and_mul(gate_up), reference.silu_and_mul(gate_up))


@each_vector_library
@each_dtype
@looped("size", SIZES)
def test_sums_in_place_are_those_of_torch(instruction_set, dtype, size):
    x, y = numbers(37, 2 * size, dtype=dtype), numbers(41, size, dtype=dtype)[2:39]
    expected = x[:, :size] + y
    rest = x[:, size:].clone()
    result = kernels_for(instruction_set).add_(x[:, :size], y)
    assert result.data_ptr() == x.data_ptr()
    assert torch.equal(result, expected)
    assert torch.equal(x[:, size:], rest)


@each_vector_library
@each_dtype
@looped("size", SIZES)
@looped("activation", ["silu", "gelu_tanh", "gelu", "relu", "relu2", "quick_gelu"])
def test_activations_agree_with_plain_torch(instruction_set, dtype, size, activation):
    kernels, gate_up = kernels_for(instruction_set), numbers(37, 2 * size, dtype=dtype)
    rounding = 2e-6 if dtype == torch.float32 else 2**-7
    ways = [
        (one.activate(gate_up, activation), one.activate_and_mul(gate_up, activation)) for one in (kernels, reference)
    ]
    for mine, expected in zip(*ways, strict=True):
        # Far below 0 the reference has lost what is left of it.
        torch.testing.assert_close(mine, expected, rtol=rounding, atol=2e-5)


@each_vector_library
@each_dtype
def test_activations_of_extreme_numbers_and_nan_equal_torch(instruction_set, dtype):
    x = torch.tensor([[-3e38, -90.0, -1e-30, -0.0, 0.0, 1e-30, 6.0, 90.0, 1e19, math.nan]]).to(dtype)
    for activation in ("gelu", "relu", "relu2"):
        ways = [one.activate(x, activation) for one in (kernels_for(instruction_set), reference)]
        torch.testing.assert_close(*ways, rtol=1e-2, atol=1e-30, equal_nan=True)


@each_vector_library
@each_dtype
@looped("size", SIZES)
def test_bounds_agree_with_plain_torch(instruction_set, dtype, size):
    kernels, x = kernels_for(instruction_set), 20 * numbers(37, size, dtype=dtype)
    x[0, :5] = torch.tensor([0.0, -0.0, 1e-6, math.inf, -math.inf])
    for cap in (0.5, 30.0):
        rounding = 2e-6 if dtype == torch.float32 else 2**-7
        torch.testing.assert_close(kernels.bound(x, cap), reference.bound(x, cap), rtol=rounding, atol=0)
        assert float(kernels.bound(x, cap).abs().max()) == cap


@each_vector_library
@each_dtype
def test_silu_of_extreme_numbers_equals_torch(instruction_set, dtype):
    gate = [-math.inf, -3e38, -1e30, -200.0, -90.0, -0.0, 0.0, 1e-30, 90.0, 3e38, math.inf, math.nan]
    gate_up = torch.tensor([gate + [1.0] * len(gate)]).to(dtype)
    result, expected = kernels_for(instruction_set).silu_and_mul(gate_up), reference.silu_and_mul(gate_up)
    torch.testing.assert_close(result, expected, rtol=1e-2, atol=1e-30, equal_nan=True)


@each_vector_library
@each_dtype
def test_row_bits_independent_of_the_batch(instruction_set, dtype):
    """With one thread and with two, which share out the rows of the larger batches."""
    kernels = kernels_for(instruction_set)
    x, residual, weight = (numbers(*shape, dtype=dtype) for shape in ((200, 576), (200, 576), (576,)))
    angles = numbers(200, 32, dtype=dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        whole = _all_operations(kernels, x, residual, weight, angles)
        torch.set_num_threads(1)
        for rows in (slice(0, 1), slice(7, 8), slice(3, 70), slice(199, 200)):
            parts = _all_operations(kernels, x[rows], residual[rows], weight, angles[rows])
            for part, result in zip(parts, whole, strict=True):
                assert torch.equal(part, result[rows]), rows
    finally:
        torch.set_num_threads(before)


def _all_operations(kernels, x, residual, weight, angles):
    heads, total = x.unflatten(1, (9, 64)), residual.clone()
    return (
        kernels.rms_norm(x, weight, EPS),
        kernels.add_rms_norm(x.clone(), total, weight, EPS),
        total,
        kernels.add_(x.clone(), residual),
        kernels.rotate(heads, angles, angles),
        kernels.silu_and_mul(x),
        kernels.full_norm(x, weight, weight, EPS, offset=1.0, is_centred=True),
        kernels.full_norm(x[:, :570], weight[:570], None, EPS, offset=0.0, is_centred=False),
        kernels.full_norm(heads, weight[:64], None, EPS, offset=1.0, is_centred=False),
        kernels.activate(x[:, :570], "gelu_tanh"),
        kernels.activate_and_mul(x, "gelu_tanh"),
        *(kernels.activate(x[:, :570], each) for each in ("gelu", "relu", "relu2")),
        kernels.bound(x[:, :570], 3.0),
    )


@each_dtype
def test_no_rows_are_no_trouble(dtype):
    kernels, empty, weight = kernels_for(NATIVE), torch.empty(0, 64, dtype=dtype), torch.ones(64, dtype=dtype)
    assert kernels.rms_norm(empty, weight, EPS).shape == (0, 64)
    assert kernels.add_rms_norm(empty, empty.clone(), weight, EPS).shape == (0, 64)
    assert kernels.add_(empty, empty.clone()).shape == (0, 64)
    assert kernels.silu_and_mul(empty).shape == (0, 32)
    assert kernels.full_norm(empty, weight, None, EPS, offset=0.0, is_centred=True).shape == (0, 64)
    assert kernels.activate(empty, "gelu_tanh").shape == kernels.bound(empty, 1.0).shape == (0, 64)
    assert kernels.rotate(empty.view(0, 2, 32), empty[:, :16], empty[:, :16]).shape == (0, 2, 32)


def test_what_the_compiled_code_cannot_read_is_refused():
    kernels, x, weight = kernels_for(NATIVE), torch.ones(4, 64), torch.ones(64)
    with pytest.raises(AssertionError, match="float16"):
        kernels.rms_norm(x.half(), weight.half(), EPS)
    with pytest.raises(AssertionError, match="bfloat16"):
        kernels.rms_norm(x, weight.bfloat16(), EPS)
    with pytest.raises(AssertionError, match="63"):
        kernels.rms_norm(x, weight[:63], EPS)
    with pytest.raises(AssertionError, match="3, 64"):
        kernels.add_rms_norm(x, x[:3], weight, EPS)
    with pytest.raises(AssertionError, match="3, 64"):
        kernels.add_(x, x[:3])
    with pytest.raises(AssertionError, match="63"):
        kernels.silu_and_mul(x[:, :63])
    with pytest.raises(AssertionError, match="4, 2"):
        kernels.rotate(x.view(4, 2, 32), x[:, :2], x[:, :2])


@each_vector_library
@each_dtype
@looped("count", [1, 5, 16, 17, 255, 4096, 49153])
def test_argmax_of_rows_and_its_first_index(instruction_set, dtype, count):
    kernels = kernels_for(instruction_set)
    rows = numbers(9, count + 3, dtype=dtype, seed=count)[:, :count]
    # Rounded to few values, so that many are equal.
    rows = (rows * 2).round()
    rows[1] = -math.inf
    rows[2, count // 2] = math.inf
    rows[3] = 0.0
    rows[4, count - 1] = 100.0
    rows[5, count // 3 :] = math.nan
    rows[6, count - 1] = math.nan
    rows[7] = -0.0
    values, indices = kernels.argmax(rows)
    expected_values, expected_indices = reference.argmax(rows)
    torch.testing.assert_close(values, expected_values, rtol=0, atol=0, equal_nan=True)
    assert values.dtype == torch.float32
    assert indices.tolist() == expected_indices.tolist()


@each_vector_library
def test_no_rows_have_no_largest(instruction_set):
    values, indices = kernels_for(instruction_set).argmax(torch.empty(0, 8))
    assert (values.shape, indices.shape) == ((0,), (0,))


@each_vector_library
@each_dtype
@looped("count", [1, 15, 64, 2500])
def test_logits_above_a_value_are_counted(instruction_set, dtype, count):
    kernels = kernels_for(instruction_set)
    logits = numbers(9, count + 5, dtype=dtype, seed=count)[:, :count]
    logits[1] = 1.0
    logits[2, 1::5] = -torch.inf
    logits[3, ::2] = torch.nan
    values = logits.float()[:, count // 2].contiguous()
    values[4], values[5] = -torch.inf, torch.inf
    expected = [
        sum(number > value for number in row) for row, value in zip(logits.tolist(), values.tolist(), strict=True)
    ]
    assert kernels.count_above(logits, values).tolist() == reference.count_above(logits, values).tolist() == expected
    assert expected[4:6] == [count, 0]
    assert expected[1] == 0


@each_vector_library
@each_dtype
@looped("count", [1, 15, 64, 1024, 2500])
def test_prob_sums_equal_reference_in_any_pieces(instruction_set, dtype, count):
    kernels = kernels_for(instruction_set)
    logits = numbers(9, count + 5, dtype=dtype, seed=count)[:, :count]
    logits[2] = 1.0
    logits[1, 1::5] = -torch.inf
    # Whole vectors of what a form forbids, which are passed over, and the rest of one.
    logits[5, count // 3 + 1 :] = -torch.inf
    logits[6, : -(-count // 2) - 1] = -torch.inf
    largest, factors = logits.float().amax(dim=1), torch.tensor([1.44, 0.3, 9.0] * 3)
    factors[3], factors[4] = 1e38, 1e-30
    each = kernels.prob_sums(logits.reshape(-1, 1), *(x.repeat_interleave(count) for x in (largest, factors)))
    each = each.view(9, count)
    expected = (((logits.float() - largest[:, None]) * factors[:, None]).double().exp2() * 2.0**40).floor().long()
    assert torch.allclose(each.double(), expected.double(), rtol=4e-7, atol=1)
    sums = kernels.prob_sums(logits, largest, factors)
    assert torch.equal(sums.sum(dim=1), each.sum(dim=1))
    assert each.max(dim=1).values.tolist() == [2**40] * 9
    assert each[4].tolist() == [2**40] * count
    for share in (0.0, 0.1, 0.5, 0.999, 1.0):
        targets = (each.sum(dim=1).double() * share).long().clamp(max=each.sum(dim=1) - 1)
        found = kernels.invert_cdf(logits, largest, factors, sums, targets)
        running = each.cumsum(dim=1)
        assert torch.equal(found, torch.searchsorted(running, targets.unsqueeze(1), right=True).squeeze(1))
    beyond = kernels.invert_cdf(logits, largest, factors, sums, each.sum(dim=1))
    assert beyond.tolist() == kernels.invert_cdf(logits, largest, factors, sums, -targets - 1).tolist() == [-1] * 9
    ours, plain = (
        one.invert_cdf(logits, largest, factors, one.prob_sums(logits, largest, factors), targets // 3)
        for one in (kernels, reference)
    )
    assert torch.equal(ours, plain)
