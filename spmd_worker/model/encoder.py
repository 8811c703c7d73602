"""What encoders have that decoders have not: types of tokens.

T: tokens of the step.
"""

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor

from spmd_worker.model.layers.checkpoint_layer import CheckpointLayer
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.weight_slice import WeightSlice, whole


class TokenTypeEmbedding(CheckpointLayer):
    """Types of tokens: int64 [T] -> [T, hidden_size]. Whole on every rank."""

    def __init__(self, context: LayerContext, num_types: int, hidden_size: int) -> None:
        super().__init__()
        self.num_types, self.hidden_size = num_types, hidden_size
        self.weight = context.parameter(num_types, hidden_size)

    def forward(self, token_types: Tensor) -> Tensor:
        """Types are below the number of them."""
        return F.embedding(token_types, self.weight)

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        """`prefix` is this layer's name."""
        yield whole(f"{prefix}.weight", (self.num_types, self.hidden_size), f"{prefix}.weight")
