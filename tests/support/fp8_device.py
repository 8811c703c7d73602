"""A device backend that computes FP8 by its definition in plain torch, on CPUs, for tests."""

import torch

from spmd_worker.ops.attention.sdpa import SdpaBackend
from spmd_worker.ops.kernels.fp8 import ReferenceFp8Kernels
from spmd_worker.worker.backends.backend import DeviceBackend, Operations


class Fp8ReferenceDevice(DeviceBackend):
    def operations(self) -> Operations:
        kernels = ReferenceFp8Kernels(getattr(torch, self.resolved.dtype))
        return Operations(kernels, SdpaBackend(), kernels)


FP8 = {"quantization": "fp8", "device_backend": "fp8_device.Fp8ReferenceDevice", "device": "cpu"}
"""Arguments of `LLM`."""
