"""Small random encoders, written by transformers, with tokenizers that encode pairs as the family's do; and what
transformers makes of a row.

`ENCODERS` has a folder for each family and head. Knows nothing of the runtime under test.
"""

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from pooling_models import SIZES, write_modules
from reference_models import fill
from run_folder import made_once
from safetensors.torch import load_file
from tokenizer_folders import CORPUS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    AlbertConfig,
    AlbertForPreTraining,
    AlbertForSequenceClassification,
    AlbertForTokenClassification,
    AlbertModel,
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    DebertaConfig,
    DebertaForSequenceClassification,
    DebertaForTokenClassification,
    DebertaModel,
    DebertaV2Config,
    DebertaV2ForMaskedLM,
    DebertaV2ForSequenceClassification,
    DebertaV2ForTokenClassification,
    DebertaV2Model,
    DistilBertConfig,
    DistilBertForMaskedLM,
    DistilBertForSequenceClassification,
    DistilBertForTokenClassification,
    DistilBertModel,
    DistilBertPreTrainedModel,
    ElectraConfig,
    ElectraForPreTraining,
    ElectraForSequenceClassification,
    ElectraForTokenClassification,
    ElectraModel,
    EuroBertConfig,
    EuroBertForMaskedLM,
    EuroBertForSequenceClassification,
    EuroBertForTokenClassification,
    EuroBertModel,
    Gemma3TextConfig,
    Gemma3TextModel,
    GteConfig,
    GteForSequenceClassification,
    GteForTokenClassification,
    GteModel,
    JinaEmbeddingsV3Config,
    JinaEmbeddingsV3ForMaskedLM,
    JinaEmbeddingsV3ForSequenceClassification,
    JinaEmbeddingsV3ForTokenClassification,
    JinaEmbeddingsV3Model,
    ModernBertConfig,
    ModernBertForSequenceClassification,
    ModernBertForTokenClassification,
    ModernBertModel,
    MPNetConfig,
    MPNetForMaskedLM,
    MPNetForSequenceClassification,
    MPNetForTokenClassification,
    MPNetModel,
    MT5Config,
    MT5EncoderModel,
    NomicBertConfig,
    NomicBertForSequenceClassification,
    NomicBertForTokenClassification,
    NomicBertModel,
    RobertaConfig,
    RobertaForSequenceClassification,
    RobertaForTokenClassification,
    T5Config,
    T5EncoderModel,
    UMT5Config,
    UMT5EncoderModel,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
    XLMRobertaForTokenClassification,
    XLMRobertaModel,
)

