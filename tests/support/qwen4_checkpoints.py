"""Small random checkpoints of Qwen4, written by transformers with the hub's names of tensors, and what it computes.

No weight is what a mistake would leave it at. Tables of n-grams are so small that their heads' ids collide as in large
ones; indexers leave keys out after a few tokens. Knows nothing of the runtime under test.
"""

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from delta_checkpoints import MOE, SMALL_VISION
from mamba_checkpoints import stir_hybrid
from reference_models import without_defaults
from run_folder import made_once
from transformers import PreTrainedModel

LINEAR, FULL = "linear_attention", "full_attention"
TEXT: dict[str, Any] = {
    **MOE,
    "num_hidden_layers": 5,
    "layer_types": [LINEAR, FULL, LINEAR, LINEAR, FULL],
    "hc_count": 3,
    "hc_lowrank": 10,
    "ple_layer_ids": [1, 4],
    "ple_embed_dim": 48,
    "ngram_size": 3,
    "heads_per_ngram": 3,
    "ngram_vocab_size_base": 30,
    "make_ngram_vocab_size_divisible_by": 16,
    "split_ngram_parts": 5,
    # So many that hardly a score is zero.
    "indexer_n_heads": 12,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 12,
    "indexer_compress_ratio": 4,
}
QWEN4_CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen4": ("Qwen4ExpTextConfig", "Qwen4ExpForCausalLM", TEXT),
    "qwen4_sigmoid": (
        *("Qwen4ExpTextConfig", "Qwen4ExpForCausalLM"),
        {**TEXT, "output_gate_type": "sigmoid", "norm_topk_prob": False, "attention_bias": True, "ngram_size": 4}
        | {"ple_layer_ids": [3], "ple_embed_dim": 36, "ple_conv_kernel_size": 3, "indexer_compress_ratio": 6},
    ),
    "qwen4_images": ("Qwen4ExpConfig", "Qwen4ExpForConditionalGeneration", {"text_config": TEXT}),
    "qwen4_images_tokens": (
        *("Qwen4ExpConfig", "Qwen4ExpForConditionalGeneration"),
        {"text_config": {**TEXT, "indexer_compress_ratio": 1}},
    ),
}
"""Classes of configuration and model, and what the configuration is made of."""


@cache
def qwen4_folder(name: str) -> Path:
    """The checkpoint of a case; written once a run."""
    return made_once(f"qwen4 {name}", lambda folder: qwen4_reference(name).save_pretrained(folder))


@cache
def thinned_qwen4_folder(name: str) -> Path:
    """The same without the keys that have the class's default, and with ropes in the keys of files with images."""
    return made_once(f"thinned qwen4 {name}", lambda folder: _thin(folder, name))


@cache
def qwen4_reference(name: str) -> PreTrainedModel:
    """transformers' model with the weights of the folder."""
    config_class, model_class, given = QWEN4_CASES[name]
    given = {**given, "vision_config": SMALL_VISION} if "text_config" in given else given
    config = getattr(transformers, config_class)(**given)
    for each in (config, config.get_text_config()):
        each._attn_implementation = each._experts_implementation = "eager"
    model: PreTrainedModel = getattr(transformers, model_class)(config).float().eval()
    stir_hybrid(model)
    numbers = torch.Generator().manual_seed(3)
    for key, value in model.named_parameters():
        if "ple.conv1d" in key or "hyper_connection" in key or "ple_embedding" in key:
            value.data.normal_(0.1, 0.4, generator=numbers)
    return model


def _thin(folder: Path, name: str) -> None:
    shutil.copytree(qwen4_folder(name), folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    defaults = getattr(transformers, QWEN4_CASES[name][0])()
    if "text_config" in config:
        config["text_config"] = without_defaults(config["text_config"], defaults.text_config.to_dict())
    else:
        config = without_defaults(config, defaults.to_dict())
    path.write_text(json.dumps(config))
