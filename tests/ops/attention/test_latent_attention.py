"""Compiled attention over latents: close to the formula, and the same bits for a row however it is computed. Products
of heads with their own weights likewise.
"""

import math
from itertools import accumulate

import pytest
import torch
from native_builds import WITHOUT_AMX, library_for
from native_libraries import each_library, needs_products
from torch import Tensor

from spmd_worker.ops.attention import cpu
from spmd_worker.ops.attention.backend import AttentionBackend
from spmd_worker.ops.attention.cache_dtype import FP8, from_cache, to_cache
from spmd_worker.ops.attention.cpu import CpuBackend
from spmd_worker.ops.attention.metadata import AttentionMetadata
from spmd_worker.ops.attention.sdpa import SdpaBackend
from spmd_worker.ops.kernels.cpu.native import CpuKernels
from spmd_worker.ops.kernels.reference import ReferenceKernels

FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
LENGTHS = (130, 70, 1)
SHAPES = {"deepseek": (8, 576, 512, 16), "small": (3, 48, 32, 4)}
"""Query heads, sizes of a key and of a value, tokens of a block."""
each_dtype = pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
each_shape = pytest.mark.parametrize("shape", SHAPES)


class Latents:
    """Sequences of random queries and keys, which are written and attended `chunk` tokens of each at a time."""

    def __init__(self, backend: AttentionBackend, shape: str, dtype: torch.dtype, *used: int) -> None:
        self.backend, (num_heads, size, self.value_size, self.block_size) = backend, SHAPES[shape]
        generator = torch.Generator().manual_seed(5)
        rows = [
            [torch.randn(length, heads, size, generator=generator).to(dtype) for heads in (num_heads, 1)]
            for length in LENGTHS
        ]
        self.rows = [rows[index] for index in used or range(len(rows))]
        counts = [-(-len(query) // self.block_size) for query, _ in self.rows]
        block_shape = backend.block_shape(1, self.block_size, size, has_values=False)
        # NaN where nothing was written: a key that should not be looked at shows.
        of_cache = getattr(backend, "cache_dtype", None) or dtype
        self.cache = to_cache(torch.full((sum(counts) + 2, *block_shape), math.nan, dtype=dtype), of_cache)
        order = torch.randperm(len(self.cache), generator=generator)[: sum(counts)]
        self.tables = torch.zeros(len(counts), max(counts), dtype=torch.int64)
        for row, blocks in zip(self.tables, order.split(counts), strict=True):
            row[: len(blocks)] = blocks

    def run(self, chunk: int) -> list[Tensor]:
        parts: list[list[Tensor]] = [[] for _ in self.rows]
        for first in range(0, max(len(query) for query, _ in self.rows), chunk):
            used = [index for index, (query, _) in enumerate(self.rows) if first < len(query)]
            ends = [min(first + chunk, len(self.rows[index][0])) for index in used]
            outputs = self._step(used, first, ends)
            for index, output in zip(used, outputs, strict=True):
                parts[index].append(output)
        return [torch.cat(each) for each in parts]

    def _step(self, used: list[int], first: int, ends: list[int]) -> tuple[Tensor, ...]:
        counts, tables = [end - first for end in ends], self.tables[used]
        at = [torch.arange(first, end) for end in ends]
        blocks = torch.cat([table[each // self.block_size] for table, each in zip(tables, at, strict=True)])
        metadata = AttentionMetadata(
            *((0, *accumulate(counts)), tuple(ends), tables, blocks, torch.cat(at) % self.block_size)
        )
        query, key = (
            torch.cat([self.rows[index][part][first:end] for index, end in zip(used, ends, strict=True)])
            for part in (0, 1)
        )
        self.backend.write(key, None, self.cache, metadata)
        scale = query.shape[2] ** -0.5
        return self.backend.attend(query, self.cache, metadata, scale, 0, value_size=self.value_size).split(counts)

    def formula(self, index: int) -> Tensor:
        """In float64."""
        query, key = (each.double() for each in self.rows[index])
        scores = torch.einsum("thd,sd->hts", query, key[:, 0]) * query.shape[2] ** -0.5
        seen = torch.ones(len(key), len(key)).tril().bool()
        weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
        return torch.einsum("hts,sv->thv", weights, key[:, 0, : self.value_size])


def error(found: list[Tensor], latents: Latents) -> float:
    expected = [latents.formula(index) for index in range(len(found))]
    return max(
        float((one.double() - other).abs().max() / other.abs().max())
        for one, other in zip(found, expected, strict=True)
    )


def compiled(instruction_set: str, shape: str, dtype: torch.dtype) -> CpuBackend:
    _, size, _, block_size = SHAPES[shape]
    return CpuBackend(library_for(instruction_set), dtype, (size,), block_size)


@each_library
@each_dtype
@each_shape
def test_rows_are_right_and_have_equal_bits(instruction_set: str, dtype: torch.dtype, shape: str):
    backend = compiled(instruction_set, shape, dtype)
    latents = Latents(backend, shape, dtype)
    whole = latents.run(1000)
    assert error(whole, latents) < (2e-6 if dtype == FLOAT32 else 4e-3)
    for chunk in (16, 64, 65) if shape == "deepseek" else (1, 7, 63):
        assert all(map(torch.equal, Latents(backend, shape, dtype).run(chunk), whole)), chunk
    for index in range(len(LENGTHS)):
        assert torch.equal(Latents(backend, shape, dtype, index).run(13)[0], whole[index]), index


@each_library
@each_dtype
@each_shape
def test_fp8_cache_has_bits_of_rounded_keys(instruction_set: str, dtype: torch.dtype, shape: str):
    _, size, _, block_size = SHAPES[shape]
    plain, reduced = (
        Latents(CpuBackend(library_for(instruction_set), dtype, (size,), block_size, cache_dtype), shape, dtype)
        for cache_dtype in (dtype, FP8)
    )
    assert not any(map(torch.equal, plain.run(1000), reduced.run(1000)))
    for _, key in plain.rows:
        key.copy_(from_cache(to_cache(key, FP8), dtype))
    for chunk in (1000, 63):
        assert all(map(torch.equal, plain.run(1000), reduced.run(chunk))), chunk


def test_a_key_too_few_is_noticed():
    """Negative control: the last key of the first row is another."""
    latents = Latents(compiled(WITHOUT_AMX, "small", FLOAT32), "small", FLOAT32)
    found = latents.run(1000)
    latents.rows[0][1][-1] += 1.0
    assert error(found, latents) > 1e-3


@each_dtype
@each_shape
def test_plain_torch_agrees_with_the_formula(dtype: torch.dtype, shape: str):
    latents = Latents(SdpaBackend(), shape, dtype)
    assert error(latents.run(64), latents) < (2e-6 if dtype == FLOAT32 else 4e-3)


@pytest.mark.parametrize("sizes", [(592, 16), (48, 3)])
def test_backend_rejects_sizes_it_cannot_compute(sizes: tuple[int, int]):
    size, block_size = sizes
    assert cpu.MAX_HEAD_SIZE == 576
    assert "compiled attention needs a" in str(cpu.cpu_backend_or_reason(FLOAT32, (size,), block_size))


@needs_products
@each_library
@each_dtype
def test_heads_are_multiplied_row_by_row(instruction_set: str, dtype: torch.dtype):
    """Strided rows into strided rows. Weights that fit no panels are oneDNN's."""
    kernels = CpuKernels(library_for(instruction_set))
    generator = torch.Generator().manual_seed(3)
    for num_heads, num_inputs, num_outputs in ((2, 128, 512), (16, 32, 48), (3, 20, 24)):
        weight = torch.randn(num_heads, num_outputs, num_inputs, generator=generator).to(dtype)
        packed = kernels.pack_heads(weight)
        assert packed.numel() == weight.numel()
        assert torch.equal(kernels.unpack_heads(packed), weight)
        x = torch.randn(37, num_heads, num_inputs + 8, generator=generator).to(dtype)[..., 8:]
        out = torch.zeros(37, num_heads, num_outputs + 16, dtype=dtype)
        kernels.linear_of_heads(x, packed, out[..., 16:])
        expected = torch.einsum("thi,hoi->tho", x.double(), weight.double())
        difference = (out[..., 16:].double() - expected).abs().max() / expected.abs().max()
        assert difference < (2e-6 if dtype == FLOAT32 else 4e-3)
        assert not out[..., :16].any()
        alone = torch.zeros(1, num_heads, num_outputs, dtype=dtype)
        kernels.linear_of_heads(x[5:6], packed, alone)
        assert torch.equal(alone[0], out[5, :, 16:])
    plain = torch.zeros(37, 3, 24, dtype=dtype)
    ReferenceKernels().linear_of_heads(x, weight, plain)
    torch.testing.assert_close(plain, out[..., 16:], rtol=2e-2, atol=2e-2)
