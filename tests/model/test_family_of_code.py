"""A family with arithmetic of its own is two files: a module with its layer, and its entry in the table."""

import json
import shutil
import sys
from pathlib import Path

import ranks
import torch
from ranks import REPOSITORY
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

LAYER = '''
"""A decoder layer whose feed-forward is scaled by a gate per token."""
from torch import Tensor
from spmd_worker.model.decoder import DecoderLayer
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.feed_forward import FeedForward
from spmd_worker.model.layers.linear import replicated_linear
from spmd_worker.model_config.layer_config import LayerConfig

class GatedFeedForward(FeedForward):
    """[T, hidden] -> this rank's part of [T, hidden]."""

    def __init__(self, context: LayerContext, layer: LayerConfig, hidden_size: int) -> None:
        super().__init__(context, layer, hidden_size)
        self.token_gate = replicated_linear(context, "token_gate", hidden_size, 1)

    def forward(self, x: Tensor, *, is_fused: bool = True) -> Tensor:
        # Sigmoid by tanh, which is row-wise in these kernels.
        gate = (self._kernels.bound(self.token_gate(x) / 2, 1.0) + 1) / 2
        return super().forward(x, is_fused=is_fused) * gate

class Layer(DecoderLayer):
    def __init__(self, context: LayerContext, layer: LayerConfig, hidden_size: int, *, defers: bool) -> None:
        super().__init__(context, layer, hidden_size, defers=defers)
        self.mlp = GatedFeedForward(context, layer, hidden_size)
'''
TABLE = "spmd_worker/model_config/families/table.py"
BEFORE = '    "LlamaForCausalLM": Family('
ENTRY = '    "GatedForCausalLM": Family(models="Gated", layer="gated_layer"),\n'
COMPARE = """
import sys, torch
from our_model import load_model, prompt_logits
folder, prompt, expected = sys.argv[1], *torch.load(sys.argv[2])
model = load_model(folder)
found = prompt_logits(model, [prompt])[0]
assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
assert torch.equal(prompt_logits(model, [prompt], 7)[0], found)
"""


def test_family_of_code_is_two_files(tmp_path: Path):
    shutil.copytree(REPOSITORY / "spmd_worker", tmp_path / "spmd_worker", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "kv_cache").symlink_to(REPOSITORY / "kv_cache")
    (tmp_path / "spmd_worker" / "model" / "gated_layer.py").write_text(LAYER)
    table = (tmp_path / TABLE).read_text(encoding="utf-8")
    assert table.count(BEFORE) == 1
    (tmp_path / TABLE).write_text(table.replace(BEFORE, ENTRY + BEFORE), encoding="utf-8")
    torch.manual_seed(5)
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    theirs = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, **sizes)).eval()
    tensors = dict(theirs.state_dict())
    for index, layer in enumerate(theirs.model.layers):
        gate = tensors[f"model.layers.{index}.mlp.token_gate.weight"] = torch.randn(1, 64)
        layer.mlp.register_forward_hook(lambda mlp, args, output, w=gate: output * torch.sigmoid(args[0] @ w.T))
    (tmp_path / "model").mkdir()
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    config = {"architectures": ["GatedForCausalLM"], "num_attention_heads": 4, "eos_token_id": 2, **sizes}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    prompt = list(range(3, 43))
    torch.save((prompt, theirs(torch.tensor([prompt])).logits[0].detach()), tmp_path / "expected.pt")
    (tmp_path / "compare.py").write_text(COMPARE)
    command = [sys.executable, *(str(tmp_path / name) for name in ("compare.py", "model", "expected.pt"))]
    own = {"PYTHONPATH": f"{tmp_path}:{REPOSITORY / 'tests' / 'support'}"}
    done = ranks.run_command(command, timeout_s=240, env=own, cwd=tmp_path)
    assert done.returncode == 0, done.output
