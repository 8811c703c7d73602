"""GEMMs have the bits that they had: digests of results, recorded once for each instruction set.

Every result is one chain of steps over the inputs, in an order of the micro-kernel's own: cut, threads and epilogues
change no bit of it. The inputs are made of whole numbers, so that no library draws others one day. AVX-512's products
of pairs of bfloat16 are left to tests that compare: whether all processors round them alike is not known.
"""

import functools
import hashlib

import numpy as np
import pytest
import torch
from native_builds import DOTS, EMULATED, HAS_AMX, NATIVE, WITHOUT_AMX, library_for
from native_libraries import each_library_and_emulator
from torch import Tensor

from spmd_worker.ops.kernels.cpu.int8 import Int8CpuKernels
from spmd_worker.ops.kernels.cpu.native import CpuKernels

# (inputs, outputs, rows): a last panel that is alone, several parts of the inputs, of the rows and of the panels; rows
# that share sets of a cache.
SHAPES = [(64, 80, 5), (96, 96, 1), (320, 608, 33), (704, 560, 150), (1312, 96, 300), (4096, 288, 40)]
LONG = (8224, 96, 30)
"""Several parts of the inputs, of a byte each."""


def numbers(*shape: int, seed: int) -> Tensor:
    """From -1 to 1."""
    mixed = (np.arange(np.prod(shape), dtype=np.uint64) + np.uint64(seed << 32)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed >> np.uint64(40)).astype(np.float64) / 2**23 - 1
    return torch.from_numpy(mixed.astype(np.float32).reshape(shape))


class Digest:
    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=8)

    def add(self, *results: Tensor) -> None:
        for each in results:
            integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[each.element_size()]
            self._hash.update(each.contiguous().view(integers).numpy().tobytes())

    def __str__(self) -> str:
        return self._hash.hexdigest()


def operands(num_inputs: int, num_outputs: int, num_rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    x, weight = numbers(num_rows, num_inputs, seed=1).to(dtype), numbers(num_outputs, num_inputs, seed=2).to(dtype)
    x[num_rows // 2, 3:] = 0.0
    return x, weight, numbers(num_outputs, seed=3).to(dtype)


def gemm_digest(instruction_set: str, dtype: torch.dtype) -> str:
    kernels, digest = CpuKernels(library_for(instruction_set)), Digest()
    for shape in SHAPES:
        x, weight, bias = operands(*shape, dtype)
        packed = kernels.pack(weight)
        digest.add(kernels.linear(x, packed, None), kernels.linear(x, packed, bias))
        if shape[1] % 32 == 0:
            digest.add(kernels.gated_linear(x, kernels.pack_gated(weight), bias))
        digest.add(*kernels.linear_argmax(x, packed, shape[1] - 7))
    return str(digest)


def int8_digest(instruction_set: str, dtype: torch.dtype) -> str:
    kernels, digest = Int8CpuKernels(library_for(instruction_set), dtype), Digest()
    for shape in (*SHAPES, LONG):
        x, weight, bias = operands(*shape, dtype)
        packed = kernels.pack(weight)
        digest.add(kernels.linear(x, packed, None), kernels.linear(x, packed, bias))
        digest.add(kernels.sums(x, kernels.row_maxima(x), packed))
        if shape[1] % 32 == 0:
            # Without SiLU, whose exponential is not one on all instruction sets.
            digest.add(kernels.linear(x, kernels.pack_gated(weight), bias))
        digest.add(*kernels.linear_argmax(x, packed, shape[1] - 7))
    return str(digest)


RECORDED = {
    ("amx", "float32"): "75df66b4a5643214",
    ("amx", "bfloat16"): "308fc39f9dc49ab4",
    ("dots", "float32"): "5f9e8b1301e34513",
    ("avx512", "float32"): "5f9e8b1301e34513",
    ("avx512", "bfloat16"): "88f04bcc8cbdcb91",
    ("avx2", "float32"): "5f9e8b1301e34513",
    ("avx2", "bfloat16"): "88f04bcc8cbdcb91",
}
INT8 = {"float32": "a0d5bd8fb8afb71c", "bfloat16": "184fb31e21dda686"}


@functools.cache
def multiplied_by(instruction_set: str) -> str:
    """Micro-kernels that share their bits."""
    library = library_for(instruction_set)
    if library.has_amx:
        return "amx"
    return "dots" if library.instruction_set == DOTS else library.instruction_set.split()[0]


@each_library_and_emulator
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_gemms_have_the_bits_that_were_recorded(instruction_set: str, dtype: torch.dtype):
    name = multiplied_by(instruction_set), str(dtype).removeprefix("torch.")
    if name not in RECORDED:
        pytest.skip(f"nothing is recorded of {name[0]} with {name[1]}")
    assert gemm_digest(instruction_set, dtype) == RECORDED[name]


@pytest.mark.gate("bfloat16-*", "*-native", "*-x86-64-v3")
@each_library_and_emulator
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_int8_gemms_have_recorded_bits_everywhere(instruction_set: str, dtype: torch.dtype):
    assert int8_digest(instruction_set, dtype) == INT8[str(dtype).removeprefix("torch.")]


def test_another_order_of_the_steps_has_another_digest():
    """Negative control: AVX-512's or AVX2's chain of pairs is not the tile unit's."""
    sets = (EMULATED, WITHOUT_AMX if HAS_AMX else NATIVE)
    if not all("float32" in library_for(each).gemm_dtypes for each in sets) or not library_for(EMULATED).has_amx:
        pytest.skip("the emulation is made of AVX-512 and its bfloat16 instructions")
    assert gemm_digest(sets[0], torch.float32) != gemm_digest(sets[1], torch.float32)
