"""FP8 and int8 kernels of a GPU, interpreted on CPU tensors or on a GPU; run like triton_cases.py.

    OPENBLAS_CORETYPE=Nehalem TRITON_INTERPRET=1 python tests/ops/kernels/triton_quantised_cases.py
    python tests/ops/kernels/triton_quantised_cases.py cuda

The interpreter rounds float32 to e4m3 wrongly (halves up, subnormals cut), so there the numbers before rounding are
compared, and torch rounds them for the matmuls. How many bits a matrix unit keeps is seen on a GPU alone.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from triton_cases import report, run, set_device

from spmd_worker.ops.kernels.api import ExpertSizes, ExpertWeights
from spmd_worker.ops.kernels.fp8 import Fp8Weights, ReferenceFp8Kernels, products, quantised, scales_of
from spmd_worker.ops.kernels.int8 import Int8Kernels, row_maxima
from spmd_worker.ops.kernels.triton import attention_kernels, fp8, int8, rows
from spmd_worker.ops.kernels.triton.fp8 import Fp8Tile, Fp8TritonKernels
from spmd_worker.ops.kernels.triton.int8 import Int8Tile
from spmd_worker.ops.kernels.triton.int8_model import Int8TritonKernels
from spmd_worker.ops.kernels.triton.launching import is_interpreted

_PROCESSES = 10
SHAPES = ((20, 144, 384), (5, 130, 1152))
DTYPES = (torch.float32, torch.float16) if is_interpreted() else (torch.float32, torch.float16, torch.bfloat16)


def fp8_tiles() -> list[Fp8Tile]:
    """On a GPU all take wgmma, which has 64 rows at least: of x, or swapped of the weight."""
    if is_interpreted():
        return [
            Fp8Tile(16, 16, 1, 4, 2),
            Fp8Tile(32, 64, 2, 4, 2, is_paired=True),
            Fp8Tile(16, 32, 1, 4, 2, is_swapped=True),
        ]
    few = [Fp8Tile(64, 32, 2, 4, 4), Fp8Tile(64, 128, 1, 4, 4), Fp8Tile(64, 64, 1, 4, 2, is_paired=True)]
    many = [Fp8Tile(128, 64, 1, 8, 4), Fp8Tile(128, 128, 1, 8, 4, is_flat=True)]
    swapped = [Fp8Tile(16, 64, 2, 4, 4, is_swapped=True), Fp8Tile(64, 128, 1, 4, 3, is_swapped=True)]
    return [*few, *many, *swapped]


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(dtype)


def activations(num_rows: int, num_inputs: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """With a row of zeros, a large one, one of subnormal numbers, and a zero below zero."""
    x = numbers(num_rows, num_inputs, dtype=dtype)
    x[0, 1] = -0.0
    x[1], x[2] = 0.0, x[2] * 1000.0
    if dtype != torch.float16:
        x[3] *= 1e-40
    return x


SCALES: dict[str, dict[str, bool]] = {"rows": {}, "groups": {"is_grouped": True}, "blocks": {"is_blocked": True}}


def scaled_operands(shape: tuple[int, int, int], kind: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """E4m3 x [M, K], its scales, weight [N, K], its scales; packed as a model has them."""
    num_rows, num_columns, num_inputs = shape
    x, weight = activations(num_rows, num_inputs), numbers(num_columns, num_inputs) * num_inputs**-0.5
    weight *= torch.arange(1, num_columns + 1).unsqueeze(1) / num_columns
    x_scales, weights = scales_of(x, is_grouped=kind != "rows"), Fp8Weights(torch.float32)
    packed = weights.pack_stored(weight, scales_of(weight, **SCALES[kind]))
    assert packed.ndim == 2 + list(SCALES).index(kind)
    of_rows = x_scales[:, 0] if kind == "rows" else x_scales
    return quantised(x, x_scales), of_rows, weights.numbers(packed), weights.scales(packed)


def definition(x: Tensor, x_scales: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    return products(x, x_scales.view(len(x), -1), weight, scales)


def error_of(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max())


def tolerance() -> float:
    """A matrix unit of Hopper keeps about 14 bits of a chain's products."""
    return 1e-5 if is_interpreted() else 5e-3


