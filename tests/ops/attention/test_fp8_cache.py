"""Attention over a cache in FP8: bits of attention over a cache that has the rounded numbers in the model's dtype."""

from dataclasses import replace

import pytest
import torch
from native_builds import library_for
from native_libraries import each_library
from paged_steps import Sequence, Sizes, run, sequence, together
from torch import Tensor

from spmd_worker.ops.attention.cache_dtype import FP8, from_cache, to_cache
from spmd_worker.ops.attention.cpu import CpuBackend
from spmd_worker.ops.attention.sdpa import SdpaBackend

WHOLE = 10_000
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
SHAPES = [
    Sizes(head_size=16, block_size=2, group_size=1),
    Sizes(head_size=48, block_size=4, group_size=3, window=50),
    Sizes(head_size=80, block_size=8, group_size=2, has_sinks=True),
    Sizes(head_size=64, block_size=16, group_size=7, num_kv_heads=1),
    Sizes(head_size=128, block_size=128, group_size=2, score_cap=3.0),
]
EDGES = [448.0, 449.0, -464.0, 1e30, 2**-6, 2**-7 + 2**-11, 1.5 * 2**-9, 2.5 * 2**-9, 2**-10, -(2**-10) * 1.01, -0.0]
"""The largest number and beyond, the least normal one, ties of subnormal ones, and what is half of the least."""

each_dtype = pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])


def wide(length: int, sizes: Sizes) -> Sequence:
    """Keys and values of all magnitudes, edges included."""
    one = sequence(length, sizes)
    generator = torch.Generator().manual_seed(1)
    _, key, value = one.parts
    for part in (key, value):
        part *= torch.exp2(torch.randint(-9, 3, part.shape, generator=generator).to(part.dtype))
        part[0, 0, : len(EDGES)] = torch.tensor(EDGES, dtype=part.dtype)
    return one


def rounded(one: Sequence) -> Sequence:
    """The same with keys and values as torch rounds them."""
    copy = replace(one, merged=one.merged.clone())
    for part in copy.parts[1:]:
        part.copy_(from_cache(to_cache(part, FP8), part.dtype))
    return copy


def expected_bytes(numbers: Tensor) -> Tensor:
    """Bytes of the nearest of all numbers, of two equally near ones that with an even last bit."""
    all_bytes = torch.arange(127, dtype=torch.uint8)
    values = all_bytes.view(torch.float8_e4m3fn).double()
    distances = (numbers.double().abs().clamp(max=448).unsqueeze(-1) - values).abs() + 1e-12 * (all_bytes % 2)
    return distances.argmin(-1).to(torch.uint8) | (numbers.signbit().to(torch.uint8) << 7)


def test_numbers_are_rounded_to_the_nearest():
    numbers = torch.cat((torch.tensor(EDGES), torch.randn(4000) * torch.exp2(torch.randint(-12, 9, (4000,)))))
    assert torch.equal(to_cache(numbers, FP8), expected_bytes(numbers))
    strange = to_cache(torch.tensor([torch.inf, -torch.inf, torch.nan]), FP8)
    assert from_cache(strange, FLOAT32).isnan().all()


@pytest.mark.gate("*-native", "16-2-*", "*0*")
@each_library
@each_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.head_size}-{shape.block_size}")
def test_bits_are_those_of_rounded_numbers(instruction_set: str, dtype: torch.dtype, shape: Sizes):
    sizes = replace(shape, dtype=dtype)
    one, library = wide(203, sizes), library_for(instruction_set)
    plain, reduced = (
        CpuBackend(library, dtype, (sizes.head_size,), sizes.block_size, cache_dtype) for cache_dtype in (dtype, FP8)
    )
    whole = run(plain, rounded(one), WHOLE)
    assert whole.isfinite().all()
    for chunk in (WHOLE, 66, 1):
        assert torch.equal(run(reduced, one, chunk), whole), chunk
    for result in together(reduced, [one, one, one], [1, 66, 7]):
        assert torch.equal(result, whole[-len(result) :])
    # Without rounding there are other bits.
    assert not torch.equal(run(plain, one, WHOLE), whole)


@each_library
@each_dtype
def test_what_is_not_finite_reaches_rows_that_see_it(instruction_set: str, dtype: torch.dtype):
    sizes = Sizes(dtype=dtype, head_size=32, group_size=2)
    one = sequence(100, sizes)
    one.parts[2][70, 0, 5] = torch.inf
    found = run(CpuBackend(library_for(instruction_set), dtype, (32,), 16, FP8), one, 33)
    is_nan = found.isnan().any(-1)
    assert not is_nan[:70].any()
    assert is_nan[70:, :2].all()
    assert not is_nan[70:, 2:].any()


@each_dtype
def test_plain_torch_has_bits_of_rounded_numbers(dtype: torch.dtype):
    one = wide(70, Sizes(dtype=dtype, head_size=32, group_size=2))
    for chunk in (1, 13, WHOLE):
        found = run(SdpaBackend(FP8), one, chunk)
        assert torch.equal(found, run(SdpaBackend(), rounded(one), chunk)), chunk


def test_policies_of_the_two_differ():
    library = library_for("native")
    for plain, reduced in (
        (SdpaBackend(), SdpaBackend(FP8)),
        (CpuBackend(library, FLOAT32, (16,), 16), CpuBackend(library, FLOAT32, (16,), 16, FP8)),
    ):
        assert plain.numerics() != reduced.numerics()
        assert plain.numerics() == reduced.of_sequences(16, 16).numerics(), "towers have no cache"
