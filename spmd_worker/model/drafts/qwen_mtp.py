"""The head for multi-token prediction of Qwen3-Next and Qwen3.5: tensors of `mtp.`, beside the model's.

    states, token i + 1 -> [pre_fc_norm_embedding(embedding) | pre_fc_norm_hidden(states)] -> fc
                        -> layer with full attention -> norm -> states -> logits

The target's states and the head's own are normed, by the norm before the token head, and a further draft takes the
latter. So vLLM has it (`qwen3_5_mtp.py`), and SGLang (`qwen3_next_mtp.py`).

T: tokens.
"""

import torch
from torch import Tensor, nn

from spmd_worker.model.decoder_layer import DecoderLayer
from spmd_worker.model.drafts.draft_names import QwenNames
from spmd_worker.model.drafts.mtp import MtpStack
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.embedding import VocabularyParallelEmbedding
from spmd_worker.model.layers.linear import replicated_linear
from spmd_worker.model.layers.norm import new_norm
from spmd_worker.model_config.model_config import ModelConfig


class QwenStack(MtpStack):
    """Norms of both inputs, their projection, the layer and its norm; perhaps the target's embedding once more."""

    names = QwenNames

    def __init__(self, context: LayerContext, model_config: ModelConfig, *, has_embedding: bool) -> None:
        super().__init__(context, model_config, has_embedding=has_embedding)
        (layer,), size = model_config.layers, model_config.hidden_size
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = (
            new_norm(context, size, model_config.norm) for _ in range(3)
        )
        self.fc = replicated_linear(context, "fc", 2 * size, size)
        self.layers = nn.ModuleList([DecoderLayer(context, layer, size, defers=layer.is_plain_wiring)])
        if has_embedding:
            sizes = (model_config.num_embeddings, model_config.embedding_size)
            self.embed_tokens = VocabularyParallelEmbedding(context.of_head, *sizes)

    @property
    def own_embedding(self) -> VocabularyParallelEmbedding:
        return self.embed_tokens

    def joined(self, embedded: Tensor, states: Tensor) -> Tensor:
        both = (self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(states))
        stream: Tensor = self.fc(torch.cat(both, dim=-1))
        return stream

    def continued(self, stream: Tensor) -> Tensor:
        states: Tensor = self.norm(stream)
        return states

    def scored(self, states: Tensor) -> Tensor:
        return states
