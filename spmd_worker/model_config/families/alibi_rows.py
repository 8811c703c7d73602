"""Rows of `table.py`: families whose positions are slopes of attention scores (https://arxiv.org/abs/2108.12409)."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from spmd_worker.model_config.config_reader import ConfigReader
from spmd_worker.model_config.families.family import (
    QKV,
    Attention,
    Embedding,
    Family,
    FeedForward,
    Names,
    Norms,
)
from spmd_worker.model_config.families.layer_norm_rows import FALCON_RW

_BLOOM: Final = Family(
    models="BLOOM, BLOOMZ",
    names=replace(
        FALCON_RW.names, embedding_norm="transformer.word_embeddings_layernorm", optional_prefix="transformer."
    ),
    attention=Attention(qkv_bias=True, output_bias=True, alibi="added"),
    rope=None,
    norms=FALCON_RW.norms,
    feed_forward=FeedForward(bias=True, is_gated=False, size_factor=4),
    embedding=Embedding(has_norm=True),
    file_keys={
        "max_position_embeddings": "seq_length",
        "intermediate_size": "",
        "num_key_value_heads": "",
        "head_dim": "",
    },
    older_keys={"hidden_size": "n_embed", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"},
    required={"apply_residual_connection_post_layernorm": False},
    defaults={
        "vocab_size": 250880,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "layer_norm_epsilon": 1e-5,
        # A constant of the class.
        "hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    },
)


def _flat_mpt(config: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """The config of MPT with keys of its nested object behind the object's name."""
    nested = ConfigReader(config, path).object("attn_config").config
    return {**config, **{f"attn_config.{key}": value for key, value in nested.items()}}


_MPT: Final = Family(
    models="MPT: 7B, 30B",
    names=Names(
        embedding="transformer.wte",
        layers="transformer.blocks",
        norm="transformer.norm_f",
        norms=("norm_1", "", "norm_2", ""),
        parts={
            "self_attn.o_proj": "attn.out_proj",
            "mlp.up_proj": "ffn.up_proj",
            "mlp.down_proj": "ffn.down_proj",
        },
        fused={"attn.Wqkv": QKV},
        token_classifier="classifier",
    ),
    attention=Attention(qkv_bias=False, output_bias=False, alibi="added", qkv_clip_key="attn_config.clip_qkv"),
    rope=None,
    norms=Norms(kind="layer", eps_key="layer_norm_epsilon"),
    feed_forward=FeedForward(bias=False, is_gated=False, size_factor=4),
    file_keys={
        "hidden_size": "d_model",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
        "max_position_embeddings": "max_seq_len",
        "intermediate_size": "",
        "num_key_value_heads": "",
        "head_dim": "",
    },
    required={
        "attn_config.alibi": True,
        "attn_config.alibi_bias_max": 8,
        "attn_config.attn_type": "multihead_attention",
        "attn_config.prefix_lm": False,
        "attn_config.qk_ln": False,
        "attn_config.softmax_scale": None,
        "expansion_ratio": 4,
        "logit_scale": None,
        "no_bias": True,
    },
    defaults={
        "vocab_size": 50368,
        "d_model": 2048,
        "n_heads": 16,
        "n_layers": 24,
        "layer_norm_epsilon": 1e-5,
        # A constant of the class.
        "hidden_act": "gelu",
        "tie_word_embeddings": True,
    },
    newer=_flat_mpt,
)

ALIBI_ROWS: Final[dict[str, Family]] = {"BloomForCausalLM": _BLOOM, "MptForCausalLM": _MPT}
