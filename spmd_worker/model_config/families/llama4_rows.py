"""Rows of `table.py`: Llama 4, whose layers with a rope attend within chunks of the text, and whose routed experts
have weighted inputs.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from spmd_worker.model_config.config_reader import MAX_INT, ConfigReader, checked_integer
from spmd_worker.model_config.families.experts import ExpertsFamily, StackedTensor
from spmd_worker.model_config.families.family import Attention, Family, FeedForward, Names, Rope, TextPart
from spmd_worker.model_config.families.text_part_rows import inside_language_model
from spmd_worker.model_config.layer_config import LayerConfig
from spmd_worker.model_config.rope import NOT_ROTATED, RopeParameters, read_rope

_CHUNKED: Final = "chunked_attention"
_SPARSE_KINDS: Final = "mlp_layer_types"
_ROTATED, _GROWING = range(2)
"""Ropes: of layers with one, and of the others, whose queries grow."""


def _layers(reader: ConfigReader, layers: tuple[LayerConfig, ...]) -> tuple[LayerConfig, ...]:
    grows, norms = _grows(reader), reader.flag("use_qk_norm", True)
    others = _GROWING if grows else None
    kinds = _kinds(reader, layers)
    return tuple(
        replace(
            layer,
            rope=others if layer.rope is None else _ROTATED,
            qk_norm="bare_after_rope" if norms and layer.rope is not None else "none",
            chunk=reader.count("attention_chunk_size") if kind == _CHUNKED else 0,
        )
        for kind, layer in zip(kinds, layers, strict=True)
    )


def _kinds(reader: ConfigReader, layers: tuple[LayerConfig, ...]) -> list[str]:
    kinds, known = reader.get("layer_types"), (_CHUNKED, "full_attention")
    if kinds is None:
        return [known[layer.rope is None] for layer in layers]
    if not isinstance(kinds, list) or len(kinds) != len(layers) or any(kind not in known for kind in kinds):
        raise reader.error("layer_types", f"must list {len(layers)} of {', '.join(known)}")
    return kinds


def _grows(reader: ConfigReader) -> bool:
    """Whether queries of layers without a rope grow; older files have a number."""
    given = reader.get("attn_temperature_tuning")
    if not isinstance(given, bool | int):
        raise reader.error("attn_temperature_tuning", "must be true or false")
    return bool(given)


def _ropes(reader: ConfigReader, max_positions: int, head_size: int) -> tuple[RopeParameters, ...]:
    found = read_rope(reader, max_positions, head_size, may_be_partial=False)
    rotated = replace(found, is_interleaved=True, rounding="result")
    if not _grows(reader):
        return (rotated,)
    growing = RopeParameters(
        head_size,
        rope_type=NOT_ROTATED,
        original_max_position_embeddings=reader.count("floor_scale"),
        query_growth=reader.number("attn_scale"),
        growth_offset=1,
        rounding="result",
    )
    return rotated, growing


def _newer(config: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """The config with a kind for each layer instead of `moe_layers`; an empty `no_rope_layers` is none."""
    found = {key: value for key, value in config.items() if key != "no_rope_layers" or value}
    reader = ConfigReader({**_DEFAULTS, **config}, path)
    sparse = reader.get("moe_layers")
    if sparse is None:
        return found
    if not isinstance(sparse, list):
        raise reader.error("moe_layers", "must be a list of layers, from 0 on")
    numbers = {checked_integer(each, reader.where("moe_layers"), 0, MAX_INT) for each in sparse}
    count = reader.count("num_hidden_layers")
    return {**found, _SPARSE_KINDS: ["sparse" if layer in numbers else "dense" for layer in range(count)]}


_MATRICES: Final = ("gate_proj", "up_proj", "down_proj")
_NAMES: Final = Names(
    parts={
        **{f"mlp.{each}": f"feed_forward.{each}" for each in _MATRICES},
        **{f"mlp.shared_expert.{each}": f"feed_forward.shared_expert.{each}" for each in _MATRICES},
        "mlp.gate": "feed_forward.router",
    },
    stacked=(
        StackedTensor("feed_forward.experts.gate_up_proj", ("gate_proj", "up_proj"), is_transposed=True),
        StackedTensor("feed_forward.experts.down_proj", ("down_proj",), is_transposed=True),
    ),
)
_DEFAULTS: Final[dict[str, Any]] = {
    "vocab_size": 202048,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "num_experts_per_tok": 1,
    "no_rope_layer_interval": 4,
    "attention_chunk_size": 8192,
    "attn_temperature_tuning": True,
    "floor_scale": 8192,
    "attn_scale": 0.1,
    "eos_token_id": 2,
}
_LLAMA4: Final = Family(
    models="Llama 4: Scout, Maverick, of text alone",
    names=_NAMES,
    attention=Attention(head_size=128),
    rope=Rope(layers="listed"),
    feed_forward=FeedForward(bias=False),
    experts=ExpertsFamily(
        count_keys=("num_local_experts",),
        default_count=16,
        every_key="interleave_moe_layer_step",
        kinds_key=_SPARSE_KINDS,
        score="sigmoid_chosen",
        weighs_inputs=True,
        renormalises=False,
        shared_key="shared_expert_intermediate_size",
    ),
    layers=_layers,
    ropes=_ropes,
    newer=_newer,
    # A layer without experts is as wide as no expert.
    file_keys={
        "intermediate_size": "intermediate_size_mlp",
        "moe_intermediate_size": "intermediate_size",
        "shared_expert_intermediate_size": "intermediate_size",
    },
    defaults=_DEFAULTS,
)

LLAMA4_ROWS: Final[dict[str, Family]] = {
    "Llama4ForCausalLM": _LLAMA4,
    "Llama4ForConditionalGeneration": replace(
        _LLAMA4,
        models="Llama 4: Scout, Maverick",
        vision="llama4",
        names=inside_language_model(_NAMES, "vision_model.", "multi_modal_projector."),
        text=TextPart(),
    ),
}
