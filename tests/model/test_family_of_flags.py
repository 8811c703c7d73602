"""A family that differs by flags is one edit: its entry in the table, after which its checkpoints run."""

from pathlib import Path

import pytest
import torch
from new_family import check_logits, copy_with_family
from transformers import Qwen3Config, Qwen3ForCausalLM

ENTRY = """    "AcmeForCausalLM": Family(
        models="Acme",
        names=Names(
            embedding="stem.tokens",
            layers="stem.blocks",
            norm="stem.final",
            parts={"self_attn.o_proj": "attn.out", "self_attn.q_norm": "attn.q", "self_attn.k_norm": "attn.k"},
            fused={"mlp.gates": ("mlp.gate_proj", "mlp.up_proj")},
        ),
        attention=Attention(qk_norm="head"),
        file_keys={"hidden_size": "width", "num_hidden_layers": "depth"},
    ),
"""
THEIR_NAMES = {
    "model.embed_tokens": "stem.tokens",
    "model.layers": "stem.blocks",
    "model.norm": "stem.final",
    "self_attn.o_proj": "attn.out",
    "self_attn.q_norm": "attn.q",
    "self_attn.k_norm": "attn.k",
}


@pytest.mark.stress
def test_family_of_flags_is_one_edit(tmp_path: Path):
    copy_with_family(tmp_path, ENTRY, {})
    torch.manual_seed(5)
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96}
    theirs = Qwen3ForCausalLM(Qwen3Config(vocab_size=96, hidden_size=64, num_hidden_layers=2, **sizes)).eval()
    tensors = {}
    for name, tensor in theirs.state_dict().items():
        for old, new in THEIR_NAMES.items():
            name = name.replace(old, new)
        tensors[name] = tensor
    for layer in range(2):
        parts = [tensors.pop(f"stem.blocks.{layer}.mlp.{part}_proj.weight") for part in ("gate", "up")]
        tensors[f"stem.blocks.{layer}.mlp.gates.weight"] = torch.cat(parts)
    config = {"architectures": ["AcmeForCausalLM"], "vocab_size": 96, "width": 64, "depth": 2, **sizes}
    prompt = list(range(3, 43))
    check_logits(tmp_path, config, tensors, prompt, theirs(torch.tensor([prompt])).logits[0])
