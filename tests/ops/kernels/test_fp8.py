"""FP8 in plain torch: what is quantised, how it is packed, and that stored numbers survive being dequantised.

The kernels of GPUs are compared with it by triton_quantised_cases.py.
"""

import pytest
import torch
from torch import Tensor

from spmd_worker.model_config.byte_rows import fits_bytes, inputs_of, row_bytes
from spmd_worker.ops.kernels.byte_rows import byte_rows_shape
from spmd_worker.ops.kernels.fp8 import (
    Fp8Weights,
    ReferenceFp8Kernels,
    are_blocked,
    dequantised,
    products,
    quantised,
    scales_of,
)
from spmd_worker.ops.kernels.int8 import row_maxima

each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def stored_numbers(num_rows: int, num_inputs: int) -> Tensor:
    """Each finite e4m3 number, in turns."""
    finite = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    finite = finite[finite.isfinite()]
    return finite.repeat(-(-num_rows * num_inputs // len(finite)))[: num_rows * num_inputs].view(num_rows, -1)


def test_what_is_quantised_is_defined_number_by_number():
    """Ties go to the even number, zeros have the scale 1, and what is not a number stays so."""
    rows = torch.tensor([[448.0, 17.0, 19.0, 0.001], [0.0, 0.0, 0.0, 0.0], [torch.nan, 1.0, 2.0, 3.0]])
    scales = scales_of(rows)
    assert scales[:2, 0].tolist() == [1.0, 1.0]
    assert scales[2].isnan()
    found = quantised(rows, scales).float()
    assert found[0].tolist() == [448.0, 16.0, 20.0, 0.001953125]
    assert found[1].tolist() == [0.0] * 4
    assert found[2].isnan().all()
    assert quantised(torch.tensor([[1e6]]), torch.tensor([[1.0]])).float() == 448.0, "not NaN, which torch makes of it"


def test_a_row_says_how_many_inputs_it_has():
    for num_inputs in range(16, 20_000, 16):
        assert inputs_of(row_bytes(num_inputs)) == num_inputs
        assert row_bytes(num_inputs) % 16 == 0
    assert row_bytes(4096) % 128 == 0
    assert not fits_bytes(40)


@each_dtype
@pytest.mark.parametrize("is_grouped", [False, True])
def test_stored_numbers_survive_dequantisation(dtype: torch.dtype, is_grouped: bool):
    """With scales of any size. Controls: float16 loses small ones, and other scales make other numbers."""
    stored = stored_numbers(24, 256).to(torch.float8_e4m3fn)
    # No row has the largest number, which would give it the scale that it has.
    stored[12:] = stored[12:].float().clamp(-288, 288).to(stored.dtype)
    factors = 10.0 ** torch.linspace(-30, 20, 24).unsqueeze(1)
    scales = numbers(24, 2 if is_grouped else 1).abs() * factors + 1e-37
    weights = Fp8Weights(dtype)
    packed = weights.pack_stored(dequantised(stored, scales, dtype), scales)
    assert torch.equal(weights.numbers(packed).float(), stored.float())
    assert torch.equal(weights.scales(packed), scales)
    assert byte_rows_shape(packed) == (24, 256)
    assert torch.equal(weights.dequantised(packed, 3, 9), dequantised(stored, scales, dtype)[3:9])
    shorter = quantised(dequantised(stored, scales, torch.float16), scales)
    assert not torch.equal(shorter.float(), stored.float())
    again = weights.pack(dequantised(stored, scales, dtype), torch.empty(0))
    assert not torch.equal(weights.numbers(again).float(), stored.float())
    assert ReferenceFp8Kernels(torch.float16).stored is None


def test_products_are_those_of_plain_rows():
    """Near the product of what is dequantised, with both kinds of scales."""
    x, weight = numbers(5, 384), numbers(48, 384)
    for is_grouped in (False, True):
        x_scales, scales = scales_of(x, is_grouped=is_grouped), scales_of(weight, is_grouped=is_grouped)
        a, b = quantised(x, x_scales), quantised(weight, scales)
        expected = dequantised(a, x_scales, torch.float32) @ dequantised(b, scales, torch.float32).t()
        torch.testing.assert_close(products(a, x_scales, b, scales), expected, rtol=1e-4, atol=1e-4)
    assert ((expected - x @ weight.t()).norm() / expected.norm()).item() < 0.05


def test_blocks_of_rows_share_scales_after_changes():
    """Rows of one block are quantised again together, other blocks stay. Controls: rows that share no scales."""
    kernels, weight = ReferenceFp8Kernels(torch.float32), numbers(300, 256)
    blocked = scales_of(weight, is_blocked=True)
    packed = kernels.pack_stored(weight, blocked)
    assert packed.shape == (300, 1, 1, row_bytes(256))
    assert blocked[0].tolist() == (weight[:128].abs().view(128, 2, 128).amax((0, 2)) * (1 / 448)).tolist()
    before = packed.clone()
    kernels.repack_part_(packed, 130, 5 * weight[130:140], row_maxima(weight[130:140]))
    changed = weight.clone()
    changed[130:140] *= 5
    assert torch.equal(packed[:128], before[:128])
    assert torch.equal(packed[256:], before[256:])
    assert are_blocked(kernels.weights.scales(packed), 0, 300)
    assert not torch.equal(kernels.weights.scales(packed)[128:256], blocked[128:256])
    assert ((kernels.unpack(packed, 0, 300) - changed).norm() / changed.norm()).item() < 0.05
    kernels.repack_stored_(packed, 128, weight[128:256], blocked[128:256])
    kernels.repack_stored_(packed, 0, weight, blocked)
    assert torch.equal(packed, before)
    assert not are_blocked(scales_of(weight, is_grouped=True), 0, 300)
    assert not are_blocked(blocked[:100], 0, 300)
    assert not are_blocked(blocked[100:], 100, 300)
    x = numbers(3, 256)
    ungrouped = Fp8Weights(torch.float32).pack_stored(weight[:129], blocked[[0] * 100 + [150] * 29])
    assert ungrouped.ndim == 3
    grouped = before.squeeze(1)
    assert torch.equal(kernels.linear(x, before, None), kernels.linear(x, grouped, None))


@each_dtype
@pytest.mark.parametrize("is_grouped", [False, True])
def test_repack_quantises_only_changed_rows_again(dtype: torch.dtype, is_grouped: bool):
    kernels, weight = ReferenceFp8Kernels(dtype), numbers(40, 256, dtype=dtype)
    packed = kernels.pack_stored(weight, scales_of(weight, is_grouped=is_grouped) * 1.01)
    before, address = packed.clone(), packed.data_ptr()
    shown = kernels.unpack(packed, 0, 40)
    assert not torch.equal(shown, weight), "eight bits do not hold it"
    kernels.repack_(packed, 0, shown)
    assert torch.equal(packed, before)
    assert not kernels.is_changed(packed, 8, shown[8:30])
    shown[9] *= 3
    assert kernels.is_changed(packed, 8, shown[8:30])
    kernels.repack_(packed, 8, shown[8:30])
    assert torch.equal(packed[:9], before[:9])
    assert torch.equal(packed[10:], before[10:])
    assert not torch.equal(packed[9], before[9])
    kernels.repack_part_(packed, 0, weight, row_maxima(weight))
    kernels.repack_stored_(packed, 0, weight, scales_of(weight, is_grouped=is_grouped) * 1.01)
    assert torch.equal(packed, before)
    assert packed.data_ptr() == address


def test_weight_whose_inputs_do_not_fit_stays_plain():
    kernels, weight, x = ReferenceFp8Kernels(torch.float32), numbers(8, 40), numbers(3, 40)
    packed = kernels.pack(weight)
    assert packed is weight
    assert torch.equal(kernels.linear(x, packed, None), x @ weight.t())
    kernels.repack_(packed, 2, torch.ones(1, 40))
    assert kernels.unpack(packed, 2, 3).eq(1).all()
    assert kernels.is_changed(packed, 2, torch.zeros(1, 40))