@contextmanager
def rounded_by_torch() -> Iterator[None]:
    """Activations quantised by torch where kernels are interpreted."""

    def quantise(x: Tensor, *, is_grouped: bool) -> tuple[Tensor, Tensor]:
        scales = scales_of(x, is_grouped=is_grouped)
        return quantised(x, scales), scales if is_grouped else scales[:, 0]

    with mock.patch.object(fp8, "quantise", quantise if is_interpreted() else fp8.quantise):
        yield


def activations_are_quantised_as_torch_does() -> None:
    for dtype in DTYPES:
        for num_inputs in (128, 384, 4224):
            x = activations(6, num_inputs, dtype)
            for is_grouped in (False, True):
                found, scales = fp8.quantise(x, is_grouped=is_grouped, dtype=torch.float32)
                expected_scales = scales_of(x, is_grouped=is_grouped)
                assert torch.equal(scales.view_as(expected_scales), expected_scales), (dtype, num_inputs, is_grouped)
                shaped = x.float().unflatten(1, (expected_scales.shape[1], -1))
                quotients = (shaped / expected_scales.unsqueeze(2)).clamp(-448, 448).flatten(1)
                # The interpreter rounds in the middle of a fused multiplication and addition.
                ulps = (found.view(torch.int32) - quotients.view(torch.int32)).abs().max()
                assert ulps <= is_interpreted(), (dtype, num_inputs, is_grouped, ulps)
                if not is_interpreted():
                    found, _ = fp8.quantise(x, is_grouped=is_grouped)
                    assert torch.equal(found.view(torch.uint8), quantised(x, expected_scales).view(torch.uint8))


def rows_longer_than_registers_are_quantised_alike() -> None:
    x = activations(5, 1296)
    whole, scales = fp8.quantise(x, is_grouped=False, dtype=torch.float32)
    with mock.patch.object(fp8, "_MOST_IN_REGISTERS", 256):
        assert all(map(torch.equal, fp8.quantise(x, is_grouped=False, dtype=torch.float32), (whole, scales)))
    maxima = row_maxima(x)
    for given in (None, maxima * 2):
        whole, scales = int8.quantise(x, given)
        with mock.patch.object(int8, "_MOST_IN_REGISTERS", 256):
            assert all(map(torch.equal, int8.quantise(x, given), (whole, scales)))


def producers_of_rows(
    dtype: torch.dtype, width: int
) -> Iterator[tuple[Callable[..., Any], Callable[[], list[Tensor]]]]:
    """A norm and gates: with what kind of scales and numbers they quantise their rows; and the rows, not quantised."""
    x, residual, weight = (activations(6, width, dtype), numbers(6, width, dtype=dtype), numbers(width, dtype=dtype))
    columns = activations(6, 2 * width, dtype)

    def normed(**how: Any) -> list[Tensor]:
        stream = residual.clone()
        return [*fp8.add_rms_norm(x, stream, weight, 1e-5, **how), stream]

    def plainly_normed() -> list[Tensor]:
        stream = residual.clone()
        return [rows.add_rms_norm(x, stream, weight, 1e-5), stream]

    yield normed, plainly_normed
    yield partial(fp8.silu_and_mul, columns), lambda: [rows.silu_and_mul(columns)]


def producers_quantise_as_a_launch_of_its_own() -> None:
    kinds = (torch.float32, *(() if is_interpreted() else (torch.float8_e4m3fn,)))
    for dtype in DTYPES:
        for width, kind, is_grouped in product((640,) if is_interpreted() else (128, 640, 4096), kinds, (False, True)):
            for quantising, plain in producers_of_rows(dtype, width):
                made, found, scales, *stream = quantising(is_grouped=is_grouped, dtype=kind)
                expected, *expected_stream = plain()
                assert torch.equal(bits(made), bits(expected)), (dtype, width)
                assert all(map(torch.equal, map(bits, stream), map(bits, expected_stream)))
                wanted, wanted_scales = fp8.quantise(expected, is_grouped=is_grouped, dtype=kind)
                assert torch.equal(bits(found), bits(wanted)), (dtype, width, is_grouped)
                assert torch.equal(scales, wanted_scales)


