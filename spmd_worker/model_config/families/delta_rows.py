"""Rows of `table.py`: hybrids of full attention and gated delta nets (https://arxiv.org/abs/2412.06464).

Tensor names are those of the hub's files.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from spmd_worker.model_config.config_reader import ConfigReader
from spmd_worker.model_config.families.experts import ExpertsFamily, StackedTensor
from spmd_worker.model_config.families.family import (
    Attention,
    Family,
    FeedForward,
    Names,
    Norms,
    Rope,
    TextPart,
    Windows,
    next_to,
)
from spmd_worker.model_config.layer_config import DeltaConfig, LayerConfig
from spmd_worker.model_config.rope import RopeParameters, read_rope

_KINDS: Final = ("linear_attention", "full_attention")


def layer_types(reader: ConfigReader, num_layers: int, *others: str) -> list[str]:
    """Kind of each layer: listed, `others` too, or every `full_attention_interval`th is a full one."""
    if reader.get("layer_types") is not None:
        return reader.kinds("layer_types", num_layers, (*_KINDS, *others))
    every = reader.count("full_attention_interval", 4)
    return [_KINDS[(layer + 1) % every == 0] for layer in range(num_layers)]


def _delta(reader: ConfigReader, defaults: Mapping[str, int], **others: Any) -> DeltaConfig:
    sizes = {key: reader.count(f"linear_{key}", default) for key, default in defaults.items()}
    num_key_heads, num_value_heads = sizes["num_key_heads"], sizes["num_value_heads"]
    if num_value_heads % num_key_heads:
        raise reader.error("linear_num_value_heads", f"is not a multiple of linear_num_key_heads={num_key_heads}")
    return DeltaConfig(
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_size=sizes["key_head_dim"],
        value_size=sizes["value_head_dim"],
        kernel_size=reader.count("linear_conv_kernel_dim", 4),
        **others,
    )


def qwen_delta(reader: ConfigReader, norm_eps: float) -> DeltaConfig:
    """The nets of Qwen's hybrids."""
    sizes = {"num_key_heads": 16, "num_value_heads": 32, "key_head_dim": 128, "value_head_dim": 128}
    return _delta(reader, sizes, norm_eps=norm_eps)


def _qwen_layers(reader: ConfigReader, layers: tuple[LayerConfig, ...]) -> tuple[LayerConfig, ...]:
    delta = qwen_delta(reader, layers[0].norm.eps)
    # Files may name gates, which transformers does not read: these are its own.
    reader.choice("output_gate_type", ("silu", "swish"), "silu")
    reader.choice("attn_output_gate", (True,), True)
    return tuple(
        layer if kind == "full_attention" else replace(layer, mixer="delta", delta=delta, rope=None, output_gate="")
        for kind, layer in zip(layer_types(reader, len(layers)), layers, strict=True)
    )


def _olmo_layers(reader: ConfigReader, layers: tuple[LayerConfig, ...]) -> tuple[LayerConfig, ...]:
    """Full layers have their norms behind attention and feed-forward, linear ones before."""
    num_heads = layers[0].num_heads
    key_size = reader.get("linear_key_head_dim")
    if key_size is None:
        num_key_heads = reader.count("linear_num_key_heads", num_heads)
        key_size = max(int(0.75 * reader.count("hidden_size") / num_key_heads), 1)
    sizes = {"num_key_heads": num_heads, "num_value_heads": num_heads, "key_head_dim": key_size}
    value_size = 2 * reader.count("linear_key_head_dim", key_size)
    # Its kernels' own epsilon, whatever the file says.
    beta_scale = 2.0 if reader.flag("linear_allow_neg_eigval", True) else 1.0
    delta = _delta(reader, {**sizes, "value_head_dim": value_size}, norm_eps=1e-5, beta_scale=beta_scale)
    rope = 0 if _has_rope(reader) else None
    return tuple(
        replace(layer, norms=(False, True, False, True), rope=rope)
        if kind == "full_attention"
        else replace(layer, norms=(True, False, True, False), mixer="delta", delta=delta, rope=None)
        for kind, layer in zip(_olmo_layer_types(reader, len(layers)), layers, strict=True)
    )


def _olmo_layer_types(reader: ConfigReader, num_layers: int) -> list[str]:
    kinds = layer_types(reader, num_layers)
    has_full = reader.get("layer_types") is not None or _KINDS[1] in kinds
    return kinds if has_full else [*kinds[:-1], _KINDS[1]]


