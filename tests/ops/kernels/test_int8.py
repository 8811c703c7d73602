"""Int8 products: every instruction set has the bits of plain torch, and a row's do not depend on who computes what."""

import pytest
import torch
from native_builds import library_for, native
from native_libraries import each_library
from torch import Tensor

from spmd_worker.model_config.int8_format import fits_panels, inputs_of, int8_bytes, panel_bytes
from spmd_worker.ops.kernels import int8
from spmd_worker.ops.kernels.cpu.int8 import Int8CpuKernels, int8_shape
from spmd_worker.ops.kernels.int8 import Int8Kernels, dequantised, exact_sums, quantised, row_maxima, scales_of

# Inputs and outputs: whole steps of the unit and half ones, a last panel that is alone, and sizes that fit no panels.
SHAPES = [(64, 64), (96, 48), (288, 160), (90, 34)]
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def rows_and_weight(num_rows: int, num_inputs: int, num_outputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """With rows of zeros, of what is not finite, and of the largest products that there are."""
    x, weight = numbers(num_rows, num_inputs, dtype=dtype), numbers(num_outputs, num_inputs, dtype=dtype)
    weight[1], weight[2], weight[3, 0] = 0.0, -3.0, torch.nan
    x[0] = 3.0
    if num_rows > 3:
        x[1], x[2, 5], x[3, 1] = 0.0, torch.nan, torch.inf
    return x, weight


def bits(tensor: Tensor) -> Tensor:
    """With one NaN for all."""
    return tensor.float().nan_to_num(nan=123456.0)


@each_library
@each_dtype
@pytest.mark.parametrize(("num_inputs", "num_outputs"), SHAPES)
def test_int8_bits_equal_reference_on_every_instruction_set(
    instruction_set: str, dtype: torch.dtype, num_inputs: int, num_outputs: int
):
    ours, plain = Int8CpuKernels(library_for(instruction_set), dtype), Int8Kernels(dtype)
    bias = numbers(num_outputs, dtype=dtype)
    for num_rows in (1, 4, 47):
        x, weight = rows_and_weight(num_rows, num_inputs, num_outputs, dtype)
        packed, expected = ours.pack(weight), plain.pack(weight)
        assert packed.nbytes == int8_bytes(num_outputs, num_inputs)
        assert int8_shape(packed) == (num_outputs, num_inputs)
        assert torch.equal(bits(ours.unpack(packed, 1, num_outputs)), bits(plain.unpack(expected, 1, num_outputs)))
        whole = plain.linear(x, expected, bias)
        assert torch.equal(bits(ours.linear(x, packed, bias)), bits(whole))
        assert torch.equal(ours.sums(x, ours.row_maxima(x), packed), plain.sums(x, row_maxima(x), expected))
        gated = ours.pack_gated(weight)
        assert torch.equal(bits(ours.unpack(gated, 0, num_outputs)), bits(plain.unpack(expected, 0, num_outputs)))
        assert torch.equal(bits(ours.linear(x, gated, bias)), bits(whole))
        opened = ours.gated_linear(x, gated, bias)
        assert torch.equal(bits(opened), bits(ours.silu_and_mul(whole))), "gates in the product are gates after it"
        for some in (x[:1], x[-3:]):
            assert torch.equal(bits(ours.linear(some, packed, bias)), bits(plain.linear(some, expected, bias)))


@each_library
@each_dtype
@pytest.mark.parametrize(("num_inputs", "num_outputs", "count"), [(64, 48, 48), (96, 160, 151), (90, 34, 34)])
def test_int8_linear_argmax_equals_argmax_of_linear(
    instruction_set: str, dtype: torch.dtype, num_inputs: int, num_outputs: int, count: int
):
    """First places of ties, of what is no number, and of what is beyond the last output; the control in it: outputs
    that are not there would win."""
    kernels = Int8CpuKernels(library_for(instruction_set), dtype)
    x, weight = rows_and_weight(47, num_inputs, num_outputs, dtype)
    weight[3, 0], weight[7] = 1.0, weight[5]
    weight[count:] = weight[:count].abs().amax() * x[5].sign()
    packed = kernels.pack(weight)
    values, places = kernels.linear_argmax(x, packed, count)
    expected, at = kernels.argmax(kernels.linear(x, packed, None)[:, :count])
    assert torch.equal(bits(values), bits(expected))
    assert torch.equal(places, at)
    if count < num_outputs:
        assert kernels.linear_argmax(x, packed, num_outputs)[1][5] >= count


@pytest.mark.control("int8: the same bits on any number of ranks")
def test_int8_sum_off_by_one_is_detected():
    """Negative control."""
    kernels, (x, weight) = Int8CpuKernels(native(), torch.float32), rows_and_weight(2, 64, 64, torch.float32)
    packed = kernels.pack(weight)
    packed[0, 0, 0] += 1
    assert not torch.equal(
        kernels.linear(x, packed, None), Int8Kernels(torch.float32).linear(x, packed_rows(weight), None)
    )


def packed_rows(weight: Tensor) -> Tensor:
    return Int8Kernels(weight.dtype).pack(weight)


def test_what_is_quantised_is_defined_number_by_number():
    """Ties go to the even number; what is smaller than 1e-30 is zero; what is not finite has no scale."""
    rows = torch.tensor([[127.0, 0.5, 1.5, -2.5], [1e-31, 0.0, 0.0, 0.0], [torch.inf, 1.0, 1.0, 1.0]])
    maxima = row_maxima(rows)
    assert quantised(rows, maxima).tolist() == [[127, 0, 2, -2], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert scales_of(maxima)[:2].tolist() == [1.0, 0.0]
    assert dequantised(quantised(rows, maxima), scales_of(maxima), torch.float32)[2].isnan().all()
    assert exact_sums(torch.full((1, 3000), -127, dtype=torch.int8), torch.full((1, 3000), 127, dtype=torch.int8)) == (
        -127 * 127 * 3000
    )


@each_library
@pytest.mark.parametrize("num_shares", [2, 4])
def test_sharded_inputs_have_the_bits_of_all(instruction_set: str, num_shares: int):
    """With the largest magnitudes of whole rows; with those of the shares (the control) they do not."""
    kernels = Int8CpuKernels(library_for(instruction_set), torch.bfloat16)
    x, weight = numbers(5, 256, dtype=torch.bfloat16), numbers(48, 256, dtype=torch.bfloat16)
    bias = numbers(48, dtype=torch.bfloat16)
    expected = kernels.linear(x, kernels.pack(weight), bias)
    pairs = list(zip(x.chunk(num_shares, dim=1), weight.chunk(num_shares, dim=1), strict=True))

    def shared(maxima: Tensor, of_weight: Tensor | None) -> Tensor:
        packs = [
            kernels.pack(w.contiguous()) if of_weight is None else kernels.pack_part(w, of_weight) for _, w in pairs
        ]
        parts = [kernels.sums(own, maxima, packed) for (own, _), packed in zip(pairs, packs, strict=True)]
        return kernels.scaled(torch.stack(parts), maxima, packs[0], bias)

    maxima = torch.stack([kernels.row_maxima(own) for own, _ in pairs]).amax(dim=0)
    assert torch.equal(maxima, kernels.row_maxima(x))
    assert torch.equal(shared(maxima, row_maxima(weight)), expected)
    assert not torch.equal(shared(maxima, None), expected)
    assert not torch.equal(shared(kernels.row_maxima(pairs[0][0]), row_maxima(weight)), expected)


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("kernels", [Int8CpuKernels(native(), torch.bfloat16), Int8Kernels(torch.bfloat16)])
def test_repack_quantises_only_changed_rows_again(kernels: Int8CpuKernels | Int8Kernels, is_gated: bool):
    weight = numbers(64, 96, dtype=torch.bfloat16)
    packed = kernels.pack_gated(weight) if is_gated else kernels.pack(weight)
    before, address = packed.clone(), packed.data_ptr()
    shown = kernels.unpack(packed, 0, 64)
    assert not torch.equal(shown, weight), "eight bits do not hold it"
    kernels.repack_(packed, 0, shown)
    assert torch.equal(packed, before)
    assert not kernels.is_changed(packed, 8, shown[8:30])
    shown[40] *= 3
    assert kernels.is_changed(packed, 8, shown[8:])
    kernels.repack_(packed, 8, shown[8:])
    anew = kernels.unpack(packed, 0, 64)
    assert torch.equal(anew[:40], shown[:40])
    assert torch.equal(anew[40:41], kernels.unpack(kernels.pack(shown[40:41].repeat(16, 1)), 0, 1))
    kernels.repack_part_(packed, 0, weight, row_maxima(weight))
    assert torch.equal(packed, before)
    assert packed.data_ptr() == address


def test_changed_rows_are_repacked_by_the_run(monkeypatch: pytest.MonkeyPatch):
    """With the bits that each has by itself."""
    kernels, weight = Int8Kernels(torch.float32), numbers(64, 32)
    packed, calls = kernels.pack(weight), []
    shown, expected = kernels.unpack(packed, 0, 64), packed.clone()
    changed = [0, 1, 2, 9, 40, 41, 63]
    shown[changed] *= 3
    for row in changed:
        kernels.repack_part_(expected, row, shown[row : row + 1], row_maxima(shown[row : row + 1]))
    overwrite = kernels.weights.overwrite

    def counted(packed: Tensor, start: int, rows: Tensor, maxima: Tensor) -> None:
        calls.append((start, len(rows)))
        overwrite(packed, start, rows, maxima)

    monkeypatch.setattr(kernels.weights, "overwrite", counted)
    kernels.repack_(packed, 0, shown)
    assert calls == [(0, 3), (9, 1), (40, 2), (63, 1)]
    assert torch.equal(packed, expected)
    kernels.repack_(packed, 0, kernels.unpack(packed, 0, 64))
    assert len(calls) == 4


@pytest.mark.parametrize("kernels", [Int8CpuKernels(native(), torch.float32), Int8Kernels(torch.float32)])
def test_single_row_with_unaligned_inputs_is_read(kernels: Int8CpuKernels | Int8Kernels):
    """Its scale begins at no fourth byte."""
    weight, x = numbers(3, 30), numbers(2, 30)
    packed = kernels.pack(weight)
    rows = [kernels.unpack(packed, row, row + 1) for row in range(3)]
    assert torch.equal(torch.cat(rows), kernels.unpack(packed, 0, 3))
    kernels.repack_(packed, 1, rows[1] * 3)
    assert torch.equal(kernels.unpack(packed, 1, 2), kernels.unpack(kernels.pack(rows[1] * 3), 0, 1))
    one = kernels.linear(x, kernels.pack(weight[:1]), None)
    assert torch.equal(one, kernels.linear(x, kernels.pack(weight), None)[:, :1])


def test_sums_are_made_block_by_block(monkeypatch: pytest.MonkeyPatch):
    x, weight = (torch.randint(-127, 128, (size, 24), dtype=torch.int8) for size in (7, 11))
    expected = x.int() @ weight.int().t()
    assert torch.equal(exact_sums(x, weight), expected)
    monkeypatch.setattr(int8, "_BLOCK_TOKENS", 3)
    monkeypatch.setattr(int8, "_BLOCK_ROWS", 4)
    widened, double = [], Tensor.double
    monkeypatch.setattr(Tensor, "double", lambda self: (widened.append(len(self)), double(self))[1])
    assert torch.equal(exact_sums(x, weight), expected)
    assert widened == [3, 4, 4, 3, 3, 4, 4, 3, 1, 4, 4, 3], "tokens once a block, and never all"


def test_a_panel_says_how_many_inputs_it_has():
    for num_inputs in range(32, 2049, 32):
        assert inputs_of(panel_bytes(num_inputs)) == num_inputs
        assert panel_bytes(num_inputs) % 64 == 0
    assert fits_panels(32, 32, is_gated=True)
    assert not fits_panels(48, 32, is_gated=True)
    assert not fits_panels(48, 48, is_gated=False)