def matmuls_take_rows_that_are_quantised() -> None:
    x, residual, weight = numbers(5, 256), numbers(5, 256), numbers(256)
    kernels = Fp8TritonKernels(torch.float32)
    packed, gates = kernels.pack(numbers(48, 256)), numbers(5, 512)
    apart = grouped(numbers(48, 256))
    makes = (lambda: kernels.add_rms_norm(x, residual.clone(), weight, 1e-5), lambda: kernels.silu_and_mul(gates))
    for make, is_grouped in product(makes, (False, True)):
        kernels._is_grouped, of = is_grouped, apart if is_grouped else packed
        made = make()
        # A copy is quantised by a launch of its own, and so is what was quantised in another way.
        expected = kernels.linear(made.clone(), of, None)
        other = kernels.linear(made, packed if is_grouped else apart, None)
        assert torch.equal(other, kernels.linear(made.clone(), packed if is_grouped else apart, None))
        with mock.patch.object(fp8, "quantise", side_effect=AssertionError("quantised twice")):
            assert torch.equal(kernels.linear(made, of, None), expected)
        # Control: numbers of other rows.
        fp8._with_quantised(made, *fp8.quantise(made.flip(0), is_grouped=is_grouped))
        assert not torch.equal(kernels.linear(made, of, None), expected)
    plain = numbers(5, 40)
    assert torch.equal(kernels.silu_and_mul(plain), rows.silu_and_mul(plain)), "20 inputs are not quantised"


def values_that_are_not_finite_stay_so() -> None:
    kernels = Fp8TritonKernels(torch.float32)
    packed = kernels.pack(numbers(32, 128))
    for value in (torch.nan, torch.inf):
        x = numbers(3, 128)
        x[1, 7] = value
        with rounded_by_torch():
            found = kernels.linear(x, packed, None)
        assert not found[1].isfinite().any()
        assert found[[0, 2]].isfinite().all()
        unrounded, _ = fp8.quantise(x, is_grouped=False, dtype=torch.float32)
        assert unrounded[1, 7].isnan()


def fp8_matmuls_are_the_definition() -> None:
    for shape in SHAPES:
        for kind in SCALES:
            operands = scaled_operands(shape, kind)
            expected, bias = definition(*operands), numbers(shape[1])
            found = fp8.multiply(*operands, None, torch.float32, is_blocked=kind == "blocks")
            assert error_of(found, expected) < tolerance(), (shape, kind)
            added = fp8.multiply(*operands, bias, torch.float32, is_blocked=kind == "blocks")
            assert torch.equal(added, found + bias)


def a_row_beside_one_that_is_not_finite_keeps_its_bits() -> None:
    """Five groups, in steps of two: the sixth group of a row was the next row's first."""
    for kind in ("groups", "blocks"):
        x, x_scales, weight, scales = scaled_operands((20, 144, 640), kind)
        broken = x_scales.clone()
        broken[1] = torch.inf
        tile = next(each for each in fp8_tiles() if each.steps > 1)
        how: dict[str, Any] = {"tile": tile, "by_tma": False, "is_blocked": kind == "blocks"}
        expected = fp8.multiply(x, x_scales, weight, scales, None, torch.float32, **how)
        found = fp8.multiply(x, broken, weight, scales, None, torch.float32, **how)
        assert expected.isfinite().all()
        assert torch.equal(found[0], expected[0]), kind
        assert torch.equal(found[2:], expected[2:]), kind


def compare_tiles(kind: str) -> None:
    """Scales of blocks have the bits of the same scales by groups."""
    # Interpreted, a dot over the inputs of two steps adds them up before it adds the sum, as no matrix unit does.
    has_one_step = is_interpreted() and kind == "rows"
    tiles = [replace(tile, steps=1) if has_one_step else tile for tile in fp8_tiles()]
    for shape in SHAPES:
        operands = scaled_operands(shape, kind)
        first = fp8.multiply(*operands, None, torch.float32, by_tma=False)
        for tile in tiles:
            for by_tma in (False, True):
                how: dict[str, Any] = {"tile": tile, "by_tma": by_tma, "is_blocked": kind == "blocks"}
                found = fp8.multiply(*operands, None, torch.float32, **how)
                assert torch.equal(found, first), (shape, kind, tile, by_tma)


def fp8_tiles_have_the_same_bits_with_scales_of_rows() -> None:
    compare_tiles("rows")


def fp8_tiles_have_the_same_bits_with_scales_of_groups() -> None:
    compare_tiles("groups")


def fp8_tiles_have_the_same_bits_with_scales_of_blocks() -> None:
    compare_tiles("blocks")


