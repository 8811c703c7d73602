"""The families that run, by architecture name: what each does differently from Llama.

Each row is compared with transformers on a checkpoint of its own, and each entry set back to Llama's must be noticed
there (tests/models/test_families.py).
"""

from typing import Final

from spmd_worker.model_config.families.family import Family

_QWEN_DEFAULTS: Final = {"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096}
_MISTRAL_DEFAULTS: Final = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
    "eos_token_id": 2,
}

FAMILIES: Final[dict[str, Family]] = {
    "LlamaForCausalLM": Family(defaults={"eos_token_id": 2}),
    "MistralForCausalLM": Family(
        qkv_bias=False, output_bias=False, mlp_bias=False, sliding_window="always", defaults=_MISTRAL_DEFAULTS
    ),
    "Qwen2ForCausalLM": Family(
        qkv_bias=True, output_bias=False, mlp_bias=False, sliding_window="late_layers", defaults=_QWEN_DEFAULTS
    ),
    "Qwen3ForCausalLM": Family(
        mlp_bias=False,
        qk_norm="head",
        default_head_size=128,
        sliding_window="late_layers",
        defaults=_QWEN_DEFAULTS,
    ),
}
