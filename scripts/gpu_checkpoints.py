"""Small random checkpoints for the scripts that ask a GPU, written by transformers' own classes, adapters and prompts
for them.

Weights are spread enough for a likeliest token to be one. Sizes are large enough for several tiles of a kernel, and
small enough to be made in a second. Knows nothing of the runtime under test.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

VOCAB_SIZE = 4096
SEED = 20240229
MAX_LENGTH = 1024

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": MAX_LENGTH,
    "initializer_range": 0.08,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 0,
    "pad_token_id": None,
}
_EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 8, "intermediate_size": 256, "sliding_window": None}
_MANY_EXPERTS = {"num_experts_per_tok": 4, "num_experts": 16, "moe_intermediate_size": 128, "head_dim": 64}
_GEMMA = {
    "head_dim": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "sliding_window": 96,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
}
_DELTA = {
    "head_dim": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_MAMBA = {
    "head_dim": 64,
    "mamba_d_ssm": 512,
    "mamba_n_heads": 8,
    "mamba_d_head": 64,
    "mamba_n_groups": 2,
    "mamba_d_state": 64,
    "mamba_chunk_size": 32,
}
_NEMOTRON = {
    "head_dim": 64,
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
    "mamba_num_heads": 8,
    "mamba_head_dim": 64,
    "n_groups": 2,
    "ssm_state_size": 64,
    "chunk_size": 32,
    # transformers bounds dt of prompts by it, and not of later tokens.
    "time_step_min": 1e-12,
}
_CONVOLUTION = {
    "layer_types": ["conv", "full_attention"] * 2,
    "block_auto_adjust_ff_dim": False,
    "tie_word_embeddings": True,
}
_LATENT = {
    "num_key_value_heads": 8,
    "q_lora_rank": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_CHOICE = {**_LATENT, "index_n_heads": 32, "index_head_dim": 128, "index_topk": 64}
_COMPRESSED = {
    "head_dim": 512,
    "q_lora_rank": 128,
    "o_groups": 2,
    "o_lora_rank": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "layer_types": [
        *("sliding_attention", "compressed_sparse_attention"),
        *("heavily_compressed_attention", "compressed_sparse_attention"),
    ],
    "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
    "sliding_window": 128,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 32,
    "partial_rotary_factor": 0.125,
    "num_key_value_heads": 1,
}
_SHAPES = {
    **_GEMMA,
    "global_head_dim": 512,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
}
del _SHAPES["query_pre_attn_scalar"]
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {"head_dim": 64, "num_key_value_heads": 2}),
    "gemma3": ("Gemma3Text", _GEMMA),
    "mixtral": ("Mixtral", _EXPERTS),
    "qwen3_moe": ("Qwen3Moe", _MANY_EXPERTS),
    "qwen3_5": ("Qwen3_5Text", _DELTA),
    "falcon_h1": ("FalconH1", _MAMBA),
    "nemotron_h": ("NemotronH", _NEMOTRON),
    "lfm2": ("Lfm2", _CONVOLUTION),
    "deepseek_v3": ("DeepseekV3", _LATENT),
    "deepseek_v32": ("DeepseekV32", _CHOICE),
    "deepseek_v4": ("DeepseekV4", _COMPRESSED),
    "gemma4": ("Gemma4Text", _SHAPES),
}
"""Families by name: transformers' name of the classes, and what differs from the common sizes."""
_TINY_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": None,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "moe_intermediate_size": 32,
}
_SMALL_MAMBA = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16}
TINY_OF: dict[str, dict[str, Any]] = {
    "qwen3_5": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "falcon_h1": _SMALL_MAMBA,
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "full_attention"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
    },
    "deepseek_v3": _TINY_LATENT,
    "deepseek_v32": {**_TINY_LATENT, "index_n_heads": 16, "index_head_dim": 32, "index_topk": 6},
    "deepseek_v4": {
        **{key: _TINY_LATENT[key] for key in ("q_lora_rank", "n_routed_experts", "moe_intermediate_size")},
        "num_key_value_heads": 1,
        "head_dim": 32,
        "o_lora_rank": 24,
        "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
        "mlp_layer_types": ["hash_moe", "moe"],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 12},
        "sliding_window": 7,
        "index_n_heads": 16,
        "index_head_dim": 32,
        "index_topk": 3,
        "partial_rotary_factor": 0.5,
    },
    "gemma4": {"global_head_dim": 32},
}
"""Sizes of these families that replace those of `TINY`."""
ENCODER: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.08,
    "pad_token_id": 0,
}
TINY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 320}
"""Sizes for interpreted kernels; heads stay as they are, for which the width does not matter."""


class MissingFamilyError(Exception):
    """transformers as it is here does not have the family's classes."""