def fp8_gates_are_those_of_apart_matmuls() -> None:
    kernels = Fp8TritonKernels(torch.float32)
    for kind, width in (("rows", 144), ("groups", 144), ("blocks", 256)):
        x, x_scales, weight, scales = scaled_operands((9, width, 256), kind)
        bias = numbers(width)
        columns = fp8.multiply(x, x_scales, weight, scales, bias, torch.float32)
        expected = kernels.silu_and_mul(columns)
        most = 1024 if is_interpreted() else 4096
        tiles = [replace(tile, is_paired=True) for tile in fp8_tiles() if tile.columns * tile.rows <= most]
        how: dict[str, Any] = {"is_gated": True, "is_blocked": kind == "blocks"}
        found = [
            fp8.multiply(x, x_scales, weight, scales, bias, torch.float32, tile=tile, by_tma=by_tma, **how)
            for tile in tiles
            for by_tma in (False, True)
        ]
        assert all(torch.equal(each, expected) for each in found)


def fp8_gates_of_many_rows_have_the_bits_of_few() -> None:
    """Many take a plain matmul, whose bits have been rounded where gates are multiplied, and which quantises them."""
    most, num_rows = (8, 12) if is_interpreted() else (fp8.MOST_FUSED_ROWS, 600)
    for dtype in DTYPES:
        kernels, bias = Fp8TritonKernels(dtype), numbers(256, dtype=dtype)
        x, packed = activations(num_rows, 128, dtype), kernels.pack(numbers(256, 128, dtype=dtype))
        with rounded_by_torch(), mock.patch.object(fp8, "MOST_FUSED_ROWS", most):
            many = kernels.gated_linear(x, packed, bias)
            few = [kernels.gated_linear(some, packed, bias) for some in x.split(most)]
        assert torch.equal(bits(many), bits(torch.cat(few))), dtype
        # Both ways were taken.
        assert hasattr(many, fp8._QUANTISED)
        assert not any(hasattr(each, fp8._QUANTISED) for each in few)


def a_rows_fp8_matmul_does_not_depend_on_the_others() -> None:
    """In all sizes of tiles that the table has."""
    kernels = Fp8TritonKernels(torch.float32)
    x, num_rows = numbers(600, 256), 70 if is_interpreted() else 600
    for packed in (
        kernels.pack(numbers(48, 256)),
        grouped(numbers(48, 256)),
        grouped(numbers(256, 256), is_blocked=True),
    ):
        with rounded_by_torch():
            for of in (kernels.linear, kernels.gated_linear):
                whole = of(x[:num_rows], packed, None)
                for rows in ((0, 1), (17, 40), (num_rows - 1, num_rows)):
                    assert torch.equal(of(x[slice(*rows)], packed, None), whole[slice(*rows)])


def grouped(weight: Tensor, *, is_blocked: bool = False) -> Tensor:
    scales = scales_of(weight, is_grouped=True, is_blocked=is_blocked)
    return Fp8Weights(weight.dtype).pack_stored(weight, scales)


def fp8_kernels_are_near_the_reference() -> None:
    for dtype in DTYPES:
        kernels, reference = Fp8TritonKernels(dtype), ReferenceFp8Kernels(dtype)
        x, weight, bias = numbers(9, 256, dtype=dtype), numbers(64, 256, dtype=dtype), numbers(64, dtype=dtype)
        least = max(tolerance(), float(torch.finfo(dtype).eps))
        for packed in (kernels.pack(weight), grouped(weight)):
            with rounded_by_torch():
                found = kernels.linear(x, packed, bias), kernels.gated_linear(x, packed, bias)
            assert error_of(found[0], reference.linear(x, packed, bias)) < least
            assert error_of(found[1], reference.gated_linear(x, packed, bias)) < 4 * least
        plain = numbers(64, 40, dtype=dtype)
        assert kernels.pack(plain) is plain, "16 does not divide its inputs"


def sums_of_two_ranks_are_near_those_of_one() -> None:
    kernels = Fp8TritonKernels(torch.float32)
    x, weight = numbers(9, 512), numbers(64, 512)
    with rounded_by_torch():
        whole = kernels.linear(x, kernels.pack(weight), None)
        parts = [
            kernels.linear(own.contiguous(), kernels.pack(part.contiguous()), None)
            for own, part in zip(x.chunk(2, 1), weight.chunk(2, 1), strict=True)
        ]
    # The largest error, of rounding to three bits twice.
    assert error_of(parts[0] + parts[1], x @ weight.t()) < 0.1
    assert not torch.equal(parts[0] + parts[1], whole), "shares of rows have scales of their own"


