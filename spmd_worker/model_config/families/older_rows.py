"""Rows of `table.py`: older families with layer norms, from GPT-Neo to Persimmon."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from spmd_worker.model_config.config_reader import MAX_INT, MAX_LAYERS, ConfigReader, checked_integer
from spmd_worker.model_config.families.family import (
    QKV,
    Attention,
    Embedding,
    Family,
    FeedForward,
    Head,
    Names,
    Norms,
    Rope,
    Windows,
    Wiring,
)
from spmd_worker.model_config.layer_config import LayerConfig

_FIRST_POSITION: Final = 2
"""Row of the first position in tables of fairseq's models."""
_KINDS: Final = {"global": "full_attention", "local": "sliding_attention"}


def _with_layer_types(config: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """The config of GPT-Neo with a kind for each layer: `attention_types` lists groups of layers, and how often each
    is repeated.
    """
    reader = ConfigReader({**_GPT_NEO_DEFAULTS, **config}, path)
    kinds: list[str] = []
    groups = reader.get("attention_types", [[["global", "local"], 12]])
    for group in groups if isinstance(groups, list) else (groups,):
        if len(kinds) > MAX_LAYERS or not _is_group(group):
            raise reader.error("attention_types", "must list pairs: a list of global and local, and a number")
        kinds += [_KINDS[each] for each in group[0]] * group[1]
    if len(kinds) != reader.count("num_layers"):
        raise reader.error("attention_types", f"has {len(kinds)} layers: num_layers is {reader.count('num_layers')}")
    return {**config, "layer_types": kinds}


def _is_group(group: Any) -> bool:
    if not isinstance(group, list) or len(group) != 2:  # layers and their number
        return False
    kinds, number = group
    is_list = isinstance(kinds, list) and all(each in ("global", "local") for each in kinds)
    is_number = isinstance(number, int) and not isinstance(number, bool) and number >= 0
    return is_list and is_number and len(kinds) * number <= MAX_LAYERS


def _with_all_positions(config: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """The config of XGLM, whose table of positions has zeros in the row of the padding token's number."""
    reader = ConfigReader(config, path)
    if checked_integer(reader.get("pad_token_id", 1), reader.where("pad_token_id"), -1, MAX_INT) >= _FIRST_POSITION:
        raise reader.error("pad_token_id", "must be 0 or 1: transformers has zeros for the position of this number")
    return config


def _last_with_bias(reader: ConfigReader, layers: tuple[LayerConfig, ...]) -> tuple[LayerConfig, ...]:
    """The output of attention has a bias in the last layer alone."""
    del reader
    return (*layers[:-1], replace(layers[-1], has_output_bias=True))


def _width_by_multiple(config: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """The config with the columns of the feed-forward, a multiple of the hidden size."""
    reader = ConfigReader({**_JAPANESE_DEFAULTS, **config}, path)
    width = int(reader.count("hidden_size") * reader.number("intermediate_multiple_size", 4))
    return {**config, "intermediate_size": width}


_GPT_NEO_DEFAULTS: Final[dict[str, Any]] = {
    "vocab_size": 50257,
    "hidden_size": 2048,
    "num_layers": 24,
    "num_heads": 16,
    "window_size": 256,
    "layer_norm_epsilon": 1e-5,
    "activation_function": "gelu_new",
    "tie_word_embeddings": True,
    "eos_token_id": 50256,
}
_JAPANESE_DEFAULTS: Final[dict[str, Any]] = {
    "vocab_size": 32000,
    "hidden_size": 2560,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "layer_norm_eps": 1e-5,
    "hidden_act": "gelu",
    "tie_word_embeddings": True,
    "eos_token_id": 31999,
}
_DENSE: Final = {"mlp.up_proj": "mlp.dense_h_to_4h", "mlp.down_proj": "mlp.dense_4h_to_h"}
_FAIRSEQ: Final = Family(
    names=Names(
        norms=("self_attn_layer_norm", "", "final_layer_norm", ""),
        parts={"self_attn.o_proj": "self_attn.out_proj", "mlp.up_proj": "fc1", "mlp.down_proj": "fc2"},
    ),
    attention=Attention(qkv_bias=True, output_bias=True),
    rope=None,
    norms=Norms(kind="layer", has_bias=True, eps_key="", eps=1e-5),
    feed_forward=FeedForward(bias=True, is_gated=False),
    embedding=Embedding(root_key="scale_embedding", position_offset=_FIRST_POSITION),
    file_keys={"num_key_value_heads": "", "head_dim": ""},
    defaults={"scale_embedding": True, "tie_word_embeddings": True, "eos_token_id": 2},
)

OLDER_ROWS: Final[dict[str, Family]] = {
    "GPTJForCausalLM": Family(
        models="GPT-J",
        names=Names(
            embedding="transformer.wte",
            layers="transformer.h",
            norm="transformer.ln_f",
            norms=("ln_1", "", "", ""),
            parts={
                **{f"self_attn.{each}_proj": f"attn.{each}_proj" for each in "qkv"},
                "self_attn.o_proj": "attn.out_proj",
                "mlp.up_proj": "mlp.fc_in",
                "mlp.down_proj": "mlp.fc_out",
            },
            ignored=(".attn.bias", ".attn.masked_bias"),
        ),
        attention=Attention(qkv_bias=False, output_bias=False),
        rope=Rope(is_interleaved=True, may_be_partial=True, rotary_size_key="rotary_dim"),
        norms=Norms(kind="layer", has_bias=True, eps_key="layer_norm_epsilon"),
        feed_forward=FeedForward(bias=True, activation_key="activation_function", is_gated=False, size_factor=4),
        wiring=Wiring(is_parallel=True),
        head=Head(has_bias=True),
        file_keys={
            "hidden_size": "n_embd",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions",
            "intermediate_size": "n_inner",
            "num_key_value_heads": "",
            "head_dim": "",
            **dict.fromkeys(("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"), ""),
        },
        required={"rotary": True},
        defaults={
            "vocab_size": 50400,
            "n_embd": 4096,
            "n_layer": 28,
            "n_head": 16,
            "rotary_dim": 64,
            "layer_norm_epsilon": 1e-5,
            "activation_function": "gelu_new",
            "eos_token_id": 50256,
        },
    ),
    "GPTNeoForCausalLM": Family(
        models="GPT-Neo: 125M to 2.7B",
        names=Names(
            embedding="transformer.wte",
            positions="transformer.wpe",
            layers="transformer.h",
            norm="transformer.ln_f",
            norms=("ln_1", "", "ln_2", ""),
            parts={
                **{f"self_attn.{each}_proj": f"attn.attention.{each}_proj" for each in "qkv"},
                "self_attn.o_proj": "attn.attention.out_proj",
                "mlp.up_proj": "mlp.c_fc",
                "mlp.down_proj": "mlp.c_proj",
            },
            ignored=(".attn.attention.bias", ".attn.attention.masked_bias"),
            token_classifier="classifier",
        ),
        attention=Attention(qkv_bias=False, output_bias=True, scale=1.0),
        windows=Windows(rule="layer_types"),
        rope=None,
        norms=Norms(kind="layer", has_bias=True, eps_key="layer_norm_epsilon"),
        feed_forward=FeedForward(bias=True, activation_key="activation_function", is_gated=False, size_factor=4),
        newer=_with_layer_types,
        file_keys={
            "num_hidden_layers": "num_layers",
            "num_attention_heads": "num_heads",
            "sliding_window": "window_size",
            "num_key_value_heads": "",
            "head_dim": "",
        },
        defaults=_GPT_NEO_DEFAULTS,
    ),
    "BioGptForCausalLM": replace(
        _FAIRSEQ,
        models="BioGPT",
        names=replace(
            _FAIRSEQ.names,
            embedding="biogpt.embed_tokens",
            positions="biogpt.embed_positions",
            layers="biogpt.layers",
            token_classifier="classifier",
            norm="biogpt.layer_norm",
            head="output_projection",
        ),
        defaults={
            **_FAIRSEQ.defaults,
            "vocab_size": 42384,
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
            "max_position_embeddings": 1024,
            "hidden_act": "gelu",
        },
    ),
    "XGLMForCausalLM": replace(
        _FAIRSEQ,
        models="XGLM: 564M to 7.5B",
        names=replace(_FAIRSEQ.names, norm="model.layer_norm", ignored=("embed_positions.weights",)),
        feed_forward=replace(_FAIRSEQ.feed_forward, activation_key="activation_function"),
        embedding=replace(_FAIRSEQ.embedding, sinusoid="fairseq"),
        file_keys={
            **_FAIRSEQ.file_keys,
            "hidden_size": "d_model",
            "num_hidden_layers": "num_layers",
            "num_attention_heads": "attention_heads",
            "intermediate_size": "ffn_dim",
        },
        newer=_with_all_positions,
        required={"add_cross_attention": False},
        defaults={
            **_FAIRSEQ.defaults,
            "vocab_size": 256008,
            "d_model": 1024,
            "num_layers": 24,
            "attention_heads": 16,
            "ffn_dim": 4096,
            "activation_function": "gelu",
        },
    ),
    "PersimmonForCausalLM": Family(
        models="Persimmon 8B",
        names=Names(
            norm="model.final_layernorm",
            parts={
                "self_attn.o_proj": "self_attn.dense",
                "self_attn.q_norm": "self_attn.q_layernorm",
                "self_attn.k_norm": "self_attn.k_layernorm",
                **_DENSE,
            },
            fused={"self_attn.query_key_value": QKV},
            by_kv_head=("self_attn.query_key_value",),
        ),
        attention=Attention(qkv_bias=True, output_bias=True, qk_norm="head", qk_norm_key="qk_layernorm"),
        rope=Rope(may_be_partial=True),
        norms=Norms(kind="layer", has_bias=True, eps_key="layer_norm_eps"),
        feed_forward=FeedForward(bias=True, is_gated=False),
        file_keys={"num_key_value_heads": "", "head_dim": ""},
        defaults={
            "vocab_size": 262144,
            "hidden_size": 4096,
            "intermediate_size": 16384,
            "num_hidden_layers": 36,
            "num_attention_heads": 64,
            "max_position_embeddings": 16384,
            "layer_norm_eps": 1e-5,
            "hidden_act": "relu2",
            "partial_rotary_factor": 0.5,
            "qk_layernorm": True,
            "eos_token_id": 2,
        },
    ),
    "GPTNeoXJapaneseForCausalLM": Family(
        models="GPT-NeoX Japanese",
        names=Names(
            embedding="gpt_neox_japanese.embed_in",
            layers="gpt_neox_japanese.layers",
            norm="gpt_neox_japanese.final_layer_norm",
            head="embed_out",
            parts={"self_attn.o_proj": "attention.dense", "self_attn.o_proj.bias": "attention.dense_bias", **_DENSE},
            fused={"attention.query_key_value": QKV},
            by_kv_head=("attention.query_key_value",),
        ),
        attention=Attention(qkv_bias=False, output_bias=False),
        rope=Rope(may_be_partial=True),
        norms=Norms(kind="layer", has_bias=True, eps_key="layer_norm_eps"),
        feed_forward=FeedForward(bias=False, is_gated=False),
        layers=_last_with_bias,
        newer=_width_by_multiple,
        file_keys={
            "partial_rotary_factor": "rotary_pct",
            "rope_theta": "rotary_emb_base",
            "num_key_value_heads": "",
            "head_dim": "",
        },
        defaults=_JAPANESE_DEFAULTS,
    ),
}