def make_checkpoint(folder: Path, family: str = "llama", *, is_tiny: bool = False) -> None:
    """Weights in float32. Raises MissingFamilyError if transformers here does not have the family."""
    # Imported here, so that a machine without a GPU hears of it at once.
    import transformers

    word, overrides = FAMILIES[family]
    name = f"{word.removesuffix('Text')}ForCausalLM"
    if not hasattr(transformers, name):
        raise MissingFamilyError(f"transformers {transformers.__version__} has no {name}")
    tiny = {**TINY, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16} if is_tiny else {}
    if is_tiny and "layer_types" in overrides:
        tiny["layer_types"] = overrides["layer_types"][: TINY["num_hidden_layers"]]
    tiny |= TINY_OF.get(family, {}) if is_tiny else {}
    # Sizes that are None are left out: a class may have its own.
    sizes = {key: value for key, value in {**overrides, **tiny}.items() if value is not None}
    config = getattr(transformers, f"{word}Config")(**{**_COMMON, **sizes})
    torch.manual_seed(SEED)
    model = getattr(transformers, name)(config)
    _spread_rates(model)
    model.save_pretrained(folder)


@torch.no_grad()
def _spread_rates(model: Any) -> None:
    """States of a new model forget within a token: rates with which some last, and taps of which each counts."""
    generator = torch.Generator().manual_seed(SEED)
    for name, value in sorted(model.named_parameters()):
        noise = torch.randn(value.shape, generator=generator)
        if name.endswith(("A_log", "dt_bias")):
            value.copy_(noise - 1.0)
        elif value.ndim == 3 and "conv" in name:
            value.copy_(0.6 * noise)


def make_encoder(folder: Path, *, is_tiny: bool = False) -> None:
    """BERT with mean pooling, weights in float32, and the files of sentence-transformers."""
    from transformers import BertConfig, BertModel

    config = BertConfig(**{**ENCODER, **(TINY if is_tiny else {})})
    torch.manual_seed(SEED)
    BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    listed = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": config.hidden_size, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


MODULES = {
    "self_attn.q_proj": ("hidden", "queries"),
    "self_attn.k_proj": ("hidden", "keys"),
    "self_attn.v_proj": ("hidden", "keys"),
    "self_attn.o_proj": ("queries", "hidden"),
    "mlp.gate_proj": ("hidden", "inner"),
    "mlp.up_proj": ("hidden", "inner"),
    "mlp.down_proj": ("inner", "hidden"),
}
"""Linear layers of a decoder layer: names of their inputs and outputs."""


def make_adapter(
    config: dict[str, Any], seed: int, rank: int, modules: Sequence[str] = tuple(MODULES)
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors of a random LoRA adapter by the names of PEFT's file, in bfloat16, and its adapter_config.json, for a
    model with this config.json: large enough that answers change.
    """
    generator, tensors = torch.Generator().manual_seed(seed), {}
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    sizes = {
        "hidden": config["hidden_size"],
        "inner": config["intermediate_size"],
        "queries": config["num_attention_heads"] * head,
        "keys": config["num_key_value_heads"] * head,
    }
    for layer in range(config["num_hidden_layers"]):
        for module in modules:
            num_inputs, num_outputs = (sizes[name] for name in MODULES[module])
            name = f"base_model.model.model.layers.{layer}.{module}"
            a = torch.randn(rank, num_inputs, generator=generator) * num_inputs**-0.5
            b = torch.randn(num_outputs, rank, generator=generator) * 0.3
            tensors |= {f"{name}.lora_A.weight": a.bfloat16(), f"{name}.lora_B.weight": b.bfloat16()}
    targets = [module.rpartition(".")[2] for module in modules]
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets, "bias": "none"}
    return tensors, settings


def make_expert_adapter(config: dict[str, Any], seed: int, rank: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """`make_adapter` of all experts' stacks, routers and queries, for a Qwen3-MoE."""
    tensors, settings = make_adapter(config | {"intermediate_size": 0}, seed, rank, ("self_attn.q_proj",))
    generator, hidden, size = (
        torch.Generator().manual_seed(seed),
        config["hidden_size"],
        config["moe_intermediate_size"],
    )
    count = config.get("num_experts") or config["num_local_experts"]
    stacks = {"experts.base_layer": (hidden, 2 * size, count), "experts": (size, hidden, count)}
    for layer in range(config["num_hidden_layers"]):
        for module, (num_inputs, num_outputs, num_each) in (stacks | {"gate": (hidden, count, 1)}).items():
            name = f"base_model.model.model.layers.{layer}.mlp.{module}"
            a = torch.randn(num_each * rank, num_inputs, generator=generator) * num_inputs**-0.5
            b = torch.randn(num_outputs, num_each * rank, generator=generator) * 0.3
            tensors |= {f"{name}.lora_A.weight": a.bfloat16(), f"{name}.lora_B.weight": b.bfloat16()}
    settings |= {"target_modules": None, "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    return tensors, settings


def long_and_short_prompts(count: int, vocab_size: int = VOCAB_SIZE) -> list[list[int]]:
    """Token ids of short rows, with every eighth longer than a segment of attention's keys. Where the cache is small,
    rows that started together have to give way as they grow.
    """
    generator = torch.Generator().manual_seed(SEED)
    lengths = [640 + row if row % 8 == 7 else 1 + 37 * row % 160 for row in range(count)]
    return [torch.randint(1, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def make_prompts(count: int, longest: int = 300, vocab_size: int = VOCAB_SIZE) -> list[list[int]]:
    """Token ids of mixed lengths, from 1 on."""
    generator = torch.Generator().manual_seed(SEED)
    lengths = [1 + 37 * index % longest for index in range(count)]
    return [torch.randint(1, vocab_size, (length,), generator=generator).tolist() for length in lengths]
