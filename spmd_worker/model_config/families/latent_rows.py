"""Rows of `table.py`: families with multi-head latent attention (https://arxiv.org/abs/2405.04434).

Each row is compared with transformers, and each entry broken, in tests/model/test_latent_rows.py.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from spmd_worker.model_config.config_reader import MAX_INT, ConfigReader, checked_integer, checked_number
from spmd_worker.model_config.families.experts import ExpertsFamily, StackedTensor
from spmd_worker.model_config.families.family import (
    Attention,
    Embedding,
    Family,
    FeedForward,
    Head,
    Names,
    Rope,
    Variant,
)
from spmd_worker.model_config.layer_config import IndexerConfig, LatentConfig, LayerConfig
from spmd_worker.model_config.rope import RopeParameters, given_rope, rope_of

_PARTIAL: Final = "partial_rotary_factor"
_CHOICES: Final = ("full", "shared")


def latent_ropes(reader: ConfigReader, max_positions: int, head_size: int) -> tuple[RopeParameters, ...]:
    """The rope of the rotated part of a head, `head_size` numbers, whose neighbours are pairs. A partial factor is of
    the complete head: the part that it leaves is this one.
    """
    given = {key: value for key, value in given_rope(reader).items() if key != _PARTIAL}
    rope = rope_of(given, replace(reader, file_keys={**reader.file_keys, _PARTIAL: ""}), max_positions, head_size)
    growth = given.get("llama_4_scaling_beta")
    if growth:
        growth = checked_number(growth, f"{reader.path}: rope llama_4_scaling_beta")
    return (replace(rope, is_interleaved=True, query_growth=growth or 0.0),)


def _rounded_once(reader: ConfigReader, max_positions: int, head_size: int) -> tuple[RopeParameters, ...]:
    """The same, computed in float32."""
    return tuple([replace(rope, rounding="result") for rope in latent_ropes(reader, max_positions, head_size)])


def read_latent(reader: ConfigReader) -> LatentConfig:
    """Sizes of latent attention, by the keys that all such families have."""
    has_query_rank = reader.get("q_lora_rank") is not None
    return LatentConfig(
        rank=reader.count("kv_lora_rank"),
        nope_size=reader.count("qk_nope_head_dim"),
        rope_size=reader.count("qk_rope_head_dim"),
        value_size=reader.count("v_head_dim"),
        query_rank=reader.count("q_lora_rank") if has_query_rank else 0,
    )


def _with_latents(reader: ConfigReader, layers: tuple[LayerConfig, ...]) -> tuple[LayerConfig, ...]:
    latent = read_latent(reader)
    scale = score_scale(reader, latent)
    return tuple(
        [
            replace(layer, mixer="latent", latent=latent, head_size=latent.key_size, num_kv_heads=1, scale=scale)
            for layer in layers
        ]
    )


def _with_indexers(
    reader: ConfigReader, layers: tuple[LayerConfig, ...], *, is_interleaved: bool = False
) -> tuple[LayerConfig, ...]:
    """Layers each of which chooses the keys that a token sees."""
    indexer = IndexerConfig(
        num_heads=reader.count("index_n_heads"),
        head_size=reader.count("index_head_dim"),
        num_chosen=reader.count("index_topk"),
        is_interleaved=is_interleaved,
    )
    found = []
    for layer in _with_latents(reader, layers):
        latent = layer.latent
        assert latent is not None, layer
        if not latent.query_rank:
            raise reader.error("q_lora_rank", "must be a number: the indexer's queries come from that latent")
        if indexer.head_size < latent.rope_size:
            raise reader.error("index_head_dim", f"must be at least qk_rope_head_dim, {latent.rope_size}")
        found.append(replace(layer, latent=replace(latent, indexer=indexer)))
    return tuple(found)


def _glm_layers(reader: ConfigReader, layers: tuple[LayerConfig, ...]) -> tuple[LayerConfig, ...]:
    """Layers that choose, and behind each those that take its choice."""
    indexed = _with_indexers(reader, layers, is_interleaved=True)
    return tuple(map(_with_choice, indexed, takes_choice(reader, len(layers))))


def _with_choice(layer: LayerConfig, is_shared: bool) -> LayerConfig:
    latent = layer.latent
    assert latent is not None, layer
    assert latent.indexer is not None, layer
    indexer = replace(latent.indexer, is_shared=is_shared, num_slots=int(not is_shared))
    return replace(layer, latent=replace(latent, indexer=indexer))


def takes_choice(reader: ConfigReader, num_layers: int) -> list[bool]:
    """Whether each layer takes the choice of the one before: listed, as letters, or by a period and an offset."""
    for key, kinds in (("indexer_types", _CHOICES), ("index_topk_pattern", ("F", "S"))):
        listed = reader.get(key)
        if listed is None:
            continue
        # A pattern may be a list of words too.
        kinds = _CHOICES if isinstance(listed, list) else kinds
        if not isinstance(listed, list | str) or len(listed) != num_layers or any(each not in kinds for each in listed):
            raise reader.error(key, f"must list {num_layers} of {' and '.join(kinds)}, one for each layer")
        found = [each == kinds[1] for each in listed]
        break
    else:
        key = "index_topk_freq"
        where = reader.where("index_skip_topk_offset")
        offset = checked_integer(reader.get("index_skip_topk_offset", 2), where, 0, MAX_INT)
        every = max(checked_integer(reader.get(key, 1), reader.where(key), 0, MAX_INT), 1)
        found = [max(layer - offset + 1, 0) % every != 0 for layer in range(num_layers)]
    if found[0]:
        raise reader.error(key, "must let the first layer choose the keys that a token sees")
    return found


def score_scale(reader: ConfigReader, latent: LatentConfig) -> float:
    """The scale of scores: YaRN's growth (https://arxiv.org/abs/2309.00071) is here, not in the angles."""
    (rope,) = latent_ropes(reader, reader.count("max_position_embeddings", 2048), latent.rope_size)
    scale = float(latent.query_size**-0.5)
    if rope.rope_type == "default" or not rope.mscale_all_dim or rope.factor <= 1:
        return scale
    return scale * (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2


def _newer_minicpm(config: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """The config of MiniCPM3 with sizes that follow from others where it has null, or no size of values."""
    reader = ConfigReader({**_MINICPM_DEFAULTS, **config}, path)
    hidden_size = reader.count("hidden_size")
    derived = {
        "v_head_dim": max(hidden_size // reader.count("num_attention_heads"), 1),
        "dim_model_base": hidden_size,
    }
    return {**config, **{key: value for key, value in derived.items() if reader.get(key) is None}}


def _minicpm_layers(reader: ConfigReader, layers: tuple[LayerConfig, ...]) -> tuple[LayerConfig, ...]:
    """Outputs are scaled by the number of layers."""
    has_depth = reader.get("scale_depth") is not None
    multiplier = reader.number("scale_depth") / math.sqrt(len(layers)) if has_depth else 1.0
    return tuple([replace(layer, residual_multiplier=multiplier) for layer in _with_latents(reader, layers)])


_SHARED: Final = {
    f"mlp.shared_expert.{each}": f"mlp.shared_experts.{each}" for each in ("gate_proj", "up_proj", "down_proj")
}
_NAMES: Final = Names(parts=_SHARED)
DEEPSEEK_V3_NAMES: Final = replace(_NAMES, ignores_later_layers=True)
MISTRAL4_NAMES: Final = replace(
    _NAMES,
    stacked=(
        StackedTensor("mlp.experts.gate_up_proj", ("gate_proj", "up_proj")),
        StackedTensor("mlp.experts.down_proj", ("down_proj",)),
    ),
)
_COUNTS: Final = ("n_routed_experts", "num_local_experts", "num_experts")
SPARSE: Final[dict[str, Any]] = {
    "count_keys": _COUNTS,
    "first_key": "first_k_dense_replace",
    "scaling_key": "routed_scaling_factor",
    "shared_key": "n_shared_experts",
    "counts_shared": True,
}
# https://arxiv.org/abs/2412.19437
_V3_EXPERTS: Final = ExpertsFamily(**SPARSE, score="sigmoid", has_choice_bias=True, has_groups=True)
_V2_EXPERTS: Final = ExpertsFamily(**SPARSE, shared_bias="mlp_bias")
_V3_CHOICE: Final[dict[str, Any]] = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}
_NEIGHBOURS: Final[dict[str, Any]] = {"rope_interleave": True}
_HEADS: Final[dict[str, Any]] = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


_INDEXED: Final[dict[str, Any]] = {
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "first_k_dense_replace": 3,
    "moe_intermediate_size": 2048,
    "eos_token_id": 1,
    "index_topk": 2048,
    "index_head_dim": 128,
}


def _latent_family(**parts: Any) -> Family:
    return Family(
        attention=Attention(num_kv_heads=1),
        rope=Rope(),
        file_keys={"head_dim": "qk_rope_head_dim"},
        layers=_with_latents,
        **{"feed_forward": FeedForward(bias=False), "ropes": latent_ropes, **parts},
    )


def _newer_sarvam(config: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """The config of Sarvam with YaRN by its usual name."""
    scaling = ConfigReader(config, path).object("rope_scaling").config
    if "deepseek_yarn" not in (scaling.get("type"), scaling.get("rope_type")):
        return config
    rest = {key: value for key, value in scaling.items() if key != "type"}
    return {**config, "rope_scaling": {**rest, "rope_type": "yarn"}}


_MINICPM_DEFAULTS: Final[dict[str, Any]] = {
    "vocab_size": 73448,
    "hidden_size": 2560,
    "intermediate_size": 6400,
    "num_hidden_layers": 62,
    "num_attention_heads": 40,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "kv_lora_rank": 256,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "scale_emb": 12,
    "scale_depth": 1.4,
    "dim_model_base": 256,
    "eos_token_id": 2,
}
_V2: Final = _latent_family(
    models="DeepSeek-V2, V2-Lite, Coder-V2",
    names=_NAMES,
    feed_forward=FeedForward(),
    ropes=_rounded_once,
    experts=_V2_EXPERTS,
    required={
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "moe_layer_freq": 1,
    },
    defaults={
        **_HEADS,
        "vocab_size": 102400,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "q_lora_rank": 1536,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1407,
        "eos_token_id": 2,
    },
)
_V2_BY_GROUPS: Final = replace(
    _V2,
    experts=replace(_V2_EXPERTS, has_groups=True, groups_by_best=True),
    required={**_V2.required, "topk_method": "group_limited_greedy"},
)

LATENT_ROWS: Final[dict[str, Family]] = {
    "DeepseekV2ForCausalLM": replace(_V2, variants=(Variant({"topk_method": "group_limited_greedy"}, _V2_BY_GROUPS),)),
    "DeepseekV3ForCausalLM": _latent_family(
        models="DeepSeek-V3, V3.1, R1, Kimi K2, Moonlight",
        names=DEEPSEEK_V3_NAMES,
        experts=_V3_EXPERTS,
        required={**_V3_CHOICE, **_NEIGHBOURS},
        defaults={
            **_HEADS,
            "vocab_size": 129280,
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "max_position_embeddings": 4096,
            "q_lora_rank": 1536,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "n_group": 8,
            "topk_group": 4,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "first_k_dense_replace": 3,
            "moe_intermediate_size": 2048,
            "eos_token_id": 1,
        },
    ),
    "DeepseekV32ForCausalLM": replace(
        _latent_family(
            models="DeepSeek-V3.2",
            names=DEEPSEEK_V3_NAMES,
            experts=replace(_V3_EXPERTS, kinds_key="mlp_layer_types"),
            required={**_V3_CHOICE, **_NEIGHBOURS},
            defaults={
                **_HEADS,
                **_INDEXED,
                "vocab_size": 129280,
                "hidden_size": 7168,
                "intermediate_size": 18432,
                "num_hidden_layers": 61,
                "num_attention_heads": 128,
                "max_position_embeddings": 163840,
                "q_lora_rank": 1536,
                "n_group": 8,
                "topk_group": 4,
                "index_n_heads": 64,
            },
        ),
        layers=_with_indexers,
    ),
    "GlmMoeDsaForCausalLM": replace(
        _latent_family(
            models="GLM-5",
            names=DEEPSEEK_V3_NAMES,
            experts=replace(_V3_EXPERTS, kinds_key="mlp_layer_types"),
            required={**_V3_CHOICE, **_NEIGHBOURS, "indexer_rope_interleave": True},
            defaults={
                **_HEADS,
                **_INDEXED,
                "qk_nope_head_dim": 192,
                "v_head_dim": 256,
                "vocab_size": 154880,
                "hidden_size": 6144,
                "intermediate_size": 12288,
                "num_hidden_layers": 78,
                "num_attention_heads": 64,
                "max_position_embeddings": 202752,
                "rms_norm_eps": 1e-5,
                "q_lora_rank": 2048,
                "index_n_heads": 32,
            },
        ),
        layers=_glm_layers,
    ),
    "Glm4MoeLiteForCausalLM": _latent_family(
        models="GLM-4.7-Flash",
        names=DEEPSEEK_V3_NAMES,
        experts=replace(_V3_EXPERTS, kinds_key="mlp_layer_types"),
        required={**_V3_CHOICE, **_NEIGHBOURS},
        defaults={
            **_HEADS,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "vocab_size": 154880,
            "hidden_size": 2048,
            "intermediate_size": 10240,
            "num_hidden_layers": 47,
            "num_attention_heads": 20,
            "max_position_embeddings": 202752,
            "rms_norm_eps": 1e-5,
            "q_lora_rank": 768,
            "n_routed_experts": 64,
            "n_shared_experts": 1,
            "num_experts_per_tok": 4,
            "routed_scaling_factor": 1.8,
            "norm_topk_prob": True,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 1536,
            "eos_token_id": 1,
        },
    ),
    "MiniCPM3ForCausalLM": replace(
        _latent_family(
            models="MiniCPM3 4B",
            feed_forward=FeedForward(),
            # Pairs are elements of two halves.
            ropes=None,
            embedding=Embedding(multiplier_key="scale_emb"),
            head=Head(divisor_key="hidden_size", multiplier_key="dim_model_base"),
            newer=_newer_minicpm,
            defaults=_MINICPM_DEFAULTS,
        ),
        layers=_minicpm_layers,
    ),
    "Mistral4ForCausalLM": _latent_family(
        models="Mistral Small 4, the text",
        names=MISTRAL4_NAMES,
        experts=ExpertsFamily(**SPARSE, has_groups=True),
        required=_NEIGHBOURS,
        defaults={
            **_HEADS,
            "kv_lora_rank": 256,
            "qk_nope_head_dim": 64,
            "vocab_size": 131072,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "max_position_embeddings": 1048576,
            "q_lora_rank": 1024,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "num_experts_per_tok": 4,
            "norm_topk_prob": True,
            "moe_intermediate_size": 2048,
            "eos_token_id": 2,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 128.0,
                "original_max_position_embeddings": 8192,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "YoutuForCausalLM": _latent_family(
        models="Youtu-LLM 2B",
        required=_NEIGHBOURS,
        defaults={
            **_HEADS,
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 32,
            "num_attention_heads": 16,
            "max_position_embeddings": 131072,
            "q_lora_rank": 1536,
            "tie_word_embeddings": True,
            "eos_token_id": 128001,
        },
    ),
    "SarvamMLAForCausalLM": _latent_family(
        models="Sarvam 105B",
        names=DEEPSEEK_V3_NAMES,
        experts=replace(_V3_EXPERTS, default_count=128),
        newer=_newer_sarvam,
        older_keys={"n_shared_experts": "num_shared_experts"},
        required={**_V3_CHOICE, **_NEIGHBOURS, "score_function": "sigmoid"},
        defaults={
            **_HEADS,
            "vocab_size": 262144,
            "hidden_size": 4096,
            "intermediate_size": 16384,
            "num_hidden_layers": 32,
            "num_attention_heads": 64,
            "max_position_embeddings": 4096,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 2048,
            "eos_token_id": 1,
        },
    ),
}
