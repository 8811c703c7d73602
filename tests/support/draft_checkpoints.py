"""Small random drafts in the formats of their authors: MTP layers behind a checkpoint's last, heads of EAGLE-3, and a
smaller model with the tokenizer of a larger one.

Knows nothing of the runtime under test.
"""

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from delta_checkpoints import delta_config, delta_folder
from expert_checkpoints import expert_folder
from latent_checkpoints import latent_folder
from mamba_checkpoints import stir_hybrid
from reference_models import CheckpointSpec, edit_config, write_checkpoint
from run_folder import made_once
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models import qwen3_5, qwen3_5_moe, qwen3_next

DRAFT_VOCAB_SIZE = 64
EAGLE_TARGET = "llama_four_layers"
_HIDDEN, _COLUMNS, _HEADS, _KV_HEADS, _HEAD_SIZE = 64, 90, 4, 2, 16


@cache
def mtp_folder(name: str = "deepseek_v3") -> Path:
    """A checkpoint with a layer for multi-token prediction."""
    source = expert_folder if name == "glm4_moe" else latent_folder
    return made_once(f"mtp {name}", lambda folder: _write_mtp(folder, source(name)))


@cache
def qwen_mtp_folder(name: str = "qwen3_5") -> Path:
    """A checkpoint of `delta_checkpoints` with a layer for multi-token prediction."""
    return made_once(f"qwen mtp {name}", lambda folder: _write_qwen_mtp(folder, name))


class QwenMtpReference(nn.Module):
    """The head of classes of transformers, which has none. Its names are those of `mtp.` in the hub's files. `config`:
    of another model than that of the case `name`.
    """

    def __init__(self, name: str, config: Any = None) -> None:
        super().__init__()
        module, prefix = next(each for beginning, each in _QWEN_CLASSES if name.startswith(beginning))
        config = config or delta_config(name).get_text_config()
        size, eps = config.hidden_size, config.rms_norm_eps
        layer, norm, rotary = (getattr(module, prefix + each) for each in ("DecoderLayer", "RMSNorm", _ROTARY[prefix]))
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = (norm(size, eps=eps) for _ in range(3))
        self.layers = nn.ModuleList([layer(config, config.layer_types.index("full_attention"))])
        self.rotary = rotary(config)
        stir_hybrid(self)

    def forward(self, embedded: Tensor, states: Tensor, rope_positions: Tensor | None = None) -> Tensor:
        """States [T, hidden] of the first tokens of a row; both arguments are [T, hidden]. `rope_positions` int64
        [3, T]: None without images.
        """
        both = (self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(states))
        x = self.fc(torch.cat(both, dim=-1))[None]
        positions = torch.arange(len(states))[None] if rope_positions is None else rope_positions[:, None]
        angles = self.rotary(x, positions)
        mask = torch.full((len(states), len(states)), -torch.inf).triu(1)[None, None]
        found: Tensor = self.norm(self.layers[0](x, position_embeddings=angles, attention_mask=mask))[0]
        return found


_QWEN_CLASSES: Final = (
    ("qwen3_5_moe", (qwen3_5_moe.modeling_qwen3_5_moe, "Qwen3_5Moe")),
    ("qwen3_5", (qwen3_5.modeling_qwen3_5, "Qwen3_5")),
    ("qwen3_next", (qwen3_next.modeling_qwen3_next, "Qwen3Next")),
)
_ROTARY: Final = {
    "Qwen3_5Moe": "TextRotaryEmbedding",
    "Qwen3_5": "TextRotaryEmbedding",
    "Qwen3Next": "RotaryEmbedding",
}


def _write_qwen_mtp(folder: Path, name: str) -> None:
    shutil.copytree(delta_folder(name), folder)
    add_qwen_head(folder, name)


def add_qwen_head(folder: Path, name: str, config: Any = None) -> None:
    """Add the tensors of `QwenMtpReference` to a model's."""
    tensors = load_file(folder / "model.safetensors")
    for own, value in QwenMtpReference(name, config).state_dict().items():
        for part, each in _on_hub(own, value, is_separate=name == "qwen3_next").items():
            tensors[f"mtp.{part}"] = each.contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    # The hub's Qwen3-Next has no such key.
    if name != "qwen3_next":
        keys = {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
        edit_config(folder, lambda config: config.get("text_config", config).update(keys))


def _on_hub(name: str, value: Tensor, *, is_separate: bool) -> dict[str, Tensor]:
    """Experts of Qwen3-Next are separate in files, and stacks of transformers in memory."""
    module, _, leaf = name.rpartition(".")
    if not is_separate or not module.endswith("mlp.experts"):
        return {name: value}
    parts = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else (leaf,)
    return {
        f"{module}.{expert}.{part}.weight": each
        for expert, own in enumerate(value)
        for part, each in zip(parts, own.chunk(len(parts)), strict=True)
    }


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
