"""Tensor descriptors of kernel operands, which the tensor memory accelerator (TMA) of sm_90 and later reads.

They are made on the host for each launch, and passed by value: a CUDA graph copies them with the other arguments, and
they are valid as long as the memory they name. Descriptors that a kernel makes itself would name scratch memory that a
graph does not keep.
"""

import torch
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from spmd_worker.ops.kernels.triton.launching import capability

_ALIGNED_BYTES = 16
_FIRST_WITH_TMA = (9, 0)
ELEMENTS = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


def can_describe(*tensors: Tensor) -> bool:
    """Whether the chip has TMA and takes these matrices: rows contiguous, base and rows at multiples of 16 bytes. The
    interpreter does.
    """
    device = tensors[0].device
    has_tma = device.type != "cuda" or capability(device) >= _FIRST_WITH_TMA
    return has_tma and all(
        each.stride(1) == 1
        and each.data_ptr() % _ALIGNED_BYTES == 0
        and each.stride(0) * each.itemsize % _ALIGNED_BYTES == 0
        for each in tensors
    )


def describe(matrix: Tensor, num_rows: int, num_columns: int) -> TensorDescriptor:
    """A descriptor of [M, N] for tiles of [num_rows, num_columns]; see `can_describe`."""
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [num_rows, num_columns])
