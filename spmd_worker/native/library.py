"""The compiled kernels as Python functions over addresses, loaded once per process. Callers check shapes and dtypes."""

import ctypes
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from spmd_worker.native.build import Built, build

_POINTER, _INTEGER, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float

_CACHE = (_POINTER, _INTEGER, _INTEGER, _INTEGER, _INTEGER)  # elements, block stride, heads, head size, block size
_STRIDED = (_POINTER, _INTEGER, _INTEGER)  # elements, stride of tokens, stride of heads
_ANGLES = (_POINTER, _POINTER)  # cosines and sines of the rotation of rows, or null

# Rows, their stride and number, inputs, the weight, outputs.
_BYTE_GEMM = (*(_POINTER, _INTEGER, _INTEGER, _INTEGER), *(_POINTER, _INTEGER))

_DTYPES = ("float32", "bfloat16")

# One function per dtype, `spmd_<name>_float32` and `spmd_<name>_bfloat16`; the sources document the arguments.
_SIGNATURES: dict[str, tuple[type, ...]] = {
    "write": (*_CACHE, *_STRIDED, *_STRIDED, *_ANGLES, _POINTER, _POINTER, _INTEGER, _INTEGER),
    "attend": (
        *_CACHE,
        *(_POINTER, _INTEGER),
        *(*_STRIDED, _INTEGER, *_ANGLES),
        *(_POINTER, _POINTER, _INTEGER),
        *(_FLOAT, _FLOAT, _INTEGER, _INTEGER, _POINTER),
        *(_POINTER, _INTEGER, _INTEGER),
    ),
    "full_norm": (
        *_STRIDED,
        _INTEGER,
        _INTEGER,
        _INTEGER,
        _POINTER,
        _POINTER,
        _FLOAT,
        _FLOAT,
        *(_INTEGER, _POINTER),
        _INTEGER,
    ),
    "activate": (_POINTER, _INTEGER, _INTEGER, _INTEGER, _INTEGER, _INTEGER, _POINTER, _INTEGER),
    "bound": (_POINTER, _INTEGER, _INTEGER, _INTEGER, _FLOAT, _POINTER, _INTEGER),
    "rms_norm": (*_STRIDED, _INTEGER, _INTEGER, _INTEGER, _POINTER, _FLOAT, _POINTER, _INTEGER),
    "add_rms_norm": (
        *(_POINTER, _INTEGER, _POINTER, _INTEGER),
        *(_INTEGER, _INTEGER, _POINTER, _FLOAT, _INTEGER),
    ),
    "attend_projected": (
        *_CACHE,
        *(_POINTER, _INTEGER),
        *(_POINTER, _INTEGER, _INTEGER, *_ANGLES),
        *(_POINTER, _POINTER, _INTEGER),
        *(_POINTER, _POINTER, _INTEGER),
        *(_FLOAT, _INTEGER),
        *(_POINTER, _INTEGER, _INTEGER),
    ),
    "rotate": (*_STRIDED, _INTEGER, _INTEGER, _INTEGER, _POINTER, _POINTER, _POINTER, _INTEGER, _INTEGER),
    "silu_and_mul": (_POINTER, _INTEGER, _INTEGER, _INTEGER, _POINTER, _INTEGER),
    "gemm": (*(_POINTER, _INTEGER, _INTEGER, _INTEGER), *(_POINTER, _INTEGER, _POINTER, _POINTER), *(_INTEGER,) * 2),
    "argmax": (_POINTER, _INTEGER, _INTEGER, _INTEGER, _POINTER, _POINTER, _INTEGER),
    "prob_sums": (*(_POINTER, *(_INTEGER,) * 3), *(_POINTER,) * 3, _INTEGER),
    "invert_cdf": (*(_POINTER, *(_INTEGER,) * 3), *(_POINTER,) * 5),
    "count_above": (*(_POINTER, *(_INTEGER,) * 3), _POINTER, _POINTER, _INTEGER),
    "forbid": (*(_POINTER, *(_INTEGER,) * 3), *(_POINTER, _INTEGER), *(_POINTER, _POINTER), *(_INTEGER,) * 2),
    "int8_maxima": (_POINTER, _INTEGER, _INTEGER, _INTEGER, _POINTER, _INTEGER),
    "int8_quantise": (_POINTER, _INTEGER, _INTEGER, _INTEGER, _POINTER, _POINTER, _INTEGER, _INTEGER),
    "int8_gemm": (*_BYTE_GEMM, *(_POINTER, _POINTER, _INTEGER), *(_POINTER, _POINTER, _INTEGER)),
    "int8_argmax": (*_BYTE_GEMM, *(_INTEGER, _POINTER, _POINTER), *(_POINTER, _POINTER, _INTEGER)),
    "int8_scaled": (*(_POINTER, *(_INTEGER,) * 3), *(_POINTER, _INTEGER), *(_POINTER,) * 3, _INTEGER),
}
# Functions of one dtype or none.
_SIGNATURES_OF_ONE: dict[str, tuple[type, ...]] = {
    "gemm_argmax_bfloat16": (
        *(_POINTER, _INTEGER, _INTEGER, _INTEGER),
        *(_POINTER, _INTEGER, _INTEGER, _POINTER, _POINTER, _INTEGER),
    ),
    "fill_prefilter_bfloat16": (_POINTER, _INTEGER, _INTEGER, _POINTER, _INTEGER),
    "thread_pool_counters": (_POINTER,),
    "filter_float32": (*(_POINTER, *(_INTEGER,) * 3), *(_POINTER,) * 5, _INTEGER),
    "int8_sums": (*_BYTE_GEMM, _POINTER, _INTEGER),
}
_LAYERS = (_POINTER, _POINTER, _POINTER, _INTEGER, _INTEGER)
_GROUP = (_POINTER, _INTEGER, _INTEGER, _INTEGER, _INTEGER, _INTEGER, _POINTER, _INTEGER)
_SUM_AND_NORM = (*_GROUP, _POINTER, _POINTER, _INTEGER, _INTEGER, _POINTER, _FLOAT, _POINTER)
# Functions that return a number or an address, which may be null; those of shared memory exist on Linux alone.
_COUNTING: dict[str, tuple[type, ...]] = {
    "has_argmax_prefilter": (),
    "filtered_argmax_bfloat16": (
        *(_POINTER, _INTEGER, _INTEGER, _INTEGER),
        *(_POINTER, _INTEGER, _INTEGER),
        *(_POINTER,) * 5,
        _INTEGER,
    ),
    "run_layers_float32": _LAYERS,
    "run_layers_bfloat16": _LAYERS,
    "shared_header_bytes": (_INTEGER,),
    "shared_leave": _GROUP,
    "shared_next_part": (*_GROUP, _INTEGER),
    "shared_common_norms": (*_GROUP, _INTEGER, _INTEGER),
    "shared_sum_float32": (*_GROUP, _POINTER, _INTEGER),
    "shared_sum_bfloat16": (*_GROUP, _POINTER, _INTEGER),
    "shared_sum_add_rms_norm_float32": _SUM_AND_NORM,
    "shared_sum_add_rms_norm_bfloat16": _SUM_AND_NORM,
    "shared_gather": (*_GROUP, _POINTER, _INTEGER, _POINTER),
    "shared_send": (*_GROUP, _POINTER, _INTEGER),
    "shared_receive": (*_GROUP, _POINTER, _INTEGER),
    "shared_broadcast": (*_GROUP, _INTEGER, _POINTER, _INTEGER),
}

