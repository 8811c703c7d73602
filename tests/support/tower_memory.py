"""Memory that a tower takes, by torch's allocator."""

from typing import Any

import torch
from allocated import peak_bytes

from spmd_worker.model.layers.checkpoint_layer import PackedLayer
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.towers.new_tower import new_tower
from spmd_worker.model_config.model_config import ModelConfig
from spmd_worker.ops.attention.sdpa import SdpaBackend
from spmd_worker.ops.kernels.reference import ReferenceKernels
from spmd_worker.ranks.communicator import single_group


@torch.inference_mode()
def peak_of(config: ModelConfig, given: Any, dtype: torch.dtype) -> tuple[int, int, int]:
    """Bytes that torch's allocator gave at most at once, rows of what was given, and parameters."""
    assert config.vision is not None
    context = LayerContext(single_group(), ReferenceKernels(), SdpaBackend(), dtype, torch.device("cpu"))
    tower = new_tower(context, config.vision, config.hidden_size)
    num_parameters = sum(each.numel() for each in tower.parameters())
    for each in tower.parameters():
        each.zero_()
    for module in tower.modules():
        if isinstance(module, PackedLayer):
            module.pack_weights()
    found: list[int] = []
    most = peak_bytes(lambda: found.append(len(tower(given).rows)))
    return most, found[0], num_parameters
