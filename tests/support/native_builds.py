"""The compiled kernels for each instruction set that this machine runs, with the AMX unit, without it and emulated.

Knows names of instruction sets. Imports neither torch nor pytest, so that scripts/test.sh can compile before they are
installed.
"""

import dataclasses
import functools
import os
import platform
import re
from pathlib import Path
from unittest import mock

from spmd_worker.native import build
from spmd_worker.native.library import NativeLibrary, load, native_library

NATIVE = "native"
WITHOUT_AMX = "native without AMX"
EMULATED = "native with emulated AMX"
ONEDNN = "native with oneDNN's products"
EMULATE, LEAVE_OUT, DELAY = "-DSPMD_EMULATED_AMX", "-DSPMD_WITHOUT_AMX", "-DSPMD_PLANTED_DELAYS"


def has_flags_of_users() -> bool:
    """True if a test of the stress tier runs the gate's tests again, with these libraries as users have them."""
    return bool(os.environ.get("TESTS_FLAGS_OF_USERS"))


QUICK = [] if has_flags_of_users() else ["-O1", "-finline-functions", "-finline-small-functions"]
"""Flags of libraries that only tests run: they are compiled quickly, and another optimization changes no bit."""


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
    """The same sources with a flag more, on disk. Those that a flag about AMX does not change are not compiled again:
    the library is linked to the one without the flag.
    """
    if flag == DELAY:
        return built_for_tests(architecture, flag, *QUICK)
    plain = plain_library(architecture)
    # A private one is no file any more.
    return built_for_tests(architecture, flag, *QUICK, linked_to=None if plain.is_private else plain.path)


@functools.cache
def plain_library(architecture: str) -> build.Built:
    """The library as users have it, on disk."""
    built = build.build(architecture)
    assert isinstance(built, build.Built), built
    return built


def built_for_tests(architecture: str, *flags: str, linked_to: Path | None = None) -> build.Built:
    """A library with more flags; `linked_to`: one of all sources, from which those come that AMX does not change."""
    more = [] if linked_to is None else ["-Wl,--no-as-needed", str(linked_to)]
    sources = [each for each in build._sources() if linked_to is None or each.suffix != ".cpp" or reaches_amx(each)]
    with (
        mock.patch.object(build, "_FLAGS", (*build._FLAGS, *flags, *more)),
        mock.patch.object(build, "_sources", return_value=sources),
    ):
        built = build.build(architecture)
    assert isinstance(built, build.Built), built
    return built


_INCLUDED = re.compile(r'^#include "(.+)"$', re.MULTILINE)
_CALLED = re.compile(r"\bspmd_(gemm|stored_gemm|int8_gemm|attend|write)")
"""Functions of exports.h whose sources include amx.h."""


def reaches_amx(source: Path) -> bool:
    """True if a source includes amx.h, or calls functions of one that does."""
    found, names = {source.name}, [source.name]
    while names:
        text = (source.parent / names.pop()).read_text(encoding="utf-8")
        names += [each for each in _INCLUDED.findall(text) if each not in found]
        found |= set(names)
    return "amx.h" in found or bool(_CALLED.search(source.read_text(encoding="utf-8")))


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
    library = load(built_for_tests(architecture, *QUICK))
    assert isinstance(library, NativeLibrary), library
    return library


def _portable() -> tuple[str, ...]:
    """Lesser instruction sets, so that the code for other processors runs here too."""
    if platform.machine() != "x86_64":
        return ()
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    # Where AVX2 is the last there is, the native library is the one for it.
    return ("x86-64-v3", "x86-64-v2") if " avx512f " in flags else ("x86-64-v2",)


# Now: later a test may have planted a mistake in the sources.
plain_library(NATIVE)
HAS_AMX = native().has_amx
WITH_AMX = NATIVE if HAS_AMX else EMULATED
"""Data types in which the AMX kernels run on this machine, natively or emulated."""
# Where the processor has no unit, the native library is the one without it.
INSTRUCTION_SETS = (NATIVE, WITHOUT_AMX, EMULATED, *_portable()) if HAS_AMX else (NATIVE, EMULATED, *_portable())
DOTS = "avx512 with bf16 dot products"
WIDENED = "x86-64-v4"
"""AVX-512 whose bfloat16 products are those of floats, as the native library has where dot products are slower."""
if native().instruction_set == DOTS and not HAS_AMX:
    INSTRUCTION_SETS = (*INSTRUCTION_SETS, WIDENED)
OLDEST = "x86-64-v2"
"""Without AVX2. Where the gate has kernels of AVX2 beside those of this machine, these and `WIDENED` are in the stress
tier.
"""


def is_of_stress_tier(instruction_set: str) -> bool:
    is_beside = len(_portable()) > 1 and not has_flags_of_users()
    return is_beside and instruction_set in (OLDEST, WIDENED)


def library_for(instruction_set: str) -> NativeLibrary:
    """Built at the first call."""
    if instruction_set == EMULATED:
        return emulated()
    if instruction_set == WITHOUT_AMX:
        return compiled_with(LEAVE_OUT) if HAS_AMX else native()
    if instruction_set == ONEDNN:
        return dataclasses.replace(library_for(WITHOUT_AMX), gemm_dtypes=())
    return native() if instruction_set == NATIVE else quickly_compiled(instruction_set)
