"""Small random drafts in the formats of their authors: MTP layers behind a checkpoint's last, heads of EAGLE-3, and a
smaller model with the tokenizer of a larger one.

Knows nothing of the runtime under test.
"""

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import torch
from expert_checkpoints import expert_folder
from latent_checkpoints import latent_folder
from reference_models import CHECKPOINTS, CheckpointSpec, checkpoint_folder, edit_config, write_checkpoint
from run_folder import made_once
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig

DRAFT_VOCAB_SIZE = 64
EAGLE_TARGET = "llama_four_layers"
_HIDDEN, _COLUMNS, _HEADS, _KV_HEADS, _HEAD_SIZE = 64, 90, 4, 2, 16


@cache
def mtp_folder(name: str = "deepseek_v3") -> Path:
    """A checkpoint with a layer for multi-token prediction."""
    source = expert_folder if name == "glm4_moe" else latent_folder
    return made_once(f"mtp {name}", lambda folder: _write_mtp(folder, source(name)))


@cache
def eagle_folder(**changes: Any) -> Path:
    """A head for `EAGLE_TARGET`, with `changes` of its config.json."""
    words = "-".join(f"{key}={value}" for key, value in sorted(changes.items()))
    return made_once(f"eagle {words}", lambda folder: _write_eagle(folder, changes))


@cache
def small_draft_folder(vocab_size: int = 211) -> Path:
    """A model of one layer that may draft for the models of `reference_models`."""
    overrides = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
    spec = CheckpointSpec(LlamaConfig, {**overrides, "head_dim": 16, "vocab_size": vocab_size})
    return made_once(f"small draft {vocab_size}", lambda folder: write_checkpoint(folder, spec, seed=7))


def copied_target(folder: Path, name: str = EAGLE_TARGET) -> Path:
    """A copy of a checkpoint, to be changed."""
    assert name in CHECKPOINTS, name
    shutil.copytree(checkpoint_folder(name), folder)
    return folder


def _write_mtp(folder: Path, source: Path) -> None:
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    number = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    last, new = f"model.layers.{number - 1}.", f"model.layers.{number}."
    generator = torch.Generator().manual_seed(31)
    head = {
        new + name.removeprefix(last): _like(tensor, generator)
        for name, tensor in sorted(tensors.items())
        if name.startswith(last)
    }
    size = tensors["model.norm.weight"].shape[0]
    head |= {f"{new}{norm}.weight": 1 + 0.1 * torch.randn(size, generator=generator) for norm in ("enorm", "hnorm")}
    head[f"{new}shared_head.norm.weight"] = 1 + 0.1 * torch.randn(size, generator=generator)
    head[f"{new}eh_proj.weight"] = torch.randn(size, 2 * size, generator=generator) / (2 * size) ** 0.5
    # Copies, as in the files of DeepSeek.
    head[f"{new}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    head[f"{new}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file({**tensors, **head}, folder / "model.safetensors", metadata={"format": "pt"})
    edit_config(folder, lambda config: config.update(num_nextn_predict_layers=1))


def _like(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Other numbers of the same spread."""
    if tensor.dim() < 2:
        return tensor + 0.05 * torch.randn(tensor.shape, generator=generator)
    return torch.randn(tensor.shape, generator=generator) * tensor.std()


def eagle_tensors(seed: int = 3) -> dict[str, Tensor]:
    """The tensors of a head, by the names of EAGLE-3's authors."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) / columns**0.5

    names = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    norms = {f"midlayer.{name}.weight": 1 + 0.1 * torch.randn(_HIDDEN, generator=generator) for name in names}
    ids = torch.randperm(211, generator=generator)[:DRAFT_VOCAB_SIZE].sort().values
    is_kept = torch.zeros(211, dtype=torch.bool)
    is_kept[ids] = True
    return {
        **norms,
        "midlayer.self_attn.q_proj.weight": matrix(_HEADS * _HEAD_SIZE, 2 * _HIDDEN),
        "midlayer.self_attn.k_proj.weight": matrix(_KV_HEADS * _HEAD_SIZE, 2 * _HIDDEN),
        "midlayer.self_attn.v_proj.weight": matrix(_KV_HEADS * _HEAD_SIZE, 2 * _HIDDEN),
        "midlayer.self_attn.o_proj.weight": matrix(_HIDDEN, _HEADS * _HEAD_SIZE),
        "midlayer.mlp.gate_proj.weight": matrix(_COLUMNS, _HIDDEN),
        "midlayer.mlp.up_proj.weight": matrix(_COLUMNS, _HIDDEN),
        "midlayer.mlp.down_proj.weight": matrix(_HIDDEN, _COLUMNS),
        "norm.weight": 1 + 0.1 * torch.randn(_HIDDEN, generator=generator),
        "fc.weight": matrix(_HIDDEN, 3 * _HIDDEN),
        "lm_head.weight": matrix(DRAFT_VOCAB_SIZE, _HIDDEN),
        "d2t": ids - torch.arange(DRAFT_VOCAB_SIZE),
        "t2d": is_kept,
    }


def _write_eagle(folder: Path, changes: dict[str, Any]) -> None:
    folder.mkdir()
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": _HIDDEN,
        "intermediate_size": _COLUMNS,
        "num_hidden_layers": 1,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "vocab_size": 211,
        "draft_vocab_size": DRAFT_VOCAB_SIZE,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(eagle_tensors(), folder / "model.safetensors", metadata={"format": "pt"})
