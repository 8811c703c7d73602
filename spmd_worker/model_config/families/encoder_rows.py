"""Rows of the table: encoders, whose tokens see all of their row, by the architecture without a head. See `table.py`.

Each is compared with transformers and with sentence-transformers on checkpoints of its own
(tests/scenarios/test_encoders.py).
"""

from dataclasses import replace
from typing import Final

from spmd_worker.model_config.families.family import (
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


_BERT_ATTENTION: Final = Attention(qkv_bias=True, output_bias=True)
_BERT_NORMS: Final = Norms(kind="layer", has_bias=True, eps_key="layer_norm_eps", are_of_sums=True)
_BERT_FEED_FORWARD: Final = FeedForward(bias=True, is_gated=False)
_BERT_EMBEDDING: Final = Embedding(has_norm=True)
_BERT_ENCODER: Final = Encoder(token_types_key="type_vocab_size", classifier=ClassifierFamily())
_BERT_SPELLED: Final = {"num_key_value_heads": "", "head_dim": ""}
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
_ROBERTA_NAMES: Final = _bert_names("roberta.", "lm_head", "classifier.dense", "classifier.out_proj")
_ROBERTA_EMBEDDING: Final = replace(_BERT_EMBEDDING, position_offset=2)
_ROBERTA_ENCODER: Final = replace(_BERT_ENCODER, counts_offset=True)
_ROBERTA_REQUIRED: Final = {**_BERT_REQUIRED, "pad_token_id": 1}
_ROBERTA_DEFAULTS: Final = {**_BERT_DEFAULTS, "pad_token_id": 1, "eos_token_id": 2}

ENCODERS: Final[dict[str, Family]] = {
    "BertModel": Family(
        models="BERT: all-MiniLM, bge, gte, e5, ms-marco cross-encoders",
        names=_bert_names("bert.", "cls", "bert.pooler.dense", "classifier"),
        attention=_BERT_ATTENTION,
        rope=None,
        norms=_BERT_NORMS,
        feed_forward=_BERT_FEED_FORWARD,
        embedding=_BERT_EMBEDDING,
        encoder=_BERT_ENCODER,
        spelled=_BERT_SPELLED,
        required=_BERT_REQUIRED,
        defaults=_BERT_DEFAULTS,
    ),
    "RobertaModel": Family(
        models="RoBERTa: all-distilroberta, stsb cross-encoders",
        names=_ROBERTA_NAMES,
        attention=_BERT_ATTENTION,
        rope=None,
        norms=_BERT_NORMS,
        feed_forward=_BERT_FEED_FORWARD,
        embedding=_ROBERTA_EMBEDDING,
        encoder=_ROBERTA_ENCODER,
        spelled=_BERT_SPELLED,
        required=_ROBERTA_REQUIRED,
        defaults=_ROBERTA_DEFAULTS,
    ),
    "XLMRobertaModel": Family(
        models="XLM-R: bge-m3, multilingual-e5, bge-reranker",
        names=_ROBERTA_NAMES,
        attention=_BERT_ATTENTION,
        rope=None,
        norms=_BERT_NORMS,
        feed_forward=_BERT_FEED_FORWARD,
        embedding=_ROBERTA_EMBEDDING,
        encoder=_ROBERTA_ENCODER,
        spelled=_BERT_SPELLED,
        required=_ROBERTA_REQUIRED,
        defaults=_ROBERTA_DEFAULTS,
    ),
    "CamembertModel": Family(
        models="CamemBERT",
        names=_ROBERTA_NAMES,
        attention=_BERT_ATTENTION,
        rope=None,
        norms=_BERT_NORMS,
        feed_forward=_BERT_FEED_FORWARD,
        embedding=_ROBERTA_EMBEDDING,
        encoder=_ROBERTA_ENCODER,
        spelled=_BERT_SPELLED,
        required=_ROBERTA_REQUIRED,
        defaults=_ROBERTA_DEFAULTS,
    ),
    "ModernBertModel": Family(
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
    ),
    "Gemma3TextModel": replace(
        FAMILIES["Gemma3ForCausalLM"],
        models="EmbeddingGemma",
        names=replace(FAMILIES["Gemma3ForCausalLM"].names, optional_prefix="model."),
        head=Head(),
        encoder=Encoder(),
        required={"use_bidirectional_attention": True},
        defaults={**FAMILIES["Gemma3ForCausalLM"].defaults, "use_bidirectional_attention": False},
    ),
}
