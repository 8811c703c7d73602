"""Row of `table.py`: LongCat-Flash (https://arxiv.org/abs/2509.01322), whose layers are two of ours: two times latent
attention and a dense feed-forward, and experts that begin behind the first attention and are added at the end.

Compared with transformers, and broken, in tests/model/test_latent_rows.py.
"""

from dataclasses import replace
from typing import Any, Final

from spmd_worker.model_config.config_reader import ConfigReader
from spmd_worker.model_config.families.experts import ExpertsFamily
from spmd_worker.model_config.families.family import Attention, Family, FeedForward, Names, Rope
from spmd_worker.model_config.families.latent_rows import latent_ropes, read_latent, score_scale
from spmd_worker.model_config.layer_config import LayerConfig


def _layers(reader: ConfigReader, layers: tuple[LayerConfig, ...]) -> tuple[LayerConfig, ...]:
    """Two for each of the file: queries, and latents of keys, grow with the hidden size."""
    latent, hidden_size = read_latent(reader), reader.count("hidden_size")
    if not latent.query_rank:
        raise reader.error("q_lora_rank", "must be a number: queries come from that latent")
    if reader.get("qk_head_dim") is not None and reader.count("qk_head_dim") != latent.query_size:
        raise reader.error("qk_head_dim", f"must be qk_nope_head_dim + qk_rope_head_dim, {latent.query_size}")
    scale = score_scale(reader, latent) * (hidden_size / latent.query_rank) ** 0.5
    latent = replace(latent, multiplier=(hidden_size / latent.rank) ** 0.5)
    found = []
    for layer in layers:
        first = replace(layer, mixer="latent", latent=latent, head_size=latent.key_size, num_kv_heads=1, scale=scale)
        found += [first, replace(first, experts=None)]
    return tuple(found)


_PROJECTIONS: Final = (
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "q_a_layernorm", "kv_a_layernorm"),
)
_MATRICES: Final = ("gate_proj", "up_proj", "down_proj")
_DEFAULTS: Final[dict[str, Any]] = {
    "vocab_size": 131072,
    "hidden_size": 6144,
    "num_layers": 28,
    "num_attention_heads": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000000.0,
    "ffn_hidden_size": 12288,
    "expert_ffn_hidden_size": 2048,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_topk": 12,
    "n_routed_experts": 512,
    "zero_expert_num": 256,
    "routed_scaling_factor": 6.0,
    "eos_token_id": 2,
}
LONGCAT_ROWS: Final[dict[str, Family]] = {
    "LongcatFlashForCausalLM": Family(
        models="LongCat-Flash",
        names=Names(
            layers_in_one=2,
            norms=("input_layernorm.#", "", "post_attention_layernorm.#", ""),
            parts={
                **{f"self_attn.{each}": f"self_attn.#.{each}" for each in _PROJECTIONS},
                **{f"{ours}.{each}": f"mlps.#.{each}" for ours in ("mlp", "dense") for each in _MATRICES},
                "mlp.gate": "mlp.router.classifier",
                "mlp.gate.e_score_correction_bias": "mlp.router.e_score_correction_bias",
            },
            # A head for drafts is not run.
            ignored_prefixes=("model.mtp.",),
        ),
        attention=Attention(num_kv_heads=1),
        rope=Rope(),
        ropes=latent_ropes,
        layers=_layers,
        layer="shortcut_layer",
        feed_forward=FeedForward(bias=False),
        experts=ExpertsFamily(
            count_keys=("n_routed_experts", "num_local_experts"),
            size_key="expert_ffn_hidden_size",
            chosen_key="moe_topk",
            has_choice_bias=True,
            scaling_key="routed_scaling_factor",
            identity_key="zero_expert_num",
            skips_layer=True,
        ),
        file_keys={
            "head_dim": "qk_rope_head_dim",
            "intermediate_size": "ffn_hidden_size",
            "num_hidden_layers": "num_layers",
        },
        required={
            "router_bias": False,
            "norm_topk_prob": False,
            "zero_expert_type": "identity",
            "mla_scale_q_lora": True,
            "mla_scale_kv_lora": True,
            "attention_method": "MLA",
        },
        defaults=_DEFAULTS,
    ),
}
