"""Triton kernels of layers with recurrent states. What has none yet is computed by the reference."""

from spmd_worker.base.numerical_policy import Region
from spmd_worker.ops.kernels.reference_recurrent import ReferenceRecurrentKernels
from spmd_worker.ops.kernels.triton.scan_delta import gated_norm, scan_delta
from spmd_worker.ops.kernels.triton.scan_mamba import scan_mamba, scan_mamba1
from spmd_worker.ops.kernels.triton.short_conv import short_conv
from spmd_worker.ops.kernels.triton.version import triton_region


class TritonRecurrentKernels(ReferenceRecurrentKernels):
    """Implements `RecurrentKernels` on CUDA, and on the CPU if kernels are interpreted."""

    def numerics(self) -> Region:
        return triton_region()

    short_conv = staticmethod(short_conv)
    scan_delta = staticmethod(scan_delta)
    scan_mamba = staticmethod(scan_mamba)
    scan_mamba1 = staticmethod(scan_mamba1)
    gated_norm = staticmethod(gated_norm)
