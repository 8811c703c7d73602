"""The int8 pre-filter of the argmax: the values and indices of the full GEMM, bit for bit."""

from typing import Any

import pytest
import torch
from native_builds import EMULATED, HAS_AMX, NATIVE, WITHOUT_AMX, library_for
from native_libraries import needs_avx512
from torch import Tensor

from spmd_worker.ops.kernels.cpu import argmax_prefilter
from spmd_worker.ops.kernels.cpu.argmax_bytes import MIN_ELEMENTS, argmax_bytes
from spmd_worker.ops.kernels.cpu.argmax_prefilter import ArgmaxPrefilter
from spmd_worker.ops.kernels.cpu.int8 import int8_kernels
from spmd_worker.ops.kernels.cpu.native import CpuKernels

LIBRARY = library_for(WITHOUT_AMX if HAS_AMX else NATIVE)
KERNELS = None if isinstance(LIBRARY, str) else CpuKernels(LIBRARY, has_argmax_prefilter=True)
needs_prefilter = pytest.mark.skipif(
    KERNELS is None or KERNELS._prefilter is None, reason="no AVX-512 that multiplies bytes"
)
# (outputs, inputs): rows of bytes that end with a step of AMX and within one; the fewest elements that are filtered.
SHAPES = [(21856, 96), (32768, 64), (4096, 576)]
NUM_ROWS = 33


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape) + seed)).bfloat16()


class Filtered:
    """A weight with its pre-filter."""

    def __init__(self, weight: Tensor) -> None:
        assert KERNELS is not None
        self.weight, self.packed = weight, KERNELS.pack(weight)
        prefilter = KERNELS.argmax_module(self.packed)
        assert prefilter is not None
        self.prefilter = prefilter
        self.prefilter.fill(self.packed)

    def find(self, x: Tensor, count: int | None = None, *, has_rows: bool = True) -> tuple[Tensor, Tensor, int]:
        count = len(self.weight) if count is None else count
        rows = self.weight if has_rows else None
        return self.prefilter.find(x, self.packed, count, rows)

    def agrees(self, x: Tensor, count: int | None = None) -> int:
        """The number of outputs that were computed, if the results are those of the full GEMM."""
        expected = KERNELS.linear_argmax(x, self.packed, len(self.weight) if count is None else count)
        for has_rows in (True, False):
            values, places, num_computed = self.find(x, count, has_rows=has_rows)
            assert values.equal(expected[0]) or (values.isnan() == expected[0].isnan()).all()
            finite = ~expected[0].isnan()
            assert torch.equal(values[finite], expected[0][finite])
            assert torch.equal(places, expected[1])
        return num_computed


@needs_prefilter
@pytest.mark.parametrize(("num_outputs", "num_inputs"), SHAPES)
def test_prefilter_finds_argmax_with_few_outputs_computed(num_outputs: int, num_inputs: int):
    filtered = Filtered(numbers(num_outputs, num_inputs))
    x = numbers(NUM_ROWS, num_inputs)
    num_computed = filtered.agrees(x)
    assert NUM_ROWS <= num_computed < NUM_ROWS * num_outputs / 50
    # Rows of padding beyond `count`, and rows that are not in one piece.
    filtered.agrees(x, num_outputs - 21)
    filtered.agrees(numbers(NUM_ROWS, 2 * num_inputs)[:, ::2])


@needs_prefilter
def test_prefilter_results_independent_of_batch_and_threads(monkeypatch: pytest.MonkeyPatch):
    filtered, x = Filtered(numbers(4096, 576)), numbers(NUM_ROWS, 576)
    values, places, _ = filtered.find(x)
    for threads in (1, 3):
        monkeypatch.setattr(argmax_prefilter, "num_threads", lambda threads=threads: threads)
        for row in range(0, NUM_ROWS, 4):
            alone = filtered.find(x[row : row + 1])
            assert (alone[0][0], alone[1][0]) == (values[row], places[row])


