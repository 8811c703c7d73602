"""The largest of each row of a product, by way of a screen: the value and the place that the whole product has."""

import pytest
import torch
from native_libraries import EMULATED, HAS_AMX, NATIVE, WITHOUT_AMX, library_for, needs_avx512
from torch import Tensor

from spmd_worker.model_config.int8_format import LEAST_SCREENED, screen_bytes
from spmd_worker.ops.kernels.cpu import native
from spmd_worker.ops.kernels.cpu.int8 import int8_kernels
from spmd_worker.ops.kernels.cpu.native import CpuKernels

LIBRARY = library_for(WITHOUT_AMX if HAS_AMX else NATIVE)
KERNELS = None if isinstance(LIBRARY, str) else CpuKernels(LIBRARY)
needs_screens = pytest.mark.skipif(
    KERNELS is None or not KERNELS._has_screens, reason="no AVX-512 that multiplies bytes and bfloat16"
)
# (outputs, inputs): rows of bytes that end with a step of the AMX unit and within one; as few elements as are screened.
SHAPES = [(21856, 96), (32768, 64), (4096, 576)]
NUM_ROWS = 33


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape) + seed)).bfloat16()


class Screened:
    """A weight with its screen."""

    def __init__(self, weight: Tensor) -> None:
        assert KERNELS is not None
        self.weight, self.packed = weight, KERNELS.pack(weight)
        self.screen = torch.zeros(KERNELS.screen_bytes(self.packed), dtype=torch.int8)
        KERNELS.make_screen_(self.screen, self.packed)

    def find(self, x: Tensor, count: int | None = None, *, has_rows: bool = True) -> tuple[Tensor, Tensor, int]:
        count = len(self.weight) if count is None else count
        rows = self.weight if has_rows else None
        return KERNELS.screened_argmax(x, self.packed, count, self.screen, rows)

    def agrees(self, x: Tensor, count: int | None = None) -> int:
        """Of how many outputs the products were computed, where what is found is what there is."""
        expected = KERNELS.linear_argmax(x, self.packed, len(self.weight) if count is None else count)
        for has_rows in (True, False):
            values, places, num_computed = self.find(x, count, has_rows=has_rows)
            assert values.equal(expected[0]) or (values.isnan() == expected[0].isnan()).all()
            finite = ~expected[0].isnan()
            assert torch.equal(values[finite], expected[0][finite])
            assert torch.equal(places, expected[1])
        return num_computed


@needs_screens
@pytest.mark.parametrize(("num_outputs", "num_inputs"), SHAPES)
def test_what_is_found_is_the_largest_and_little_of_the_product_is_computed(num_outputs: int, num_inputs: int):
    screened = Screened(numbers(num_outputs, num_inputs))
    x = numbers(NUM_ROWS, num_inputs)
    num_computed = screened.agrees(x)
    assert NUM_ROWS <= num_computed < NUM_ROWS * num_outputs / 50
    # Rows of padding beyond `count`, and rows that are not in one piece.
    screened.agrees(x, num_outputs - 21)
    screened.agrees(numbers(NUM_ROWS, 2 * num_inputs)[:, ::2])


@needs_screens
def test_a_row_has_its_result_alone_and_whatever_the_number_of_threads(monkeypatch: pytest.MonkeyPatch):
    screened, x = Screened(numbers(4096, 576)), numbers(NUM_ROWS, 576)
    values, places, _ = screened.find(x)
    for threads in (1, 3):
        monkeypatch.setattr(native, "num_threads", lambda threads=threads: threads)
        for row in range(0, NUM_ROWS, 4):
            alone = screened.find(x[row : row + 1])
            assert (alone[0][0], alone[1][0]) == (values[row], places[row])


@needs_screens
def test_of_equal_products_the_first_is_found_and_of_those_that_round_to_one():
    weight = numbers(4096, 576)
    # Row 0 points at outputs 700, 701 and 3000, which are one; row 1 at some that differ by less than is rounded off.
    weight[[700, 701, 3000]] = weight[3].clone()
    weight[1000:1040] = weight[5].clone()
    weight[1000:1040, 7] += torch.arange(40).bfloat16() * 2.0**-9
    screened, x = Screened(weight), torch.stack((weight[3], weight[5]))
    screened.agrees(x)
    assert screened.find(x)[1].tolist()[0] == 3
    ties = KERNELS.linear(x, screened.packed, None)[1]
    assert (ties == ties.max()).sum() > 1, "nothing rounds to one"


@needs_screens
@pytest.mark.parametrize("scale", [2.0**-120, 2.0**-100, 2.0**-60, 2.0**60, 2.0**80, 2.0**100, 2.0**120])
def test_numbers_that_are_small_or_large_for_a_float(scale: float):
    """Squares of them are none; of the largest some products are not either."""
    weight, x = numbers(4096, 576), numbers(NUM_ROWS, 576)
    Screened(weight * scale).agrees(x)
    Screened(weight).agrees(x * scale)
    Screened(weight * scale).agrees(x * scale)
    some = weight.clone()
    some[::3] *= scale
    Screened(some).agrees(x)
    # Whose products are of ordinary size, and, of some outputs, next to nothing.
    Screened(weight / scale).agrees(x * scale)
    few = -weight.abs()
    few[::3] /= scale
    few[5::7] *= 2.0**-60
    Screened(few).agrees(x.abs() * scale)


