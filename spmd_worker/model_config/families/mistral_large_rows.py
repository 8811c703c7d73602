"""Row of `table.py`: Mistral Large 4, latent attention to keys that an indexer chooses, in layers with and without a
rope, of which some read the latents of a layer before them.

Compared with transformers, and broken, in tests/model/test_latent_rows.py.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from spmd_worker.model_config.config_reader import ConfigReader, checked_integer
from spmd_worker.model_config.families.experts import ExpertsFamily
from spmd_worker.model_config.families.family import Attention, Family, FeedForward, Head, Names, Rope, TextPart
from spmd_worker.model_config.families.latent_rows import (
    SPARSE,
    latent_ropes,
    read_latent,
    score_scale,
    takes_choice,
)
from spmd_worker.model_config.layer_config import IndexerConfig, LayerConfig
from spmd_worker.model_config.rope import RopeParameters, rotated_layers

_SOURCES: Final = "kv_source_layers"


def _newer(config: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """A rope that is null is the class's, as a missing one is."""
    del path
    return {key: value for key, value in config.items() if key != "rope_parameters" or value is not None}


def _ropes(reader: ConfigReader, max_positions: int, head_size: int) -> tuple[RopeParameters, ...]:
    (rope,) = latent_ropes(reader, max_positions, head_size)
    return (replace(rope, has_learned_factors=True, gives_lengths=True),)


def _layers(reader: ConfigReader, layers: tuple[LayerConfig, ...]) -> tuple[LayerConfig, ...]:
    """Layers without a rope have no rotated part. Keys of an indexer are cached with the latents that it chooses."""
    is_rotated = rotated_layers(reader, "listed", [0] * len(layers))
    sources, shares = _sources(reader, is_rotated), takes_choice(reader, len(layers))
    whole = replace(read_latent(reader), norm_eps=layers[0].norm.eps, grows_by_head=True)
    scale, head_size = score_scale(reader, whole), reader.count("index_head_dim")
    if head_size < whole.rope_size:
        raise reader.error("index_head_dim", f"must be at least qk_rope_head_dim, {whole.rope_size}")
    # Number of indexers whose keys are beside the latents of each layer.
    num_slots = Counter(source for source, is_shared in zip(sources, shares, strict=True) if not is_shared)
    found, slots = [], Counter[int]()
    for index, (layer, source, rotates) in enumerate(zip(layers, sources, is_rotated, strict=True)):
        indexer = IndexerConfig(
            num_heads=reader.count("index_n_heads"),
            head_size=head_size,
            num_chosen=reader.count("index_topk"),
            is_interleaved=True,
            is_shared=shares[index],
            norms_input=True,
            slot=0 if shares[index] else slots[source],
            num_slots=num_slots[source],
        )
        slots[source] += not shares[index]
        latent = replace(whole, indexer=indexer)
        if not rotates:
            latent = replace(latent, nope_size=whole.query_size, rope_size=0)
        found.append(
            replace(
                layer,
                mixer="latent",
                latent=latent,
                head_size=latent.key_size,
                num_kv_heads=1,
                scale=scale,
                rope=0 if rotates else None,
                kv_layer=None if source == index else source,
            )
        )
    return tuple(found)


def _sources(reader: ConfigReader, is_rotated: Sequence[bool]) -> list[int]:
    """The layer whose latents each reads. Of those that others read, transformers keeps the last of each kind."""
    num_layers, listed = len(is_rotated), reader.get(_SOURCES)
    if listed is None:
        return list(range(num_layers))
    if not isinstance(listed, list) or len(listed) != num_layers:
        raise reader.error(_SOURCES, f"must list {num_layers} layers, one for each")
    sources = [checked_integer(each, reader.where(_SOURCES), 0, num_layers - 1) for each in listed]
    last = {source: index for index, source in enumerate(sources)}
    stored: dict[bool, int] = {}
    for index, source in enumerate(sources):
        kind = is_rotated[index]
        if source == index and last[index] > index:
            stored[kind] = index
        elif source != index and stored.get(kind) != source:
            rule = "itself, or the last layer before it that others read and that has a rope as it has, or none"
            raise reader.error(_SOURCES, f"must give layer {index} {rule}")
    return sources