@needs_prefilter
def test_prefilter_finds_first_of_equal_or_rounded_outputs():
    weight = numbers(4096, 576)
    # Row 0 points at outputs 700, 701 and 3000, which are one; row 1 at some that differ by less than is rounded off.
    weight[[700, 701, 3000]] = weight[3].clone()
    weight[1000:1040] = weight[5].clone()
    weight[1000:1040, 7] += torch.arange(40).bfloat16() * 2.0**-9
    filtered, x = Filtered(weight), torch.stack((weight[3], weight[5]))
    filtered.agrees(x)
    assert filtered.find(x)[1].tolist()[0] == 3
    ties = KERNELS.linear(x, filtered.packed, None)[1]
    assert (ties == ties.max()).sum() > 1, "nothing rounds to one"


@pytest.mark.gate("1.2089*", "7.888*", "8.6736*")
@needs_prefilter
@pytest.mark.parametrize("scale", [2.0**-120, 2.0**-100, 2.0**-60, 2.0**60, 2.0**80, 2.0**100, 2.0**120])
def test_prefilter_handles_extreme_magnitudes(scale: float):
    """Their squares underflow or overflow; so do some outputs at the largest scales."""
    weight, x = numbers(4096, 576), numbers(NUM_ROWS, 576)
    Filtered(weight * scale).agrees(x)
    Filtered(weight).agrees(x * scale)
    Filtered(weight * scale).agrees(x * scale)
    some = weight.clone()
    some[::3] *= scale
    Filtered(some).agrees(x)
    # Outputs of ordinary size, and some that are almost zero.
    Filtered(weight / scale).agrees(x * scale)
    few = -weight.abs()
    few[::3] /= scale
    few[5::7] *= 2.0**-60
    Filtered(few).agrees(x.abs() * scale)


@needs_prefilter
def test_prefilter_handles_scaled_sums_that_overflow(monkeypatch: pytest.MonkeyPatch):
    """The argmax has many tiny weights, and the sums of the others are finite."""
    monkeypatch.setattr(argmax_prefilter, "num_threads", lambda: 1)  # output 1 is seen before the others
    weight = torch.zeros(4096, 576)
    weight[:, 0] = -(2.0**-20)
    weight[1, 0] = -(2.0**-60)
    weight[2000] = -(2.0**-100)
    filtered = Filtered(weight.bfloat16())
    x = torch.full((2, 576), 2.0**118).bfloat16()
    filtered.agrees(x)
    assert filtered.find(x)[1].tolist() == [2000, 2000]


@needs_prefilter
def test_prefilter_uses_full_gemm_when_outputs_are_equal():
    """Not one output after the other: for 300 rows that would be 40 million."""
    filtered = Filtered(torch.full((32768, 64), 0.01).bfloat16())
    assert filtered.agrees(torch.ones(300, 64).bfloat16()) == 300 * 32768
    # Rising outputs: each is the maximum so far.
    rising = torch.ones(32768, 64).bfloat16() * torch.linspace(1, 4, 32768).bfloat16()[:, None]
    Filtered(rising).agrees(torch.ones(3, 64).bfloat16())


@needs_prefilter
def test_prefilter_uses_full_gemm_for_rows_without_bounds():
    weight, x = numbers(4096, 576), numbers(NUM_ROWS, 576)
    filtered = Filtered(weight)
    x[3] = 0.0
    x[5, 8] = torch.nan
    x[7, 9] = torch.inf
    # A few elements so large that bytes are too coarse for all others.
    x[9, :3] = 300.0
    num_computed = filtered.agrees(x)
    assert num_computed > 3 * 4096
    assert filtered.find(x)[0][[5, 7]].isfinite().sum() == 0
    assert num_computed < NUM_ROWS * 4096 / 4


@needs_prefilter
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_outputs_with_nonfinite_weights_are_always_computed(bad: float):
    weight, x = numbers(4096, 576), numbers(NUM_ROWS, 576)
    weight[1234, 17] = bad
    weight[1234, 18] = 0.0
    Filtered(weight).agrees(x)
    x[:, 17] = 0.0
    values, _, num_computed = Filtered(weight).find(x)
    assert values.isnan().all()
    assert num_computed < NUM_ROWS * 4096 / 10
    Filtered(weight).agrees(x)


@needs_prefilter
def test_prefilter_without_bounds_is_detected():
    """Negative control: the int8 sums alone have another argmax in some rows."""
    filtered, x = Filtered(numbers(4096, 576)), numbers(2000, 576)
    filtered.agrees(x)
    expected = filtered.find(x)[1]
    end = filtered.prefilter.int8_copy.numel() - 8 * 4096 // 16
    filtered.prefilter.int8_copy[end:] = 0
    assert (filtered.find(x)[1] != expected).sum() > 0


