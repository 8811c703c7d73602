"""Rows of the table: encoders, whose tokens see all of their row, by the architecture without a head. See `table.py`.

Each is compared with transformers and with sentence-transformers on checkpoints of its own
(tests/scenarios/test_encoders.py).
"""

from dataclasses import replace
from typing import Any, Final

from spmd_worker.model_config.families.family import ClassifierFamily, Family, Names
from spmd_worker.model_config.families.table import FAMILIES

_QKV: Final = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def _bert_names(prefix: str, head: str, head_dense: str, classifier: str) -> Names:
    """`head` is that of a masked model, which is not run; the others are of one that classifies."""
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


_BERT: Final[dict[str, Any]] = {
    "qkv_bias": True,
    "output_bias": True,
    "mlp_bias": True,
    "norm_kind": "layer",
    "norm_has_bias": True,
    "eps_key": "layer_norm_eps",
    "has_rope": False,
    "is_gated": False,
    "spelled": {"num_key_value_heads": "", "head_dim": ""},
    "is_encoder": True,
    "norms_sums": True,
    "has_embedding_norm": True,
    "token_types_key": "type_vocab_size",
    "classifier": ClassifierFamily(),
}
_BERT_DEFAULTS: Final = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
}
_BERT_REQUIRED: Final = {"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False}
_ROBERTA: Final[dict[str, Any]] = {
    **_BERT,
    "names": _bert_names("roberta.", "lm_head", "classifier.dense", "classifier.out_proj"),
    "position_offset": 2,
    "counts_offset": True,
    "required": {**_BERT_REQUIRED, "pad_token_id": 1},
    "defaults": {**_BERT_DEFAULTS, "pad_token_id": 1, "eos_token_id": 2},
}

ENCODERS: Final[dict[str, Family]] = {
    "BertModel": Family(
        **_BERT,
        models="BERT: all-MiniLM, bge, gte, e5, ms-marco cross-encoders",
        names=_bert_names("bert.", "cls", "bert.pooler.dense", "classifier"),
        required=_BERT_REQUIRED,
        defaults=_BERT_DEFAULTS,
    ),
    "RobertaModel": Family(**_ROBERTA, models="RoBERTa: all-distilroberta, stsb cross-encoders"),
    "XLMRobertaModel": Family(**_ROBERTA, models="XLM-R: bge-m3, multilingual-e5, bge-reranker"),
    "CamembertModel": Family(**_ROBERTA, models="CamemBERT"),
    "ModernBertModel": Family(
        rope_rounding="angles",
        models="ModernBERT: gte-modernbert, nomic modernbert-embed",
        names=Names(
            embedding="model.embeddings.tok_embeddings",
            embedding_norm="model.embeddings.norm",
            norm="model.final_norm",
            norms=("attn_norm", "", "mlp_norm", ""),
            parts={"self_attn.o_proj": "attn.Wo", "mlp.down_proj": "mlp.Wo"},
            fused={"attn.Wqkv": _QKV, "mlp.Wi": ("mlp.gate_proj", "mlp.up_proj")},
            optional_prefix="model.",
            ignored_prefixes=("head.", "decoder."),
            head_dense="head.dense",
            head_norm="head.norm",
            classifier="classifier",
            head="decoder",
        ),
        norm_kind="layer",
        norm_has_bias="norm_bias",
        eps_key="norm_eps",
        sliding_window="layer_types",
        full_attention_every=3,
        full_attention_every_key="global_attn_every_n_layers",
        full_attention_first=True,
        has_local_rope=True,
        activation_key="hidden_activation",
        spelled={
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
        is_encoder=True,
        has_first_norm=False,
        has_embedding_norm=True,
        classifier=ClassifierFamily(
            activation_key="classifier_activation",
            pooling_key="classifier_pooling",
            bias="classifier_bias",
            has_norm=True,
        ),
    ),
    "Gemma3TextModel": replace(
        FAMILIES["Gemma3ForCausalLM"],
        models="EmbeddingGemma",
        names=replace(FAMILIES["Gemma3ForCausalLM"].names, optional_prefix="model."),
        logit_cap_key="",
        required={"use_bidirectional_attention": True},
        defaults={**FAMILIES["Gemma3ForCausalLM"].defaults, "use_bidirectional_attention": False},
        is_encoder=True,
    ),
}
