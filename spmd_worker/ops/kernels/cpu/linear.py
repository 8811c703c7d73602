"""GEMMs on the CPU by oneDNN with prepacked weights: what runs if the compiled kernels cannot be built.

1.1 to 1.6 times as fast as plain bfloat16 GEMMs, 2 to 4 times as fast as plain float32 ones. A row's result does not
depend on the other rows, unlike that of plain GEMMs. oneDNN does not promise it: it holds with two rows or more and
without AMX (for bfloat16); `rows_are_invariant` checks it on this CPU.

oneDNN compiles kernels for each number of rows, half a MiB, and keeps some for good, whatever the capacity of its
cache: rows are multiplied in blocks of few sizes.

If oneDNN cannot pack bfloat16 (x86 without AVX-512 and avx_ne_convert), bfloat16 weights stay as they are and are
multiplied in float32: a block of outputs at a time is converted and used for a block of rows.

T: tokens.
"""

import contextlib
import ctypes
import functools
import logging
import os
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from spmd_worker.base.numerical_policy import (
    COLUMN_PARALLEL,
    EXPERTS,
    HEAD,
    ROW_PARALLEL,
    Region,
    source_version,
)
from spmd_worker.ops.kernels.reference import ReferenceKernels
from spmd_worker.ops.kernels.torch_version import torch_version

logger = logging.getLogger(__name__)

PACKED_DTYPES = (torch.float32, torch.bfloat16)

_ISA_VARIABLE = "ONEDNN_MAX_CPU_ISA"
_ISA_WITHOUT_AMX = "AVX512_CORE_FP16"
_NUM_ROWS_HINT = 64  # number of rows that oneDNN packs for; makes no difference above 16

# Elements of a weight that are converted to float32 at once (4 MiB).
_BLOCK_ELEMENTS = 1 << 20
# Rows of a GEMM, at most; fewer are padded to a power of two up to the step, then to a multiple of it.
_BLOCK_ROWS = 256
_ROW_STEP = 16

# Inputs, outputs and numbers of rows at which GEMMs that depend on the batch have been found.
_SHAPES_TO_TRY = ((576, 960), (4864, 256))
_ROWS_TO_TRY = (2, 3, 7, 13, 31, 47, 100, 180)
_MOST_ROWS = 256

Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class PackedKernels(ReferenceKernels):
    """Plain torch except for the GEMMs."""

    def numerics(self, dtype: torch.dtype) -> dict[str, Region]:
        regions = super().numerics(dtype)
        implementation = "oneDNN" if can_pack(dtype) else "plain torch in float32"
        products = Region(implementation, f"{torch_version()}, {source_version(__file__)}")
        return regions | dict.fromkeys((COLUMN_PARALLEL, ROW_PARALLEL, HEAD, EXPERTS), products)

    def pack(self, weight: Tensor) -> Tensor:
        """An opaque tensor as large as the weight, which can then be freed; the weight itself if oneDNN cannot pack."""
        if weight.device.type != "cpu":
            return weight
        keep_onednn_from_amx()
        if weight.dtype not in PACKED_DTYPES:
            return weight
        warn_unless_invariant(weight.dtype)
        if can_pack(weight.dtype):
            return _pack(weight.detach())
        log_unpacked(weight.dtype)
        return weight

    def unpack(self, packed: Tensor, start: int, stop: int) -> Tensor:
        """A weight that oneDNN packed is first unpacked completely."""
        return _unpack(packed)[start:stop].clone() if packed.is_mkldnn else super().unpack(packed, start, stop)

    def repack_(self, packed: Tensor, start: int, rows: Tensor) -> None:
        """oneDNN packs complete weights only: memory for two more of `packed` is needed meanwhile."""
        if not packed.is_mkldnn:
            super().repack_(packed, start, rows)
        elif rows.shape == packed.shape:
            _overwrite(packed, _pack(rows.contiguous()))
        else:
            weight = _unpack(packed)
            weight[start : start + len(rows)] = rows
            _overwrite(packed, _pack(weight))

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        del out
        if weight.device.type != "cpu" or (weight.dtype == torch.float32 and not weight.is_mkldnn):
            return F.linear(x, weight, bias)
        if not len(x):
            return x.new_empty(0, weight.shape[0])
        if not weight.is_mkldnn and converts_to_float32(weight.dtype):
            return _linear_in_float32(x, weight, bias)
        return _in_blocks(_gemm if weight.is_mkldnn else F.linear, x, weight, bias)

    def linear_of_heads(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        """The weights are plain, as `pack_heads` keeps them: torch would round a row differently among few others."""
        if weight.device.type != "cpu" or not can_pack(torch.float32):
            return super().linear_of_heads(x, weight, out)
        for head, of_head in enumerate(weight):
            out[:, head] = _linear_in_float32(x[:, head], of_head, None)
        return None

    def _leaf_sums(self, x: Tensor, weight: Tensor) -> Tensor:
        """The weights are plain, as `pack_leaves` keeps them: oneDNN would round a leaf's sums to the dtype."""
        if not len(x) or weight.device.type != "cpu" or not can_pack(torch.float32):
            return super()._leaf_sums(x, weight)
        return _linear_in_float32(x, weight, None, torch.float32)


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _NUM_ROWS_HINT)
    return packed