def _olmo_ropes(reader: ConfigReader, max_positions: int, head_size: int) -> tuple[RopeParameters, ...]:
    """None without a base: then positions are known to the states alone."""
    if not _has_rope(reader):
        return ()
    rope = read_rope(reader, max_positions, head_size, may_be_partial=False)
    return (replace(rope, rounding="result"),)


def _has_rope(reader: ConfigReader) -> bool:
    """Whether the file has a base or, without one, a type; a base that is null is none."""
    given = reader.object("rope_parameters").config
    if "rope_theta" in given:
        return given["rope_theta"] is not None
    return reader.get("rope_theta") is not None or given.get("rope_type") is not None


_LARA_TURNS: Final = (
    *("linear_attention", "sliding_attention", "linear_attention"),
    *("full_attention", "sliding_attention"),
)


def _lara_kinds(config: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """The config with a kind for each layer, which take turns."""
    if config.get("layer_types") is not None:
        return config
    num_layers = ConfigReader({"num_hidden_layers": 34, **config}, path).count("num_hidden_layers")
    return {**config, "layer_types": [_LARA_TURNS[layer % len(_LARA_TURNS)] for layer in range(num_layers)]}


def _lara_layers(reader: ConfigReader, layers: tuple[LayerConfig, ...]) -> tuple[LayerConfig, ...]:
    """Nets among layers with attention, of which those with a window have a rope."""
    sizes = {"num_key_heads": 8, "num_value_heads": 16, "key_head_dim": 128, "value_head_dim": 128}
    delta = _delta(reader, sizes, norm_eps=layers[0].norm.eps)
    return tuple(
        replace(layer, mixer="delta", delta=delta) if kind == "linear_attention" else layer
        for kind, layer in zip(layer_types(reader, len(layers), "sliding_attention"), layers, strict=True)
    )


_IN_PROJ: Final = {part: f"linear_attn.in_proj_{part}" for part in "qkvzba"}
_CONV: Final = {"linear_attn.conv1d": tuple(f"linear_attn.{part}_conv1d" for part in "qkv")}
_QWEN3_5_NAMES: Final = Names(
    fused={"linear_attn.in_proj_qkv": tuple(_IN_PROJ[part] for part in "qkv"), **_CONV},
    aliases={"model.language_model.": "model."},
    ignored_prefixes=("model.visual.", "mtp."),
)
_QKVZ, _BA = "linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba"
_QWEN3_5_DEFAULTS: Final[dict[str, Any]] = {
    "vocab_size": 248320,
    "max_position_embeddings": 32768,
    "partial_rotary_factor": 0.25,
}
_QWEN3_5: Final = Family(
    models="Qwen3.5, Qwen3.6, dense, of text alone",
    names=_QWEN3_5_NAMES,
    attention=Attention(qk_norm="head", head_size=256, output_gate="number"),
    rope=Rope(may_be_partial=True),
    norms=Norms(offset=1.0, rounds_once=True),
    feed_forward=FeedForward(bias=False),
    layers=_qwen_layers,
    defaults={
        **_QWEN3_5_DEFAULTS,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
    },
)
_QWEN_EXPERTS: Final[dict[str, Any]] = {
    "shared_key": "shared_expert_intermediate_size",
    "has_shared_gate": True,
}
_QWEN3_5_MOE: Final = replace(
    _QWEN3_5,
    models="Qwen3.5, Qwen3.6 with experts, of text alone",
    experts=ExpertsFamily(default_count=256, renormalises=True, **_QWEN_EXPERTS),
    # No layer is dense.
    file_keys={"intermediate_size": "moe_intermediate_size"},
    defaults={
        **_QWEN3_5_DEFAULTS,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
)


def beside_images(row: Family, models: str) -> Family:
    """The row of the model that takes images, with the text part of `row`."""
    names = replace(next_to(row.names, "visual"), ignored_prefixes=row.names.ignored_prefixes, aliases={})
    rope = Rope(may_be_partial=True, sections=(11, 11, 10), interleaves_sections=True)
    return replace(row, models=models, names=names, rope=rope, text=TextPart(), vision="qwen3_5")


_QWEN3_5_BESIDE: Final = beside_images(_QWEN3_5, "Qwen3.5, Qwen3.6, dense: 0.8B, 2B, 4B, 9B, 27B")
DELTA_ROWS: Final[dict[str, Family]] = {
    "Qwen3_5ForCausalLM": _QWEN3_5,
    "Qwen3_5ForConditionalGeneration": _QWEN3_5_BESIDE,
    "MiniCPMV4_6ForConditionalGeneration": replace(
        _QWEN3_5_BESIDE,
        models="MiniCPM-V 4.6",
        names=replace(_QWEN3_5_BESIDE.names, ignored_prefixes=("model.vision_tower.", "model.merger.", "mtp.")),
        vision="minicpmv4_6",
    ),
    "Qwen3_5MoeForCausalLM": _QWEN3_5_MOE,
    "Qwen3_5MoeForConditionalGeneration": beside_images(
        _QWEN3_5_MOE, "Qwen3.5, Qwen3.6 with experts: 35B-A3B, 122B-A10B, 397B-A17B"
    ),
    "Qwen3NextForCausalLM": replace(
        _QWEN3_5,
        models="Qwen3-Next: 80B-A3B, Coder",
        names=Names(
            fused={
                _QKVZ: tuple(_IN_PROJ[part] for part in "qkvz"),
                _BA: tuple(_IN_PROJ[part] for part in "ba"),
                **_CONV,
            },
            by_kv_head=(_QKVZ, _BA),
            ignored_prefixes=("mtp.",),
        ),
        experts=ExpertsFamily(
            default_count=512,
            every_key="decoder_sparse_step",
            dense_layers_key="mlp_only_layers",
            **_QWEN_EXPERTS,
        ),
        defaults={
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 48,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32768,
            "partial_rotary_factor": 0.25,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "norm_topk_prob": True,
        },
    ),
    "OlmoHybridForCausalLM": Family(
        models="OLMo Hybrid: 7B",
        names=Names(
            norms=(
                *("attention_layer_norm", "post_attention_layernorm"),
                *("feedforward_layer_norm", "post_feedforward_layernorm"),
            ),
            parts={
                **{_IN_PROJ[part]: f"linear_attn.{part}_proj" for part in "qkvba"},
                _IN_PROJ["z"]: "linear_attn.g_proj",
                "linear_attn.norm": "linear_attn.o_norm",
                "linear_attn.out_proj": "linear_attn.o_proj",
            },
            joined_rows={"linear_attn.conv1d.weight": tuple(f"linear_attn.{part}_conv1d.weight" for part in "qkv")},
            mixer_aliases={
                "delta": {
                    "input_layernorm.": "attention_layer_norm.",
                    "post_attention_layernorm.": "feedforward_layer_norm.",
                },
                # What transformers saves renames the norms of all layers alike.
                "attention": {"feedforward_layer_norm.": "post_attention_layernorm."},
            },
        ),
        attention=Attention(qk_norm="flat"),
        norms=Norms(rounds_once=True),
        feed_forward=FeedForward(bias=False),
        layers=_olmo_layers,
        ropes=_olmo_ropes,
        defaults={
            "vocab_size": 100352,
            "hidden_size": 3840,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 30,
            "max_position_embeddings": 65536,
            "eos_token_id": 100257,
        },
    ),
    "LaraMiniForCausalLM": Family(
        models="Lara 4 Mini",
        names=Names(
            fused={"linear_attn.in_proj": tuple(_IN_PROJ[part] for part in "qkvzba"), **_CONV},
            separate={
                "linear_attn.in_proj_qkv": tuple(_IN_PROJ[part] for part in "qkv"),
                **{_IN_PROJ[part]: (_IN_PROJ[part],) for part in "zba"},
            },
            parts={"linear_attn.norm": "linear_attn.out_norm"},
            layer_aliases={"linear_attn.norm.": "linear_attn.out_norm."},
            stacked=(
                StackedTensor("mlp.experts.gate_up_proj", ("gate_proj", "up_proj")),
                StackedTensor("mlp.experts.down_proj", ("down_proj",)),
            ),
        ),
        attention=Attention(qk_norm="head", head_size=128),
        windows=Windows(rule="layer_types", others=("linear_attention",)),
        rope=Rope(layers="sliding"),
        norms=Norms(rounds_once=True),
        feed_forward=FeedForward(bias=False),
        experts=ExpertsFamily(default_count=128, shared_key="shared_expert_intermediate_size"),
        layers=_lara_layers,
        newer=_lara_kinds,
        # No layer is dense.
        file_keys={"intermediate_size": "moe_intermediate_size"},
        defaults={
            "vocab_size": 151936,
            "hidden_size": 1024,
            "num_hidden_layers": 34,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131072,
            "sliding_window": 512,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "norm_topk_prob": True,
            "tie_word_embeddings": True,
            "eos_token_id": 151643,
        },
    ),
}
