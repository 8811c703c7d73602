"""Weights as files store them: products have the bits of those with the dequantised weight, on every instruction set.

The model is the definition, (number - zero) * scale in float32 rounded once, and the compiled product with that weight.
"""

from dataclasses import dataclass

import pytest
import torch
from native_builds import NATIVE, library_for
from native_libraries import each_library
from torch import Tensor

from spmd_worker.model_config.stored_format import IQ4_LEVELS, MXFP4, NF4_LEVELS, StoredFormat
from spmd_worker.ops.kernels.api import ExpertSizes, ExpertWeights
from spmd_worker.ops.kernels.cpu.experts import NativeExperts
from spmd_worker.ops.kernels.cpu.native import CpuKernels
from spmd_worker.ops.kernels.cpu.stored_panels import NativePanels
from spmd_worker.ops.kernels.stored_weights import affine_scales

BFLOAT16 = torch.bfloat16
LEVELS = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0))
# Around the ends of blocks of rows, and more than a group of them.
OF_GGUF = ("affine4", "iq4", "affine8")
ROWS = (1, 2, 3, 6, 7, 14, 15, 16, 17, 31, 33, 65, 140)
# Outputs, of which a last panel is alone, inputs and inputs of a group: parts of 256 inputs begin inside groups, and
# groups inside parts; 0: one group.
SHAPES = ((48, 64, 32), (80, 1376, 32), (64, 4864, 128), (96, 768, 0), (32, 96, 96), (16, 1024, 512))


@dataclass
class Stored:
    """A random weight: a file's parts, and its definition."""

    stored: StoredFormat
    numbers: Tensor
    scales: Tensor
    values: Tensor

    def packed(self, kernels: CpuKernels, *, is_gated: bool = False, cut: int = 7) -> Tensor:
        """In panels, written in two calls; nothing of the memory's is left."""
        panels, shape = panels_of(kernels), (self.values.shape[0], self.values.shape[1])
        packed = panels.empty(self.stored, shape, torch.device("cpu"), is_gated=is_gated).fill_(0xAB)
        for rows in (slice(cut, None), slice(0, cut)):
            panels.write_rows(packed, self.stored, rows.start, self.numbers[rows], self.scales[rows])
        return packed