@needs_screens
def test_sums_of_bytes_that_are_infinite_once_they_are_scaled(monkeypatch: pytest.MonkeyPatch):
    """Of an output whose weights are tiny and many; it is the largest, and the sums of others are finite."""
    monkeypatch.setattr(native, "num_threads", lambda: 1)  # which sees output 1 before the others
    weight = torch.zeros(4096, 576)
    weight[:, 0] = -(2.0**-20)
    weight[1, 0] = -(2.0**-60)
    weight[2000] = -(2.0**-100)
    screened = Screened(weight.bfloat16())
    x = torch.full((2, 576), 2.0**118).bfloat16()
    screened.agrees(x)
    assert screened.find(x)[1].tolist() == [2000, 2000]


@needs_screens
def test_a_row_whose_outputs_are_all_alike_is_computed_whole():
    """And not one output after the other: of 300 rows that would be 40 million."""
    screened = Screened(torch.full((32768, 64), 0.01).bfloat16())
    assert screened.agrees(torch.ones(300, 64).bfloat16()) == 300 * 32768
    # From the last output on they grow: each is the largest so far.
    rising = torch.ones(32768, 64).bfloat16() * torch.linspace(1, 4, 32768).bfloat16()[:, None]
    Screened(rising).agrees(torch.ones(3, 64).bfloat16())


@needs_screens
def test_rows_that_a_screen_says_nothing_of_are_computed_whole():
    weight, x = numbers(4096, 576), numbers(NUM_ROWS, 576)
    screened = Screened(weight)
    x[3] = 0.0
    x[5, 8] = torch.nan
    x[7, 9] = torch.inf
    # A few elements so large that bytes are too coarse for all others.
    x[9, :3] = 300.0
    num_computed = screened.agrees(x)
    assert num_computed > 3 * 4096
    assert screened.find(x)[0][[5, 7]].isfinite().sum() == 0
    assert num_computed < NUM_ROWS * 4096 / 4


@needs_screens
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_outputs_with_weights_that_are_not_finite_are_always_computed(bad: float):
    weight, x = numbers(4096, 576), numbers(NUM_ROWS, 576)
    weight[1234, 17] = bad
    weight[1234, 18] = 0.0
    Screened(weight).agrees(x)
    x[:, 17] = 0.0
    values, _, num_computed = Screened(weight).find(x)
    assert values.isnan().all()
    assert num_computed < NUM_ROWS * 4096 / 10
    Screened(weight).agrees(x)


@needs_screens
def test_without_its_bounds_a_screen_finds_others():
    """Negative control: of some rows bytes take another output for the largest."""
    screened, x = Screened(numbers(4096, 576)), numbers(2000, 576)
    screened.agrees(x)
    expected = screened.find(x)[1]
    end = screened.screen.numel() - 8 * 4096 // 16
    screened.screen[end:] = 0
    assert (screened.find(x)[1] != expected).sum() > 0


@needs_screens
def test_a_screen_of_what_the_weight_was_finds_others():
    """Negative control of the above."""
    screened, x = Screened(numbers(4096, 576)), numbers(NUM_ROWS, 576)
    screened.packed = KERNELS.pack(numbers(4096, 576, seed=1))
    with pytest.raises(AssertionError):
        screened.agrees(x)


@needs_screens
def test_what_has_no_screen():
    weight = torch.zeros(4096, 576)
    assert KERNELS.screen_bytes(KERNELS.pack(weight)) == 0, "float32"
    assert KERNELS.screen_bytes(KERNELS.pack(weight.bfloat16()[:512])) == 0, "small"
    assert KERNELS.screen_bytes(weight.bfloat16()) == 0, "not packed"
    assert KERNELS.screen_bytes(KERNELS.pack_gated(weight.bfloat16())) == 0, "gated"
    assert KERNELS.screen_bytes(KERNELS.pack(weight.bfloat16())) == screen_bytes(4096, 576)
    quantised, _ = int8_kernels(torch.bfloat16)
    assert quantised.screen_bytes(quantised.pack(weight.bfloat16())) == 0, "int8"


@needs_avx512
@pytest.mark.matrix
def test_where_a_unit_multiplies_there_is_no_screen():
    kernels = CpuKernels(library_for(EMULATED))
    assert kernels.screen_bytes(kernels.pack(torch.zeros(4096, 576, dtype=torch.bfloat16))) == 0


def test_bytes_of_a_screen():
    assert screen_bytes(4096, 576) == 256 * (576 * 16 + 128 + 8)
    assert screen_bytes(4096, 96 * 8) == 256 * (96 * 8 * 16 + 128 + 8)
    assert screen_bytes(4097, 576) == screen_bytes(4096, 575) == 0
    assert screen_bytes(LEAST_SCREENED // 64, 64) > 0
    assert screen_bytes(LEAST_SCREENED // 64 - 16, 64) == 0
    assert screen_bytes(1 << 20, 1 << 13) == 0
