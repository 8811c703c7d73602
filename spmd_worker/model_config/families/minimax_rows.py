"""Rows of `table.py`: MiniMax-M3, whose sparse layers choose runs of keys for each key-value head
(`IndexerConfig.is_by_head`).

Each row is compared with transformers, and each entry broken, in tests/model/test_expert_rows.py.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from spmd_worker.base.config.plain_values import shown
from spmd_worker.model_config.config_reader import ConfigReader, is_bit
from spmd_worker.model_config.families.experts import ExpertsFamily, StackedTensor
from spmd_worker.model_config.families.family import (
    GATE_UP,
    Attention,
    Family,
    FeedForward,
    Names,
    Norms,
    Rope,
    TextPart,
)
from spmd_worker.model_config.families.text_part_rows import inside_language_model
from spmd_worker.model_config.layer_config import IndexerConfig, LayerConfig
from spmd_worker.model_config.rope import read_rope

_MOST_KEYS: Final = 1 << 20
"""Keys that a token sees at most in a sparse layer: they are copied."""
_LONGEST_RUN: Final = 512
"""Tokens of a block that is chosen, at most."""
_FULL, _SPARSE = "full_attention", "minimax_m3_sparse"
_SECTION: Final = "sparse_attention_config"
_OLDER: Final = {
    "index_n_heads": "sparse_num_index_heads",
    "index_head_dim": "sparse_index_dim",
    "index_block_size": "sparse_block_size",
    "index_topk_blocks": "sparse_topk_blocks",
    "index_local_blocks": "sparse_local_block",
}
"""Our keys -> the hub's, in an object, which take precedence."""
_LISTS: Final = (
    ("layer_types", _SECTION, "sparse_attention_freq", (_FULL, _SPARSE)),
    ("mlp_layer_types", "", "moe_layer_freq", ("dense", "sparse")),
)
"""Lists of kinds of layers, and the hub's of 0 and 1."""


