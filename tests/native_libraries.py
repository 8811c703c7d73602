"""The compiled kernels for each instruction set that this machine runs, the matrix unit used and not used.

Knows names of instruction sets. Knows nothing of what is tested.
"""

import dataclasses
import platform
from pathlib import Path

import pytest

from spmd_worker.kernels.cpu.library import NativeLibrary, native_library

NATIVE = "native"
WITHOUT_UNIT = "native without matrix unit"


def _portable() -> tuple[str, ...]:
    """Lesser instruction sets, so that the code for other processors runs here too."""
    if platform.machine() != "x86_64":
        return ()
    has_avx2 = " avx2 " in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    return ("x86-64-v3", "x86-64-v2") if has_avx2 else ("x86-64-v2",)


INSTRUCTION_SETS = (NATIVE, WITHOUT_UNIT, *_portable())
each_library = pytest.mark.parametrize(
    "instruction_set",
    [pytest.param(name, marks=[] if NATIVE in name else pytest.mark.slow) for name in INSTRUCTION_SETS],
)


def library_for(instruction_set: str) -> NativeLibrary:
    """Built at the first call."""
    library = native_library(NATIVE if instruction_set == WITHOUT_UNIT else instruction_set)
    assert isinstance(library, NativeLibrary), library
    return dataclasses.replace(library, has_matrix_unit=False) if instruction_set == WITHOUT_UNIT else library
