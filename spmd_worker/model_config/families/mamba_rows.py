"""Rows of `table.py`: Mamba2 (https://arxiv.org/abs/2405.21060), alone and in hybrids with attention.

Each row is compared with transformers, and each entry broken, in tests/model/test_mamba_families.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
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
    Norms,
    Rope,
    Variant,
    Wiring,
)
from spmd_worker.model_config.layer_config import LayerConfig, MambaConfig
from spmd_worker.model_config.rope import RopeParameters, read_rope

Layers = tuple[LayerConfig, ...]

_IN_PROJ: Final = tuple(f"mamba.in_{part}" for part in ("z", "x", "b", "c", "dt"))
_KINDS: Final = {
    "mamba": "mamba",
    "linear_attention": "mamba",
    "attention": "attention",
    "full_attention": "attention",
}
"""Mixers, by the words of hub files and of transformers 5."""
_NEMOTRON_KINDS: Final = {**_KINDS, "mlp": "mlp", "moe": "moe"}
_NEMOTRON_ALIASES: Final = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_limit": "time_step_limit",
    "mamba_conv_bias": "use_conv_bias",
}
"""Keys that transformers takes too; those that it reads besides are of training, of kernels or of no effect."""
_NEMOTRON_LETTERS: Final = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def _mamba(
    reader: ConfigReader,
    layers: Layers,
    norm: str = "grouped",
    output_bias_key: str = "mamba_proj_bias",
    **others: Any,
) -> MambaConfig:
    """Sizes by the keys of all families but Nemotron. Raises ModelConfigError."""
    num_heads, inner_key = reader.count("mamba_n_heads"), "mamba_d_ssm"
    if reader.get(inner_key) is not None:
        inner = reader.count(inner_key)
    else:
        inner_key, inner = "hidden_size", reader.count("mamba_expand") * reader.count("hidden_size")
    head_size = reader.get("mamba_d_head", "auto")
    head_size = inner // num_heads if head_size == "auto" else reader.count("mamba_d_head")
    if head_size * num_heads != inner:
        raise reader.error(
            "mamba_n_heads", f"heads of mamba_d_head={head_size} are not the {inner} columns of {inner_key}"
        )
    return _checked(
        reader,
        "mamba_n_groups",
        MambaConfig(
            num_heads=num_heads,
            head_size=head_size,
            num_groups=reader.count("mamba_n_groups"),
            state_size=reader.count("mamba_d_state"),
            norm_eps=layers[0].norm.eps,
            kernel_size=num_taps(reader, "mamba_d_conv"),
            has_conv_bias=reader.flag("mamba_conv_bias", True),
            has_bias=reader.flag("mamba_proj_bias", False),
            has_output_bias=reader.flag(output_bias_key, False),
            norm=norm,
            dt_limits=_dt_limits(reader),
            **others,
        ),
    )


def _checked(reader: ConfigReader, groups_key: str, mamba: MambaConfig) -> MambaConfig:
    if mamba.num_heads % mamba.num_groups:
        raise reader.error(groups_key, f"does not divide the {mamba.num_heads} Mamba heads")
    return mamba


def num_taps(reader: ConfigReader, key: str) -> int:
    """Taps of a convolution. Raises ModelConfigError."""
    return checked_integer(reader.get(key), reader.where(key), 2, MAX_INT)


def _dt_limits(reader: ConfigReader) -> tuple[float, float]:
    """Bounds of dt; transformers 5 writes infinity as an object. Raises ModelConfigError."""
    given = reader.get("time_step_limit", (0.0, inf))
    if not isinstance(given, list | tuple) or len(given) != 2:
        raise reader.error("time_step_limit", "must be a list of two numbers")
    least, most = (_number(reader, each) for each in given)
    if least > most:
        raise reader.error("time_step_limit", "must be a lower and an upper bound")
    return least, most


def _number(reader: ConfigReader, value: Any) -> float:
    value = value.get("__float__") if isinstance(value, Mapping) else value
    if value in ("Infinity", inf):
        return inf
    return 0.0 if value == 0 and not isinstance(value, bool) else checked_number(value, reader.where("time_step_limit"))


def _numbers(reader: ConfigReader, key: str, count: int) -> tuple[float, ...]:
    """A list of multipliers; all 1 without one. Raises ModelConfigError."""
    given = reader.get(key, [1.0] * count)
    if not isinstance(given, list) or len(given) != count:
        raise reader.error(key, f"must be a list of {count} numbers")
    return tuple(checked_number(each, reader.where(key)) for each in given)


def _listed(reader: ConfigReader, key: str, num_layers: int, words: Mapping[str, str]) -> Sequence[str]:
    """Kind of each layer, by the words of a list. Raises ModelConfigError."""
    return [words[each] for each in reader.kinds(key, num_layers, tuple(words))]


def _mixed(layers: Layers, kinds: Sequence[str], mamba: MambaConfig, rope: int | None) -> Layers:
    """Layers that have attention or Mamba2 before the feed-forward."""
    return tuple(
        replace(layer, mixer="mamba", mamba=mamba, rope=None) if kind == "mamba" else replace(layer, rope=rope)
        for kind, layer in zip(kinds, layers, strict=True)
    )


def _granite_layers(reader: ConfigReader, layers: Layers) -> Layers:
    key = "layers_block_type" if reader.get("layers_block_type") is not None else "layer_types"
    is_silent = reader.get(key) is None
    kinds = ["mamba"] * len(layers) if is_silent else _listed(reader, key, len(layers), _KINDS)
    return _mixed(layers, kinds, _mamba(reader, layers), 0 if _has_rope(reader) else None)


def _has_rope(reader: ConfigReader) -> bool:
    return bool(reader.choice("position_embedding_type", ("rope", "nope", None)) == "rope")


def _granite_ropes(reader: ConfigReader, max_positions: int, head_size: int) -> tuple[RopeParameters, ...]:
    if not _has_rope(reader):
        return ()
    return (read_rope(reader, max_positions, head_size, may_be_partial=False),)


def _bamba_layers(reader: ConfigReader, layers: Layers) -> Layers:
    with_attention = reader.get("attn_layer_indices", [])
    if not isinstance(with_attention, list) or any(type(each) is not int for each in with_attention):
        raise reader.error("attn_layer_indices", "must be a list of layers, from 0 on")
    kinds = ["attention" if index in with_attention else "mamba" for index in range(len(layers))]
    return _mixed(layers, kinds, _mamba(reader, layers), 0)


def _falcon_layers(reader: ConfigReader, layers: Layers) -> Layers:
    """Each layer has both, on the same input."""
    norm = "none"
    if reader.flag("mamba_rms_norm", False):
        norm = "grouped_first" if reader.flag("mamba_norm_before_gate", True) else "grouped"
    mamba = _mamba(
        reader,
        layers,
        norm,
        "projectors_bias",
        norm_rounds_once=norm != "none",
        multipliers=_numbers(reader, "ssm_multipliers", 5),
        in_multiplier=reader.number("ssm_in_multiplier", 1.0),
        out_multiplier=reader.number("ssm_out_multiplier", 1.0),
    )
    gate, down = _numbers(reader, "mlp_multipliers", 2)
    layer = replace(
        layers[0],
        mixer="attention_and_mamba",
        mamba=mamba,
        key_multiplier=reader.number("key_multiplier", 1.0),
        attention_multipliers=(
            reader.number("attention_in_multiplier", 1.0),
            reader.number("attention_out_multiplier", 1.0),
        ),
        mlp_multipliers=(gate, down),
    )
    return (layer,) * len(layers)


def _nemotron_keys(config: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """The list of layers is their number too; `hybrid_override_pattern` is the older word for it, a letter each.
    Sizes by the keys of other Mamba2 models win, as in transformers.
    """
    del path
    config = {**config, **{key: config[other] for other, key in _NEMOTRON_ALIASES.items() if other in config}}
    pattern, listed = config.get("hybrid_override_pattern"), config.get("layers_block_type", config.get("layer_types"))
    if listed is None:
        letters = pattern if isinstance(pattern, str) else "ME*-"
        listed = [_NEMOTRON_LETTERS.get(letter, letter) for letter in letters]
    if not isinstance(listed, list):
        return config
    return {**config, "layers_block_type": listed, "num_hidden_layers": len(listed)}


def _nemotron_layers(reader: ConfigReader, layers: Layers) -> Layers:
    """Each layer has one part and one norm: attention, Mamba2, or a feed-forward."""
    mamba = _checked(
        reader,
        "n_groups",
        MambaConfig(
            num_heads=reader.count("mamba_num_heads"),
            head_size=reader.count("mamba_head_dim"),
            num_groups=reader.count("n_groups"),
            state_size=reader.count("ssm_state_size"),
            norm_eps=layers[0].norm.eps,
            kernel_size=num_taps(reader, "conv_kernel"),
            has_conv_bias=reader.flag("use_conv_bias", True),
            has_bias=reader.flag("use_bias", False),
            has_output_bias=reader.flag("use_bias", False),
            dt_limits=_dt_limits(reader),
        ),
    )
    mixer = replace(layers[0], norms=(True, False, False, False), has_feed_forward=False, experts=None, rope=None)
    feed_forward = replace(layers[0], norms=(False, False, True, False), mixer="none", rope=None)
    of_kind = {
        "mamba": replace(mixer, mixer="mamba", mamba=mamba),
        "attention": mixer,
        "mlp": replace(feed_forward, experts=None),
        "moe": feed_forward,
    }
    kinds = _listed(reader, "layers_block_type", len(layers), _NEMOTRON_KINDS)
    return tuple(of_kind[kind] for kind in kinds)


def _mamba2_layers(reader: ConfigReader, layers: Layers) -> Layers:
    """Each layer has Mamba2 and one norm, and no feed-forward."""
    num_heads, head_size = reader.count("num_attention_heads"), reader.count("mamba_head_dim")
    inner = reader.count("expand") * reader.count("hidden_size")
    if num_heads * head_size != inner:
        rule = f"heads of head_dim={head_size} are not the {inner} columns of expand times hidden_size"
        raise reader.error("num_attention_heads", rule)
    mamba = _checked(
        reader,
        "n_groups",
        MambaConfig(
            num_heads=num_heads,
            head_size=head_size,
            num_groups=reader.count("n_groups"),
            state_size=reader.count("state_size"),
            norm_eps=layers[0].norm.eps,
            kernel_size=num_taps(reader, "conv_kernel"),
            has_conv_bias=reader.flag("use_conv_bias", True),
            has_bias=reader.flag("use_bias", False),
            has_output_bias=reader.flag("use_bias", False),
            dt_limits=_dt_limits(reader),
        ),
    )
    return (replace(layers[0], mixer="mamba", mamba=mamba, has_feed_forward=False, rope=None),) * len(layers)


def no_ropes(reader: ConfigReader, max_positions: int, head_size: int) -> tuple[RopeParameters, ...]:
    """Positions are known to the states alone."""
    del reader, max_positions, head_size
    return ()


UNBOUNDED: Final = 2**20
"""Tokens of a sequence in a model without positions, which has no bound of its own and no memory that grows with it."""
_MAMBA_DEFAULTS: Final[dict[str, Any]] = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
_FEED_FORWARD_PARTS: Final = {
    f"mlp.{matrix}": f"feed_forward.{matrix}" for matrix in ("gate_proj", "up_proj", "down_proj")
}
_FALCON_NAMES: Final = Names(
    norm="model.final_layernorm",
    norms=("input_layernorm", "", "pre_ff_layernorm", ""),
    parts=_FEED_FORWARD_PARTS,
    fused={"mamba.in_proj": _IN_PROJ},
)
_GRANITE_NAMES: Final = Names(
    parts={"mlp.down_proj": "shared_mlp.output_linear"},
    fused={"shared_mlp.input_linear": ("mlp.gate_proj", "mlp.up_proj"), "mamba.in_proj": _IN_PROJ},
)
_GRANITE_DENSE: Final = Family(
    models="Granite 4, H, without experts",
    names=_GRANITE_NAMES,
    attention=Attention(scale_key="attention_multiplier"),
    feed_forward=FeedForward(bias=False),
    wiring=Wiring(residual_multiplier_key="residual_multiplier"),
    embedding=Embedding(multiplier_key="embedding_multiplier"),
    head=Head(divisor_key="logits_scaling"),
    file_keys={"intermediate_size": "shared_intermediate_size"},
    defaults={**_MAMBA_DEFAULTS, "eos_token_id": 2, "shared_intermediate_size": 1024},
    layers=_granite_layers,
    ropes=_granite_ropes,
)
_NEMOTRON_PARTS: Final = {
    "mamba": "mixer",
    **{f"mamba.{part}": f"mixer.{part}" for part in ("conv1d", "norm", "out_proj")},
    **{f"self_attn.{part}": f"mixer.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj")},
    **{
        f"mlp.{part}": f"mixer.{part}"
        for part in ("up_proj", "down_proj", "gate", "fc1_latent_proj", "fc2_latent_proj")
    },
    **{f"mlp.experts.{{}}.{part}": f"mixer.experts.{{}}.{part}" for part in ("up_proj", "down_proj")},
    **{f"mlp.shared_expert.{part}": f"mixer.shared_experts.{part}" for part in ("up_proj", "down_proj")},
}

MAMBA_ROWS: Final[dict[str, Family]] = {
    "Mamba2ForCausalLM": Family(
        models="Mamba 2: 130M to 2.7B, Codestral Mamba 7B",
        names=Names(
            embedding="backbone.embeddings",
            layers="backbone.layers",
            norm="backbone.norm_f",
            norms=("norm", "", "", ""),
            parts={
                "mamba": "mixer",
                **{f"mamba.{part}": f"mixer.{part}" for part in ("conv1d", "norm", "out_proj")},
            },
            fused={"mixer.in_proj": _IN_PROJ},
            aliases={"backbone.embedding.": "backbone.embeddings."},
        ),
        # No layer has attention: ranks divide its heads as Mamba's.
        attention=Attention(head_size=64),
        norms=Norms(eps_key="layer_norm_epsilon", eps=1e-5),
        file_keys={
            "num_attention_heads": "num_heads",
            "num_key_value_heads": "",
            "head_dim": "",
            "mamba_head_dim": "head_dim",
            "intermediate_size": "hidden_size",
        },
        required={"hidden_act": "silu"},
        defaults={
            "vocab_size": 32768,
            "hidden_size": 4096,
            "num_hidden_layers": 64,
            "num_heads": 128,
            "head_dim": 64,
            "n_groups": 8,
            "state_size": 128,
            "expand": 2,
            "conv_kernel": 4,
            "max_position_embeddings": UNBOUNDED,
            "eos_token_id": 2,
        },
        layers=_mamba2_layers,
        ropes=no_ropes,
    ),
    "NemotronHForCausalLM": Family(
        models="Nemotron-H; Nemotron Nano 2; Nemotron 3 Nano, Super",
        names=Names(
            embedding="backbone.embeddings",
            layers="backbone.layers",
            norm="backbone.norm_f",
            norms=("norm", "", "norm", ""),
            parts=_NEMOTRON_PARTS,
            fused={"mixer.in_proj": _IN_PROJ},
            aliases={"model.": "backbone."},
            ignored_prefixes=("mtp.",),
        ),
        attention=Attention(qkv_bias=False, output_bias=False, head_size=128),
        norms=Norms(rounds_once=True, eps_key="layer_norm_epsilon", eps=1e-5),
        feed_forward=FeedForward(is_gated=False, activation_key="mlp_hidden_act"),
        experts=ExpertsFamily(
            count_keys=("n_routed_experts", "num_local_experts"),
            default_count=8,
            score="sigmoid",
            has_choice_bias=True,
            has_groups=True,
            scaling_key="routed_scaling_factor",
            shared_key="moe_shared_expert_intermediate_size",
            is_gated=False,
            latent_key="moe_latent_size",
        ),
        required={"mamba_hidden_act": "silu"},
        defaults={
            "intermediate_size": 21504,
            "num_key_value_heads": 8,
            "max_position_embeddings": 4096,
            "eos_token_id": 2,
            "mlp_hidden_act": "relu2",
            "ssm_state_size": 128,
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "n_groups": 8,
            "conv_kernel": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 7688,
            "moe_shared_expert_intermediate_size": 7688,
            "norm_topk_prob": True,
        },
        layers=_nemotron_layers,
        ropes=no_ropes,
        newer=_nemotron_keys,
    ),
    "GraniteMoeHybridForCausalLM": replace(
        _GRANITE_DENSE,
        models="Granite 4, H: 350M, 1B, Micro, Tiny, Small",
        names=Names(
            parts={
                "mlp.gate": "block_sparse_moe.router.layer",
                "mlp.shared_expert.down_proj": "shared_mlp.output_linear",
            },
            fused={
                "shared_mlp.input_linear": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
                "mamba.in_proj": _IN_PROJ,
            },
            layer_aliases={
                "block_sparse_moe.experts.gate_up_proj": "block_sparse_moe.input_linear.weight",
                "block_sparse_moe.experts.down_proj": "block_sparse_moe.output_linear.weight",
                "block_sparse_moe.router.weight": "block_sparse_moe.router.layer.weight",
            },
            stacked=(
                StackedTensor("block_sparse_moe.input_linear.weight", ("gate_proj", "up_proj")),
                StackedTensor("block_sparse_moe.output_linear.weight", ("down_proj",)),
            ),
        ),
        experts=ExpertsFamily(
            count_keys=("num_local_experts",),
            default_count=8,
            size_key="intermediate_size",
            score="softmax_chosen",
            renormalises=False,
            shared_key="shared_intermediate_size",
        ),
        file_keys={},
        defaults={
            **_GRANITE_DENSE.defaults,
            "intermediate_size": 11008,
            "num_experts_per_tok": 2,
        },
        variants=(Variant({"num_local_experts": 0}, _GRANITE_DENSE),),
    ),
    "FalconH1ForCausalLM": Family(
        models="Falcon-H1: 0.5B, 1.5B, 3B, 7B, 34B",
        names=_FALCON_NAMES,
        embedding=Embedding(multiplier_key="embedding_multiplier"),
        head=Head(multiplier_key="lm_head_multiplier"),
        defaults={
            **_MAMBA_DEFAULTS,
            "intermediate_size": 14336,
            "mamba_d_ssm": 1024,
            "num_key_value_heads": 8,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "eos_token_id": 2,
        },
        layers=_falcon_layers,
    ),
    "BambaForCausalLM": Family(
        models="Bamba 9B",
        names=_FALCON_NAMES,
        rope=Rope(may_be_partial=True),
        defaults={
            **_MAMBA_DEFAULTS,
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-5,
            "eos_token_id": 2,
            "partial_rotary_factor": 0.5,
        },
        layers=_bamba_layers,
    ),
}
