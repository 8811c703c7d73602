"""Marks of tests of the libraries that native_builds.py has, and models that compute with one of them."""

import importlib
from collections.abc import Iterable

import pytest
import torch
from native_builds import (
    EMULATED,
    HAS_AMX,
    INSTRUCTION_SETS,
    NATIVE,
    WITHOUT_AMX,
    emulated,
    is_of_stress_tier,
    library_for,
)

from spmd_worker.ops.kernels.cpu.linear import keep_onednn_from_amx

# As a worker does, before oneDNN is asked anything: it reads what it may use once.
keep_onednn_from_amx()
ONEDNN_PACKS_BFLOAT16 = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
"""Whether torch supports it: on x86 with AVX-512 or avx_ne_convert."""
needs_onednn_bfloat16 = pytest.mark.skipif(
    not ONEDNN_PACKS_BFLOAT16, reason="torch's oneDNN packs no bfloat16 without AVX-512 or avx_ne_convert"
)
needs_avx512 = pytest.mark.skipif(
    not emulated().has_amx,
    reason="the unit's kernels are made of AVX-512 and its bfloat16 instructions too, which are not here",
)
needs_products = pytest.mark.skipif(
    len(emulated().gemm_dtypes) < 2, reason="the library has no products of its own for this processor"
)


def _marks_of(instruction_set: str, *, is_emulator_a_subject: bool) -> list[pytest.MarkDecorator]:
    # Where the unit's kernels are left out, what would emulate it is the native library over again.
    if instruction_set == EMULATED:
        # Where the unit is, the native library has run the same code in it.
        is_repetition = HAS_AMX and not is_emulator_a_subject
        return [needs_avx512, *([pytest.mark.stress] if is_repetition else [])]
    if NATIVE in instruction_set:
        return []
    return [pytest.mark.stress if is_of_stress_tier(instruction_set) else pytest.mark.matrix]


def _each(instruction_sets: Iterable[str], *, is_emulator_a_subject: bool = False) -> pytest.MarkDecorator:
    found = [
        pytest.param(name, marks=_marks_of(name, is_emulator_a_subject=is_emulator_a_subject))
        for name in instruction_sets
    ]
    return pytest.mark.parametrize("instruction_set", found)


each_library = _each(INSTRUCTION_SETS)
each_library_and_emulator = _each(INSTRUCTION_SETS, is_emulator_a_subject=True)
"""With the emulated unit in the gate beside the real one too: for bits that are alike everywhere."""
each_vector_library = _each(each for each in INSTRUCTION_SETS if each not in (WITHOUT_AMX, EMULATED))
"""Libraries for kernels that have nothing to do with AMX: those of the others are the native one's own."""


def use(instruction_set: str) -> None:
    """Make models of this process compute with this library."""
    for module in ("ops.attention.cpu", "ops.kernels.cpu.native"):
        importlib.import_module(f"spmd_worker.{module}").native_library = lambda: library_for(instruction_set)
