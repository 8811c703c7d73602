"""Inputs of each layer, besides the stream: numbers of a token's id and of its embedding (per-layer
embeddings of Gemma 3n and 4).

T: tokens of the step; L: layers; P: numbers of a layer.
"""

import torch
from torch import Tensor, nn

from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.embedding import VocabularyParallelEmbedding
from spmd_worker.model.layers.linear import replicated_linear
from spmd_worker.model.layers.norm import new_norm
from spmd_worker.model_config.model_config import ModelConfig
from spmd_worker.ops.kernels.adapters import StepAdapters


class LayerInputs(nn.Module):
    """Ids [T] and their scaled embeddings [T, hidden] -> [T, L, P]. Ids beyond the table have its first row. The table
    is cut by rows, the rest replicated.
    """

    def __init__(self, context: LayerContext, model_config: ModelConfig) -> None:
        super().__init__()
        self._size, total = model_config.layers[0].input_size, model_config.layer_inputs_size
        self._num_rows = model_config.num_layer_inputs
        self._has_row_of_all = model_config.vocab_size <= self._num_rows
        # Rounded as the embedding's.
        self._table_scale = float(torch.tensor(self._size**0.5, dtype=context.dtype))
        self._projection_scale = model_config.hidden_size**-0.5
        self.table = VocabularyParallelEmbedding(context.of_head, model_config.num_layer_inputs, total)
        self.projection = replicated_linear(context, "projection", model_config.hidden_size, total)
        self.norm = new_norm(context, self._size, model_config.norm)

    def forward(self, token_ids: Tensor, embedded: Tensor, adapters: StepAdapters | None = None) -> Tensor:
        if not self._has_row_of_all:
            token_ids = torch.where(token_ids < self._num_rows, token_ids, 0)
        of_ids: Tensor = (self.table(token_ids) * self._table_scale).view(len(token_ids), -1, self._size)
        projected = (self.projection(embedded, adapters) * self._projection_scale).view_as(of_ids)
        inputs: Tensor = (self.norm(projected) + of_ids) * 2.0**-0.5
        return inputs
