"""A worker that computes with our kernels in Triton:
`executor.worker_cls=spmd_worker.worker.triton_worker.TritonWorker`.

Not the default on CUDA until a GPU has run them: docs/decisions.md.
"""

from spmd_worker.attention.backend import AttentionBackend
from spmd_worker.attention.triton import MAX_HEAD_SIZE, TritonBackend
from spmd_worker.errors import ConfigError
from spmd_worker.kernels.api import Kernels, QuantisedKernels
from spmd_worker.kernels.triton import attention_kernels
from spmd_worker.kernels.triton.kernels import TritonKernels
from spmd_worker.kernels.triton.launching import is_interpreted
from spmd_worker.worker.worker import Worker

_KEY = "executor.worker_cls=spmd_worker.worker.triton_worker.TritonWorker"


class TritonWorker(Worker):
    """On CUDA; on the CPU where TRITON_INTERPRET=1 was set before Triton was imported, for tests."""

    def get_arithmetic(self) -> str:
        """See `WorkerBase.get_arithmetic`."""
        return f"Triton kernels{' interpreted' if is_interpreted() else ''}, {super().get_arithmetic()}"

    def _choose_backends(self) -> tuple[Kernels, AttentionBackend, QuantisedKernels | None]:
        """Raises ConfigError for what these kernels cannot compute."""
        if is_interpreted() != (self.device.type == "cpu"):
            raise ConfigError(f"{_KEY} computes on CUDA: use device=cuda, or leave executor.worker_cls at null")
        if self.config.model.quantization is not None:
            raise ConfigError(f"{_KEY} computes with weights as they are: leave model.quantization at null")
        if is_interpreted() and self.resolved.dtype == "bfloat16":
            raise ConfigError(f"{_KEY}: Triton's interpreter has no bfloat16: use model.dtype=float32")
        for layer in self.model_config.layers:
            group = layer.num_heads // layer.num_kv_heads
            if layer.head_size > MAX_HEAD_SIZE or group > attention_kernels.ROWS:
                raise ConfigError(
                    f"{_KEY} takes heads of at most {MAX_HEAD_SIZE} and at most {attention_kernels.ROWS} query heads a "
                    f"key-value head, not {layer.head_size} and {group}: leave executor.worker_cls at null"
                )
        return TritonKernels(), TritonBackend(), None