def _newer(config: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """The text's config with the keys of transformers where the hub's files have others."""
    reader = ConfigReader(config, path)
    section = reader.object(_SECTION)
    section.choice("sparse_init_block", (0,), 0)
    section.choice("sparse_score_type", ("max",), "max")
    section.choice("use_sparse_attention", (True,), True)
    found = dict(config) | {ours: section.get(key) for ours, key in _OLDER.items() if section.get(key) is not None}
    for ours, where, key, kinds in _LISTS:
        source = section if where else reader
        listed = source.get(key)
        if config.get(ours) is not None or listed is None:
            continue
        count = config.get("num_hidden_layers")
        is_short = isinstance(count, int) and isinstance(listed, list) and len(listed) != count
        if not isinstance(listed, list) or is_short or not all(map(is_bit, listed)):
            raise source.error(key, f"must list 0 or 1 for each of num_hidden_layers={shown(count)} layers")
        found[ours] = [kinds[each] for each in listed]
    return found


def _layers(reader: ConfigReader, layers: tuple[LayerConfig, ...]) -> tuple[LayerConfig, ...]:
    """Layers with clamped gates; those with experts have another width, and listed ones an indexer."""
    kinds = reader.get("layer_types", [_FULL] * len(layers))
    if not isinstance(kinds, list) or len(kinds) != len(layers) or any(each not in (_FULL, _SPARSE) for each in kinds):
        raise reader.error("layer_types", f"must list {len(layers)} of {_FULL} and {_SPARSE}, one for each layer")
    width, bound = reader.count("dense_intermediate_size"), reader.number("swiglu_limit")
    indexer = _indexer(reader, layers[0]) if _SPARSE in kinds else None
    return tuple(
        replace(
            layer,
            activation="swigluoai",
            bound=bound,
            intermediate_size=width if layer.experts is None else layer.intermediate_size,
            experts=None if layer.experts is None else replace(layer.experts, bound=bound),
            indexer=indexer if kind == _SPARSE else None,
        )
        for layer, kind in zip(layers, kinds, strict=True)
    )


def _indexer(reader: ConfigReader, layer: LayerConfig) -> IndexerConfig:
    num_chosen, run_length = reader.count("index_topk_blocks"), reader.count("index_block_size")
    indexer = IndexerConfig(
        num_heads=reader.count("index_n_heads"),
        head_size=reader.count("index_head_dim"),
        num_chosen=num_chosen * run_length,
        is_interleaved=False,
        run_length=run_length,
        is_by_head=True,
        num_local=reader.count("index_local_blocks"),
    )
    if indexer.num_heads != layer.num_kv_heads:
        raise reader.error(
            "index_n_heads", f"must be num_key_value_heads={layer.num_kv_heads}: each chooses for itself"
        )
    if run_length > _LONGEST_RUN:
        raise reader.error("index_block_size", f"must be at most {_LONGEST_RUN}: a block is scored as a whole")
    if indexer.most_seen > _MOST_KEYS:
        raise reader.error("index_topk_blocks", f"of index_block_size must be at most {_MOST_KEYS} keys")
    if indexer.num_local > num_chosen:
        raise reader.error("index_local_blocks", f"must be at most index_topk_blocks={num_chosen}")
    rope = read_rope(reader, reader.count("max_position_embeddings"), layer.head_size, may_be_partial=True)
    if indexer.head_size < rope.rotary_size:
        raise reader.error("index_head_dim", f"must be at least the {rope.rotary_size} rotated numbers of a head")
    return indexer


def _of_shared(name: str) -> dict[str, str]:
    return {f"mlp.shared_expert.{each}": f"{name}.{each}" for each in ("gate_proj", "up_proj", "down_proj")}


_SHARED_GATE_UP: Final = tuple(each.replace("mlp.", "mlp.shared_expert.") for each in GATE_UP)
_INDEX: Final = {
    f"self_attn.indexer.{each}": f"self_attn.index_{each}" for each in ("q_proj", "k_proj", "q_norm", "k_norm")
}
_BIAS: Final = "mlp.gate.e_score_correction_bias"
_MOE: Final = "block_sparse_moe"
_HUB_NAMES: Final = Names(
    parts={
        "mlp.gate": f"{_MOE}.gate",
        _BIAS: f"{_MOE}.e_score_correction_bias",
        "mlp.experts.{}.gate_proj": _MOE + ".experts.{}.w1",
        "mlp.experts.{}.up_proj": _MOE + ".experts.{}.w3",
        "mlp.experts.{}.down_proj": _MOE + ".experts.{}.w2",
        **_of_shared(f"{_MOE}.shared_experts"),
        **_INDEX,
    },
    joined_rows={
        "mlp.gate_up_proj.weight": tuple(f"{each}.weight" for each in GATE_UP),
        f"{_MOE}.shared_experts.gate_up_proj.weight": tuple(
            f"{_MOE}.shared_experts.{each}.weight" for each in ("gate_proj", "up_proj")
        ),
    },
    layer_aliases={
        _BIAS: f"{_MOE}.e_score_correction_bias",
        **{f"mlp.{each}.": f"{_MOE}.{each}." for each in ("gate", "experts", "shared_experts")},
        **_INDEX,
    },
    ignores_later_layers=True,
)
_NOT_TEXT: Final = ("vision_tower.", "multi_modal_projector.", "patch_merge_mlp.")
_DRAFTS: Final = ("mtp.", "model.mtp.", "language_model.mtp.", "language_model.model.mtp.")

_TEXT: Final = Family(
    models="MiniMax-M3, of text alone",
    names=Names(
        parts=_of_shared("mlp.shared_experts"),
        fused={"mlp.gate_up_proj": GATE_UP, "mlp.shared_experts.gate_up_proj": _SHARED_GATE_UP},
        stacked=(
            StackedTensor("mlp.experts.gate_up_proj", ("gate_proj", "up_proj")),
            StackedTensor("mlp.experts.down_proj", ("down_proj",)),
        ),
        ignored_prefixes=_DRAFTS,
        ignores_later_layers=True,
    ),
    attention=Attention(qkv_bias=False, output_bias=False, qk_norm="head", head_size=128),
    rope=Rope(may_be_partial=True),
    norms=Norms(offset=1.0, rounds_once=True),
    feed_forward=FeedForward(bias=False, activation_words={"swigluoai": "silu"}),
    experts=ExpertsFamily(
        default_count=128,
        size_key="intermediate_size",
        kinds_key="mlp_layer_types",
        score="sigmoid",
        renormalises=True,
        has_choice_bias=True,
        scaling_key="routed_scaling_factor",
        shared_key="shared_intermediate_size",
    ),
    layers=_layers,
    newer=_newer,
    required={
        "swiglu_alpha": 1.702,
        "scoring_func": "sigmoid",
        "attention_output_gate": False,
        "use_qk_norm": True,
        "qk_norm_type": "per_head",
        "use_gemma_norm": True,
    },
    defaults={
        "num_key_value_heads": 4,
        "max_position_embeddings": 524288,
        "rope_theta": 5000000.0,
        "eos_token_id": 200020,
        "num_experts_per_tok": 4,
        "intermediate_size": 3072,
        "dense_intermediate_size": 12288,
        "shared_intermediate_size": 3072,
        "routed_scaling_factor": 2.0,
        "swiglu_limit": 7.0,
        "index_n_heads": 4,
        "index_head_dim": 128,
        "index_block_size": 128,
        "index_topk_blocks": 16,
        "index_local_blocks": 1,
    },
)

MINIMAX_ROWS: Final[dict[str, Family]] = {
    "MiniMaxM3VLForCausalLM": _TEXT,
    "MiniMaxM3SparseForConditionalGeneration": replace(
        _TEXT,
        models="MiniMax-M3, the text",
        names=inside_language_model(_HUB_NAMES, *_NOT_TEXT, *_DRAFTS),
        text=TextPart(tie="also"),
    ),
}
