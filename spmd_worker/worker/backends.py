"""Which kernels and which attention a rank computes with.

Says once a process, in the log, when it must take something slower or less exact.
"""

import logging
from functools import cache

import torch

from spmd_worker.attention.backend import AttentionBackend
from spmd_worker.attention.cpu import CpuBackend, cpu_backend_or_reason
from spmd_worker.attention.sdpa import SdpaBackend
from spmd_worker.kernels.api import Kernels, QuantisedKernels
from spmd_worker.kernels.cpu.int8 import int8_kernels
from spmd_worker.kernels.cpu.native import cpu_kernels
from spmd_worker.kernels.reference import ReferenceKernels

logger = logging.getLogger(__name__)


def choose_backends(
    device: torch.device, dtype: torch.dtype, head_size: int, block_size: int, quantization: str | None = None
) -> tuple[Kernels, AttentionBackend, QuantisedKernels | None]:
    """Native kernels on the CPU where they can be built, plain torch elsewhere. The last are the first again, where the
    weights are to be quantised.
    """
    if quantization is not None:
        assert (device.type, quantization) == ("cpu", "int8"), (device, quantization)
        quantised, slow_kernels = int8_kernels(dtype)
        return quantised, _choose_attention(dtype, head_size, block_size, slow_kernels), quantised
    if device.type != "cpu":
        return ReferenceKernels(), SdpaBackend(), None
    kernels, slow_kernels = cpu_kernels(dtype)
    return kernels, _choose_attention(dtype, head_size, block_size, slow_kernels), None


def _choose_attention(
    dtype: torch.dtype, head_size: int, block_size: int, slow_kernels: str | None
) -> AttentionBackend:
    attention = cpu_backend_or_reason(dtype, head_size, block_size)
    if isinstance(attention, CpuBackend):
        _say_once(slow_kernels)
        return attention
    _say_once(attention)
    return SdpaBackend()


def arithmetic_of(attention: AttentionBackend) -> str:
    """In which order numbers are added, in words: ranks that differ in it compute different bits."""
    return attention.arithmetic if isinstance(attention, CpuBackend) else "torch"


@cache
def _say_once(reason: str | None) -> None:
    if reason is not None:
        logger.warning(
            "plain torch computes where native kernels would: slower, and a row's last bits may depend on how its "
            "prompt was cut into chunks (%s)",
            reason,
        )
