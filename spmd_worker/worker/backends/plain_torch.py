"""Backend of torch's own operators, for any device: CUDA's default, and the reference for the other backends."""

import torch

from spmd_worker.base.errors import ConfigError
from spmd_worker.ops.attention.cache_dtype import cache_dtype_of
from spmd_worker.ops.attention.sdpa import SdpaBackend
from spmd_worker.ops.kernels.reference import ReferenceKernels
from spmd_worker.ranks.gpu_leaves import PLAIN_TORCH
from spmd_worker.worker.backends.backend import DeviceBackend, Operations


class TorchDevice(DeviceBackend):
    """`executor.device_backend=torch`."""

    def operations(self) -> Operations:
        if self.resolved.config.parallel.invariant_tensor_parallel:
            raise ConfigError(PLAIN_TORCH)
        if self.resolved.config.model.quantization is not None:
            raise ConfigError(
                "executor.device_backend=torch does not support quantised weights: set executor.device_backend=triton "
                "on a GPU, or leave model.quantization at null"
            )
        cache_dtype = cache_dtype_of(getattr(torch, self.resolved.dtype), self.resolved.cache_dtype)
        return Operations(ReferenceKernels(), SdpaBackend(cache_dtype))
