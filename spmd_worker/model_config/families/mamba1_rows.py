"""Rows of `table.py`: Mamba (https://arxiv.org/abs/2312.00752), alone and in a hybrid with attention.

Each row is compared with transformers, and each entry broken, in tests/model/test_mamba_families.py.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from spmd_worker.model_config.config_reader import MAX_INT, MAX_LAYERS, ConfigReader, checked_integer
from spmd_worker.model_config.families.experts import ExpertsFamily
from spmd_worker.model_config.families.family import Attention, Family, FeedForward, Names, Norms, Variant
from spmd_worker.model_config.families.mamba_rows import UNBOUNDED, Layers, no_ropes, num_taps
from spmd_worker.model_config.layer_config import Mamba1Config

_KINDS: Final = "feed_forward_types"
"""Key that hub files do not have: "dense" or "sparse" for each layer."""
_CHANNELS_A_RANK: Final = 16
"""Inputs that the numbers of a token's step come from, if the file has no rank: one for so many of the hidden size."""


def _dt_rank(reader: ConfigReader, key: str) -> int:
    given = reader.get(key, "auto")
    return -(-reader.count("hidden_size") // _CHANNELS_A_RANK) if given == "auto" else reader.count(key)


def _mamba_layers(reader: ConfigReader, layers: Layers, *, norm: str) -> Layers:
    """Each layer has Mamba and one norm, and no feed-forward."""
    mamba1 = Mamba1Config(
        # The size wins where the file has both: `expand` is 16 in Falcon Mamba 7B, which has twice its hidden size.
        num_channels=reader.count("num_channels", reader.count("expand") * reader.count("hidden_size")),
        state_size=reader.count("state_size"),
        dt_rank=_dt_rank(reader, "time_step_rank"),
        kernel_size=num_taps(reader, "conv_kernel"),
        has_conv_bias=reader.flag("use_conv_bias", True),
        has_bias=reader.flag("use_bias", False),
        has_output_bias=reader.flag("use_bias", False),
        norm=norm,
        norm_eps=reader.number("mixer_rms_eps", 1e-6) if norm == "bare" else 1e-6,
    )
    return (replace(layers[0], mixer="mamba1", mamba1=mamba1, has_feed_forward=False, rope=None),) * len(layers)


def _jamba_keys(config: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """The file with a list of the layers that have experts, one in each period. Raises ModelConfigError."""

    def read(key: str, default: int, least: int, most: int = MAX_INT) -> int:
        given = config.get(key)
        return checked_integer(default if given is None else given, f"{path}: {key}", least, most)

    num_layers, offset = read("num_hidden_layers", 32, 1, MAX_LAYERS), read("expert_layer_offset", 1, 0)
    period = read("expert_layer_period", 2, 1)
    kinds = ["sparse" if layer % period == offset else "dense" for layer in range(num_layers)]
    return {**config, _KINDS: kinds}


def _jamba_layers(reader: ConfigReader, layers: Layers) -> Layers:
    """One layer in each period has attention, without positions; the others have Mamba."""
    period = reader.count("attn_layer_period")
    offset = checked_integer(reader.get("attn_layer_offset"), reader.where("attn_layer_offset"), 0, MAX_INT)
    has_bias = reader.flag("mamba_proj_bias", False)
    mamba1 = Mamba1Config(
        num_channels=reader.count("mamba_expand") * reader.count("hidden_size"),
        state_size=reader.count("mamba_d_state"),
        dt_rank=_dt_rank(reader, "mamba_dt_rank"),
        kernel_size=num_taps(reader, "mamba_d_conv"),
        has_conv_bias=reader.flag("mamba_conv_bias", True),
        has_bias=has_bias,
        has_output_bias=has_bias,
        norm="weighted",
        norm_eps=layers[0].norm.eps,
    )
    return tuple(
        replace(layer, rope=None)
        if index % period == offset
        else replace(layer, mixer="mamba1", mamba1=mamba1, rope=None)
        for index, layer in enumerate(layers)
    )


_MODULES: Final = ("conv1d", "x_proj", "dt_proj", "out_proj")
_IN_PROJ: Final = ("mamba.in_x", "mamba.in_z")
_MAMBA: Final = Family(
    models="Mamba: 130M to 2.8B",
    names=Names(
        embedding="backbone.embeddings",
        layers="backbone.layers",
        norm="backbone.norm_f",
        norms=("norm", "", "", ""),
        parts={"mamba": "mixer", **{f"mamba.{part}": f"mixer.{part}" for part in _MODULES}},
        fused={"mixer.in_proj": _IN_PROJ},
        aliases={"backbone.embedding.": "backbone.embeddings."},
    ),
    # No layer has attention: sizes of heads are not used.
    attention=Attention(head_size=64),
    norms=Norms(eps_key="layer_norm_epsilon", eps=1e-5),
    file_keys={
        "num_key_value_heads": "",
        "head_dim": "",
        "num_channels": "intermediate_size",
        "intermediate_size": "hidden_size",
    },
    required={"hidden_act": "silu"},
    defaults={
        "num_attention_heads": 64,
        "vocab_size": 50280,
        "hidden_size": 768,
        "num_hidden_layers": 32,
        "state_size": 16,
        "expand": 2,
        "conv_kernel": 4,
        "max_position_embeddings": UNBOUNDED,
        "tie_word_embeddings": True,
        "eos_token_id": 0,
    },
    layers=partial(_mamba_layers, norm="none"),
    ropes=no_ropes,
)
_JAMBA_DENSE: Final = Family(
    models="Jamba, without experts",
    names=Names(
        norm="model.final_layernorm",
        norms=("input_layernorm", "", "pre_ff_layernorm", ""),
        parts={f"mlp.{matrix}": f"feed_forward.{matrix}" for matrix in ("gate_proj", "up_proj", "down_proj")},
        fused={"mamba.in_proj": _IN_PROJ},
    ),
    attention=Attention(qkv_bias=False, output_bias=False),
    feed_forward=FeedForward(bias=False),
    required={"hidden_act": "silu"},
    defaults={
        "vocab_size": 65536,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 262144,
        "eos_token_id": 2,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "attn_layer_period": 8,
        "attn_layer_offset": 4,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
    },
    layers=_jamba_layers,
    ropes=no_ropes,
)

MAMBA1_ROWS: Final[dict[str, Family]] = {
    "MambaForCausalLM": _MAMBA,
    "FalconMambaForCausalLM": replace(_MAMBA, models="Falcon Mamba 7B", layers=partial(_mamba_layers, norm="bare")),
    "JambaForCausalLM": replace(
        _JAMBA_DENSE,
        models="Jamba 1.5, 1.6, 1.7; Jamba Reasoning 3B; Jamba2",
        names=replace(
            _JAMBA_DENSE.names,
            parts={
                **_JAMBA_DENSE.names.parts,
                "mlp.gate": "feed_forward.router",
                **{
                    f"mlp.experts.{{}}.{matrix}": f"feed_forward.experts.{{}}.{matrix}"
                    for matrix in ("gate_proj", "up_proj", "down_proj")
                },
            },
        ),
        experts=ExpertsFamily(size_key="intermediate_size", renormalises=False, kinds_key=_KINDS),
        newer=_jamba_keys,
        variants=(Variant({"num_experts": 1}, _JAMBA_DENSE),),
    ),
}
