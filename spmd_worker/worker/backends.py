"""Which kernels and which attention a rank computes with.

Says once a process, in the log, when it must take something slower or less exact.
"""

import logging
from functools import cache

import torch

from spmd_worker.attention.backend import AttentionBackend
from spmd_worker.attention.cpu import CpuBackend, cpu_backend_or_reason
from spmd_worker.attention.sdpa import SdpaBackend
from spmd_worker.kernels.api import Kernels
from spmd_worker.kernels.cpu.native import CpuKernels, cpu_kernels
from spmd_worker.kernels.reference import ReferenceKernels

logger = logging.getLogger(__name__)


def choose_backends(
    device: torch.device, dtype: torch.dtype, head_size: int, block_size: int
) -> tuple[Kernels, AttentionBackend]:
    """Native kernels on the CPU where they can be built, plain torch elsewhere."""
    if device.type != "cpu":
        return ReferenceKernels(), SdpaBackend()
    kernels, slow_kernels = cpu_kernels(dtype)
    attention = cpu_backend_or_reason(dtype, head_size, block_size)
    if isinstance(attention, CpuBackend):
        _say_once(slow_kernels)
        return kernels, attention
    _say_once(attention)
    return kernels, SdpaBackend()


def computes_alone(kernels: Kernels, dtype: torch.dtype) -> bool:
    """Whether a step's products are the compiled kernels', so that torch's own threads have little to do."""
    return isinstance(kernels, CpuKernels) and kernels.has_products(dtype)


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