Function = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class NativeLibrary:
    """One loaded library. `functions` by name and dtype: `attend_float32`.

    `has_amx`: it uses AMX. `gemm_dtypes`: dtypes of weights that are packed for its GEMMs; it always has int8 GEMMs, by
    `int8_instructions`.
    """

    instruction_set: str
    has_amx: bool
    gemm_dtypes: tuple[str, ...]
    int8_instructions: str
    functions: Mapping[str, Function]


class ThreadPoolCounters(NamedTuple):
    """Counters of the threads of one process (thread_pool.h)."""

    num_jobs: int
    """Jobs of several threads."""
    num_waits: int
    """Jobs at whose end the calling thread waited for others."""
    waited_s: float
    """Total of these waits."""
    num_slept: int
    """Waits longer than any item takes: another thread had lost its core."""


_LIBRARIES: dict[str, NativeLibrary | str] = {}
"""Loaded library by architecture, or the reason if there is none."""


def thread_pool_counters(library: NativeLibrary) -> ThreadPoolCounters:
    """The current counters of this process."""
    numbers = (ctypes.c_int64 * 4)()
    library.functions["thread_pool_counters"](ctypes.addressof(numbers))
    num_jobs, num_waits, waited_ns, num_slept = numbers
    return ThreadPoolCounters(num_jobs, num_waits, waited_ns / 1e9, num_slept)


def thread_waits() -> ThreadPoolCounters:
    """Counters of the library that this process computes with; zeros if it has none."""
    library = native_library()
    return ThreadPoolCounters(0, 0, 0.0, 0) if isinstance(library, str) else thread_pool_counters(library)


def native_library(architecture: str = "native") -> NativeLibrary | str:
    """The library, built and loaded at the first call; or the reason if there is none."""
    if architecture not in _LIBRARIES:
        built = build(architecture)
        _LIBRARIES[architecture] = built if isinstance(built, str) else load(built)
    return _LIBRARIES[architecture]


def load(built: Built) -> NativeLibrary | str:
    """Load a library into this process; a private one is then removed from disk. Returns the reason if it fails."""
    try:
        library = ctypes.CDLL(str(built.path))
    except OSError as error:
        return f"the compiled kernels do not load: {error}"
    finally:
        if built.is_private:
            shutil.rmtree(built.path.parent, ignore_errors=True)
    library.spmd_instruction_set.restype = ctypes.c_char_p
    library.spmd_int8_instructions.restype = ctypes.c_char_p
    library.spmd_has_amx.restype = _INTEGER
    packs = [getattr(library, f"spmd_packs_{dtype}") for dtype in _DTYPES]
    for each in packs:
        each.restype = _INTEGER
    return NativeLibrary(
        instruction_set=library.spmd_instruction_set().decode(),
        has_amx=bool(library.spmd_has_amx()),
        gemm_dtypes=tuple(dtype for dtype, each in zip(_DTYPES, packs, strict=True) if each()),
        int8_instructions=library.spmd_int8_instructions().decode(),
        functions=_functions(library),
    )


def _functions(library: ctypes.CDLL) -> dict[str, Function]:
    signatures = {f"{name}_{dtype}": types for name, types in _SIGNATURES.items() for dtype in _DTYPES}
    signatures |= _SIGNATURES_OF_ONE
    functions: dict[str, Function] = {}
    for name, types in signatures.items():
        function = getattr(library, f"spmd_{name}")
        function.argtypes, function.restype = types, None
        functions[name] = function
    for name, types in _COUNTING.items():
        if hasattr(library, f"spmd_{name}"):
            function = getattr(library, f"spmd_{name}")
            function.argtypes, function.restype = types, _INTEGER
            functions[name] = function
    return functions
