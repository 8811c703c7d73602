"""Rows of `table.py`: Kimi Linear (https://arxiv.org/abs/2510.26692), a hybrid of latent attention and gated delta nets
in which each channel decays by itself.

No layer rotates positions, which the states of the nets know. Each entry is compared with transformers, and broken, in
tests/model/test_kimi_linear.py.
"""

from dataclasses import replace
from typing import Any, Final

from spmd_worker.model_config.config_reader import ConfigReader
from spmd_worker.model_config.families.experts import ExpertsFamily
from spmd_worker.model_config.families.family import GATE_UP, Attention, Family, FeedForward, Names, Norms, Rope
from spmd_worker.model_config.families.latent_rows import read_latent
from spmd_worker.model_config.layer_config import DeltaConfig, LayerConfig
from spmd_worker.model_config.rope import RopeParameters

_KINDS: Final = ("linear_attention", "full_attention")
_SECTION: Final = "linear_attn_config"


def _layers(reader: ConfigReader, layers: tuple[LayerConfig, ...]) -> tuple[LayerConfig, ...]:
    latent, delta = read_latent(reader), _delta(reader, layers[0].norm.eps)
    sizes: dict[str, Any] = {"head_size": latent.key_size, "scale": float(latent.query_size**-0.5), "rope": None}
    return tuple(
        replace(layer, mixer="latent", latent=latent, **sizes)
        if kind == "full_attention"
        else replace(layer, mixer="delta", delta=delta, **sizes)
        for kind, layer in zip(_layer_types(reader, len(layers)), layers, strict=True)
    )


def _delta(reader: ConfigReader, eps: float) -> DeltaConfig:
    """Sizes, from the section of the hub's files or the keys of transformers'."""
    section = _section(reader)

    def size(key: str, other_key: str, default: int) -> int:
        return reader.count(other_key, default) if section.get(key) is None else section.count(key)

    num_heads, head_size = size("num_heads", "linear_num_heads", 32), size("head_dim", "linear_head_dim", 128)
    return DeltaConfig(
        num_key_heads=num_heads,
        num_value_heads=num_heads,
        key_size=head_size,
        value_size=head_size,
        norm_eps=eps,
        kernel_size=size("short_conv_kernel_size", "linear_conv_kernel_dim", 4),
        gate_activation="sigmoid",
        is_per_channel=True,
        gate_rank=head_size,
    )


def _layer_types(reader: ConfigReader, num_layers: int) -> list[str]:
    """Kind of each layer: listed, or numbered from 1 in the section; without both every fourth after the first is a
    full one.
    """
    section = _section(reader)
    if reader.get("layer_types") is not None:
        return reader.kinds("layer_types", num_layers, _KINDS)
    linear, full = (_numbers(section, key) for key in ("kda_layers", "full_attn_layers"))
    if linear is None and full is None:
        return [_KINDS[layer > 0 and layer % 4 == 0] for layer in range(num_layers)]
    full = full or []
    if sorted([*(linear or []), *full]) != list(range(1, num_layers + 1)):
        raise section.error(
            "kda_layers", f"and full_attn_layers must list each of the layers 1 to {num_layers} once, counted from 1"
        )
    return [_KINDS[layer in full] for layer in range(1, num_layers + 1)]


def _section(reader: ConfigReader) -> ConfigReader:
    """The section's keys have names of their own."""
    return replace(reader.object(_SECTION), file_keys={})


def _numbers(section: ConfigReader, key: str) -> list[int] | None:
    values = section.get(key)
    if values is None:
        return None
    if not isinstance(values, list) or any(isinstance(each, bool) or not isinstance(each, int) for each in values):
        raise section.error(key, "must be a list of layers, counted from 1")
    return values


def _ropes(reader: ConfigReader, max_positions: int, head_size: int) -> tuple[RopeParameters, ...]:
    del reader, max_positions, head_size
    return ()


_NET: Final = {
    **{f"in_proj_{part}": f"{part}_proj" for part in "qkvb"},
    **{f"{part}_conv1d": f"{part}_conv1d" for part in "qkv"},
    "z_latent": "g_a_proj",
    "z_proj": "g_b_proj",
    "a_latent": "f_a_proj",
    "a_proj": "f_b_proj",
    "norm": "o_norm",
    "out_proj": "o_proj",
    "A_log": "A_log",
    "dt_bias": "dt_bias",
}
_DENSE: Final = (*GATE_UP, "mlp.down_proj")
_SPARSE: Final = "block_sparse_moe"
_NAMES: Final = Names(
    parts={
        **{f"linear_attn.{ours}": f"self_attn.{theirs}" for ours, theirs in _NET.items()},
        "mlp.gate": f"{_SPARSE}.gate",
        **{
            each.replace("mlp", "mlp.shared_expert"): each.replace("mlp", f"{_SPARSE}.shared_experts")
            for each in _DENSE
        },
        **{
            each.replace("mlp", "mlp.experts.{}"): f"{_SPARSE}.experts.{{}}.{theirs}"
            for each, theirs in zip(_DENSE, ("w1", "w3", "w2"), strict=True)
        },
    },
    joined_rows={"self_attn.conv1d.weight": tuple(f"self_attn.{part}_conv1d.weight" for part in "qkv")},
    layer_aliases={
        "self_attn.forget_gate.": "self_attn.",
        **{f"mlp.{part}.": f"{_SPARSE}.{part}." for part in ("gate", "experts", "shared_experts")},
        # transformers saves dense layers by the name of sparse ones.
        **{each.replace("mlp", _SPARSE) + ".": each + "." for each in _DENSE},
    },
)

KIMI_ROWS: Final[dict[str, Family]] = {
    "KimiLinearForCausalLM": Family(
        models="Kimi Linear: 48B-A3B",
        names=_NAMES,
        attention=Attention(num_kv_heads=1),
        rope=Rope(may_be_partial=True),
        ropes=_ropes,
        norms=Norms(eps=1e-5),
        feed_forward=FeedForward(bias=False),
        layers=_layers,
        experts=ExpertsFamily(
            default_count=256,
            first_key="first_k_dense_replace",
            first=1,
            kinds_key="mlp_layer_types",
            score="sigmoid",
            has_choice_bias=True,
            has_groups=True,
            scaling_key="routed_scaling_factor",
            shared_key="n_shared_experts",
            counts_shared=True,
        ),
        file_keys={
            "head_dim": "qk_rope_head_dim",
            "max_position_embeddings": "model_max_length",
            "norm_topk_prob": "moe_renormalize",
            "n_group": "num_expert_group",
            "num_experts_per_tok": "num_experts_per_token",
            "n_shared_experts": "num_shared_experts",
        },
        required={
            "hidden_act": "silu",
            "mla_use_nope": True,
            "moe_router_activation_func": "sigmoid",
            "moe_layer_freq": 1,
            "topk_method": "noaux_tc",
            "use_grouped_topk": True,
        },
        defaults={
            "vocab_size": 163840,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "moe_intermediate_size": 1024,
            "num_hidden_layers": 27,
            "num_attention_heads": 32,
            "num_shared_experts": 1,
            "routed_scaling_factor": 2.446,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "num_experts_per_token": 8,
            "moe_renormalize": True,
            "model_max_length": 1048576,
            "eos_token_id": 163586,
        },
    ),
}