def control_another_order_of_steps_is_found() -> None:
    """With a scale a step: sums of few products of FP8 are exact in any order."""
    x, x_scales, weight, scales = scaled_operands((20, 144, 1024), "groups")
    expected = fp8.multiply(x, x_scales, weight, scales, None, torch.float32)
    turned = [
        each.view(torch.uint8).unflatten(1, (-1, 128)).flip(1).flatten(1).contiguous().view(each.dtype)
        for each in (x, weight)
    ]
    turned_scales = [each.flip(1).contiguous() for each in (x_scales, scales)]
    other = fp8.multiply(turned[0], turned_scales[0], turned[1], turned_scales[1], None, torch.float32)
    assert not torch.equal(other, expected)
    assert error_of(other, expected) < tolerance()


def control_a_wrong_scale_is_found() -> None:
    for kind in SCALES:
        x, x_scales, weight, scales = scaled_operands((20, 144, 256), kind)
        expected = definition(x, x_scales, weight, scales)
        for wrong in ((torch.ones_like(x_scales), scales), (x_scales, scales.roll(72, 0) * 1.5)):
            found = fp8.multiply(x, wrong[0], weight, wrong[1], None, torch.float32, is_blocked=kind == "blocks")
            assert error_of(found, expected) > 0.1


def int8_operands(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of zeros and of what is not finite."""
    x, weight, bias = (numbers(*shape, dtype=dtype) for shape in ((9, 288), (64, 288), (64,)))
    x[1], x[2, 5], x[3, 1], x[4] = 0.0, torch.nan, torch.inf, 3.0
    weight[1], weight[2] = 0.0, -3.0
    return x, weight, bias


def bits(tensor: Tensor) -> Tensor:
    """With one NaN for all."""
    return tensor.float().nan_to_num(nan=123456.0)


INT8_TILES = (Int8Tile(16, 32, 256, 4, 2), Int8Tile(64, 64, 128, 4, 3))


def int8_bits_are_those_of_the_cpu() -> None:
    for dtype in DTYPES:
        kernels, reference = Int8TritonKernels(dtype), Int8Kernels(dtype)
        x, weight, bias = int8_operands(dtype)
        # The reference adds in float64 on the CPU.
        on_cpu = [each.cpu() for each in (x, weight, bias)]
        packed, expected_pack = kernels.pack(weight), reference.pack(on_cpu[1])
        assert torch.equal(kernels.unpack(packed, 3, 9).cpu(), reference.unpack(expected_pack, 3, 9))
        for added, added_there in ((None, None), (bias, on_cpu[2])):
            expected = bits(reference.linear(on_cpu[0], expected_pack, added_there))
            assert torch.equal(bits(kernels.linear(x, packed, added)).cpu(), expected), dtype
            assert kernels.linear(x[:0], packed, added).shape == (0, len(weight))
            operands = (*int8.quantise(x), kernels.weights.numbers(packed), kernels.weights.scales(packed))
            for tile in INT8_TILES:
                for by_tma in (False, True):
                    found = int8.multiply(*operands, added, dtype, tile=tile, by_tma=by_tma)
                    assert torch.equal(bits(found).cpu(), expected), (dtype, tile, by_tma)


def int8_gates_are_those_of_apart_matmuls() -> None:
    for dtype in DTYPES:
        kernels = Int8TritonKernels(dtype)
        x, weight, bias = int8_operands(dtype)
        packed = kernels.pack_gated(weight)
        finite = [0, 1, 4, 5, 8]
        found = kernels.gated_linear(x, packed, bias)[finite]
        expected = kernels.silu_and_mul(kernels.linear(x, packed, bias))[finite]
        assert error_of(found, expected) < 4 * torch.finfo(dtype).eps


def int8_shares_of_two_ranks_have_the_bits_of_one() -> None:
    kernels = Int8TritonKernels(torch.float32)
    x, weight, bias = int8_operands(torch.float32)
    x, weight = x[:, :256], weight[:, :256]
    whole = kernels.linear(x, kernels.pack(weight), bias)

    def shared(maxima: Tensor) -> Tensor:
        packs = [kernels.pack_part(part, row_maxima(weight)) for part in weight.chunk(2, 1)]
        sums = [kernels.sums(own, maxima, packed) for own, packed in zip(x.chunk(2, 1), packs, strict=True)]
        return kernels.scaled(torch.stack(sums), maxima, packs[0], bias)

    assert torch.equal(bits(shared(row_maxima(x))), bits(whole))
    # Control: with the maxima of one share they are other numbers.
    assert not torch.equal(bits(shared(row_maxima(x[:, :128]))), bits(whole))


def int8_experts_of(
    kernels: Int8TritonKernels, dtype: torch.dtype, own: tuple[int, ...], **kind: Any
) -> tuple[dict[int, ExpertWeights], ExpertSizes]:
    """Some of 5 experts of 48 inputs and 32 columns, with biases."""
    hidden, size, is_gated = 48, 32, kind.get("is_gated", True)
    weights = {}
    for expert in own:
        generator = torch.Generator(torch.get_default_device()).manual_seed(expert)
        shapes = ((size * (1 + is_gated), hidden), (size * (1 + is_gated),), (hidden, size), (hidden,))
        gates, gates_bias, down, down_bias = (torch.randn(each, generator=generator).to(dtype) for each in shapes)
        weights[expert] = ExpertWeights(kernels.pack_gated(gates), gates_bias, kernels.pack(down), down_bias)
    sizes = {"activation": "silu", "limit": 0.0, "bound": 0.0, "is_gated": True} | kind
    return weights, ExpertSizes(5, hidden, size, leaf_ends=(), dtype=dtype, part_dtype=dtype, **sizes)


def int8_experts_together_have_the_bits_of_each() -> None:
    """Gates of three kinds; experts of another rank, one that nobody chose, and padding."""
    kinds: tuple[dict[str, Any], ...] = ({}, {"limit": 0.7}, {"is_gated": False, "activation": "gelu_tanh"})
    for dtype, kind in [(DTYPES[0], kind) for kind in kinds] + [(DTYPES[1], kinds[0])]:
        kernels, own = Int8TritonKernels(dtype), (0, 1, 3, 4)
        experts, sizes = int8_experts_of(kernels, dtype, own, **kind)
        joined = kernels.join_experts(experts, sizes)
        x, ids = numbers(20, 48, dtype=dtype), torch.tensor([[0, 2], [1, 4], [0, 1], [1, 2]] * 5)
        x[3] = 0.0
        slots, totals = torch.zeros(20, dtype=torch.int32), torch.zeros(5, dtype=torch.int64)
        slots[18:] = -1
        found = joined.outputs(x, ids, totals, slots).view(20, 2, 48)
        assert totals.tolist() == [9, 13, 9, 0, 5], totals
        for token, chosen in enumerate(ids.tolist()):
            for place, expert in enumerate(chosen):
                each = experts.get(expert)
                if each is None or token >= 18:
                    assert (found[token, place] == 0).all()
                    continue
                columns = kernels.linear(x[token : token + 1], each.gates, each.gates_bias)
                expected = kernels.linear(joined._activated(columns), each.down, each.down_bias)
                assert torch.equal(found[token, place], expected[0]), (kind, token, expert)
        # The caller's activation has columns by slot; other ranks' and padding's are zero.
        seen: list[Tensor] = []

        def activated(columns: Tensor, joined: Any = joined, seen: list[Tensor] = seen) -> Tensor:
            seen.append(columns)
            return joined._activated(columns)

        assert torch.equal(joined.outputs(x, ids, totals.clone(), slots, activated).view(20, 2, 48), found)
        columns = seen[0].view(20, 2, -1)
        assert (columns[18:] == 0).all()
        assert (columns[:18][ids[:18] == 2] == 0).all()
        first = experts[0]
        assert torch.equal(columns[:1, 0], kernels.linear(x[:1], first.gates, first.gates_bias))
        alone = joined.outputs(x[5:6], ids[5:6], totals)
        assert torch.equal(alone.view(2, 48), found[5])
        weights = torch.randn(20, 2)
        total = joined.weighted_sum(found.view(40, 48), weights)
        expected = (found[:, 0].float() * weights[:, :1] + found[:, 1].float() * weights[:, 1:]).to(dtype)
        assert torch.equal(total, expected)
        # Control: an expert's scale is read from its own row.
        kernels.weights.scales(experts[4].down)[7] *= 2
        assert not torch.equal(joined.outputs(x, ids, totals, slots).view(20, 2, 48)[1, 1], found[1, 1])
        # Tables stay where graphs read them; other addresses are other tables.
        assert kernels.join_experts(experts, sizes) is joined
        assert kernels.join_experts({each: experts[each] for each in (0, 1)}, sizes) is not joined
    plain = ExpertWeights(numbers(64, 40), None, numbers(40, 32), None)
    assert kernels.join_experts({0: plain}, sizes) is None


def control_an_int8_sum_off_by_one_is_found() -> None:
    kernels = Int8TritonKernels(torch.float32)
    x, weight, _ = int8_operands(torch.float32)
    packed = kernels.pack(weight)
    before = kernels.linear(x, packed, None)
    packed[0, 0] += 1
    assert not torch.equal(bits(kernels.linear(x, packed, None)), bits(before))


def an_int8_engine_has_the_tokens_of_the_cpu() -> None:
    """Greedy, of a model of two layers; the refusal of FP8 where it would be rounded wrongly."""
    if not is_interpreted():
        return
    # Not needed, and perhaps not importable, where kernels alone are tried on a GPU.
    from triton_engine import CONFIG

    from spmd_worker import LLM, SamplingParams
    from spmd_worker.base.errors import ConfigError

    attention_kernels.ROWS, attention_kernels.TILE, attention_kernels.SEGMENT = 16, 16, 32
    prompts = [{"prompt_token_ids": [3 + (row * 31 + at * 17) % 300 for at in range(1 + 9 * row)]} for row in range(4)]
    params, found = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), []
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(CONFIG))
        arguments = {"dtype": "float32", "device": "cpu", "load_format": "dummy", "num_blocks": 64}
        for quantization, backend in (("int8", "cpu"), ("int8", "triton"), (None, "cpu")):
            with LLM(folder, quantization=quantization, device_backend=backend, **arguments) as llm:
                outputs = llm.generate(prompts, params, use_tqdm=False)
                found.append([output.outputs[0].token_ids for output in outputs])
        try:
            LLM(folder, quantization="fp8", device_backend="triton", **arguments).close()
            refusal = ""
        except ConfigError as error:
            refusal = str(error)
    assert found[1] == found[0]
    assert found[2] != found[0], "control: eight bits are seen"
    assert "rounds FP8 wrongly: use model.quantization=int8" in refusal.replace(
        " quantization=", " model.quantization="
    ), refusal


GATE: tuple[Callable[[], None], ...] = (
    activations_are_quantised_as_torch_does,
    rows_longer_than_registers_are_quantised_alike,
    producers_quantise_as_a_launch_of_its_own,
    matmuls_take_rows_that_are_quantised,
    values_that_are_not_finite_stay_so,
    fp8_matmuls_are_the_definition,
    a_row_beside_one_that_is_not_finite_keeps_its_bits,
    fp8_gates_are_those_of_apart_matmuls,
    fp8_gates_of_many_rows_have_the_bits_of_few,
    a_rows_fp8_matmul_does_not_depend_on_the_others,
    fp8_kernels_are_near_the_reference,
    sums_of_two_ranks_are_near_those_of_one,
    control_another_order_of_steps_is_found,
    control_a_wrong_scale_is_found,
    int8_bits_are_those_of_the_cpu,
    int8_gates_are_those_of_apart_matmuls,
    int8_shares_of_two_ranks_have_the_bits_of_one,
    int8_experts_together_have_the_bits_of_each,
    control_an_int8_sum_off_by_one_is_found,
)
REST: tuple[Callable[[], None], ...] = (
    fp8_tiles_have_the_same_bits_with_scales_of_rows,
    fp8_tiles_have_the_same_bits_with_scales_of_groups,
    fp8_tiles_have_the_same_bits_with_scales_of_blocks,
    an_int8_engine_has_the_tokens_of_the_cpu,
)


def run_on_gpu(name: str) -> str:
    torch.set_default_device("cuda")
    return run(globals()[name])


def main() -> None:
    set_device()
    if is_interpreted():
        for module, kind, rows in ((fp8, Fp8Tile, 32), (int8, Int8Tile, 16)):
            for name in [each for each, tile in vars(module).items() if isinstance(tile, kind)]:
                setattr(module, name, replace(getattr(module, name), rows=rows, columns=64))
    cases = GATE if "gate" in sys.argv else (*GATE, *REST)
    if not is_interpreted():
        # A GPU may be there for minutes only: kernels are compiled side by side.
        names = [case.__name__ for case in cases]
        with ProcessPoolExecutor(_PROCESSES, get_context("spawn")) as pool:
            print(json.dumps(dict(zip(names, pool.map(run_on_gpu, names), strict=True))))
        return
    report(cases)


if __name__ == "__main__":
    main()
