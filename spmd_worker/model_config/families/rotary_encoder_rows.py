"""Encoders with rotary positions and no table of them: Nomic, GTE, EuroBERT and Jina v3; rows as in `table.py`."""

from dataclasses import replace
from typing import Final

from spmd_worker.model_config.families.family import (
    QKV,
    Attention,
    ClassifierFamily,
    Embedding,
    Encoder,
    Family,
    FeedForward,
    Names,
    Norms,
)
from spmd_worker.model_config.families.table import FAMILIES
from spmd_worker.model_config.rope import ntk_rope

_NOMIC_BERT: Final = Family(
    models="Nomic: nomic-embed-text v1 and v1.5, arctic-embed-m-long",
    names=Names(
        embedding="nomic_bert.embeddings.word_embeddings",
        token_types="nomic_bert.embeddings.token_type_embeddings",
        embedding_norm="nomic_bert.embeddings.LayerNorm",
        layers="nomic_bert.layers",
        norm="",
        norms=("", "post_attention_layernorm", "", "post_mlp_layernorm"),
        optional_prefix="nomic_bert.",
        aliases={
            f"{prefix}{theirs}": f"nomic_bert.{ours}"
            for prefix in ("nomic_bert.", "bert.", "")
            for theirs, ours in (("encoder.layers.", "layers."), ("emb_ln.", "embeddings.LayerNorm."))
        }
        | {"bert.": "nomic_bert."},
        layer_aliases={
            "attn.out_proj.": "self_attn.o_proj.",
            "mlp.fc11.": "mlp.up_proj.",
            "mlp.fc12.": "mlp.gate_proj.",
            "mlp.fc2.": "mlp.down_proj.",
            "norm1.": "post_attention_layernorm.",
            "norm2.": "post_mlp_layernorm.",
        },
        joined_rows={"attn.Wqkv.weight": tuple(f"{part}.weight" for part in QKV)},
        ignored=("rotary_emb.inv_freq", "embeddings.position_ids"),
        head="cls",
        ignored_prefixes=("nomic_bert.pooler.", "cls."),
        head_dense="nomic_bert.pooler.dense",
        classifier="classifier",
    ),
    attention=Attention(qkv_bias=False, output_bias=False),
    norms=Norms(kind="layer", has_bias=True, eps_key="layer_norm_eps", are_of_sums=True),
    feed_forward=FeedForward(bias=False),
    embedding=Embedding(has_norm=True),
    encoder=Encoder(token_types_key="type_vocab_size", classifier=ClassifierFamily()),
    file_keys={"num_key_value_heads": ""},
    older_keys={
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "intermediate_size": "n_inner",
        "max_position_embeddings": "n_positions",
        "layer_norm_eps": "layer_norm_epsilon",
        "rope_theta": "rotary_emb_base",
    },
    # Keys of the authors' code, which transformers does not read.
    required={
        "activation_function": "swiglu",
        "causal": False,
        "mlp_fc1_bias": False,
        "mlp_fc2_bias": False,
        "num_experts": 0,
        "parallel_block": False,
        "prenorm": False,
        "qkv_proj_bias": False,
        "rotary_emb_fraction": 1.0,
        "rotary_emb_interleaved": False,
        "rotary_emb_scale_base": None,
        "rotary_scaling_factor": None,
        "use_rms_norm": False,
    },
    defaults={
        "vocab_size": 30528,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "max_position_embeddings": 2048,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        "rope_theta": 1000.0,
    },
)
_GTE: Final = Family(
    models="GTE: gte-multilingual, gte-en v1.5",
    names=Names(
        embedding="gte.embeddings.word_embeddings",
        token_types="gte.embeddings.token_type_embeddings",
        embedding_norm="gte.embeddings.LayerNorm",
        layers="gte.layers",
        norm="",
        norms=("", "post_attention_layernorm", "", "post_mlp_layernorm"),
        optional_prefix="gte.",
        aliases={f"{prefix}encoder.layer.": "gte.layers." for prefix in ("gte.", "new.", "")} | {"new.": "gte."},
        layer_aliases={
            "attention.": "self_attn.",
            "attn_ln.": "post_attention_layernorm.",
            "mlp_ln.": "post_mlp_layernorm.",
        },
        joined_rows={
            "self_attn.qkv_proj.weight": tuple(f"{part}.weight" for part in QKV),
            "self_attn.qkv_proj.bias": tuple(f"{part}.bias" for part in QKV),
            "mlp.up_gate_proj.weight": ("mlp.up_proj.weight", "mlp.gate_proj.weight"),
        },
        ignored=("rotary_emb.inv_freq", "embeddings.position_ids"),
        head="lm_head",
        # Files of embedding models have scores of single tokens too.
        ignored_prefixes=("gte.pooler.", "lm_head.", "classifier."),
        head_dense="gte.pooler.dense",
        classifier="classifier",
    ),
    attention=Attention(qkv_bias=True, output_bias=True),
    norms=Norms(kind="layer", has_bias=True, eps_key="layer_norm_eps", are_of_sums=True),
    feed_forward=FeedForward(bias=False, has_down_bias=True),
    embedding=Embedding(has_norm=True),
    encoder=Encoder(token_types_key="type_vocab_size", classifier=ClassifierFamily()),
    file_keys={"num_key_value_heads": ""},
    defaults={
        "vocab_size": 250048,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "hidden_act": "gelu",
        "max_position_embeddings": 8192,
        "type_vocab_size": 1,
        "layer_norm_eps": 1e-12,
        "rope_theta": 160_000.0,
    },
)
_GTE_OF_AUTHORS: Final = replace(
    _GTE,
    models="GTE, as its authors' code has written it",
    ropes=lambda reader, *sizes: (ntk_rope(reader, *sizes),),
    required={"layer_norm_type": "layer_norm", "logn_attention_scale": False, "position_embedding_type": "rope"},
    defaults={**_GTE.defaults, "vocab_size": 30528, "max_position_embeddings": 2048, "rope_theta": 10000.0},
)
_JINA_V3: Final = replace(
    _GTE,
    models="Jina v3: jina-embeddings-v3-hf",
    names=Names(
        embedding="roberta.embeddings.word_embeddings",
        token_types="roberta.embeddings.token_type_embeddings",
        embedding_norm="roberta.embeddings.LayerNorm",
        layers="roberta.layers",
        norm="",
        norms=("", "post_attention_layernorm", "", "post_mlp_layernorm"),
        parts={"mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2"},
        optional_prefix="roberta.",
        aliases={
            f"{prefix}{theirs}": f"roberta.{ours}"
            for prefix in ("roberta.", "")
            for theirs, ours in (("encoder.layers.", "layers."), ("emb_ln.", "embeddings.LayerNorm."))
        },
        layer_aliases={
            "mixer.out_proj.": "self_attn.o_proj.",
            "norm1.": "post_attention_layernorm.",
            "norm2.": "post_mlp_layernorm.",
        },
        joined_rows={f"mixer.Wqkv.{kind}": tuple(f"{part}.{kind}" for part in QKV) for kind in ("weight", "bias")},
        ignored=("rotary_emb.inv_freq", "embeddings.position_ids"),
        head="lm_head",
        ignored_prefixes=("roberta.pooler.", "lm_head."),
        head_dense="classifier.dense",
        classifier="classifier.out_proj",
        token_classifier="classifier",
    ),
    feed_forward=FeedForward(bias=True, is_gated=False),
    defaults={
        "vocab_size": 250002,
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
        "hidden_act": "gelu",
        "max_position_embeddings": 8194,
        "type_vocab_size": 1,
        "layer_norm_eps": 1e-5,
        "rope_theta": 20_000.0,
        "eos_token_id": 2,
    },
)
_LLAMA: Final = FAMILIES["LlamaForCausalLM"]
_EUROBERT: Final = replace(
    _LLAMA,
    models="EuroBERT",
    names=replace(
        _LLAMA.names,
        optional_prefix="model.",
        ignored_prefixes=("lm_head.",),
        head_dense="dense",
        classifier="classifier",
    ),
    encoder=Encoder(
        classifier=ClassifierFamily(
            activation="gelu",
            pooling_key="classifier_pooling",
            poolings={"bos": "cls", "mean": "mean", "late": "late"},
        )
    ),
    older_keys={"classifier_pooling": "clf_pooling"},
    defaults={
        "vocab_size": 128256,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "classifier_pooling": "late",
        "eos_token_id": 128001,
    },
)

ROTARY_ENCODERS: Final[dict[str, Family]] = {
    "NomicBertModel": _NOMIC_BERT,
    "GteModel": _GTE,
    "NewModel": _GTE_OF_AUTHORS,
    "EuroBertModel": _EUROBERT,
    "JinaEmbeddingsV3Model": _JINA_V3,
}