PAD = {
    "bert": 0,
    "roberta": 1,
    "xlm": 1,
    "modern": 0,
    "gemma": 0,
    "mpnet": 1,
    "t5": 0,
    "bart": 1,
    "distil": 0,
    "electra": 0,
    "nomic": 0,
    "gte": 1,
    "jina": 1,
    "euro": 0,
    "albert": 0,
    "deberta": 0,
    "debertav1": 0,
}
_TYPED = ("bert", "electra", "nomic", "albert", "deberta", "debertav1")
_COMMON: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": SIZES["hidden_size"],
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
}
_ROBERTA = {**_COMMON, "max_position_embeddings": 130, "type_vocab_size": 1, "layer_norm_eps": 0.05}
_MPNET = {**_COMMON, "max_position_embeddings": 130, "layer_norm_eps": 0.05}
_T5 = {
    "vocab_size": 320,
    "d_model": SIZES["hidden_size"],
    "d_kv": 32,
    "d_ff": 96,
    "num_layers": 4,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "layer_norm_epsilon": 0.05,
}
_MODERN = {**_COMMON, "local_attention": 12, "pad_token_id": 0, "bos_token_id": 1, "cls_token_id": 1, "sep_token_id": 2}
_ELECTRA = {**_COMMON, "embedding_size": 32}
_NOMIC = {
    **_COMMON,
    "rope_parameters": {"rope_type": "default", "rope_theta": 60.0},
    "layer_norm_eps": 0.02,
    "pad_token_id": 0,
}
# What the authors' code makes of the base 30 with a factor of 4, in heads of 16.
_GTE = {
    **_COMMON,
    "layer_norm_eps": 0.02,
    "rope_parameters": {"rope_type": "linear", "rope_theta": 120.0, "factor": 4.0 ** (2 / 16)},
}
_JINA = {**_COMMON, "layer_norm_eps": 0.02, "rope_parameters": {"rope_type": "default", "rope_theta": 60.0}}
_ALBERT = {**_ELECTRA, "layer_norm_eps": 0.1, "hidden_act": "gelu"}
_EURO = {
    **_COMMON,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 0.05,
    "rope_parameters": {"rope_type": "default", "rope_theta": 60.0},
    "bos_token_id": 1,
    "pad_token_id": 0,
    "mask_token_id": 3,
}
_GEMMA = {
    **_COMMON,
    "num_hidden_layers": 7,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 20,
    "sliding_window": 14,
    "use_bidirectional_attention": True,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
# Rows of 90 tokens have distances of rows of their own, of shared ones and beyond the last.
_DEBERTA = {
    **_COMMON,
    "layer_norm_eps": 0.05,
    "relative_attention": True,
    "position_buckets": 16,
    "max_relative_positions": 64,
    "pos_att_type": "p2c|c2p",
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "position_biased_input": False,
}
# Of the first release: a row each, positions in the input too.
_DEBERTA1 = {
    **{key: value for key, value in _DEBERTA.items() if key in (*_COMMON, "layer_norm_eps", "relative_attention")},
    "max_relative_positions": 48,
    "pos_att_type": ["c2p", "p2c"],
    "position_biased_input": True,
    "type_vocab_size": 2,
}
_DISTIL = {"vocab_size": 320, "dim": 64, "hidden_dim": 96, "n_layers": 4, "n_heads": 4, "max_position_embeddings": 128}


def _write_tokenizer(folder: Path, kind: str) -> None:
    """Byte-level, with the family's own special tokens around a text and between two."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "<pad>", "</s>", "<mask>"] if PAD[kind] else ["<pad>", "<s>", "</s>", "<mask>"]
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    pairs = {
        **dict.fromkeys(_TYPED, "<s> $A </s> $B:1 </s>:1"),
        "modern": "<s> $A </s> $B </s>",
        "distil": "<s> $A </s> $B </s>",
        "gemma": "<s> $A </s> <s> $B </s>",
        "t5": "$A </s> $B </s>",
    }
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>" if kind == "t5" else "<s> $A </s>",
        pair=pairs.get(kind, "<s> $A </s> </s> $B </s>"),
        special_tokens=[(each, tokenizer.token_to_id(each)) for each in ("<s>", "</s>")],
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    inputs = ["input_ids", *(["token_type_ids"] if kind in _TYPED else []), "attention_mask"]
    names = {"bos_token": "<s>", "cls_token": "<s>", "eos_token": "</s>", "sep_token": "</s>", "pad_token": "<pad>"}
    values = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 128,
        "model_input_names": inputs,
        **names,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(values))


_LARGE = ("query", "key", "in_proj", "q_proj", "q_lin", "Wqkv", ".attn.q.", ".attn.k.", "classifier.weight", "out_proj")


@torch.no_grad()
def _stir(model: Any) -> None:
    """Random weights with which every token counts in every vector, and every score hangs on them."""
    generator = torch.Generator().manual_seed(11)
    fill(model, generator)
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        if name.lower().endswith("norm.weight"):
            parameter.copy_((0.0 if isinstance(model, Gemma3TextModel) else 1.0) + 0.1 * noise)
        elif name.endswith("bias"):
            parameter.copy_(0.1 * noise)
        elif "embeddings" in name:
            # Where the epsilon is a constant, so small that another one shows.
            scale = 1e-4 if isinstance(model, DistilBertPreTrainedModel) else 1.0
            parameter.copy_(noise * scale * (1.0 if "word" in name or "tok_" in name else 0.3))
        elif "relative" in name or "shared" in name:
            # As large as scores are.
            parameter.copy_(noise)
        elif "Attention.q." in name:
            # Queries of T5 are not scaled.
            parameter.mul_(0.4)
        elif any(part in name for part in _LARGE):
            parameter.mul_(2.0)


def written(
    kind: str, model_class: Any, config_class: Any, sizes: Mapping[str, Any], **settings: Any
) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        torch.manual_seed(7)
        model = model_class(config_class(**{**sizes, **settings}))
        _stir(model)
        model.save_pretrained(folder)
        _write_tokenizer(folder, kind)

    return write


def _with_modules(write: Callable[[Path], None], pooling: Mapping[str, Any], *kinds: str) -> Callable[[Path], None]:
    def write_both(folder: Path) -> None:
        write(folder)
        write_modules(folder, dict(pooling), *kinds, max_seq_length=100)

    return write_both


_BERT_MODEL = written("bert", BertModel, BertConfig, _COMMON)
_XLM_MODEL = written("xlm", XLMRobertaModel, XLMRobertaConfig, _ROBERTA)
_MODERN_MODEL = written("modern", ModernBertModel, ModernBertConfig, _MODERN)
_MPNET_MODEL = written("mpnet", MPNetModel, MPNetConfig, _MPNET)
_T5_MODEL = written("t5", T5EncoderModel, T5Config, _T5)
_NOMIC_MODEL = written("nomic", NomicBertModel, NomicBertConfig, _NOMIC)
_GTE_MODEL = written("gte", GteModel, GteConfig, _GTE)
_JINA_MODEL = written("jina", JinaEmbeddingsV3Model, JinaEmbeddingsV3Config, _JINA)
_GEMMA_MODEL = written("gemma", Gemma3TextModel, Gemma3TextConfig, _GEMMA)

_DEBERTA_MODEL = written("deberta", DebertaV2Model, DebertaV2Config, _DEBERTA)

ENCODERS: dict[str, Callable[[Path], None]] = {
    "bert": _BERT_MODEL,
    "bert_masked": written("bert", BertForMaskedLM, BertConfig, _COMMON, layer_norm_eps=0.1, hidden_act="gelu_new"),
    "bert_labels": written("bert", BertForSequenceClassification, BertConfig, _COMMON, num_labels=3),
    "bert_pairs": written("bert", BertForSequenceClassification, BertConfig, _COMMON, num_labels=1),
    "roberta_labels": written("roberta", RobertaForSequenceClassification, RobertaConfig, _ROBERTA, num_labels=3),
    "xlm": _XLM_MODEL,
    "xlm_pairs": written("xlm", XLMRobertaForSequenceClassification, XLMRobertaConfig, _ROBERTA, num_labels=1),
    "modern": _MODERN_MODEL,
    "modern_labels": written("modern", ModernBertForSequenceClassification, ModernBertConfig, _MODERN, num_labels=3),
    "modern_pairs": written(
        "modern",
        ModernBertForSequenceClassification,
        ModernBertConfig,
        _MODERN,
        num_labels=1,
        classifier_pooling="mean",
        classifier_bias=True,
        norm_bias=True,
        attention_bias=True,
        mlp_bias=True,
        classifier_activation="silu",
    ),
    "gemma": _GEMMA_MODEL,
    "mpnet": _MPNET_MODEL,
    "mpnet_masked": written("mpnet", MPNetForMaskedLM, MPNetConfig, _MPNET),
    "mpnet_labels": written("mpnet", MPNetForSequenceClassification, MPNetConfig, _MPNET, num_labels=3),
    "mpnet_pairs": written("mpnet", MPNetForSequenceClassification, MPNetConfig, _MPNET, num_labels=1),
    "t5": _T5_MODEL,
    "t5_gates": written("t5", T5EncoderModel, T5Config, _T5, feed_forward_proj="gated-gelu"),
    "mt5": written("t5", MT5EncoderModel, MT5Config, _T5, feed_forward_proj="relu"),
    "umt5": written("t5", UMT5EncoderModel, UMT5Config, _T5, feed_forward_proj="relu"),
    "distil": written("distil", DistilBertModel, DistilBertConfig, _DISTIL),
    "distil_masked": written("distil", DistilBertForMaskedLM, DistilBertConfig, _DISTIL, activation="gelu_new"),
    "distil_labels": written("distil", DistilBertForSequenceClassification, DistilBertConfig, _DISTIL, num_labels=3),
    "distil_pairs": written("distil", DistilBertForSequenceClassification, DistilBertConfig, _DISTIL, num_labels=1),
    # Embeddings of the hidden size are not projected.
    "electra": written("electra", ElectraModel, ElectraConfig, _ELECTRA),
    "electra_trained": written(
        "electra", ElectraForPreTraining, ElectraConfig, {**_ELECTRA, "embedding_size": 64}, layer_norm_eps=0.1
    ),
    "electra_labels": written("electra", ElectraForSequenceClassification, ElectraConfig, _ELECTRA, num_labels=3),
    "electra_pairs": written("electra", ElectraForSequenceClassification, ElectraConfig, _ELECTRA, num_labels=1),
    "nomic": _NOMIC_MODEL,
    "nomic_labels": written("nomic", NomicBertForSequenceClassification, NomicBertConfig, _NOMIC, num_labels=3),
    "nomic_pairs": written(
        "nomic",
        NomicBertForSequenceClassification,
        NomicBertConfig,
        _NOMIC,
        num_labels=1,
        num_attention_heads=2,
        head_dim=16,
        hidden_act="gelu",
    ),
    "gte": _GTE_MODEL,
    "gte_labels": written("gte", GteForSequenceClassification, GteConfig, _GTE, num_labels=3, type_vocab_size=0),
    "gte_pairs": written("gte", GteForSequenceClassification, GteConfig, _GTE, num_labels=1, hidden_act="silu"),
    "euro": written("euro", EuroBertModel, EuroBertConfig, _EURO),
    "euro_masked": written("euro", EuroBertForMaskedLM, EuroBertConfig, _EURO, mlp_bias=True, attention_bias=True),
    "euro_labels": written("euro", EuroBertForSequenceClassification, EuroBertConfig, _EURO, num_labels=3),
    "euro_pairs": written(
        *("euro", EuroBertForSequenceClassification, EuroBertConfig, _EURO), num_labels=1, classifier_pooling="bos"
    ),
    "jina": _JINA_MODEL,
    "jina_masked": written("jina", JinaEmbeddingsV3ForMaskedLM, JinaEmbeddingsV3Config, _JINA, hidden_act="gelu_new"),
    "jina_labels": written(
        *("jina", JinaEmbeddingsV3ForSequenceClassification, JinaEmbeddingsV3Config, _JINA), num_labels=3
    ),
    "jina_pairs": written(
        *("jina", JinaEmbeddingsV3ForSequenceClassification, JinaEmbeddingsV3Config, _JINA), num_labels=1
    ),
    "albert": written("albert", AlbertModel, AlbertConfig, _ELECTRA),
    "albert_trained": written("albert", AlbertForPreTraining, AlbertConfig, {**_COMMON, "embedding_size": 64}),
    "albert_labels": written("albert", AlbertForSequenceClassification, AlbertConfig, _ALBERT, num_labels=3),
    "albert_pairs": written("albert", AlbertForSequenceClassification, AlbertConfig, _ALBERT, num_labels=1),
    "deberta": _DEBERTA_MODEL,
    "deberta_wide": written(
        *("deberta", DebertaV2Model, DebertaV2Config, _DEBERTA),
        num_hidden_layers=2,
        position_buckets=256,
        max_relative_positions=-1,
        max_position_embeddings=512,
    ),
    "deberta_masked": written(
        *("deberta", DebertaV2ForMaskedLM, DebertaV2Config, _DEBERTA),
        share_att_key=False,
        norm_rel_ebd="none",
        hidden_act="gelu_new",
    ),
    # An odd number of rows that are no whole panels, one product, and no positions but these.
    "deberta_labels": written(
        *("deberta", DebertaV2ForSequenceClassification, DebertaV2Config, _DEBERTA),
        num_labels=3,
        position_buckets=21,
        pos_att_type=["p2c"],
        type_vocab_size=2,
    ),
    "deberta_pairs": written(
        *("deberta", DebertaV2ForSequenceClassification, DebertaV2Config, _DEBERTA),
        num_labels=1,
        position_buckets=-1,
        max_relative_positions=-1,
        share_att_key=False,
        pos_att_type=["c2p"],
        position_biased_input=True,
        type_vocab_size=2,
        pooler_hidden_act="relu",
    ),
    "deberta_plain": written(
        *("deberta", DebertaV2Model, DebertaV2Config, _COMMON), pos_att_type="c2p|p2c", layer_norm_eps=0.05
    ),
    "debertav1": written("debertav1", DebertaModel, DebertaConfig, _DEBERTA1),
    "debertav1_labels": written(
        *("debertav1", DebertaForSequenceClassification, DebertaConfig, _DEBERTA1),
        num_labels=3,
        position_biased_input=False,
        pos_att_type="c2p",
    ),
    "debertav1_pairs": written(
        *("debertav1", DebertaForSequenceClassification, DebertaConfig, _DEBERTA1), num_labels=1, pos_att_type="p2c"
    ),
    # Scores of each token.
    "bert_tokens": written("bert", BertForTokenClassification, BertConfig, _COMMON, num_labels=5),
    "roberta_tokens": written("roberta", RobertaForTokenClassification, RobertaConfig, _ROBERTA, num_labels=5),
    "xlm_tokens": written("xlm", XLMRobertaForTokenClassification, XLMRobertaConfig, _ROBERTA, num_labels=1),
    "modern_tokens": written(
        *("modern", ModernBertForTokenClassification, ModernBertConfig, _MODERN),
        num_labels=5,
        classifier_bias=True,
        norm_bias=True,
        classifier_activation="silu",
    ),
    "mpnet_tokens": written("mpnet", MPNetForTokenClassification, MPNetConfig, _MPNET, num_labels=5),
    "distil_tokens": written("distil", DistilBertForTokenClassification, DistilBertConfig, _DISTIL, num_labels=5),
    "electra_tokens": written("electra", ElectraForTokenClassification, ElectraConfig, _ELECTRA, num_labels=5),
    "nomic_tokens": written("nomic", NomicBertForTokenClassification, NomicBertConfig, _NOMIC, num_labels=5),
    "gte_tokens": written("gte", GteForTokenClassification, GteConfig, _GTE, num_labels=5),
    "euro_tokens": written("euro", EuroBertForTokenClassification, EuroBertConfig, _EURO, num_labels=5),
    "albert_tokens": written("albert", AlbertForTokenClassification, AlbertConfig, _ALBERT, num_labels=5),
    "jina_tokens": written("jina", JinaEmbeddingsV3ForTokenClassification, JinaEmbeddingsV3Config, _JINA, num_labels=5),
    "deberta_tokens": written("deberta", DebertaV2ForTokenClassification, DebertaV2Config, _DEBERTA, num_labels=5),
    "debertav1_tokens": written("debertav1", DebertaForTokenClassification, DebertaConfig, _DEBERTA1, num_labels=5),
    # Folders of sentence-transformers.
    "bert_mean": _with_modules(_BERT_MODEL, {"pooling_mode_mean_tokens": True}, "Normalize"),
    "xlm_cls": _with_modules(_XLM_MODEL, {"pooling_mode_cls_token": True}, "Normalize"),
    "jina_mean": _with_modules(_JINA_MODEL, {"pooling_mode_mean_tokens": True}, "Normalize"),
    "mpnet_mean": _with_modules(_MPNET_MODEL, {"pooling_mode_mean_tokens": True}, "Normalize"),
    "deberta_mean": _with_modules(_DEBERTA_MODEL, {"pooling_mode_mean_tokens": True}, "Normalize"),
    "t5_mean": _with_modules(_T5_MODEL, {"pooling_mode_mean_tokens": True}, "Normalize"),
    "modern_dense": _with_modules(_MODERN_MODEL, {"pooling_mode": "mean"}, "Dense", "Normalize"),
    "gemma_dense": _with_modules(_GEMMA_MODEL, {"pooling_mode_mean_tokens": True}, "Dense", "Normalize"),
}
ALONE: dict[str, Any] = {"t5": T5EncoderModel, "mt5": MT5EncoderModel, "umt5": UMT5EncoderModel}
"""Classes of encoders whose AutoModel has a decoder."""
WITH_TOKENS = tuple(name for name in ENCODERS if name.endswith("_tokens"))
WITH_SCORES = tuple(name for name in ENCODERS if name.endswith(("_labels", "_pairs", "_tokens")))


def encoder_folder(name: str) -> Path:
    """The folder of this name, written once a run."""
    return made_once(f"encoder-{name}", ENCODERS[name])


@cache
def backbone(name: str) -> Any:
    """transformers' model, with its head where the folder has scores. In double precision: its own errors in float32
    are as large as ours.
    """
    kind = AutoModelForSequenceClassification if name in WITH_SCORES else ALONE.get(name.partition("_")[0], AutoModel)
    kind = AutoModelForTokenClassification if name in WITH_TOKENS else kind
    return kind.from_pretrained(encoder_folder(name), dtype=torch.float64, attn_implementation="eager").eval()


@torch.no_grad()
def hidden_states(name: str, prompt: list[int], num_first_tokens: int | None = None) -> Tensor:
    """[T, hidden] of a row alone."""
    return backbone(name)(**_inputs(prompt, num_first_tokens)).last_hidden_state[0].float()


@torch.no_grad()
def logits_of(name: str, prompt: list[int], num_first_tokens: int | None = None) -> Tensor:
    """[labels], or [T, labels], of a row alone."""
    return backbone(name)(**_inputs(prompt, num_first_tokens)).logits[0].float()


def expected(name: str, prompt: list[int]) -> Tensor:
    """Reference vectors: the model by transformers, the rest by hand."""
    if name in WITH_SCORES:
        return logits_of(name, prompt)
    states = hidden_states(name, prompt)
    x = states[0] if name == "xlm_cls" else states.mean(0)
    if name.endswith("_dense"):
        weights = load_file(encoder_folder(name) / "2_Dense" / "model.safetensors")
        x = torch.tanh(F.linear(x, weights["linear.weight"], weights["linear.bias"]))
    return F.normalize(x, dim=0) if name.endswith(("_mean", "_cls", "_dense")) else x


def error(ours: list[Any], theirs: Tensor) -> float:
    """Difference relative to the largest number, where that is above 1."""
    numbers = torch.tensor(ours)
    assert numbers.shape == theirs.shape
    return float((numbers - theirs).abs().max() / theirs.abs().max().clamp(min=1))


def _inputs(prompt: list[int], num_first_tokens: int | None) -> dict[str, Tensor]:
    inputs = {"input_ids": torch.tensor([prompt]), "attention_mask": torch.ones(1, len(prompt), dtype=torch.int64)}
    if num_first_tokens is not None:
        types = [int(index >= num_first_tokens) for index in range(len(prompt))]
        inputs["token_type_ids"] = torch.tensor([types])
    return inputs
