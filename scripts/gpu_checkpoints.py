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
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {"head_dim": 64, "num_key_value_heads": 2}),
    "gemma3": ("Gemma3Text", _GEMMA),
    "mixtral": ("Mixtral", _EXPERTS),
    "qwen3_moe": ("Qwen3Moe", _MANY_EXPERTS),
}
"""Families by name: transformers' name of the classes, and what differs from the common sizes."""
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


def make_checkpoint(folder: Path, family: str = "llama", *, is_tiny: bool = False) -> None:
    """Weights in float32."""
    # Imported here, so that a machine without a GPU hears of it at once.
    import transformers

    word, overrides = FAMILIES[family]
    tiny = {**TINY, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16} if is_tiny else {}
    if is_tiny and "layer_types" in overrides:
        tiny["layer_types"] = overrides["layer_types"][: TINY["num_hidden_layers"]]
    config = getattr(transformers, f"{word}Config")(**{**_COMMON, **overrides, **tiny})
    torch.manual_seed(SEED)
    model_class = getattr(transformers, f"{word.removesuffix('Text')}ForCausalLM")
    model_class(config).save_pretrained(folder)


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
