"""Products by oneDNN are of few numbers of rows: it keeps compiled kernels for each number, some for good."""

import pytest
import torch
import torch.nn.functional as F
from native_libraries import needs_onednn_bfloat16
from torch.utils._python_dispatch import TorchDispatchMode

from spmd_worker.ops.kernels.cpu import linear
from spmd_worker.ops.kernels.cpu.linear import PackedKernels

MOST_ROWS = 600
MOST_NUMBERS = 20
PRODUCTS = {"_linear_pointwise": 0, "linear": 0, "mm": 0, "addmm": 1}
"""Operations, and the place of the rows among their arguments."""


class ProductRows(TorchDispatchMode):
    """Numbers of rows of the products in its context."""

    def __init__(self):
        super().__init__()
        self.numbers: set[int] = set()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name = operation.__name__.partition(".")[0]
        if name in PRODUCTS:
            self.numbers.add(len(args[PRODUCTS[name]]))
        return operation(*args, **(kwargs or {}))


def numbers_of_rows(multiply, x, step=1):
    with ProductRows() as seen:
        for count in range(1, len(x) + 1, step):
            multiply(x[:count])
    return seen.numbers


def numbers(*shape, dtype):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.fixture(
    params=["float32", pytest.param("bfloat16", marks=needs_onednn_bfloat16), "float16", "converted bfloat16"]
)
def dtype(request, monkeypatch):
    """Packed, plain in half precision, and bfloat16 that oneDNN cannot pack."""
    if request.param == "converted bfloat16":
        linear.converts_to_float32.cache_clear()
        monkeypatch.setattr(linear, "can_pack", lambda dtype: dtype == torch.float32)
        yield torch.bfloat16
        linear.converts_to_float32.cache_clear()
    else:
        yield getattr(torch, request.param)


def test_products_have_few_numbers_of_rows(dtype):
    kernels, x = PackedKernels(), numbers(MOST_ROWS, 72, dtype=dtype)
    weight = kernels.pack(numbers(50, 72, dtype=dtype))
    # Blocks are powers of two: whatever is left of one is met.
    assert 0 < len(numbers_of_rows(lambda rows: kernels.linear(rows, weight, None), x, step=5)) <= MOST_NUMBERS


def test_counted_rows_of_plain_products_differ():
    """Negative control."""
    weight, x = numbers(50, 72, dtype=torch.float16), numbers(2 * MOST_NUMBERS, 72, dtype=torch.float16)
    assert len(numbers_of_rows(lambda rows: F.linear(rows, weight), x)) == len(x)


@pytest.mark.parametrize("has_bias", [False, True])
def test_blocks_keep_the_bits_of_rows(has_bias):
    kernels, x = PackedKernels(), numbers(MOST_ROWS, 72, dtype=torch.float32)
    weight = kernels.pack(numbers(50, 72, dtype=torch.float32))
    bias = numbers(50, dtype=torch.float32) if has_bias else None
    whole = kernels.linear(x, weight, bias)
    expected = F.linear(x, numbers(50, 72, dtype=torch.float32), bias)
    torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-4)
    for count in (1, 2, 3, 16, 17, 255, 256, 257, 511, 513):
        for rows in (slice(count), slice(-count, None)):
            assert torch.equal(kernels.linear(x[rows], weight, bias), whole[rows]), rows
