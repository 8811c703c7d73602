"""Any device by torch's own operators: what CUDA computes with by default, and what others are compared with."""

from spmd_worker.base.errors import ConfigError
from spmd_worker.ops.attention.sdpa import SdpaBackend
from spmd_worker.ops.kernels.reference import ReferenceKernels
from spmd_worker.worker.backends.backend import DeviceBackend, Operations


class TorchDevice(DeviceBackend):
    """`executor.device_backend=torch`."""

    def operations(self) -> Operations:
        if self.resolved.config.model.quantization is not None:
            raise ConfigError(
                "executor.device_backend=torch computes with weights as they are: leave model.quantization at null"
            )
        return Operations(ReferenceKernels(), SdpaBackend())
