"""Which kernels and which attention a rank computes with.

Says once a process, in the log, when it must take something slower or less exact.
"""

import logging
from functools import cache
from importlib import metadata

import torch

from spmd_worker.ops.attention.backend import AttentionBackend
from spmd_worker.ops.attention.cpu import CpuBackend, cpu_backend_or_reason
from spmd_worker.ops.attention.sdpa import SdpaBackend
from spmd_worker.ops.kernels.api import Kernels, QuantisedKernels
from spmd_worker.ops.kernels.cpu.int8 import int8_kernels
from spmd_worker.ops.kernels.cpu.native import CpuKernels, cpu_kernels
from spmd_worker.ops.kernels.reference import ReferenceKernels

_GPU_LIBRARIES = ("triton", "nvidia-cublas", "nvidia-cublas-cu12", "nvidia-nccl-cu13", "nvidia-nccl-cu12")

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


def computes_alone(kernels: Kernels, attention: AttentionBackend, dtype: torch.dtype) -> bool:
    """Whether a step's products and its attention are the compiled kernels', so that torch's own threads have little to
    do.
    """
    return isinstance(kernels, CpuKernels) and kernels.has_products(dtype) and isinstance(attention, CpuBackend)


def arithmetic_of(attention: AttentionBackend, device: torch.device) -> str:
    """In which order numbers are added, in words: ranks that differ in it compute different bits. A GPU's libraries and
    compilers choose by device and version, on the CPU by its instruction sets. The sources of kernels are compared with
    the rest of the code.
    """
    if isinstance(attention, CpuBackend):
        return attention.arithmetic
    if device.type != "cuda":
        return f"torch, {torch.backends.cpu.get_cpu_capability()}"
    major, minor = torch.cuda.get_device_capability(device)
    words = [f"torch {torch.__version__} on {torch.cuda.get_device_name(device)} (sm_{major}{minor})"]
    words += [f"{name} {version}" for name in _GPU_LIBRARIES if (version := _installed_version(name))]
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]  # torch's own is not typed
    precision = torch.get_float32_matmul_precision()
    return ", ".join([*words, f"cuDNN {cudnn}", f"float32 products: {precision}"])


def _installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


@cache
def _say_once(reason: str | None) -> None:
    if reason is not None:
        logger.warning(
            "plain torch computes where native kernels would: slower, and a row's last bits may depend on how its "
            "prompt was cut into chunks (%s)",
            reason,
        )
