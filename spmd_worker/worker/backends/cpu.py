"""CPUs: compiled kernels and attention, where they can be built; plain torch elsewhere, which is logged once."""

import logging
from functools import cache

import torch

from spmd_worker.base.errors import ConfigError
from spmd_worker.ops.attention.backend import AttentionBackend
from spmd_worker.ops.attention.cpu import CpuBackend, cpu_backend_or_reason
from spmd_worker.ops.attention.sdpa import SdpaBackend
from spmd_worker.ops.kernels.cpu.int8 import int8_kernels
from spmd_worker.ops.kernels.cpu.native import CpuKernels, cpu_kernels
from spmd_worker.worker.backends.backend import DeviceBackend, Operations

logger = logging.getLogger(__name__)


class CpuDevice(DeviceBackend):
    """`executor.device_backend=cpu`."""

    def operations(self) -> Operations:
        """See `DeviceBackend.operations`. Weights may be quantised to int8."""
        if self.device.type != "cpu":
            raise ConfigError("executor.device_backend=cpu computes on CPUs: use device=cpu, or leave it at auto")
        dtype, model_config = getattr(torch, self.resolved.dtype), self.resolved.model_config
        block_size = self.resolved.config.cache.block_size
        attention = cpu_backend_or_reason(dtype, model_config.head_size, block_size)
        quantised, (kernels, slow_kernels) = None, cpu_kernels(dtype)
        if self.resolved.config.model.quantization is not None:
            kernels = quantised = int8_kernels(dtype)[0]
        has_products = isinstance(kernels, CpuKernels) and kernels.has_products(dtype)
        is_native = has_products and isinstance(attention, CpuBackend)
        return Operations(kernels, _logged(attention, slow_kernels), quantised, is_native=is_native)

    def arithmetic(self, attention: AttentionBackend) -> str:
        """See `DeviceBackend.arithmetic`. The compiled kernels choose by the CPU's instruction sets."""
        return attention.arithmetic if isinstance(attention, CpuBackend) else super().arithmetic(attention)


def _logged(attention: CpuBackend | str, slow_kernels: str | None) -> AttentionBackend:
    """Attention, or torch's where there is none for the reason given."""
    if isinstance(attention, CpuBackend):
        _log_once(slow_kernels)
        return attention
    _log_once(attention)
    return SdpaBackend()


@cache
def _log_once(reason: str | None) -> None:
    if reason is not None:
        logger.warning(
            "plain torch computes where native kernels would: slower, and a row's last bits may depend on how its "
            "prompt was cut into chunks (%s)",
            reason,
        )
