"""The compiled kernels for each instruction set that this machine runs, with the AMX unit, without it and emulated.

Knows names of instruction sets. Knows nothing of what is tested.
"""

import dataclasses
import functools
import importlib
import os
import platform
from pathlib import Path

import pytest
import torch

from spmd_worker.native import build
from spmd_worker.native.library import NativeLibrary, load, native_library

NATIVE = "native"
WITHOUT_AMX = "native without AMX"
EMULATED = "native with emulated AMX"
ONEDNN = "native with oneDNN's products"
EMULATE, LEAVE_OUT, DELAY = "-DSPMD_EMULATED_AMX", "-DSPMD_WITHOUT_AMX", "-DSPMD_PLANTED_DELAYS"


@functools.cache
def native() -> NativeLibrary:
    """The library as it is used on this machine."""
    library = native_library(NATIVE)
    assert isinstance(library, NativeLibrary), library
    return library


def emulated(architecture: str = NATIVE) -> NativeLibrary:
    """The same sources with the unit's instructions written out in C++. Kept on disk as the others are."""
    return compiled_with(EMULATE, architecture)


def built_with(flag: str, architecture: str = NATIVE) -> build.Built:
    """The same sources with a flag more, on disk."""
    # Only tests run it: it need not be compiled for long, and another optimization changes no bit.
    return built_for_tests(architecture, flag, *(["-O2"] if flag == EMULATE else []))


def built_for_tests(architecture: str, *flags: str) -> build.Built:
    before = build._FLAGS
    build._FLAGS = (*before, *flags)
    try:
        built = build.build(architecture)
    finally:
        build._FLAGS = before
    assert isinstance(built, build.Built), built
    return built


@functools.cache
def compiled_with(flag: str, architecture: str = NATIVE) -> NativeLibrary:
    """The same, loaded."""
    library = load(built_with(flag, architecture))
    assert isinstance(library, NativeLibrary), library
    return library


@functools.cache
def quickly_compiled(architecture: str) -> NativeLibrary:
    """A library for a lesser instruction set, which only tests run here. `native/test_users_flags.py` compiles them as
    users do.
    """
    flags = [] if os.environ.get("TESTS_FLAGS_OF_USERS") else ["-O2"]
    library = load(built_for_tests(architecture, *flags))
    assert isinstance(library, NativeLibrary), library
    return library


def _portable() -> tuple[str, ...]:
    """Lesser instruction sets, so that the code for other processors runs here too."""
    if platform.machine() != "x86_64":
        return ()
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    # Where AVX2 is the last there is, the native library is the one for it.
    return ("x86-64-v3", "x86-64-v2") if " avx512f " in flags else ("x86-64-v2",)


ONEDNN_PACKS_BFLOAT16 = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
"""Whether torch supports it: on x86 with AVX-512 or avx_ne_convert."""
needs_onednn_bfloat16 = pytest.mark.skipif(
    not ONEDNN_PACKS_BFLOAT16, reason="torch's oneDNN packs no bfloat16 without AVX-512 or avx_ne_convert"
)
HAS_AMX = native().has_amx
WITH_AMX = NATIVE if HAS_AMX else EMULATED
"""Data types in which the AMX kernels run on this machine, natively or emulated."""
# Where the processor has no unit, the native library is the one without it.
INSTRUCTION_SETS = (NATIVE, WITHOUT_AMX, EMULATED, *_portable()) if HAS_AMX else (NATIVE, EMULATED, *_portable())
needs_avx512 = pytest.mark.skipif(
    not emulated().has_amx,
    reason="the unit's kernels are made of AVX-512 and its bfloat16 instructions too, which are not here",
)
needs_products = pytest.mark.skipif(
    len(emulated().gemm_dtypes) < 2, reason="the library has no products of its own for this processor"
)
DOTS = "avx512 with bf16 dot products"
WIDENED = "x86-64-v4"
"""AVX-512 whose bfloat16 products are those of floats, as the native library has where dot products are slower."""
_HAS_DOTS = native().instruction_set == DOTS
each_library = pytest.mark.parametrize(
    "instruction_set",
    [
        # Where the unit's kernels are left out, what would emulate it is the native library over again.
        *(
            pytest.param(name, marks=needs_avx512 if name == EMULATED else [] if NATIVE in name else pytest.mark.matrix)
            for name in INSTRUCTION_SETS
        ),
        *([pytest.param(WIDENED, marks=pytest.mark.stress)] if _HAS_DOTS else []),
    ],
)


def library_for(instruction_set: str) -> NativeLibrary:
    """Built at the first call."""
    if instruction_set == EMULATED:
        return emulated()
    if instruction_set == WITHOUT_AMX:
        return compiled_with(LEAVE_OUT) if HAS_AMX else native()
    if instruction_set == ONEDNN:
        return dataclasses.replace(library_for(WITHOUT_AMX), gemm_dtypes=())
    return native() if instruction_set == NATIVE else quickly_compiled(instruction_set)


def use(instruction_set: str) -> None:
    """Make models of this process compute with this library."""
    for module in ("ops.attention.cpu", "ops.kernels.cpu.native"):
        importlib.import_module(f"spmd_worker.{module}").native_library = lambda: library_for(instruction_set)
