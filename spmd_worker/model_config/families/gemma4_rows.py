"""Rows of `table.py`: Gemma 4, whose full layers have heads of another size, and may have experts beside a dense
feed-forward.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from spmd_worker.base.config.plain_values import shown
from spmd_worker.base.errors import ModelConfigError
from spmd_worker.model_config.config_reader import ConfigReader, checked_integer
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
    TextPart,
    Windows,
    next_to,
)
from spmd_worker.model_config.layer_config import ExpertsConfig, LayerConfig
from spmd_worker.model_config.rope import RopeParameters, rope_of

_FULL: Final = "full_attention"
_FULL_EVERY: Final = 6
_MOST_DIGITS: Final = 10
"""Length of the key of a layer: Python refuses to read thousands of digits."""
_INPUTS, _SHARED = "hidden_size_per_layer_input", "num_kv_shared_layers"


def _layers(reader: ConfigReader, layers: tuple[LayerConfig, ...]) -> tuple[LayerConfig, ...]:
    """Full layers have heads of their own size and number."""
    input_size = checked_integer(reader.get(_INPUTS, 0), reader.where(_INPUTS), 0, 1 << 16)
    full = _full_layer(reader, layers[0])
    found = tuple(
        replace(
            layer,
            head_size=layer.head_size if layer.window else full.head_size,
            num_kv_heads=layer.num_kv_heads if layer.window else full.num_kv_heads,
            values_are_keys=not layer.window and full.values_are_keys,
            scale=1.0,
            norms_values=True,
            has_scalar=True,
            input_size=input_size,
            experts=_beside(layer.experts),
        )
        for layer in layers
    )
    return with_shared_keys(reader, found)


def with_shared_keys(
    reader: ConfigReader, layers: tuple[LayerConfig, ...], default_count: int = 0
) -> tuple[LayerConfig, ...]:
    """The last layers read the keys of the last before them that is of their kind, and may be twice as wide."""
    count = checked_integer(reader.get(_SHARED, default_count), reader.where(_SHARED), 0, len(layers) - 1)
    own, later = layers[: len(layers) - count], layers[len(layers) - count :]
    last = {layer.window > 0: index for index, layer in enumerate(own)}
    if not all((layer.window > 0) in last for layer in later):
        raise reader.error(_SHARED, "leaves layers of a kind of which no layer has keys and values of its own")
    factor = 1 + reader.flag("use_double_wide_mlp", False)
    return own + tuple(
        replace(layer, kv_layer=last[layer.window > 0], intermediate_size=layer.intermediate_size * factor)
        for layer in later
    )


def _beside(experts: ExpertsConfig | None) -> ExpertsConfig | None:
    return None if experts is None else replace(experts, are_beside_dense=True)


def _full_layer(reader: ConfigReader, layer: LayerConfig) -> LayerConfig:
    """A layer with the heads of full ones."""
    are_keys, num_kv_heads = reader.flag("attention_k_eq_v", False), layer.num_kv_heads
    if are_keys:
        num_kv_heads = reader.count("num_global_key_value_heads", num_kv_heads)
    if layer.num_heads % num_kv_heads:
        raise reader.error("num_attention_heads", f"is not a multiple of num_global_key_value_heads={num_kv_heads}")
    return replace(layer, head_size=_full_size(reader), num_kv_heads=num_kv_heads, values_are_keys=are_keys)


def _full_size(reader: ConfigReader) -> int:
    size = reader.count("global_head_dim")
    if size % 2:
        raise reader.error("global_head_dim", "must be even: rotary embedding rotates pairs")
    return size


def _ropes(reader: ConfigReader, max_positions: int, head_size: int) -> tuple[RopeParameters, ...]:
    """Ropes of full and of sliding layers."""
    by_kind = reader.object("rope_parameters").config
    sizes = {_FULL: _full_size(reader), "sliding_attention": head_size}
    if not all(isinstance(by_kind.get(kind), Mapping) for kind in sizes):
        raise reader.error("rope_parameters", f"must have an object for each of {', '.join(sizes)}")
    return tuple(rope_of(by_kind[kind], reader, max_positions, size) for kind, size in sizes.items())


def _newer(config: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """The config with a full last layer, without experts that it does not use, and with the sizes of full layers that
    transformers writes by layer.
    """
    reader = ConfigReader({**_DEFAULTS, **config}, path)
    if reader.get("use_bidirectional_attention") == "all":
        raise reader.error("use_bidirectional_attention", "is not supported: tokens would see those behind them")
    found = {**config, "layer_types": _layer_types(reader)}
    if found.get("rope_parameters", 0) is None:
        del found["rope_parameters"]
    if not reader.flag("enable_moe_block", False):
        found = {key: value for key, value in found.items() if key not in ("num_experts", "top_k_experts")}
        found["mlp_layer_types"] = ["dense"] * reader.count("num_hidden_layers")
        # Of no layer.
        found |= {"num_experts": 1, "top_k_experts": 1, "moe_intermediate_size": 1}
    return found if reader.get("per_layer_config") is None else {**found, **_by_layer(reader, found["layer_types"])}


def _layer_types(reader: ConfigReader) -> list[Any]:
    """Every sixth is full if the file lists none; the last always is."""
    count, kinds = reader.count("num_hidden_layers"), reader.get("layer_types")
    if kinds is None:
        kinds = [_FULL if (layer + 1) % _FULL_EVERY == 0 else "sliding_attention" for layer in range(count)]
    if not isinstance(kinds, list):
        raise reader.error("layer_types", f"must be a list of num_hidden_layers={count} kinds of layers")
    return [*kinds[:-1], _FULL] if kinds else kinds


def _by_layer(reader: ConfigReader, kinds: Any) -> dict[str, Any]:
    """`global_head_dim` and `num_global_key_value_heads` of `per_layer_config`, by a layer's number, which transformers
    pads with zeros: "05" of 30 layers.
    """
    given = reader.object("per_layer_config")
    full = [layer for layer, kind in enumerate(kinds if isinstance(kinds, list) else ()) if kind == _FULL]
    known = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
    entries = [given.object(key).config for key in given.config]
    numbers = sorted(int(key) if key.isdecimal() and len(key) <= _MOST_DIGITS else -1 for key in map(str, given.config))
    if (
        any(entry != entries[0] for entry in entries)
        or (numbers and numbers != full)
        or (entries and set(entries[0]) - set(known))
    ):
        raise ModelConfigError(
            f"{reader.where('per_layer_config')}={shown(given.config)} must have {', '.join(known)} of every "
            f"{_FULL} layer, the same for all"
        )
    entry = entries[0] if entries else {}
    where = reader.where("per_layer_config")
    return {known[key]: checked_integer(value, f"{where} {key}", 1, 1 << 16) for key, value in entry.items()}


def layer_input_names(prefix: str) -> tuple[str, str, str]:
    """Names of the table, the projection and the norm of inputs of layers."""
    return (
        f"{prefix}.embed_tokens_per_layer",
        f"{prefix}.per_layer_model_projection",
        f"{prefix}.per_layer_projection_norm",
    )


_NAMES: Final = Names(
    norms=(
        *("input_layernorm", "post_attention_layernorm"),
        *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ),
    parts={
        "layer_scalar.value": "layer_scalar",
        **{f"dense.{each}": f"mlp.{each}" for each in ("gate_proj", "up_proj", "down_proj")},
        "mlp.gate": "router.proj",
        "mlp.gate.scale": "router.scale",
        "mlp.gate.per_expert_scale": "router.per_expert_scale",
        "dense_output_norm": "post_feedforward_layernorm_1",
        "experts_input_norm": "pre_feedforward_layernorm_2",
        "experts_output_norm": "post_feedforward_layernorm_2",
    },
    stacked=(
        StackedTensor("experts.gate_up_proj", ("gate_proj", "up_proj")),
        StackedTensor("experts.down_proj", ("down_proj",)),
    ),
    aliases={"model.language_model.": "model."},
    layer_inputs=layer_input_names("model"),
)
_DEFAULTS: Final[dict[str, Any]] = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "global_head_dim": 512,
    "max_position_embeddings": 131072,
    "sliding_window": 512,
    "hidden_activation": "gelu_pytorch_tanh",
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
    },
    _INPUTS: 256,
    "vocab_size_per_layer_input": 262144,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}
_GEMMA4: Final = Family(
    models="Gemma 4, of text alone: E2B, E4B, 26B-A4B, 31B",
    names=_NAMES,
    attention=Attention(qk_norm="head", head_size=256),
    windows=Windows(rule="layer_types"),
    rope=Rope(has_local=True),
    norms=Norms(rounds_once=True),
    feed_forward=FeedForward(bias=False, activation_key="hidden_activation"),
    experts=ExpertsFamily(
        chosen_key="top_k_experts",
        kinds_key="mlp_layer_types",
        renormalises=True,
    ),
    embedding=Embedding(by_root=True),
    head=Head(cap_key="final_logit_softcapping"),
    layer="scaled_layer",
    layers=_layers,
    ropes=_ropes,
    newer=_newer,
    defaults=_DEFAULTS,
)

_UNIFIED: Final = replace(
    _GEMMA4,
    models="Gemma 4 without a tower, of text alone: 12B",
    experts=None,
    defaults={
        **{key: value for key, value in _DEFAULTS.items() if key != "vocab_size_per_layer_input"},
        _INPUTS: 0,
        "max_position_embeddings": 262144,
        "sliding_window": 1024,
    },
)

GEMMA4_ROWS: Final[dict[str, Family]] = {
    "Gemma4ForCausalLM": _GEMMA4,
    "Gemma4UnifiedForCausalLM": _UNIFIED,
    "Gemma4UnifiedForConditionalGeneration": replace(
        _UNIFIED,
        models="Gemma 4 without a tower: 12B; images, no audio or video",
        names=replace(
            next_to(_NAMES, "vision_embedder", "embed_vision", "embed_audio"),
            aliases={},
            layer_inputs=layer_input_names("model.language_model"),
        ),
        text=TextPart(ties_by_default=True),
        vision="gemma4_unified",
    ),
    "Gemma4ForConditionalGeneration": replace(
        _GEMMA4,
        models="Gemma 4: E2B, E4B, 26B-A4B, 31B; images, no audio or video",
        names=replace(
            next_to(_NAMES, "vision_tower", "embed_vision", "audio_tower", "embed_audio"),
            aliases={},
            layer_inputs=layer_input_names("model.language_model"),
        ),
        text=TextPart(ties_by_default=True),
        vision="gemma4",
    ),
}
