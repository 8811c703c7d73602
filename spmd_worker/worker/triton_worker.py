"""A worker that computes with our kernels in Triton:
`executor.worker_cls=spmd_worker.worker.triton_worker.TritonWorker`.

Not the default on CUDA until a GPU has run them: docs/decisions.md.
"""

from typing import Any

import torch

from spmd_worker.attention.backend import AttentionBackend
from spmd_worker.attention.triton import HEAD_SIZES, TritonBackend
from spmd_worker.errors import ConfigError
from spmd_worker.kernels.api import Kernels, QuantisedKernels
from spmd_worker.kernels.triton import attention, attention_kernels, matmul
from spmd_worker.kernels.triton.kernels import TritonKernels
from spmd_worker.kernels.triton.launching import is_interpreted
from spmd_worker.worker.worker import Worker

_WAY_OUT = "leave executor.worker_cls at null"
_KEY = "executor.worker_cls=spmd_worker.worker.triton_worker.TritonWorker"


class TritonWorker(Worker):
    """On CUDA; on the CPU where TRITON_INTERPRET=1 was set before Triton was imported, for tests."""

    def get_arithmetic(self) -> str:
        """See `WorkerBase.get_arithmetic`."""
        return f"Triton kernels{' interpreted' if is_interpreted() else ''}, {super().get_arithmetic()}"

    def _choose_backends(self) -> tuple[Kernels, AttentionBackend, QuantisedKernels | None]:
        """Raises ConfigError for what these kernels cannot compute."""
        if is_interpreted() != (self.device.type == "cpu"):
            raise ConfigError(f"{_KEY} computes on CUDA: use device=cuda, or {_WAY_OUT}")
        if self.config.model.quantization is not None:
            raise ConfigError(f"{_KEY} computes with weights as they are: leave model.quantization at null")
        if is_interpreted() and self.resolved.dtype == "bfloat16":
            raise ConfigError(f"{_KEY}: Triton's interpreter has no bfloat16: use model.dtype=float32")
        if self.model_config.is_encoder:
            raise ConfigError(
                f"{_KEY} computes causal attention, and {self.model_config.architecture} is an encoder, whose tokens "
                f"see those behind them too: {_WAY_OUT}"
            )
        for layer in self.model_config.layers:
            group = layer.num_heads // layer.num_kv_heads
            if layer.head_size not in HEAD_SIZES or group > attention_kernels.ROWS:
                raise ConfigError(
                    f"{_KEY} takes heads of {HEAD_SIZES[0]} to {HEAD_SIZES[-1]} and at most {attention_kernels.ROWS} "
                    f"query heads a key-value head, not {layer.head_size} and {group}: {_WAY_OUT}"
                )
        if self.device.type == "cuda":
            self._check_shared_memory()
        return TritonKernels(), TritonBackend(), None

    def _check_shared_memory(self) -> None:
        """Raises ConfigError for a GPU whose shared memory cannot hold the tiles: the first launch would fail."""
        itemsize = getattr(torch, self.resolved.dtype).itemsize
        largest = max(layer.head_size for layer in self.model_config.layers)
        needed = max(attention.shared_bytes(largest, itemsize), matmul.shared_bytes(itemsize))
        properties: Any = torch.cuda.get_device_properties(self.device)  # torch's stub lacks the attribute
        there = int(properties.shared_memory_per_block_optin)
        if there < needed:
            raise ConfigError(
                f"{_KEY} needs {needed:,} bytes of shared memory a block for heads of {largest} in "
                f"{self.resolved.dtype}, and {torch.cuda.get_device_name(self.device)} has {there:,}: {_WAY_OUT}"
            )
