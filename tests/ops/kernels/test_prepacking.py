"""Weights in the order of the kernels: unpacked they are what was packed, repacked they are what packing anew gives."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from native_builds import ONEDNN, WITH_AMX, library_for
from native_libraries import needs_onednn_bfloat16
from property_examples import examples
from torch import Tensor

from spmd_worker.ops.kernels.api import Kernels
from spmd_worker.ops.kernels.cpu import linear, native
from spmd_worker.ops.kernels.cpu.linear import PackedKernels
from spmd_worker.ops.kernels.cpu.native import CpuKernels
from spmd_worker.ops.kernels.reference import ReferenceKernels

PANELS = CpuKernels(library_for(WITH_AMX))
KERNELS: dict[str, Kernels] = {
    "reference": ReferenceKernels(),
    "onednn": PackedKernels(),
    "native": CpuKernels(library_for(ONEDNN)),
    "panels": PANELS,
}
INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}

each_dtype = pytest.mark.parametrize("dtype", INTEGERS, ids=["float32", "bfloat16"])
each_kernels = pytest.mark.parametrize("kernels", KERNELS.values(), ids=KERNELS)
# Sizes that fit panels, and sizes that fit nothing: kernels leave or pad these.
num_outputs_of = st.one_of(st.integers(1, 8).map(lambda panels: 32 * panels), st.integers(1, 100))
num_inputs_of = st.one_of(st.integers(1, 4).map(lambda steps: 32 * steps), st.integers(1, 100))


def any_bits(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    """Every kind of number: subnormal, negative zero, infinite, NaN of any payload."""
    generator = torch.Generator().manual_seed(seed)
    limits = torch.iinfo(INTEGERS[dtype])
    return torch.randint(limits.min, limits.max, shape, generator=generator, dtype=INTEGERS[dtype]).view(dtype)


def are_same_bits(one: Tensor, other: Tensor) -> bool:
    integers = (each.contiguous().view(INTEGERS[each.dtype]) for each in (one, other))
    return one.shape == other.shape and torch.equal(*integers)


def address(packed: Tensor) -> int:
    return torch.ops.mkldnn.data_ptr(packed) if packed.is_mkldnn else packed.data_ptr()


def pack(kernels: Kernels, weight: Tensor, is_gated: bool) -> Tensor:
    return kernels.pack_gated(weight) if is_gated else kernels.pack(weight)


@each_kernels
@each_dtype
@examples()
@given(num_outputs=num_outputs_of, num_inputs=num_inputs_of, is_gated=st.booleans(), data=st.data())
def test_packed_weights_unpack_and_repack_in_place(
    kernels: Kernels, dtype: torch.dtype, num_outputs: int, num_inputs: int, is_gated: bool, data: st.DataObject
):
    num_outputs += is_gated * (num_outputs % 2)
    weight, other = any_bits(dtype, num_outputs, num_inputs), any_bits(dtype, num_outputs, num_inputs, seed=1)
    start = data.draw(st.integers(0, num_outputs))
    stop = data.draw(st.integers(start, num_outputs))
    packed = pack(kernels, weight.clone(), is_gated)
    assert are_same_bits(kernels.unpack(packed, 0, num_outputs), weight)
    assert are_same_bits(kernels.unpack(packed, start, stop), weight[start:stop])
    where = address(packed)
    kernels.repack_(packed, start, other[start:stop])
    expected = torch.cat([weight[:start], other[start:stop], weight[stop:]])
    assert address(packed) == where
    assert are_same_bits(kernels.unpack(packed, 0, num_outputs), expected)
    kernels.repack_(packed, 0, other)
    assert are_same_bits(kernels.unpack(packed, 0, num_outputs), other)


@each_kernels
@each_dtype
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(64, 96), (96, 72), (50, 64)])
def test_repacked_weight_multiplies_like_newly_packed_one(
    kernels: Kernels, dtype: torch.dtype, is_gated: bool, num_outputs: int, num_inputs: int
):
    generator = torch.Generator().manual_seed(0)
    weight, other = torch.randn(2, num_outputs, num_inputs, generator=generator).to(dtype)
    x = torch.randn(5, num_inputs, generator=generator).to(dtype)
    multiply = kernels.gated_linear if is_gated else kernels.linear
    packed = pack(kernels, weight, is_gated)
    kernels.repack_(packed, 0, other[:30])
    kernels.repack_(packed, 30, other[30:])
    assert torch.equal(multiply(x, packed, None), multiply(x, pack(kernels, other, is_gated), None))
    if not is_gated:
        anew = kernels.linear_argmax(x, kernels.pack(other), num_outputs - 3)
        assert all(map(torch.equal, kernels.linear_argmax(x, packed, num_outputs - 3), anew))


@each_kernels
@each_dtype
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("size", "num_inputs"), [(48, 64), (40, 64), (48, 40)])
def test_gated_weight_in_linear_equals_plain_weight(
    kernels: Kernels, dtype: torch.dtype, has_bias: bool, size: int, num_inputs: int
):
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(2 * size, num_inputs, generator=generator).to(dtype)
    bias = torch.randn(2 * size, generator=generator).to(dtype) if has_bias else None
    x = torch.randn(7, num_inputs, generator=generator).to(dtype)
    gated = kernels.pack_gated(weight)
    product = kernels.linear(x, gated, bias)
    assert torch.equal(product, kernels.linear(x, kernels.pack(weight), bias))
    assert torch.equal(kernels.silu_and_mul(product), kernels.gated_linear(x, gated, bias))


@pytest.mark.skipif(not PANELS.has_gemm(torch.float32), reason="the library has no products of its own here")
def test_swapped_gate_and_up_rows_are_detected(monkeypatch: pytest.MonkeyPatch):
    """Negative control: the halves of a gated weight as if they followed each other."""
    kernels, weight = PANELS, any_bits(torch.float32, 64, 32)
    packed = kernels.pack_gated(weight)
    right = native.rows_of_panels(packed, 0, 64)
    monkeypatch.setattr(native, "rows_of_panels", lambda *_: (right[0], (right[1][1], right[1][1], right[1][2])))
    assert not are_same_bits(kernels.unpack(packed, 0, 64), weight)


@needs_onednn_bfloat16
def test_the_test_sees_subnormal_numbers_that_become_zero(monkeypatch: pytest.MonkeyPatch):
    """Negative control: torch's own copy between packed weights of bfloat16 does that, where the processor converts to
    bfloat16 by an instruction.
    """
    kernels, weight = KERNELS["onednn"], torch.full((32, 32), 1e-40, dtype=torch.bfloat16)
    packed, overwrite = kernels.pack(torch.zeros_like(weight)), linear._overwrite
    kernels.repack_(packed, 0, weight)
    assert are_same_bits(kernels.unpack(packed, 0, 32), weight)

    def flushing(to: Tensor, other: Tensor) -> None:
        numbers = other.to_dense()
        overwrite(to, linear._pack(numbers.where(numbers.abs() >= torch.finfo(numbers.dtype).tiny, 0.0)))

    monkeypatch.setattr(linear, "_overwrite", flushing)
    kernels.repack_(packed, 0, weight)
    assert not kernels.unpack(packed, 0, 32).any()
    kernels.repack_(packed, 0, torch.ones_like(weight))
    assert kernels.unpack(packed, 0, 32).eq(1).all(), "nothing else"
