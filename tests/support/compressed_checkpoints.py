"""A small random checkpoint of DeepSeek V4, written by transformers, and thinned as files of the hub are.

Its window, and groups of both kinds, are far shorter than the prompts of tests; no weight is what a mistake would leave
it at. Knows nothing of the runtime under test.
"""

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import torch
from expert_checkpoints import open_experts
from family_checkpoints import BASE
from json_files import edit
from quantised_files import BLOCK, fp4_exponents, fp8_exponents
from run_folder import made_once
from safetensors.torch import load_file, save_file
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, PreTrainedModel

SPARSE, HEAVY, SLIDING = "compressed_sparse_attention", "heavily_compressed_attention", "sliding_attention"
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 8.0, "beta_slow": 0.5}
_SIZES: dict[str, Any] = {
    **{key: value for key, value in BASE.items() if key not in ("intermediate_size", "num_key_value_heads")},
    "max_position_embeddings": 512,
    "head_dim": 32,
    "q_lora_rank": 32,
    "o_groups": 2,
    "o_lora_rank": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 1.3,
    "layer_types": [SLIDING, SPARSE, HEAVY, SPARSE],
    "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
    # Heads so many that hardly a score is zero.
    "sliding_window": 7,
    "index_n_heads": 16,
    "index_head_dim": 32,
    "index_topk": 5,
    "partial_rotary_factor": 0.5,
    "hc_mult": 3,
    "hc_sinkhorn_iters": 4,
    "hc_eps": 0.01,
    "rope_theta": 500.0,
    "swiglu_limit": 0.7,
    "rms_norm_eps": 0.03,
    "compress_rates": {SPARSE: 4, HEAVY: 12},
    "rope_parameters": _YARN,
}
CASES: dict[str, dict[str, Any]] = {
    "deepseek_v4": {},
    # No layer with a window alone; groups as long as, and longer than, a block of 16.
    "deepseek_v4_wide": {
        "layer_types": [HEAVY, SPARSE],
        "mlp_layer_types": ["hash_moe", "hash_moe"],
        "num_hidden_layers": 2,
        "compress_rates": {SPARSE: 5, HEAVY: 40},
        "rope_parameters": None,
        "sliding_window": 40,
        "hc_mult": 2,
    },
}


_GROUPED: dict[str, dict[str, Any]] = {
    # Layers so alike that blocks of their keys and rows, in seven groups, are about as large as those of all entries.
    "deepseek_v4_groups": {
        "layer_types": [SPARSE] * 7,
        "mlp_layer_types": ["hash_moe"] + ["moe"] * 6,
        "num_hidden_layers": 7,
        "hc_mult": 2,
    },
}
_STORED = tuple(f".{each}.weight" for each in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "w1", "w2", "w3"))
"""Matrices that the hub's files do not have plain, and keys of entries, which they may have so."""


@cache
def compressed_folder(name: str) -> Path:
    """The checkpoint of a case, with every key in its config.json; written once a run."""
    return made_once(f"compressed {name}", lambda folder: _write(folder, (CASES | _GROUPED)[name]))


@cache
def hub_folder(name: str) -> Path:
    """The same with names and keys as DeepSeek's own files have them, and tensors of a head for drafts."""
    return made_once(f"compressed hub {name}", lambda folder: _rewrite(compressed_folder(name), folder))


def stored_folders(name: str, folder: Path) -> tuple[Path, Path]:
    """That of `hub_folder` with matrices as the hub stores them, FP8 and of experts FP4, and what they mean."""
    stored: dict[str, torch.Tensor] = {}
    plain: dict[str, torch.Tensor] = {}
    for key, tensor in load_file(hub_folder(name) / "model.safetensors").items():
        if not key.endswith(_STORED) or key.startswith("mtp."):
            stored[key] = plain[key] = tensor
            continue
        parts, plain[key] = (fp4_exponents if ".experts." in key else fp8_exponents)(tensor)
        stored |= {key.removesuffix(".weight") + ending: part for ending, part in parts.items()}
    folders = []
    for kind, tensors in (("stored", stored), ("plain", plain)):
        shutil.copytree(hub_folder(name), folder / kind)
        save_file(tensors, folder / kind / "model.safetensors", {"format": "pt"})
        folders.append(folder / kind)
    described = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": list(BLOCK)}
    edit(folders[0] / "config.json", quantization_config=described, expert_dtype="fp4")
    return folders[0], folders[1]


@cache
def compressed_reference(name: str) -> PreTrainedModel:
    """transformers' model of the folder, expert by expert."""
    return open_experts(compressed_folder(name))


def _write(folder: Path, keys: dict[str, Any]) -> None:
    model = DeepseekV4ForCausalLM(DeepseekV4Config(**{**_SIZES, **keys})).float().eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("tid2eid"):
                chosen = [torch.randperm(8, generator=generator)[:3] for _ in range(len(tensor))]
                tensor.copy_(torch.stack(chosen))
            elif "inv_freq" not in name:
                noise = torch.randn(tensor.shape, generator=generator)
                is_norm, is_small = "norm" in name, tensor.ndim < 2 or name.endswith("position_bias")
                tensor.copy_(1 + 0.3 * noise if is_norm else noise * (0.5 if is_small else tensor.shape[-1] ** -0.5))
    model.save_pretrained(folder)


def _rewrite(full: Path, folder: Path) -> None:
    shutil.copytree(full, folder)
    tensors = {}
    for name, tensor in load_file(full / "model.safetensors").items():
        ours = name.replace("model.embed_tokens.", "embed.").replace("model.hc_head.hc_", "hc_head_")
        tensors[ours.removeprefix("model.").replace(".attn.norm.", ".attn.kv_norm.")] = tensor
    tensors["mtp.0.attn.wq_a.weight"] = torch.zeros(2, 2)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    config = json.loads(path.read_text())
    rates, kinds = config.pop("compress_rates"), config.pop("mlp_layer_types")
    ratios = {SLIDING: 0, SPARSE: 4, HEAVY: 128}
    config["compress_ratios"] = [*(ratios[each] for each in config.pop("layer_types")), 0]
    config |= {"compress_rate_csa": rates[SPARSE], "compress_rate_hca": rates[HEAVY]}
    config |= {"qk_rope_head_dim": 16, "rope_scaling": config.pop("rope_parameters")["compress"]}
    del config["partial_rotary_factor"], config["rope_scaling"]["rope_theta"]
    del config["rope_scaling"]["partial_rotary_factor"]
    config["num_hash_layers"] = kinds.count("hash_moe")
    path.write_text(json.dumps(config))
