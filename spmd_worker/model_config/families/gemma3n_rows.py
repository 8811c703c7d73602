"""Rows of `table.py`: Gemma 3n, whose layers predict and correct several residual streams.

Inputs of each layer and late layers without keys of their own are as in Gemma 4.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Any, Final

from spmd_worker.model_config.config_reader import MAX_INT, ConfigReader, checked_integer
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
from spmd_worker.model_config.families.gemma4_rows import layer_input_names, with_shared_keys
from spmd_worker.model_config.layer_config import LayerConfig
from spmd_worker.model_config.stream_config import PredictedStreamsConfig

_MOST_STREAMS: Final = 64
_SIZE, _SIZES, _SPARSITY = "intermediate_size", "intermediate_sizes", "activation_sparsity_pattern"
_NUM_SPARSE, _NUM_SHARED = 10, 15
"""First layers that are sparse, and last ones without keys, where a file of more layers does not say which."""


def _layers(reader: ConfigReader, layers: tuple[LayerConfig, ...]) -> tuple[LayerConfig, ...]:
    input_size = checked_integer(
        reader.get("hidden_size_per_layer_input"), reader.where("hidden_size_per_layer_input"), 1, 1 << 16
    )
    streams = _streams(reader)
    sizes = reader.get(_SIZES) or [layer.intermediate_size for layer in layers]
    found = tuple(
        replace(
            layer,
            intermediate_size=size,
            norms_values=True,
            input_size=input_size,
            predicted_streams=streams,
            gate_cutoff=cutoff,
        )
        for layer, size, cutoff in zip(layers, sizes, _cutoffs(reader, len(layers)), strict=True)
    )
    return with_shared_keys(reader, found, _NUM_SHARED if len(found) > _NUM_SHARED else 0)


def _streams(reader: ConfigReader) -> PredictedStreamsConfig:
    count = checked_integer(reader.get("altup_num_inputs"), reader.where("altup_num_inputs"), 2, _MOST_STREAMS)
    return PredictedStreamsConfig(
        num_streams=count,
        active=checked_integer(reader.get("altup_active_idx", 0), reader.where("altup_active_idx"), 0, count - 1),
        rank=reader.count("laurel_rank"),
        scales_output=reader.flag("altup_correct_scale", True),
    )


def _cutoffs(reader: ConfigReader, num_layers: int) -> Sequence[float | None]:
    """`LayerConfig.gate_cutoff` of each layer, from the share of gates that a normal distribution has below it."""
    shares = reader.get(_SPARSITY)
    if shares is None:
        num_sparse = _NUM_SPARSE if num_layers > _NUM_SPARSE else 0
        shares = [0.95] * num_sparse + [0.0] * (num_layers - num_sparse)
    is_list = isinstance(shares, list) and len(shares) == num_layers
    if not is_list or not all(_is_share(each) for each in shares):
        raise reader.error(_SPARSITY, f"must list {num_layers} numbers from 0, for all gates, to below 1")
    cutoff_of = {share: NormalDist().inv_cdf(share) if share else None for share in dict.fromkeys(shares)}
    return [cutoff_of[share] for share in shares]


def _is_share(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1


def _newer(config: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """The config with one size of feed-forwards, and the list of all of them apart, if it has one."""
    found = {key: value for key, value in config.items() if key != _SIZES}
    sizes, reader = found.get(_SIZE), ConfigReader({**_DEFAULTS, **config}, path)
    if not isinstance(sizes, list):
        return found
    if len(sizes) != reader.count("num_hidden_layers"):
        raise reader.error(_SIZE, "must be a number, or list one for each of num_hidden_layers")
    checked = [checked_integer(each, reader.where(_SIZE), 1, MAX_INT) for each in sizes]
    return {**found, _SIZE: checked[0], _SIZES: checked}


def _outer_streams(prefix: str) -> tuple[str, str]:
    return f"{prefix}.altup_projections", f"{prefix}.altup_unembed_projections"


_NAMES: Final = Names(
    norms=(
        *("input_layernorm", "post_attention_layernorm"),
        *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ),
    aliases={"model.language_model.": "model."},
    layer_inputs=layer_input_names("model"),
    outer_streams=_outer_streams("model"),
)
_DEFAULTS: Final[dict[str, Any]] = {
    "vocab_size": 262400,
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "sliding_window": 512,
    "hidden_activation": "gelu_pytorch_tanh",
    "rope_theta": 1000000.0,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144,
    "altup_num_inputs": 4,
    "laurel_rank": 64,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}
_GEMMA3N: Final = Family(
    models="Gemma 3n, of text alone: E2B, E4B",
    names=_NAMES,
    attention=Attention(qk_norm="head", head_size=256, scale=1.0),
    windows=Windows(rule="layer_types", full_every=5),
    rope=Rope(has_local=True),
    norms=Norms(rounds_once=True),
    feed_forward=FeedForward(bias=False, activation_key="hidden_activation"),
    embedding=Embedding(by_root=True, inputs_may_end=True),
    head=Head(cap_key="final_logit_softcapping"),
    layer="predicted_streams_layer",
    layers=_layers,
    newer=_newer,
    defaults=_DEFAULTS,
)

GEMMA3N_ROWS: Final[dict[str, Family]] = {
    "Gemma3nForCausalLM": _GEMMA3N,
    "Gemma3nForConditionalGeneration": replace(
        _GEMMA3N,
        models="Gemma 3n: E2B, E4B, the text",
        names=replace(
            next_to(_NAMES, "vision_tower", "embed_vision", "audio_tower", "embed_audio"),
            aliases={},
            layer_inputs=layer_input_names("model.language_model"),
            outer_streams=_outer_streams("model.language_model"),
        ),
        text=TextPart(ties_by_default=True),
    ),
}
