"""Encoders, whose tokens attend to the complete row, by the architecture without a head; rows as in `table.py`.

Each is compared with transformers and with sentence-transformers on checkpoints of its own
(tests/scenarios/test_encoders.py).
"""

from dataclasses import replace
from typing import Final

from spmd_worker.model_config.config_reader import ConfigReader
from spmd_worker.model_config.families.distance_encoder_rows import DISTANCE_ENCODERS
from spmd_worker.model_config.families.encoder_decoder_rows import encoder_alone
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
from spmd_worker.model_config.families.rotary_encoder_rows import ROTARY_ENCODERS
from spmd_worker.model_config.families.table import FAMILIES
from spmd_worker.model_config.layer_config import LayerConfig, RelativeBias


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
        token_classifier="classifier",
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
_MPNET_BUCKETS: Final = 32


def _with_mpnet_bias(reader: ConfigReader, layers: tuple[LayerConfig, ...]) -> tuple[LayerConfig, ...]:
    """Layers with relative positions, whose buckets are constants of transformers' class."""
    del reader
    return tuple([replace(layer, relative_bias=RelativeBias(_MPNET_BUCKETS, 128)) for layer in layers])


_MPNET: Final = replace(
    _ROBERTA,
    models="MPNet: all-mpnet-base, multi-qa-mpnet-base",
    names=replace(
        _bert_names("mpnet.", "lm_head", "classifier.dense", "classifier.out_proj"),
        token_types="",
        norms=("", "attention.LayerNorm", "", "output.LayerNorm"),
        parts={
            **{f"self_attn.{each}_proj": f"attention.attn.{each}" for each in "qkvo"},
            "mlp.up_proj": "intermediate.dense",
            "mlp.down_proj": "output.dense",
        },
        relative_bias="mpnet.encoder.relative_attention_bias",
    ),
    encoder=Encoder(counts_offset=True, classifier=ClassifierFamily()),
    required={"relative_attention_num_buckets": _MPNET_BUCKETS},
    defaults={**_ROBERTA.defaults, "vocab_size": 30527},
    layers=_with_mpnet_bias,
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
                precedes_tokens=True,
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
    "MPNetModel": _MPNET,
    "T5EncoderModel": encoder_alone("T5Encoder", "encoders of T5: sentence-t5, gtr-t5"),
    "MT5EncoderModel": encoder_alone("MT5Encoder", "encoders of mT5"),
    "UMT5EncoderModel": encoder_alone("UMT5Encoder", "encoders of UMT5"),
    "DistilBertModel": _DISTILBERT,
    "ElectraModel": _ELECTRA,
    "AlbertModel": _ALBERT,
    **ROTARY_ENCODERS,
    **DISTANCE_ENCODERS,
}
