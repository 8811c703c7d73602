"""Rows of `table.py`: DeepSeek V4, whose layers attend to a window and to compressed entries of the tokens before."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from spmd_worker.base.errors import ModelConfigError
from spmd_worker.model_config.config_reader import MAX_INT, ConfigReader, checked_integer
from spmd_worker.model_config.families.experts import ExpertsFamily
from spmd_worker.model_config.families.family import Attention, Family, FeedForward, Names, Norms, Rope
from spmd_worker.model_config.layer_config import CompressedConfig, IndexerConfig, LayerConfig
from spmd_worker.model_config.rope import RopeParameters, given_rope, rope_of
from spmd_worker.model_config.stream_config import BalancedStreamsConfig

_SLIDING: Final = "sliding_attention"
_SPARSE: Final = "compressed_sparse_attention"
_HEAVY: Final = "heavily_compressed_attention"
_KINDS: Final = (_SLIDING, _SPARSE, _HEAVY)
_RATES: Final = {_SPARSE: ("compress_rate_csa", 4), _HEAVY: ("compress_rate_hca", 128)}
"""Key of older files, and the number of tokens of a group where no key has it, by kind of layer."""
_OF_RATIO: Final = {0: _SLIDING, 4: _SPARSE, 128: _HEAVY}
_PARTIAL: Final = "partial_rotary_factor"
_MAX_RATE: Final = 4_096
_DEFAULTS: Final[dict[str, Any]] = {
    "vocab_size": 129280,
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "head_dim": 512,
    "moe_intermediate_size": 2048,
    "max_position_embeddings": 1048576,
    "q_lora_rank": 1024,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "routed_scaling_factor": 1.5,
    "compress_rope_theta": 160000.0,
    "swiglu_limit": 10.0,
    "sliding_window": 128,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "eos_token_id": 1,
}


def _rope_size(reader: ConfigReader, rope: ConfigReader, *, is_nested: bool) -> int:
    """Rotated numbers at the end of a head, by the object `rope` of the file first. A rope of its own object that no
    factor is of rotates all.
    """
    head_size, given = reader.count("head_dim"), rope if rope.get(_PARTIAL) is not None else reader
    if given.get(_PARTIAL) is not None:
        key, size = _PARTIAL, int(head_size * given.number(_PARTIAL))
    elif is_nested:
        key, size = "head_dim", head_size
    else:
        key = "qk_rope_head_dim" if reader.get("qk_rope_head_dim") is not None else "head_dim"
        size = reader.count("qk_rope_head_dim", max(head_size * 64 // 512, 1))
    if size % 2 or not 2 <= size <= head_size:
        raise given.error(key, f"rotates {size} of head_dim={head_size} numbers: an even number from 2 to all must be")
    return size


def _ropes(reader: ConfigReader, max_positions: int, head_size: int) -> tuple[RopeParameters, ...]:
    """The rope of layers with a window alone, and that of layers with entries."""
    del head_size
    given, key = given_rope(reader), "rope_scaling" if reader.get("rope_scaling") else "rope_parameters"
    if is_nested := all(isinstance(given.get(kind), Mapping) for kind in ("main", "compress")):
        objects = [reader.object(key).object(kind) for kind in ("main", "compress")]
        main, compress = [dict(each.config) for each in objects]
    else:
        objects = [reader, reader]
        scaling = {
            key: value for key, value in given.items() if key not in ("main", "compress", "rope_theta", _PARTIAL)
        }
        main, compress = {}, {**scaling, "rope_theta": reader.get("compress_rope_theta")}
        if compress.get("rope_type", compress.get("type")) == "yarn":
            compress.setdefault("attention_factor", 1.0)
    plain = replace(reader, file_keys={**reader.file_keys, _PARTIAL: ""})
    found = []
    for of_kind, each in zip(objects, (main, compress), strict=True):
        size = _rope_size(reader, of_kind, is_nested=is_nested)
        found.append(rope_of({key: each[key] for key in each if key != _PARTIAL}, plain, max_positions, size))
    for rope in found:
        if rope.rope_type not in ("default", "linear", "llama3", "yarn"):
            raise ModelConfigError(
                f"{reader.where(key)} rope_type={rope.rope_type} is not supported: entries of keys are rotated once, "
                f"whatever the length of a row: only default, linear, llama3 and yarn"
            )
    return tuple([replace(each, is_interleaved=True, rounding="angles") for each in found])


def _layers(reader: ConfigReader, layers: tuple[LayerConfig, ...]) -> tuple[LayerConfig, ...]:
    max_positions, size = reader.count("max_position_embeddings"), reader.count("head_dim")
    ropes = _ropes(reader, max_positions, size)
    groups, num_heads = reader.count("o_groups"), layers[0].num_heads
    if num_heads % groups:
        raise reader.error("o_groups", f"must divide num_attention_heads={num_heads}")
    attention = CompressedConfig(
        window=reader.count("sliding_window"),
        rope_size=ropes[0].size,
        query_rank=reader.count("q_lora_rank"),
        num_groups=groups,
        output_rank=reader.count("o_lora_rank"),
    )
    kinds = {kind: _of_kind(reader, attention, kind, ropes[1]) for kind in _KINDS}
    streams = BalancedStreamsConfig(
        num_streams=checked_integer(reader.get("hc_mult", 4), reader.where("hc_mult"), 1, 64),
        num_iterations=checked_integer(reader.get("hc_sinkhorn_iters", 20), reader.where("hc_sinkhorn_iters"), 1, 1000),
        eps=reader.number("hc_eps", 1e-6),
        norm_eps=layers[0].norm.eps,
    )
    bound = -reader.number("swiglu_limit")
    found = []
    for kind, is_listed, layer in zip(_listed(reader, len(layers)), _hashed(reader, len(layers)), layers, strict=True):
        assert layer.experts is not None, layer
        num_listed = reader.count("vocab_size") if is_listed else 0
        experts = replace(layer.experts, bound=bound, num_listed_tokens=num_listed, has_choice_bias=not is_listed)
        found.append(
            replace(
                layer,
                mixer="compressed",
                compressed=kinds[kind],
                rope=int(kind != _SLIDING),
                window=attention.window if kind == _SLIDING else 0,
                experts=experts,
                bound=bound,
                has_sinks=True,
                streams=streams,
            )
        )
    return tuple(found)


def _of_kind(reader: ConfigReader, attention: CompressedConfig, kind: str, rope: RopeParameters) -> CompressedConfig:
    if kind == _SLIDING:
        return attention
    older, default = _RATES[kind]
    rates = reader.object("compress_rates")
    given = rates.get(kind, default) if reader.get(older) is None else reader.get(older)
    where = rates.where(kind) if reader.get(older) is None else reader.where(older)
    rate = checked_integer(given, where, 1, _MAX_RATE)
    if kind == _HEAVY:
        return replace(attention, rate=rate, rope=rope, rope_size=rope.size)
    indexer = IndexerConfig(
        num_heads=reader.count("index_n_heads"),
        head_size=reader.count("index_head_dim"),
        num_chosen=reader.count("index_topk"),
        is_interleaved=True,
    )
    if indexer.head_size < rope.size:
        raise reader.error("index_head_dim", f"must be at least the {rope.size} numbers that are rotated")
    return replace(attention, rate=rate, rope=rope, rope_size=rope.size, overlaps=True, indexer=indexer)


def _listed(reader: ConfigReader, num_layers: int) -> list[str]:
    """Kind of each layer; files may have more, of heads for drafts."""
    given, ratios = reader.get("layer_types"), reader.get("compress_ratios")
    if given is None and ratios is not None:
        if not isinstance(ratios, list) or any(type(each) is not int or each not in _OF_RATIO for each in ratios):
            raise reader.error("compress_ratios", f"must list 0, 4 or 128 for each of {num_layers} layers")
        return _first(reader, "compress_ratios", [_OF_RATIO[each] for each in ratios], num_layers)
    if given is None:
        return [_SPARSE if layer > 1 and layer % 2 else _HEAVY for layer in range(num_layers)]
    if not isinstance(given, list) or any(each not in _KINDS for each in given):
        raise reader.error("layer_types", f"must list {num_layers} of {', '.join(_KINDS)}")
    return _first(reader, "layer_types", given, num_layers)


def _hashed(reader: ConfigReader, num_layers: int) -> list[bool]:
    """Whether the ids of tokens choose their experts, for each layer."""
    given, key = reader.get("mlp_layer_types"), "num_hash_layers"
    if given is None:
        num_first = checked_integer(reader.get(key, 3), reader.where(key), 0, MAX_INT)
        return [layer < num_first for layer in range(num_layers)]
    if not isinstance(given, list) or any(each not in ("hash_moe", "moe") for each in given):
        raise reader.error("mlp_layer_types", f"must list {num_layers} of hash_moe and moe")
    return [each == "hash_moe" for each in _first(reader, "mlp_layer_types", given, num_layers)]


def _first(reader: ConfigReader, key: str, given: list[str], num_layers: int) -> list[str]:
    if len(given) < num_layers:
        raise reader.error(key, f"must list {num_layers} layers, num_hidden_layers, and lists {len(given)}")
    return given[:num_layers]


_ATTENTION: Final = {
    "q_a_proj": "wq_a",
    "q_b_proj": "wq_b",
    "kv_proj": "wkv",
    "o_a_proj": "wo_a",
    "o_proj": "wo_b",
    "q_a_norm": "q_norm",
    "kv_norm": "kv_norm",
    "sinks": "attn_sink",
    "indexer.q_b_proj": "indexer.wq_b",
    "indexer.weights_proj": "indexer.weights_proj",
    **{
        f"{at}compressor.{ours}": f"{at}compressor.{theirs}"
        for at in ("", "indexer.")
        for ours, theirs in (
            *(("kv_proj", "wkv"), ("gate_proj", "wgate")),
            *(("position_bias", "ape"), ("kv_norm", "norm")),
        )
    },
}
"""Our names in `self_attn`, and those of files in `attn`."""
_IN_MEMORY: Final = {
    "self_attn.compressor.indexer.scorer.weights_proj.": "attn.indexer.weights_proj.",
    "self_attn.compressor.indexer.q_b_proj.": "attn.indexer.wq_b.",
    **{
        f"self_attn.compressor.{at}{theirs}": f"attn.{at}compressor.{files}"
        for at in ("indexer.", "")
        for theirs, files in (
            *(("kv_proj.", "wkv."), ("gate_proj.", "wgate.")),
            *(("position_bias", "ape"), ("kv_norm.", "norm.")),
        )
    },
    **{
        f"self_attn.{theirs}": f"attn.{files}"
        for theirs, files in (
            *(("q_a_proj.", "wq_a."), ("q_b_proj.", "wq_b."), ("kv_proj.", "wkv."), ("o_a_proj.", "wo_a.")),
            *(("o_b_proj.", "wo_b."), ("q_a_norm.", "q_norm."), ("kv_norm.", "kv_norm."), ("sinks", "attn_sink")),
        )
    },
    # transformers 5.23 writes it so.
    "attn.norm.": "attn.kv_norm.",
    "input_layernorm.": "attn_norm.",
    "post_attention_layernorm.": "ffn_norm.",
    "mlp.gate.e_score_correction_bias": "ffn.gate.bias",
    **{
        f"mlp.shared_experts.{theirs}.": f"ffn.shared_experts.{files}."
        for theirs, files in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))
    },
    "mlp.": "ffn.",
    **{f"{part}_hc.{leaf}": f"hc_{part}_{leaf}" for part in ("attn", "ffn") for leaf in ("fn", "base", "scale")},
}
"""Names of tensors of a layer in transformers 5, in memory, and in files."""
_NAMES: Final = Names(
    embedding="embed",
    layers="layers",
    norm="norm",
    head="head",
    norms=("attn_norm", "", "ffn_norm", ""),
    parts={
        **{f"self_attn.{ours}": f"attn.{theirs}" for ours, theirs in _ATTENTION.items()},
        "mlp.gate": "ffn.gate",
        **{
            f"{ours}_hyper_connection.{leaf}": f"hc_{part}_{leaf}"
            for ours, part in (("attn", "attn"), ("mlp", "ffn"))
            for leaf in ("fn", "base", "scale")
        },
        "mlp.gate.e_score_correction_bias": "ffn.gate.bias",
        "mlp.gate.listed": "ffn.gate.tid2eid",
        **{
            f"mlp.{at}.{ours}": f"ffn.{to}.{theirs}"
            for at, to in (("experts.{}", "experts.{}"), ("shared_expert", "shared_experts"))
            for ours, theirs in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))
        },
    },
    aliases={
        "model.embed_tokens.": "embed.",
        "lm_head.": "head.",
        "model.hc_head.hc_": "hc_head_",
        "model.": "",
    },
    layer_aliases=_IN_MEMORY,
    ignored_prefixes=("mtp.",),
    stream_head="hc_head_",
)

COMPRESSED_ROWS: Final[dict[str, Family]] = {
    "DeepseekV4ForCausalLM": Family(
        models="DeepSeek-V4-Flash, V4-Pro",
        names=_NAMES,
        attention=Attention(qkv_bias=False, output_bias=False, num_kv_heads=1),
        rope=Rope(may_be_partial=True),
        norms=Norms(rounds_once=True),
        feed_forward=FeedForward(bias=False),
        experts=ExpertsFamily(
            count_keys=("n_routed_experts", "num_local_experts", "num_experts"),
            score="sqrt_softplus",
            renormalises=True,
            scaling_key="routed_scaling_factor",
            shared_key="n_shared_experts",
            counts_shared=True,
            shared_bias="mlp_bias",
        ),
        required={
            "scoring_func": "sqrtsoftplus",
            "norm_topk_prob": True,
            "n_shared_experts": 1,
        },
        file_keys={"intermediate_size": "moe_intermediate_size"},
        defaults=_DEFAULTS,
        layer="streams_layer",
        layers=_layers,
        ropes=_ropes,
    )
}
