"""Runs with `parallel.invariant_tensor_parallel=true` that GPUs, or plain torch, cannot compute. Needs no torch."""

from typing import Final

from spmd_worker.base.config.schema import RunConfig
from spmd_worker.base.errors import ConfigError
from spmd_worker.model_config.model_config import ModelConfig

_KEY: Final = "parallel.invariant_tensor_parallel"
PLAIN_TORCH: Final = (
    f"{_KEY}=true is not supported by plain torch, whose products choose the order of their sums by the shape: use the "
    f"compiled kernels on a CPU (float32, bfloat16), executor.device_backend=triton on a GPU, or leave {_KEY} out"
)


def check_gpu_leaves(config: RunConfig, model_config: ModelConfig) -> None:
    """Raise ConfigError for a run on GPUs, with this key set, whose answers would depend on the number of ranks."""
    size = config.parallel.tensor_parallel_size
    if config.model.quantization == "fp8":
        raise ConfigError(
            f"{_KEY}=true needs numbers that are the same on any number of ranks, but with model.quantization=fp8 a "
            f"rank's share of a row has scales of its own: use model.quantization=int8, whose sums are exact, or leave "
            f"one of them out"
        )
    has_experts = any(layer.experts is not None for layer in model_config.layers)
    if size > 1 and has_experts and not config.parallel.enable_expert_parallel:
        raise ConfigError(
            f"{_KEY}=true with parallel.tensor_parallel_size={size} needs complete experts on GPUs, whose kernels do "
            f"not sum columns of an expert in leaves: set parallel.enable_expert_parallel=true, or leave {_KEY} out"
        )