@needs_prefilter
def test_stale_prefilter_is_detected():
    """Negative control of the above."""
    filtered, x = Filtered(numbers(4096, 576)), numbers(NUM_ROWS, 576)
    filtered.packed = KERNELS.pack(numbers(4096, 576, seed=1))
    with pytest.raises(AssertionError):
        filtered.agrees(x)


@needs_prefilter
@pytest.mark.parametrize(
    "packed",
    [
        KERNELS.pack(torch.zeros(4096, 576)),
        KERNELS.pack(torch.zeros(512, 576).bfloat16()),
        torch.zeros(4096, 576).bfloat16(),
        KERNELS.pack_gated(torch.zeros(4096, 576).bfloat16()),
        int8_kernels(torch.bfloat16)[0].pack(torch.zeros(4096, 576).bfloat16()),
    ]
    if KERNELS
    else [],
    ids=["float32", "small", "not packed", "gated", "int8"],
)
def test_weight_has_no_prefilter_when_unsupported(packed: Tensor):
    assert KERNELS.argmax_module(packed) is None


@needs_avx512
@pytest.mark.matrix
def test_no_prefilter_when_cpu_has_amx():
    kernels = CpuKernels(library_for(EMULATED), has_argmax_prefilter=True)
    assert kernels.argmax_module(kernels.pack(torch.zeros(4096, 576, dtype=torch.bfloat16))) is None


def test_argmax_bytes_of_shapes_and_dtypes():
    def num_bytes(num_outputs: int, num_inputs: int, dtype: str = "bfloat16", device: str = "cpu") -> int:
        return argmax_bytes(num_outputs, num_inputs, dtype, device)

    assert num_bytes(4096, 576) == 256 * (576 * 16 + 128 + 8)
    assert num_bytes(4096, 96 * 8) == 256 * (96 * 8 * 16 + 128 + 8)
    assert num_bytes(4097, 576) == num_bytes(4096, 575) == 0
    assert num_bytes(4096, 576, "float32") == num_bytes(4096, 576, device="cuda") == 0
    assert num_bytes(MIN_ELEMENTS // 64, 64) > 0
    assert num_bytes(MIN_ELEMENTS // 64 - 16, 64) == 0
    assert num_bytes(1 << 20, 1 << 13) == 0


class CountingKernels:
    """Full GEMMs, and functions of a pre-filter that computes a given number of logits."""

    def __init__(self) -> None:
        self.num_computed, self.calls = 0, []

    def linear_argmax(self, *arguments: Any) -> tuple[str, str]:
        self.calls.append("full")
        return "values", "indices"

    def fill(self, *arguments: Any) -> None:
        self.calls.append("fill")

    def find(self, *arguments: Any) -> int:
        self.calls.append("filtered")
        return self.num_computed


def test_prefilter_refills_after_writes_and_bypasses_when_useless():
    kernels = CountingKernels()
    num_bytes = argmax_bytes(16384, 128, "bfloat16", "cpu")
    prefilter = ArgmaxPrefilter(kernels, kernels.fill, kernels.find, num_bytes)
    x, weight = torch.zeros(2, 128).bfloat16(), torch.zeros(1024, 64, 16, 2).bfloat16()
    with pytest.raises(AssertionError, match="512, 64, 16, 2"):
        prefilter(x, weight[:512], 100, None, 0)

    def call(version: int = 0) -> list[str]:
        prefilter(x, weight, 100, None, version)
        calls, kernels.calls = kernels.calls, []
        return calls

    assert [call(), call(), call(3), call(3)] == [["fill", "filtered"], ["filtered"]] * 2
    kernels.num_computed = 25
    assert call(3) == ["filtered"], "an eighth is no more than an eighth"
    kernels.num_computed = 26
    for num_calls in (64, 128, 256):
        assert call(3) == ["filtered"]
        assert all(call(3) == ["full"] for _ in range(num_calls))
    kernels.num_computed = 0
    assert [call(3), call(4)] == [["filtered"], ["fill", "filtered"]]
    kernels.num_computed = 26
    call(4)
    assert [call(4) for _ in range(65)] == [["full"]] * 64 + [["filtered"]]
