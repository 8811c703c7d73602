"""Row of `table.py`: Ling 3.0 (Bailing hybrid), a hybrid of latent attention whose heads have gates and of gated delta
nets in which each channel decays by itself, by a bounded factor.

Compared with transformers, and broken, in tests/model/test_bailing.py.
"""

from dataclasses import replace
from typing import Any, Final

from spmd_worker.model_config.config_reader import MAX_NUMBER, MIN_NUMBER, ConfigReader
from spmd_worker.model_config.families.experts import ExpertsFamily
from spmd_worker.model_config.families.family import GATE_UP, Attention, Family, FeedForward, Names, Rope
from spmd_worker.model_config.families.latent_rows import latent_ropes, read_latent, score_scale
from spmd_worker.model_config.layer_config import DeltaConfig, LayerConfig

_KINDS: Final = ("linear_attention", "full_attention")


def _layers(reader: ConfigReader, layers: tuple[LayerConfig, ...]) -> tuple[LayerConfig, ...]:
    latent, delta = read_latent(reader), _delta(reader, layers[0])
    scale = score_scale(reader, latent)
    full: dict[str, Any] = {"mixer": "latent", "latent": latent, "output_gate": "head"}
    linear: dict[str, Any] = {"mixer": "delta", "delta": delta, "rope": None}
    return tuple(
        replace(layer, head_size=latent.key_size, num_kv_heads=1, scale=scale, **(full if is_full else linear))
        for is_full, layer in zip(_full_layers(reader, len(layers)), layers, strict=True)
    )


def _delta(reader: ConfigReader, layer: LayerConfig) -> DeltaConfig:
    """Sizes. Files that transformers writes have a head's in a key of its own: their `head_dim` is the rope's."""
    given, bound = replace(reader, file_keys={}), 0.0
    num_heads = given.count("linear_num_heads", layer.num_heads)
    head_size = given.count("linear_head_dim", given.count("head_dim", 128))
    if reader.flag("kda_safe_gate", True):
        least = reader.get("kda_lower_bound")
        is_number = isinstance(least, int | float) and not isinstance(least, bool)
        if not is_number or not MIN_NUMBER <= -least <= MAX_NUMBER:
            rule = f"must be a number from {-MAX_NUMBER:g} to {-MIN_NUMBER:g}, the least logarithm of a decay"
            raise reader.error("kda_lower_bound", rule)
        bound = float(least)
    return DeltaConfig(
        num_key_heads=num_heads,
        num_value_heads=num_heads,
        key_size=head_size,
        value_size=head_size,
        norm_eps=layer.norm.eps,
        kernel_size=given.count("linear_conv_kernel_dim", given.count("short_conv_kernel_size", 4)),
        gate_activation="sigmoid",
        is_per_channel=True,
        decay_bound=bound,
        are_flat=True,
    )


def _full_layers(reader: ConfigReader, num_layers: int) -> list[bool]:
    """Flags of layers with full attention: listed, or the last of each group."""
    if reader.get("layer_types") is not None:
        return [each == _KINDS[1] for each in reader.kinds("layer_types", num_layers, _KINDS)]
    size = reader.count("layer_group_size")
    return [(layer + 1) % size == 0 for layer in range(num_layers)]


_FEED_FORWARD: Final = (*GATE_UP, "mlp.down_proj")
_NET: Final = {
    **{f"in_proj_{part}": f"{part}_proj" for part in "qkvb"},
    **{f"{part}_conv1d": f"{part}_conv1d" for part in "qkv"},
    "in_proj_z": "g_proj",
    "in_proj_a": "f_proj",
    "norm": "o_norm",
    "out_proj": "dense",
    "A_log": "A_log",
    "dt_bias": "dt_bias",
}
_ATTENTION: Final = ("q_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "g_proj")
_NAMES: Final = Names(
    embedding="model.word_embeddings",
    parts={
        **{f"linear_attn.{ours}": f"attention.{theirs}" for ours, theirs in _NET.items()},
        **{f"self_attn.{each}": f"attention.{each}" for each in _ATTENTION},
        "self_attn.o_proj": "attention.dense",
        "mlp.gate.e_score_correction_bias": "mlp.gate.expert_bias",
        **{
            each.replace("mlp", "mlp.shared_expert"): each.replace("mlp", "mlp.shared_experts")
            for each in _FEED_FORWARD
        },
    },
    joined_rows={"attention.conv1d.weight": tuple(f"attention.{part}_conv1d.weight" for part in "qkv")},
    aliases={"model.embed_tokens.": "model.word_embeddings."},
    layer_aliases={
        "self_attn.forget_gate.": "attention.",
        "self_attn.o_proj.": "attention.dense.",
        "self_attn.": "attention.",
        "mlp.gate.e_score_correction_bias": "mlp.gate.expert_bias",
    },
    # Heads for drafts are not run.
    ignores_later_layers=True,
)
BAILING_ROWS: Final[dict[str, Family]] = {
    "BailingHybridForCausalLM": Family(
        models="Ling 3.0",
        names=_NAMES,
        attention=Attention(num_kv_heads=1),
        rope=Rope(),
        ropes=latent_ropes,
        feed_forward=FeedForward(bias=False),
        layers=_layers,
        experts=ExpertsFamily(
            count_keys=("num_experts", "num_local_experts"),
            first_key="first_k_dense_replace",
            kinds_key="mlp_layer_types",
            score="sigmoid",
            has_choice_bias=True,
            has_groups=True,
            scaling_key="routed_scaling_factor",
            shared_key="n_shared_experts",
            counts_shared=True,
        ),
        file_keys={"head_dim": "qk_rope_head_dim", "q_lora_rank": ""},
        older_keys={
            "max_position_embeddings": "model_max_length",
            "norm_topk_prob": "moe_renormalize",
            "n_group": "num_expert_group",
            "num_experts_per_tok": "num_experts_per_token",
            "n_shared_experts": "num_shared_experts",
        },
        defaults={
            "vocab_size": 157184,
            "hidden_size": 2560,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 42,
            "num_attention_heads": 32,
            "num_experts": 512,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "n_group": 8,
            "topk_group": 4,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "first_k_dense_replace": 2,
            "max_position_embeddings": 262144,
            "eos_token_id": 156895,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "rope_theta": 6000000.0,
            "layer_group_size": 6,
            "kda_lower_bound": -5.0,
        },
    ),
}
