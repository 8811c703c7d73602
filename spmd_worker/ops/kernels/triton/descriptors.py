"""Tensor descriptors of kernel operands, which the tensor memory accelerator (TMA) of sm_90 and later reads.

They are made on the host for each launch, and passed by value: a CUDA graph copies them with the other arguments, and
they are valid as long as the memory they name. Descriptors that a kernel makes itself would name scratch memory that a
graph does not keep.
"""

from functools import cache

import torch
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from spmd_worker.ops.kernels.triton.launching import capability

_ALIGNED_BYTES = 16
_FIRST_WITH_TMA = (9, 0)
ELEMENTS = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


@cache
def has_tma(device: torch.device) -> bool:
    """Whether the chip has TMA. The interpreter does."""
    return device.type != "cuda" or capability(device) >= _FIRST_WITH_TMA


def can_describe(*tensors: Tensor) -> bool:
    """Whether the chip has TMA and takes these matrices: rows contiguous, base and rows at multiples of 16 bytes."""
    if not has_tma(tensors[0].device):
        return False
    for each in tensors:
        stride, step = each.stride()
        if step != 1 or each.data_ptr() % _ALIGNED_BYTES or stride * each.itemsize % _ALIGNED_BYTES:
            return False
    return True


def describe(matrix: Tensor, num_rows: int, num_columns: int) -> TensorDescriptor:
    """A descriptor of [M, N], of which neither is 0, for tiles of [num_rows, num_columns]; see `can_describe`."""
    # Its constructor would check once more what `can_describe` has checked, in more time than the launch takes.
    made = TensorDescriptor.__new__(TensorDescriptor)
    made.base, made.shape, made.strides = matrix, list(matrix.shape), list(matrix.stride())
    made.block_shape = [num_rows, num_columns]
    return made
