"""Small random checkpoints of Kimi Linear, written by transformers, with the hub's tensor names, and thinned as the
hub's files are.

As `delta_checkpoints`: no weight is what a mistake would leave it at. Sizes fit the compiled kernels. Knows nothing of
the runtime under test.
"""

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import torch
from mamba_checkpoints import stir_hybrid
from reference_models import without_defaults
from run_folder import made_once
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import KimiLinearConfig, KimiLinearForCausalLM, PreTrainedConfig, PreTrainedModel

_BASE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "model_max_length": 512,
    "rms_norm_eps": 0.03,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 48,
    "linear_num_heads": 4,
    "linear_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "num_experts": 8,
    "num_experts_per_token": 3,
    "moe_intermediate_size": 24,
    "num_shared_experts": 2,
    "num_expert_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}
KIMI_CASES: dict[str, dict[str, Any]] = {
    "kimi_linear": _BASE,
    "kimi_linear_query_latents": {
        **_BASE,
        "q_lora_rank": 32,
        "attention_bias": True,
        "moe_renormalize": False,
        "num_expert_group": 1,
        "topk_group": 1,
        "linear_conv_kernel_dim": 3,
        "num_shared_experts": 1,
        "mlp_layer_types": ["dense", "dense", "sparse"],
    },
}


@cache
def kimi_folder(name: str) -> Path:
    """The checkpoint of a case with the hub's names and every key in its config.json; written once a run."""
    return made_once(f"kimi {name}", lambda folder: _write(folder, name))


@cache
def saved_kimi_folder(name: str) -> Path:
    """The same as transformers saves it, which renames dense layers as if they were sparse."""
    return made_once(f"saved kimi {name}", lambda folder: kimi_reference(name).save_pretrained(folder))


@cache
def thinned_kimi_folder(name: str) -> Path:
    """The same, with a config.json as the hub has it: a section for linear layers, numbered from 1."""
    return made_once(f"thinned kimi {name}", lambda folder: _thin(folder, name))


@cache
def kimi_reference(name: str) -> KimiLinearForCausalLM:
    """transformers' model with the weights of the folder."""
    return stirred(KimiLinearForCausalLM, KimiLinearConfig(**KIMI_CASES[name]))


def stirred(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> Any:
    """A model of a hybrid with gated delta nets and experts."""
    config._attn_implementation = config._experts_implementation = "eager"
    model = model_class(config).float().eval()
    stir_hybrid(model)
    generator = torch.Generator().manual_seed(8)
    for each, value in sorted(model.named_buffers()):
        if each.endswith("e_score_correction_bias"):
            value.copy_(0.5 * torch.randn(value.shape, generator=generator))
    return model


def _write(folder: Path, name: str) -> None:
    shutil.copytree(saved_kimi_folder(name), folder)
    path = folder / "model.safetensors"
    save_file(_as_on_hub(load_file(path)), path, {"format": "pt"})


def _as_on_hub(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Dense layers by their own names."""
    matrices = [f".block_sparse_moe.{part}_proj." for part in ("gate", "up", "down")]
    return {
        each.replace("block_sparse_moe", "mlp") if any(part in each for part in matrices) else each: tensor
        for each, tensor in tensors.items()
    }


def _thin(folder: Path, name: str) -> None:
    shutil.copytree(kimi_folder(name), folder)
    path = folder / "config.json"
    given, defaults = json.loads(path.read_text()), KimiLinearConfig().to_dict()
    kinds, feed_forwards = given.pop("layer_types"), given.pop("mlp_layer_types")
    section = {
        "num_heads": given.pop("linear_num_heads"),
        "head_dim": given.pop("linear_head_dim"),
        "short_conv_kernel_size": given.pop("linear_conv_kernel_dim"),
        "kda_layers": [number for number, kind in enumerate(kinds, 1) if kind == "linear_attention"],
        "full_attn_layers": [number for number, kind in enumerate(kinds, 1) if kind == "full_attention"],
    }
    thin = without_defaults(given, defaults)
    thin |= {"linear_attn_config": section, "head_dim": 72, "rope_theta": 10000.0, "mla_use_nope": True}
    num_dense = feed_forwards.index("sparse")
    path.write_text(json.dumps(thin if num_dense == 1 else {**thin, "first_k_dense_replace": num_dense}))
