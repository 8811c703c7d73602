"""Sizes with which an interpreted engine with experts takes seconds: tiles of few elements, graphs of few rows."""

import logging

import torch

from spmd_worker.ops.kernels.triton import attention_kernels, experts, matmul, tiles
from spmd_worker.worker.backends import triton as triton_backend
from spmd_worker.worker.runner import step_graphs


def use_small_steps() -> None:
    """Call it before the first engine of a process that does nothing else."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    attention_kernels.ROWS, attention_kernels.TILE, attention_kernels.SEGMENT = 16, 16, 32
    matmul.FLOAT32 = tiles.Tile(64, 64, 64, 4, 2, False, False, False)
    experts.FLOAT32 = tiles.Tile(16, 32, 32, 4, 2), tiles.Tile(16, 32, 32, 4, 2)
    step_graphs._SMALL_SIZES = (3, 8)
    # Nothing is compiled here.
    triton_backend.TritonDevice.warm_up_masks = lambda self, runner: None
    triton_backend.warm_up_steps = lambda *arguments: ()
