"""CPU backend: compiled kernels and attention if they can be built, else plain torch, which is logged once."""

import logging
from functools import cache

import torch

from spmd_worker.base.config.speculation import AMX_STEP_TOKENS, CPU_STEP_TOKENS
from spmd_worker.base.errors import ConfigError
from spmd_worker.base.numerical_policy import RANK_SUM, NumericalPolicy
from spmd_worker.native.library import native_library
from spmd_worker.ops.attention.backend import AttentionBackend
from spmd_worker.ops.attention.cache_dtype import cache_dtype_of
from spmd_worker.ops.attention.cpu import CpuBackend, cpu_backend_or_reason
from spmd_worker.ops.attention.sdpa import SdpaBackend
from spmd_worker.ops.kernels.cpu.int8 import int8_kernels
from spmd_worker.ops.kernels.cpu.native import CpuKernels, cpu_kernels
from spmd_worker.ranks.communicator import GroupHandle
from spmd_worker.ranks.gpu_leaves import PLAIN_TORCH
from spmd_worker.worker.backends.backend import DeviceBackend, Operations

logger = logging.getLogger(__name__)


class CpuDevice(DeviceBackend):
    """`executor.device_backend=cpu`."""

    def operations(self) -> Operations:
        if self.device.type != "cpu":
            raise ConfigError("executor.device_backend=cpu computes on CPUs: use device=cpu, or leave it at auto")
        dtype, model_config = getattr(torch, self.resolved.dtype), self.resolved.model_config
        block_size = self.resolved.config.cache.block_size
        layers = model_config.layers
        # Values of latent attention are parts of its keys.
        sizes = [layer.head_size for layer in layers] + [layer.latent.rank for layer in layers if layer.latent]
        cache_dtype = cache_dtype_of(dtype, self.resolved.cache_dtype)
        attention = cpu_backend_or_reason(dtype, list(dict.fromkeys(sizes)), block_size, cache_dtype)
        has_prefilter = self.resolved.config.executor.argmax_screen
        quantised, (kernels, slow_reason) = None, cpu_kernels(dtype, has_argmax_prefilter=has_prefilter)
        if self.resolved.config.model.quantization is not None:
            kernels = quantised = int8_kernels(dtype)[0]
        has_gemm = isinstance(kernels, CpuKernels) and kernels.has_gemm(dtype)
        if isinstance(attention, CpuBackend):
            _warn_once(slow_reason)
            return Operations(kernels, attention, quantised, is_native=has_gemm)
        if self.resolved.config.parallel.invariant_tensor_parallel and quantised is None:
            raise ConfigError(f"{PLAIN_TORCH}. There are no compiled kernels: {attention}")
        _warn_once(attention)
        return Operations(kernels, SdpaBackend(cache_dtype), quantised)

    def arithmetic(self, attention: AttentionBackend) -> str:
        # The compiled kernels choose by the CPU's instruction sets.
        if isinstance(attention, CpuBackend):
            return attention.arithmetic
        size = self.resolved.layout.tensor_parallel_size
        return super().arithmetic(attention) + (f", shares of {size} ranks" if size > 1 else "")

    @property
    def step_tokens(self) -> int:
        library = native_library()
        has_amx = not isinstance(library, str) and library.has_amx
        return AMX_STEP_TOKENS if has_amx else CPU_STEP_TOKENS

    def numerical_policy(self, operations: Operations, tensor: GroupHandle) -> NumericalPolicy:
        policy = super().numerical_policy(operations, tensor)
        if isinstance(operations.attention, CpuBackend) or tensor.size == 1:
            return policy
        # Plain torch's products and attention have other bits in a rank's share.
        return NumericalPolicy({**policy.regions, RANK_SUM: policy.regions[RANK_SUM].with_constants(ranks=tensor.size)})


@cache
def _warn_once(reason: str | None) -> None:
    if reason is not None:
        logger.warning(
            "plain torch is used instead of native kernels: it is slower, and a row's last bits may depend on how its "
            "prompt was split into chunks, and on the tensor-parallel size (%s)",
            reason,
        )
