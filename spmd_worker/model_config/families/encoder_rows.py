"""Encoders, whose tokens attend to the complete row, by the architecture without a head; rows as in `table.py`.

Each is compared with transformers and with sentence-transformers on checkpoints of its own
(tests/scenarios/test_encoders.py).
"""

from dataclasses import replace
from typing import Final

from spmd_worker.model_config.families.family import (
    GATE_UP,
    QKV,
    Attention,
    ClassifierFamily,
    Embedding,
    Encoder,
    Family,
    FeedForward,
    Head,
    Names,
    Norms,
    Rope,
    Windows,
)
from spmd_worker.model_config.families.table import FAMILIES
from spmd_worker.model_config.rope import ntk_rope


def _bert_names(prefix: str, head: str, head_dense: str, classifier: str) -> Names:
    """`head` is that of a masked model, which is ignored; the others are of one that classifies."""
    return Names(
        embedding=f"{prefix}embeddings.word_embeddings",
        positions=f"{prefix}embeddings.position_embeddings",
        token_types=f"{prefix}embeddings.token_type_embeddings",
        embedding_norm=f"{prefix}embeddings.LayerNorm",
        layers=f"{prefix}encoder.layer",
        norm="",
        norms=("", "attention.output.LayerNorm", "", "output.LayerNorm"),
        parts={
            "self_attn.q_proj": "attention.self.query",
            "self_attn.k_proj": "attention.self.key",
            "self_attn.v_proj": "attention.self.value",
            "self_attn.o_proj": "attention.output.dense",
            "mlp.up_proj": "intermediate.dense",
            "mlp.down_proj": "output.dense",
        },
        optional_prefix=prefix,
        ignored=("embeddings.position_ids", "embeddings.token_type_ids"),
        head=head,
        ignored_prefixes=(f"{prefix}pooler.", f"{head}."),
        ending_aliases={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
        head_dense=head_dense,
        classifier=classifier,
    )


_BERT: Final = Family(
    models="BERT: all-MiniLM, bge, gte, e5, ms-marco cross-encoders",
    names=_bert_names("bert.", "cls", "bert.pooler.dense", "classifier"),
    attention=Attention(qkv_bias=True, output_bias=True),
    rope=None,
    norms=Norms(kind="layer", has_bias=True, eps_key="layer_norm_eps", are_of_sums=True),
    feed_forward=FeedForward(bias=True, is_gated=False),
    embedding=Embedding(has_norm=True),
    encoder=Encoder(token_types_key="type_vocab_size", classifier=ClassifierFamily()),
    file_keys={"num_key_value_heads": "", "head_dim": ""},
    required={"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False},
    defaults={
        "vocab_size": 30522,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "hidden_act": "gelu",
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
    },
)
_ROBERTA: Final = replace(
    _BERT,
    models="RoBERTa: all-distilroberta, stsb cross-encoders",
    names=_bert_names("roberta.", "lm_head", "classifier.dense", "classifier.out_proj"),
    embedding=Embedding(has_norm=True, position_offset=2),
    encoder=Encoder(token_types_key="type_vocab_size", counts_offset=True, classifier=ClassifierFamily()),
    required={**_BERT.required, "pad_token_id": 1},
    defaults={**_BERT.defaults, "pad_token_id": 1, "eos_token_id": 2},
)
_DISTILBERT: Final = replace(
    _BERT,
    models="DistilBERT: multi-qa-distilbert, sst-2 classifiers",
    names=replace(
        _BERT.names,
        embedding="distilbert.embeddings.word_embeddings",
        positions="distilbert.embeddings.position_embeddings",
        token_types="",
        embedding_norm="distilbert.embeddings.LayerNorm",
        layers="distilbert.transformer.layer",
        norms=("", "sa_layer_norm", "", "output_layer_norm"),
        parts={
            "self_attn.q_proj": "attention.q_lin",
            "self_attn.k_proj": "attention.k_lin",
            "self_attn.v_proj": "attention.v_lin",
            "self_attn.o_proj": "attention.out_lin",
            "mlp.up_proj": "ffn.lin1",
            "mlp.down_proj": "ffn.lin2",
        },
        optional_prefix="distilbert.",
        head="vocab_projector",
        ignored_prefixes=("vocab_projector.", "vocab_transform.", "vocab_layer_norm."),
        head_dense="pre_classifier",
        classifier="classifier",
    ),
    # A constant of the class, which no key changes.
    norms=replace(_BERT.norms, eps_key="", eps=1e-12),
    feed_forward=FeedForward(bias=True, is_gated=False, activation_key="activation"),
    encoder=Encoder(classifier=ClassifierFamily(activation="relu")),
    file_keys={
        **_BERT.file_keys,
        "hidden_size": "dim",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "intermediate_size": "hidden_dim",
    },
    required={},
    defaults={
        "vocab_size": 30522,
        "dim": 768,
        "n_layers": 6,
        "n_heads": 12,
        "hidden_dim": 3072,
        "activation": "gelu",
        "max_position_embeddings": 512,
    },
)
_ELECTRA_NAMES: Final = _bert_names("electra.", "generator_lm_head", "classifier.dense", "classifier.out_proj")
_ELECTRA: Final = replace(
    _BERT,
    models="ELECTRA: ms-marco-electra cross-encoders",
    names=replace(
        _ELECTRA_NAMES,
        project_in="electra.embeddings_project",
        ignored_prefixes=("generator_lm_head.", "generator_predictions.", "discriminator_predictions."),
    ),
    embedding=Embedding(has_norm=True, size_key="embedding_size", projects_sum=True),
    encoder=Encoder(token_types_key="type_vocab_size", classifier=ClassifierFamily(activation="gelu")),
    defaults={
        **_BERT.defaults,
        "embedding_size": 128,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "intermediate_size": 1024,
    },
)
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
_ALBERT: Final = replace(
    _ELECTRA,
    models="ALBERT: paraphrase-albert",
    names=Names(
        embedding="albert.embeddings.word_embeddings",
        positions="albert.embeddings.position_embeddings",
        token_types="albert.embeddings.token_type_embeddings",
        embedding_norm="albert.embeddings.LayerNorm",
        project_in="albert.encoder.embedding_hidden_mapping_in",
        layers="albert.encoder.albert_layer_groups.0.albert_layers",
        norm="",
        norms=("", "attention.LayerNorm", "", "full_layer_layer_norm"),
        parts={
            "self_attn.q_proj": "attention.query",
            "self_attn.k_proj": "attention.key",
            "self_attn.v_proj": "attention.value",
            "self_attn.o_proj": "attention.dense",
            "mlp.up_proj": "ffn",
            "mlp.down_proj": "ffn_output",
        },
        optional_prefix="albert.",
        ignored=("embeddings.position_ids", "embeddings.token_type_ids"),
        head="predictions",
        ignored_prefixes=("albert.pooler.", "predictions.", "sop_classifier."),
        head_dense="albert.pooler",
        classifier="classifier",
    ),
    embedding=replace(_ELECTRA.embedding, always_projects=True),
    encoder=_BERT.encoder,
    shares_layers=True,
    required={"num_hidden_groups": 1, "inner_group_num": 1},
    defaults={
        **_BERT.defaults,
        "vocab_size": 30000,
        "embedding_size": 128,
        "hidden_size": 4096,
        "num_attention_heads": 64,
        "intermediate_size": 16384,
        "hidden_act": "gelu_new",
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
_GEMMA3: Final = FAMILIES["Gemma3ForCausalLM"]

ENCODERS: Final[dict[str, Family]] = {
    "BertModel": _BERT,
    "RobertaModel": _ROBERTA,
    "XLMRobertaModel": replace(_ROBERTA, models="XLM-R: bge-m3, multilingual-e5, bge-reranker"),
    "CamembertModel": replace(_ROBERTA, models="CamemBERT"),
    "ModernBertModel": Family(
        models="ModernBERT: gte-modernbert, nomic modernbert-embed",
        names=Names(
            embedding="model.embeddings.tok_embeddings",
            embedding_norm="model.embeddings.norm",
            norm="model.final_norm",
            norms=("attn_norm", "", "mlp_norm", ""),
            parts={"self_attn.o_proj": "attn.Wo", "mlp.down_proj": "mlp.Wo"},
            fused={"attn.Wqkv": QKV, "mlp.Wi": GATE_UP},
            optional_prefix="model.",
            ignored_prefixes=("head.", "decoder."),
            head_dense="head.dense",
            head_norm="head.norm",
            classifier="classifier",
            head="decoder",
        ),
        windows=Windows(
            rule="layer_types", full_every=3, full_every_key="global_attn_every_n_layers", is_full_first=True
        ),
        rope=Rope(rounding="angles", has_local=True),
        norms=Norms(kind="layer", has_bias="norm_bias", eps_key="norm_eps", has_first=False),
        feed_forward=FeedForward(activation_key="hidden_activation"),
        embedding=Embedding(has_norm=True),
        encoder=Encoder(
            classifier=ClassifierFamily(
                activation_key="classifier_activation",
                pooling_key="classifier_pooling",
                bias="classifier_bias",
                has_norm=True,
            )
        ),
        file_keys={
            "num_key_value_heads": "",
            "head_dim": "",
            "sliding_window": "local_attention",
            "rope_theta": "global_rope_theta",
            "rope_local_base_freq": "local_rope_theta",
        },
        defaults={
            "vocab_size": 50368,
            "hidden_size": 768,
            "intermediate_size": 1152,
            "num_hidden_layers": 22,
            "num_attention_heads": 12,
            "hidden_activation": "gelu",
            "max_position_embeddings": 8192,
            "norm_eps": 1e-5,
            "local_attention": 128,
            "global_rope_theta": 160000.0,
            "classifier_pooling": "cls",
            "classifier_activation": "gelu",
            "eos_token_id": 50282,
        },
    ),
    "Gemma3TextModel": replace(
        _GEMMA3,
        models="EmbeddingGemma",
        names=replace(_GEMMA3.names, optional_prefix="model."),
        head=Head(),
        encoder=Encoder(),
        required={"use_bidirectional_attention": True},
        defaults={**_GEMMA3.defaults, "use_bidirectional_attention": False},
    ),
    "DistilBertModel": _DISTILBERT,
    "ElectraModel": _ELECTRA,
    "NomicBertModel": _NOMIC_BERT,
    "GteModel": _GTE,
    "NewModel": _GTE_OF_AUTHORS,
    "EuroBertModel": _EUROBERT,
    "AlbertModel": _ALBERT,
}
