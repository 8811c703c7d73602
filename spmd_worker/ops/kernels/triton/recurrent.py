"""Triton kernels of layers with recurrent states. What has none yet is computed by the reference."""

from spmd_worker.ops.kernels.reference_recurrent import ReferenceRecurrentKernels
from spmd_worker.ops.kernels.triton.short_conv import short_conv


class TritonRecurrentKernels(ReferenceRecurrentKernels):
    """Implements `RecurrentKernels` on CUDA, and on the CPU if kernels are interpreted."""

    short_conv = staticmethod(short_conv)
