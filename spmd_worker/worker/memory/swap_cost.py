"""Cost of swapping a block relative to recomputing its tokens, from sizes alone.

Replicas decide by it, so it depends on counts and constants and not on measurements. The tensor-parallel size cancels
out: each rank computes its share of the tokens and moves its share of the block.
"""

from typing import Final

from spmd_worker.model_config.model_config import ModelConfig
from spmd_worker.ranks.topology import RankLayout
from spmd_worker.worker.memory.estimate import cache_spec

OPERATIONS_PER_BYTE: Final = {"cpu": 150.0, "cuda": 8000.0}
"""Prefill operations of a device per byte moved between it and the host: about 1 TFLOP/s to 7 GB/s in host memory, 400
TFLOP/s to 50 GB/s of PCIe 5. Only the order of magnitude matters (docs/decisions.md).
"""


def block_copy_tokens(model_config: ModelConfig, dtype: str, block_size: int, device: str) -> float:
    """Tokens that could be computed while one block is swapped out and in. Two operations per weight and token;
    attention is ignored, which underestimates recomputation in long sequences. `device` is "cpu" or "cuda".
    """
    operations_per_token = 2 * model_config.num_parameters
    moved_bytes = 2 * cache_spec(model_config, RankLayout(1, 1, 1), 0, dtype, block_size).block_bytes
    return moved_bytes * OPERATIONS_PER_BYTE[device] / operations_per_token
