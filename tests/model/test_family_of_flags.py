"""A family that differs by flags is one edit: its entry in the table, after which its checkpoints run."""

import json
import shutil
import sys
from pathlib import Path

import ranks
import torch
from ranks import REPOSITORY
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

TABLE = "spmd_worker/model_config/families/table.py"
BEFORE = '    "LlamaForCausalLM": Family('
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
COMPARE = """
import sys, torch
from our_model import load_model, prompt_logits
folder, prompt, expected = sys.argv[1], *torch.load(sys.argv[2])
found = prompt_logits(load_model(folder), [prompt])[0]
assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
"""


def test_family_of_flags_is_one_edit(tmp_path: Path):
    shutil.copytree(REPOSITORY / "spmd_worker", tmp_path / "spmd_worker", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "kv_cache").symlink_to(REPOSITORY / "kv_cache")
    table = (tmp_path / TABLE).read_text(encoding="utf-8")
    assert table.count(BEFORE) == 1
    (tmp_path / TABLE).write_text(table.replace(BEFORE, ENTRY + BEFORE), encoding="utf-8")
    torch.manual_seed(5)
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96}
    theirs = Qwen3ForCausalLM(Qwen3Config(vocab_size=96, hidden_size=64, num_hidden_layers=2, **sizes)).eval()
    tensors = {}
    for name, tensor in theirs.state_dict().items():
        for old, new in (("embed_", ""), ("layers", "blocks"), ("model.norm", "model.final"), ("model.", "stem.")):
            name = name.replace(old, new)
        for old, new in (
            ("self_attn.o_proj", "attn.out"),
            ("self_attn.q_norm", "attn.q"),
            ("self_attn.k_norm", "attn.k"),
        ):
            name = name.replace(old, new)
        tensors[name] = tensor
    for layer in range(2):
        parts = [tensors.pop(f"stem.blocks.{layer}.mlp.{part}_proj.weight") for part in ("gate", "up")]
        tensors[f"stem.blocks.{layer}.mlp.gates.weight"] = torch.cat(parts)
    (tmp_path / "model").mkdir()
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    config = {"architectures": ["AcmeForCausalLM"], "vocab_size": 96, "width": 64, "depth": 2, **sizes}
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "eos_token_id": 2}))
    prompt = list(range(3, 43))
    torch.save((prompt, theirs(torch.tensor([prompt])).logits[0].detach()), tmp_path / "expected.pt")
    (tmp_path / "compare.py").write_text(COMPARE)
    command = [sys.executable, *(str(tmp_path / name) for name in ("compare.py", "model", "expected.pt"))]
    own = {"PYTHONPATH": f"{tmp_path}:{REPOSITORY / 'tests' / 'support'}"}
    done = ranks.run_command(command, timeout_s=240, env=own, cwd=tmp_path)
    assert done.returncode == 0, done.output