_LAYER_ALIASES: Final = {
    "self_attn.q_proj.": "attention.wq.",
    "self_attn.kv_a_proj_with_mqa.": "attention.wkv_a_with_mqa.",
    "self_attn.kv_a_layernorm.": "attention.kv_a_norm.",
    "self_attn.kv_b_proj.": "attention.wkv_b.",
    "self_attn.o_proj.": "attention.wo.",
    "self_attn.softmax_scaling.scale": "attention.ssmax_scaling.s",
    "self_attn.softmax_scaling.bias": "attention.ssmax_scaling.b",
    "self_attn.indexer.softmax_scaling.scale": "attention.indexer.ssmax_scaling.s",
    "self_attn.indexer.softmax_scaling.bias": "attention.indexer.ssmax_scaling.b",
    "self_attn.indexer.": "attention.indexer.",
    "input_layernorm.": "attention_norm.",
    "post_attention_layernorm.": "ffn_norm.",
    "mlp.gate_proj.": "feed_forward.w1.",
    "mlp.up_proj.": "feed_forward.w3.",
    "mlp.down_proj.": "feed_forward.w2.",
    "mlp.gate.": "gate.",
    "mlp.shared_experts.gate_proj.": "shared_experts.w1.",
    "mlp.shared_experts.up_proj.": "shared_experts.w3.",
    "mlp.shared_experts.down_proj.": "shared_experts.w2.",
    "mlp.experts.": "experts.",
}
"""Names of transformers in memory -> those of the files, in a layer."""
_NAMES: Final = Names(
    embedding="tok_embeddings",
    layers="layers",
    norm="norm",
    head="output",
    rope_factors="lerope",
    norms=("attention_norm", "", "ffn_norm", ""),
    parts={
        **{
            ours.rstrip("."): theirs.rstrip(".")
            for ours, theirs in _LAYER_ALIASES.items()
            if ours.startswith(("self_attn.", "mlp.")) and "expert" not in ours
        },
        **{
            f"self_attn.indexer.{each}": f"attention.indexer.{each}"
            for each in ("wq_b", "wk", "weights_proj", "k_norm", "q_input_norm")
        },
        **{
            f"mlp.{where}.{ours}": f"{theirs}.{name}"
            for where, theirs in (("shared_expert", "shared_experts"), ("experts.{}", "experts.{}"))
            for ours, name in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))
        },
    },
    # A head for drafts is not run.
    ignored_prefixes=(
        *("vision_encoder.", "pre_mm_projector_norm.", "patch_merger.", "vision_language_adapter."),
        "mtp_dspark.",
    ),
    aliases={
        "model.language_model.embed_tokens.": "tok_embeddings.",
        "model.language_model.layers.": "layers.",
        "model.language_model.norm.": "norm.",
        "model.language_model.rotary_emb.alpha": "lerope.alpha",
        "model.vision_tower.": "vision_encoder.",
        "model.multi_modal_projector.norm.": "pre_mm_projector_norm.",
        "model.multi_modal_projector.patch_merger.": "patch_merger.",
        "model.multi_modal_projector.linear_1.": "vision_language_adapter.w_in.",
        "model.multi_modal_projector.linear_2.": "vision_language_adapter.w_out.",
        "lm_head.": "output.",
    },
    layer_aliases=_LAYER_ALIASES,
)
_DEFAULTS: Final[dict[str, Any]] = {
    "vocab_size": 204800,
    "hidden_size": 6144,
    "intermediate_size": 24576,
    "moe_intermediate_size": 6144,
    "num_hidden_layers": 72,
    "num_attention_heads": 64,
    "n_shared_experts": 1,
    "n_routed_experts": 128,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 1048576,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
    "index_topk": 2048,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "no_rope_layer_interval": 4,
    "final_logit_softcapping": 30.0,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 2048.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "attention_factor": 1.0,
    },
}
MISTRAL_LARGE_ROWS: Final[dict[str, Family]] = {
    "MistralLarge4ForConditionalGeneration": Family(
        models="Mistral Large 4",
        names=_NAMES,
        attention=Attention(num_kv_heads=1),
        rope=Rope(),
        ropes=_ropes,
        layers=_layers,
        feed_forward=FeedForward(bias=False),
        experts=ExpertsFamily(**SPARSE, kinds_key="mlp_layer_types", has_groups=True, renormalises=True),
        head=Head(cap_key="final_logit_softcapping"),
        text=TextPart(),
        vision="mistral_large4",
        newer=_newer,
        file_keys={"head_dim": "qk_rope_head_dim", "q_lora_rank": ""},
        defaults=_DEFAULTS,
    ),
}