def _unpack(packed: Tensor) -> Tensor:
    weight: Tensor = packed.detach().to_dense()
    return weight


def _overwrite(packed: Tensor, other: Tensor) -> None:
    """Overwrite `packed` by `other`, of the same shape and so layout. `copy_` would flush subnormals to zero."""
    num_bytes, num_other_bytes = (torch.ops.mkldnn._nbytes(each) for each in (packed, other))
    assert num_bytes == num_other_bytes, (packed.shape, num_bytes, other.shape, num_other_bytes)
    ctypes.memmove(torch.ops.mkldnn.data_ptr(packed), torch.ops.mkldnn.data_ptr(other), num_bytes)


def _gemm(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x.contiguous(), packed, bias, "none", [], "")
    return result


def _in_blocks(multiply: Multiply, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[T, in] -> [T, out], a block of rows at a time."""
    if len(x) <= _BLOCK_ROWS:
        return _block(multiply, x, weight, bias)
    output = x.new_empty((len(x), weight.shape[0]))
    for rows, results in zip(torch.split(x, _BLOCK_ROWS), torch.split(output, _BLOCK_ROWS)):
        results.copy_(_block(multiply, rows, weight, bias))
    return output


def _block(multiply: Multiply, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiplies up to `_BLOCK_ROWS` rows, padded with zeros."""
    num_rows, num_padded = len(x), _num_padded(len(x))
    if num_rows < num_padded:
        x = torch.cat((x, x.new_zeros(num_padded - num_rows, x.shape[1])))
    return multiply(x, weight, bias)[:num_rows]


def _num_padded(num_rows: int) -> int:
    """Two at least: a GEMM of one row takes another path, which rounds differently, and the same time."""
    if num_rows > _ROW_STEP:
        return -(-num_rows // _ROW_STEP) * _ROW_STEP
    return max(2, 1 << (num_rows - 1).bit_length())


def _linear_in_float32(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
    """Float32 sums, rounded once to `dtype`, or to that of x. Extra memory: a block of weights, inputs and outputs."""
    num_outputs, num_inputs = weight.shape
    # The size of blocks depends on neither rows nor threads, so that a sum is always split alike.
    block_outputs = min(num_outputs, max(_BLOCK_ELEMENTS // max(num_inputs, 1) // 16 * 16, 16))
    output = x.new_empty((x.shape[0], num_outputs), dtype=dtype)
    scratch = torch.empty(block_outputs, num_inputs)
    wide_bias = None if bias is None else bias.float()
    for first in range(0, x.shape[0], _BLOCK_ROWS):
        wide_rows, results = x[first : first + _BLOCK_ROWS].float(), output[first : first + _BLOCK_ROWS]
        for start in range(0, num_outputs, block_outputs):
            block = weight[start : start + block_outputs]
            wide_block = scratch[: len(block)].copy_(block)
            part = None if wide_bias is None else wide_bias[start : start + block_outputs]
            results[:, start : start + len(block)] = _block(_gemm, wide_rows, wide_block, part)
    return output


@functools.cache
def converts_to_float32(dtype: torch.dtype) -> bool:
    """Whether oneDNN, which cannot pack weights of this dtype on this CPU, multiplies them in float32."""
    if dtype != torch.bfloat16:
        return False
    return not can_pack(torch.bfloat16) and can_pack(torch.float32)


@functools.cache
def can_pack(dtype: torch.dtype) -> bool:
    """True if torch's private oneDNN operations exist and work as expected. Callers ask before oneDNN packs, for either
    dtype: a process may run a float32 model before one in bfloat16.
    """
    keep_onednn_from_amx()
    x, weight, bias = _numbers(3, 32, dtype), _numbers(48, 32, dtype), _numbers(1, 48, dtype)[0]
    try:
        packed = _pack(torch.zeros_like(weight))
        _overwrite(packed, _pack(weight))
        result = _gemm(x, packed, bias)
        if not torch.equal(_unpack(packed), weight):
            return False
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return torch.allclose(result.float(), F.linear(x.float(), weight.float(), bias.float()), rtol=2e-2, atol=2e-2)


@functools.cache
def keep_onednn_from_amx() -> None:
    """Tell oneDNN not to use AMX, with which its GEMMs depend on the batch.

    oneDNN reads the variable once, at its first use, which should be here; the environment is restored afterwards. A
    value that the user set stays. Other bfloat16 GEMMs of oneDNN in this process lose AMX too.
    """
    if _has_amx() and _ISA_VARIABLE not in os.environ:
        with (
            _variable(_ISA_VARIABLE, _ISA_WITHOUT_AMX),
            contextlib.suppress(AttributeError, NotImplementedError, RuntimeError),
        ):
            _pack(torch.zeros(48, 32, dtype=torch.bfloat16))


def _has_amx() -> bool:
    is_supported = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return is_supported is not None and bool(is_supported())


@contextlib.contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)


@functools.cache
def rows_are_invariant(dtype: torch.dtype) -> bool:
    """Whether rows of a few GEMMs have the same bits in batches of several sizes: with packed weights, or with the
    fallback if oneDNN cannot pack this dtype.
    """
    kernels = PackedKernels()
    for num_inputs, num_outputs in _SHAPES_TO_TRY:
        weight = _numbers(num_outputs, num_inputs, dtype)
        weight = _pack(weight) if can_pack(dtype) else weight
        x = _numbers(_MOST_ROWS, num_inputs, dtype)
        full = kernels.linear(x, weight, None)
        for num_rows in (1, *_ROWS_TO_TRY):
            if not torch.equal(kernels.linear(x[:num_rows], weight, None), full[:num_rows]):
                return False
    return True


@functools.cache
def warn_unless_invariant(dtype: torch.dtype) -> None:
    """Warn once per process if results depend on the batch."""
    if not rows_are_invariant(dtype):
        logger.warning(
            "%s GEMMs give a row other bits in another batch on this CPU, so results may depend on the batch; if it "
            "has AMX, set %s=%s before the start",
            str(dtype).removeprefix("torch."),
            _ISA_VARIABLE,
            _ISA_WITHOUT_AMX,
        )


@functools.cache
def log_unpacked(dtype: torch.dtype) -> None:
    """Log once per process that oneDNN cannot pack this dtype, and the fallback."""
    name = str(dtype).removeprefix("torch.")
    if converts_to_float32(dtype):
        logger.info(
            "oneDNN cannot pack %s weights on this CPU: GEMMs outside the compiled kernels convert them to float32, a "
            "block at a time, which takes no second copy and costs most in steps of few rows",
            name,
        )
    else:
        logger.warning("oneDNN cannot pack %s weights on this CPU: torch's own GEMMs multiply them, slowly", name)


def _numbers(num_rows: int, num_columns: int, dtype: torch.dtype) -> Tensor:
    """Normal numbers with a fixed seed; the process's random state stays."""
    generator = torch.Generator().manual_seed(num_rows)
    return torch.randn(num_rows, num_columns, generator=generator).to(dtype)
