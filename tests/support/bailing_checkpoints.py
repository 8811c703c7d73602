"""Small random checkpoints of Ling 3.0, written by transformers, and thinned as the hub's files are.

As `kimi_checkpoints`: no weight is what a mistake would leave it at. Sizes fit the compiled kernels. Knows nothing of
the runtime under test.
"""

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

from kimi_checkpoints import stirred
from reference_models import without_defaults
from run_folder import made_once
from transformers import BailingHybridConfig, BailingHybridForCausalLM

_BASE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "layer_group_size": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "rms_norm_eps": 0.03,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 48,
    "head_dim": 12,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.3,
    "first_k_dense_replace": 1,
    "kda_lower_bound": -3.0,
    "rope_theta": 500.0,
}
BAILING_CASES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": _BASE,
    "bailing_hybrid_unbounded": {
        **_BASE,
        "kda_safe_gate": False,
        "attention_bias": True,
        "norm_topk_prob": False,
        "n_group": 1,
        "topk_group": 1,
        "short_conv_kernel_size": 3,
        "n_shared_experts": 1,
        "layer_types": ["full_attention", "linear_attention", "linear_attention"],
        "mlp_layer_types": ["sparse", "dense", "sparse"],
    },
}
_FILE_KEYS = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
"""Keys that transformers writes -> those of the class, which files may have too."""


@cache
def bailing_folder(name: str) -> Path:
    """The checkpoint of a case as transformers saves it; written once a run."""
    return made_once(f"bailing {name}", lambda folder: bailing_reference(name).save_pretrained(folder))


@cache
def thinned_bailing_folder(name: str) -> Path:
    """The same with the class's keys, the head size of linear layers as the file's own, and no defaults."""
    return made_once(f"thinned bailing {name}", lambda folder: _thin(folder, name))


@cache
def bailing_reference(name: str) -> BailingHybridForCausalLM:
    """transformers' model with the weights of the folder."""
    return stirred(BailingHybridForCausalLM, BailingHybridConfig(**BAILING_CASES[name]))


def _thin(folder: Path, name: str) -> None:
    shutil.copytree(bailing_folder(name), folder)
    path = folder / "config.json"
    given = json.loads(path.read_text())
    sizes = {"head_dim": given.pop("linear_head_dim"), "short_conv_kernel_size": given.pop("linear_conv_kernel_dim")}
    del given["linear_num_heads"]
    for key in ("layer_types", "mlp_layer_types"):
        if key not in BAILING_CASES[name]:
            del given[key]
    thin = without_defaults(given, BailingHybridConfig().to_dict(), "rope_theta")
    thin = {_FILE_KEYS.get(key, key): value for key, value in thin.items()}
    thin.pop("rope_parameters", None)
    path.write_text(json.dumps({**thin, **sizes}))
