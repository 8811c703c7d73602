"""What swapping a block costs against computing its tokens again, from sizes alone.

Replicas decide by it, so it is made of counts and constants and never of a measurement of this run. The tensor-parallel
size cancels: each rank computes its share of the tokens and moves its share of the block.
"""

from typing import Final

from spmd_worker.model_config.model_config import ModelConfig
from spmd_worker.ranks.topology import RankLayout
from spmd_worker.worker.memory.estimate import cache_spec

OPERATIONS_PER_BYTE: Final = {"cpu": 150.0, "cuda": 8000.0}
"""Arithmetic that a device does in prompts while one byte moves between it and the host: about 1 TFLOP/s against 7 GB/s
in host memory, 400 TFLOP/s against 50 GB/s of PCIe 5. Only the order of magnitude matters, see `docs/decisions.md`."""

_WHOLE: Final = RankLayout(1, 1, 1)


def block_copy_tokens(model_config: ModelConfig, dtype: str, block_size: int, device: str) -> float:
    """Tokens that could be computed while one block goes to the host and comes back.

    Two operations a weight and token; attention is left out, which makes recomputing look cheaper than it is in long
    sequences. `device` is "cpu" or "cuda".
    """
    operations_per_token = 2 * model_config.num_parameters
    moved_bytes = 2 * cache_spec(model_config, _WHOLE, 0, dtype, block_size).block_bytes
    return moved_bytes * OPERATIONS_PER_BYTE[device] / operations_per_token
