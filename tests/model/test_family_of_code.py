"""A family with arithmetic of its own is two files: a module with its layer, and its entry in the table."""

from pathlib import Path

import pytest
import torch
from new_family import check_logits, copy_with_family
from transformers import LlamaConfig, LlamaForCausalLM

LAYER = '''
"""A decoder layer whose feed-forward is scaled by a gate per token."""
from torch import Tensor
from spmd_worker.model.decoder_layer import DecoderLayer
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.feed_forward import FeedForward
from spmd_worker.model.layers.linear import replicated_linear
from spmd_worker.model_config.layer_config import LayerConfig
from spmd_worker.ops.kernels.adapters import StepAdapters

class GatedFeedForward(FeedForward):
    """[T, hidden] -> this rank's part of [T, hidden]."""

    def __init__(self, context: LayerContext, layer: LayerConfig, hidden_size: int) -> None:
        super().__init__(context, layer, hidden_size)
        self.token_gate = replicated_linear(context, "token_gate", hidden_size, 1)

    def forward(self, x: Tensor, adapters: StepAdapters | None = None, *, is_fused: bool = True) -> Tensor:
        # Sigmoid by tanh, which is row-wise in these kernels.
        gate = (self._kernels.bound(self.token_gate(x) / 2, 1.0) + 1) / 2
        return super().forward(x, adapters, is_fused=is_fused) * gate

class Layer(DecoderLayer):
    def __init__(self, context: LayerContext, layer: LayerConfig, hidden_size: int, *, defers: bool) -> None:
        super().__init__(context, layer, hidden_size, defers=defers)
        self.mlp = GatedFeedForward(context, layer, hidden_size)
'''
ENTRY = '    "GatedForCausalLM": Family(models="Gated", layer="gated_layer"),\n'


@pytest.mark.stress
def test_family_of_code_is_two_files(tmp_path: Path):
    copy_with_family(tmp_path, ENTRY, {"spmd_worker/model/gated_layer.py": LAYER})
    torch.manual_seed(5)
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    theirs = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, **sizes)).eval()
    tensors = dict(theirs.state_dict())
    for index, layer in enumerate(theirs.model.layers):
        gate = tensors[f"model.layers.{index}.mlp.token_gate.weight"] = torch.randn(1, 64)
        layer.mlp.register_forward_hook(lambda mlp, args, output, w=gate: output * torch.sigmoid(args[0] @ w.T))
    config = {"architectures": ["GatedForCausalLM"], "num_attention_heads": 4, **sizes}
    prompt = list(range(3, 43))
    check_logits(tmp_path, config, tensors, prompt, theirs(torch.tensor([prompt])).logits[0])
