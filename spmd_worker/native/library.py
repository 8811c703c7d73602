"""The compiled kernels as Python functions over addresses, loaded once per process. Callers check shapes and dtypes."""

import ctypes
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from spmd_worker.native.build import Built, build

_TYPES: Final = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float}
"""Codes of the signatures below: pointer, integer, float. Spaces separate groups of arguments."""

_CACHE = "piiiii"  # elements, block stride, heads, head size, block size, whether in bytes
_STRIDED = "pii"  # elements, stride of tokens, stride of heads
_ANGLES = "pp"  # cosines and sines of the rotation of rows, or null
_ROWS = "piii"  # elements, stride, rows, elements of a row
_GEMM = f"{_ROWS} pi"  # rows, the weight, outputs

_DTYPES = ("float32", "bfloat16")

# One function per dtype, `spmd_<name>_float32` and `spmd_<name>_bfloat16`; the sources document the arguments.
_SIGNATURES: Final = {
    "write": f"{_CACHE} {_STRIDED} {_STRIDED} {_ANGLES} pp ii",
    "attend": f"{_CACHE} pi {_STRIDED} i {_ANGLES} ppi ffii pp pi pp ii p i pii",
    "attend_projected": f"{_CACHE} pi pii {_ANGLES} ppi ppi ffi pii",
    "full_norm": f"{_STRIDED} iii pp ff ip i",
    "rms_norm": f"{_STRIDED} iii pf p i",
    "add_rms_norm": "pi pi ii pf i",
    "add": "pi pi ii i",
    "rotate": f"{_STRIDED} iii pp pi i",
    "rotate_once": f"{_STRIDED} iii pp p i",
    "silu_and_mul": f"{_ROWS} p i",
    "activate": f"{_ROWS} ii p i",
    "bound": f"{_ROWS} f p i",
    "gemm": f"{_GEMM} pp ii",
    "gemm_leaves": f"{_GEMM} pp pi ii",
    "gemm_heads": f"{_STRIDED} ii pi ii {_STRIDED} i",
    "experts": "ppp ii",
    "weighted_sum": "pp iii p i",
    "add_adapters": "pp pi pi i i",
    "adapter_input_sums": "pp pi pi i",
    "add_adapter_sums": "pp pi pi i",
    "scan_mamba": "ppppi iiii pi pi ppp ff pp i",
    "scan_mamba1": "ppppi ii pi pi pi ppp pp i",
    "argmax": f"{_ROWS} pp i",
    "short_conv": "pii pi pp pppp i ip i",
    "scan_delta": "pi pi pi pp p pppp i iiii ffi p i",
    "gated_norm": "pi pi iii pi fiii p i",
    "prob_sums": f"{_ROWS} pp p i",
    "invert_cdf": f"{_ROWS} pp pp p",
    "count_above": f"{_ROWS} p p i",
    "forbid": f"{_ROWS} pi pp ii",
    "int8_maxima": f"{_ROWS} p i",
    "int8_quantise": f"{_ROWS} p pi i",
    "int8_gemm": f"{_GEMM} pp i pp i",
    "int8_argmax": f"{_GEMM} i pp pp i",
    "int8_scaled": f"{_ROWS} pi ppp i",
}
# Functions of one dtype or none.
_SIGNATURES_OF_ONE: Final = {
    "gemm_argmax_bfloat16": f"{_GEMM} i pp i",
    "stored_gemm_bfloat16": f"{_GEMM} pp ii",
    "stored_gemm_leaves_bfloat16": f"{_GEMM} pp pi ii",
    "fill_prefilter_bfloat16": "pii p i",
    "thread_pool_counters": "p",
    "filter_float32": f"{_ROWS} ppppp i",
    "int8_sums": f"{_GEMM} p i",
}
_LAYERS = "ppp ii"
_GROUP = "piiiiipi"
_SUM_AND_NORM = f"{_GROUP} pp ii pf p"
# Functions that return a number or an address, which may be null; those of shared memory exist on Linux alone.
_RETURNING: Final = {
    "has_argmax_prefilter": "",
    "stored_are_rows": "",
    "filtered_argmax_bfloat16": f"{_GEMM} i ppppp i",
    "run_layers_float32": _LAYERS,
    "run_layers_bfloat16": _LAYERS,
    "shared_header_bytes": "i",
    "shared_leave": _GROUP,
    "shared_next_part": f"{_GROUP} i",
    "shared_common_norms": f"{_GROUP} i",
    "shared_sum_float32": f"{_GROUP} pi",
    "shared_sum_bfloat16": f"{_GROUP} pi",
    "shared_sum_parts_float32": f"{_GROUP} pip",
    "shared_sum_parts_bfloat16": f"{_GROUP} pip",
    "shared_sum_add_rms_norm_float32": _SUM_AND_NORM,
    "shared_sum_add_rms_norm_bfloat16": _SUM_AND_NORM,
    "shared_gather": f"{_GROUP} pip",
    "shared_send": f"{_GROUP} pi",
    "shared_receive": f"{_GROUP} pi",
    "shared_broadcast": f"{_GROUP} ipi",
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
    library.spmd_has_amx.restype = ctypes.c_int64
    packs = [getattr(library, f"spmd_packs_{dtype}") for dtype in _DTYPES]
    for each in packs:
        each.restype = ctypes.c_int64
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
    signatures |= {name: types for name, types in _RETURNING.items() if hasattr(library, f"spmd_{name}")}
    functions: dict[str, Function] = {}
    for name, types in signatures.items():
        function = functions[name] = getattr(library, f"spmd_{name}")
        function.argtypes = [_TYPES[each] for each in types.replace(" ", "")]
        function.restype = ctypes.c_int64 if name in _RETURNING else None
    return functions