def weight_of(
    num_outputs: int,
    num_inputs: int,
    group: int,
    *,
    kind: str = "int4",
    seed: int = 0,
    exponents_of: tuple[int, int] = (118, 130),
) -> Stored:
    generator = torch.Generator().manual_seed(seed + num_outputs + num_inputs)
    size = group or num_inputs
    if kind == "e4m3":
        found = torch.randint(0, 254, (num_outputs, num_inputs), generator=generator)
        # No NaN: 127 and 255.
        numbers = (found + (found >= 127)).to(torch.uint8)
        # A scale is zero, one so small that values are computed number by number.
        factors = torch.rand(num_outputs, num_inputs // size, generator=generator) * 1e-4
        factors[3, 0], factors[5, 0], factors[9, -1] = 0.0, 1e-33, -1e-4
        values = numbers.view(torch.float8_e4m3fn).float() * factors.repeat_interleave(size, 1)
        return Stored(StoredFormat(kind, 1, group), numbers, factors, values)
    if kind in OF_GGUF:
        return affine_of(num_outputs, num_inputs, kind, generator)
    q = torch.randint(0, 16, (num_outputs, num_inputs), generator=generator)
    numbers = (q[:, ::2] | q[:, 1::2] << 4).to(torch.uint8)
    if kind == "mxfp4":
        exponents = torch.randint(*exponents_of, (num_outputs, num_inputs // 32), generator=generator)
        factors = torch.exp2(exponents.double() - 127).float().repeat_interleave(32, 1)
        return Stored(MXFP4, numbers, exponents.to(torch.uint8), LEVELS[q] * factors)
    # Of 24 bits, so that products are rounded in float32 too.
    scales = torch.rand(num_outputs, num_inputs // size, generator=generator) * 0.02
    zeros = torch.randint(0, 17, scales.shape, generator=generator).float() * (kind == "int4")
    levels = q.float() if kind == "int4" else torch.tensor(NF4_LEVELS)[q]
    values = (levels - zeros.repeat_interleave(size, 1)) * scales.repeat_interleave(size, 1)
    return Stored(StoredFormat(kind, 1, group), numbers, torch.stack((scales, zeros), dim=-1), values)


def affine_of(num_outputs: int, num_inputs: int, kind: str, generator: torch.Generator) -> Stored:
    """With steps of both signs, some subnormal. Products are exact in float32, as those of files are."""
    shape, has_bytes = (num_outputs, num_inputs // 32), kind == "affine8"
    steps, minima = ((torch.rand(2, *shape, generator=generator) - 0.5) * 2e-3).half()
    steps[3, 0], minima[5, 0], steps[7, -1] = 6e-8, 6e-8, 0.0
    factors = torch.randint(-63, 64, (*shape, 1 + has_bytes), generator=generator).to(torch.int8)
    of_minima = torch.randint(0, 64, shape, generator=generator).to(torch.int8)
    q = torch.randint(
        -128 if has_bytes else 0, 128 if has_bytes else 16, (num_outputs, num_inputs), generator=generator
    )
    numbers = q.to(torch.int8).view(torch.uint8) if has_bytes else (q[:, ::2] | q[:, 1::2] << 4).to(torch.uint8)
    levels = torch.tensor(IQ4_LEVELS)[q] if kind == "iq4" else q
    scales = (steps.unsqueeze(2).double() * factors).repeat_interleave(32 // factors.shape[2], 2).flatten(1)
    offsets = (minima.double() * of_minima).repeat_interleave(32, 1)
    values = (levels * scales).float() - offsets.float()
    return Stored(StoredFormat(kind, 1, 32), numbers, affine_scales(steps, minima, of_minima, factors), values)


def numbers_of(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5)).to(BFLOAT16)


def panels_of(kernels: CpuKernels) -> NativePanels:
    panels = kernels.stored_panels(BFLOAT16)
    assert panels is not None
    return panels


def kernels_of(instruction_set: str) -> CpuKernels:
    kernels = CpuKernels(library_for(instruction_set))
    if not kernels.has_gemm(BFLOAT16):
        assert kernels.stored_panels(BFLOAT16) is None
        pytest.skip("oneDNN multiplies")
    assert kernels.stored_panels(torch.float32) is None
    return kernels


@each_library
@pytest.mark.parametrize("kind", ["int4", "mxfp4", "nf4", "e4m3", *OF_GGUF])
def test_products_are_those_of_dequantised_weights(instruction_set: str, kind: str):
    kernels = kernels_of(instruction_set)
    for shape in SHAPES:
        weight = weight_of(*shape, kind=kind)
        plain, packed, bias = weight.values.to(BFLOAT16), weight.packed(kernels), numbers_of(shape[0])
        dequantised, x = kernels.pack(plain), numbers_of(ROWS[-1], shape[1])
        for num_rows in ROWS:
            some = x[:num_rows]
            assert torch.equal(kernels.linear(some, packed, bias), kernels.linear(some, dequantised, bias)), num_rows
        # The control: another zero point or exponent is another product.
        weight.scales.view(-1)[-1] += 1
        assert not torch.equal(kernels.linear(x, weight.packed(kernels), None), kernels.linear(x, dequantised, None)), (
            shape
        )


@each_library
@pytest.mark.parametrize(("exponents_of", "factor"), [((0, 5), 2.0**100), ((249, 253), 2.0**-100)], ids=["low", "high"])
def test_exponents_at_their_ends_are_exact(instruction_set: str, exponents_of: tuple[int, int], factor: float):
    kernels = kernels_of(instruction_set)
    weight = weight_of(48, 256, 0, kind="mxfp4", exponents_of=exponents_of)
    plain, packed = weight.values.to(BFLOAT16), weight.packed(kernels)
    dequantised, x = kernels.pack(plain), numbers_of(9, 256) * factor
    for num_rows in (1, 9):
        found, wanted = (kernels.linear(x[:num_rows], each, None) for each in (packed, dequantised))
        assert wanted.isfinite().all()
        assert torch.equal(found, wanted)
    # The control: the nearest exponent in the other half.
    weight.scales.view(-1)[-1] ^= 1
    assert not torch.equal(kernels.linear(x, weight.packed(kernels), None), wanted)


@each_library
@pytest.mark.parametrize("kind", ["int4", "e4m3", "affine8"])
def test_gated_products_and_leaves_follow_too(instruction_set: str, kind: str):
    kernels = kernels_of(instruction_set)
    weight, num_inputs = weight_of(64, 1376, 32, kind=kind), 1376
    plain, x, bias = weight.values.to(BFLOAT16), numbers_of(ROWS[-1], num_inputs), numbers_of(64)
    gated, dequantised = weight.packed(kernels, is_gated=True, cut=45), kernels.pack_gated(plain)
    packed, leaves = weight.packed(kernels), kernels.pack_leaves(plain)
    for num_rows in ROWS:
        some = x[:num_rows]
        found, wanted = (kernels.gated_linear(some, each, bias) for each in (gated, dequantised))
        assert torch.equal(found, wanted), num_rows
        assert torch.equal(kernels.linear(some, gated, bias), kernels.linear(some, dequantised, bias)), num_rows
        for ends in ((num_inputs,), (32, num_inputs), (352, 704, 1056, num_inputs)):
            for dtype in (torch.float32, BFLOAT16):
                parts = (kernels.linear_of_leaves(some, each, bias, ends, dtype) for each in (packed, leaves))
                assert torch.equal(*parts), (num_rows, ends, dtype)


@pytest.mark.parametrize("kind", ["int4", "mxfp4", "e4m3", "affine8"])
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_joined_experts_have_the_same_bits(kind: str, activation: str):
    kernels, hidden, size = kernels_of(NATIVE), 128, 96
    experts: list[tuple[ExpertWeights, ExpertWeights]] = []
    for seed in range(3):
        gates = weight_of(2 * size, hidden, 64, kind=kind, seed=seed)
        down = weight_of(hidden, size, 32, kind=kind, seed=seed + 7)
        is_gated = activation == "silu"
        pack = kernels.pack_gated if is_gated else kernels.pack
        plain = ExpertWeights(pack(gates.values.to(BFLOAT16)), None, kernels.pack(down.values.to(BFLOAT16)), None)
        experts.append(
            (ExpertWeights(gates.packed(kernels, is_gated=is_gated), None, down.packed(kernels), None), plain)
        )
    for leaf_ends in ((), (32, size)):
        sizes = ExpertSizes(
            num_experts=3,
            hidden_size=hidden,
            intermediate_size=size,
            activation=activation,
            limit=0.0,
            bound=0.0,
            is_gated=True,
            dtype=BFLOAT16,
            part_dtype=torch.float32 if leaf_ends else BFLOAT16,
            leaf_ends=leaf_ends,
        )
        x = numbers_of(70, hidden)
        ids = torch.arange(140).view(70, 2) % 3
        found = []
        for which in range(2):
            joined = kernels.join_experts({index: pair[which] for index, pair in enumerate(experts)}, sizes)
            assert isinstance(joined, NativeExperts), which
            found.append(joined.outputs(x, ids, torch.zeros(3, dtype=torch.int64)))
        assert torch.equal(*found), leaf_ends


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("kind", ["int4", "mxfp4", "nf4", "e4m3", *OF_GGUF])
@each_library
def test_rows_are_read_as_written(instruction_set: str, kind: str, is_gated: bool):
    kernels, weight = kernels_of(instruction_set), weight_of(96, 160, 32, kind=kind)
    packed = weight.packed(kernels, is_gated=is_gated, cut=50)
    for start, stop in ((0, 96), (45, 53), (95, 96)):
        values = panels_of(kernels).read_values(packed, weight.stored, 160, (start, stop))
        assert torch.equal(values, weight.values[start:stop])
