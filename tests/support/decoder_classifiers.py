"""Small random encoder-decoder models that classify, written by transformers, and its scores of a row alone.

Knows nothing of the runtime under test.
"""

from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from encoder_models import written
from run_folder import made_once
from torch import Tensor
from transformers import (
    AutoModelForSequenceClassification,
    BartConfig,
    BartForSequenceClassification,
    MBartConfig,
    MBartForSequenceClassification,
    MT5Config,
    MT5ForSequenceClassification,
    T5Config,
    T5ForSequenceClassification,
    UMT5Config,
    UMT5ForSequenceClassification,
)

EOS: Final = 2
START: Final = 7
"""Of the decoder, where the file names one: no token that tokenizers put anywhere."""
_IDS: Final = {"eos_token_id": EOS, "decoder_start_token_id": START, "num_labels": 3}
_HALVES: Final[dict[str, Any]] = {
    f"{part}_{key}": value
    for part in ("encoder", "decoder")
    for key, value in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 96))
}
_BART: Final[dict[str, Any]] = {"vocab_size": 320, "d_model": 64, "max_position_embeddings": 128, **_HALVES, **_IDS}
_T5: Final[dict[str, Any]] = {
    "vocab_size": 320,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 96,
    "num_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "feed_forward_proj": "relu",
    **_IDS,
}
CLASSIFIERS: Final = {
    "bart": written("bart", BartForSequenceClassification, BartConfig, _BART),
    "bart_pairs": written("bart", BartForSequenceClassification, BartConfig, _BART, num_labels=1),
    "mbart": written("bart", MBartForSequenceClassification, MBartConfig, _BART, scale_embedding=True),
    "t5": written("t5", T5ForSequenceClassification, T5Config, _T5),
    "t5_pairs": written(
        *("t5", T5ForSequenceClassification, T5Config, _T5), num_labels=1, feed_forward_proj="gated-gelu"
    ),
    "mt5": written("t5", MT5ForSequenceClassification, MT5Config, _T5, feed_forward_proj="gated-gelu"),
    "umt5": written("t5", UMT5ForSequenceClassification, UMT5Config, _T5),
}


def classifier_folder(name: str) -> Path:
    """The folder of this name, written once a run."""
    return made_once(f"decoder-classifier-{name}", CLASSIFIERS[name])


@cache
def _classifier(name: str) -> Any:
    """transformers' model, in double precision."""
    load = AutoModelForSequenceClassification.from_pretrained
    return load(classifier_folder(name), dtype=torch.float64, attn_implementation="eager").eval()


@torch.no_grad()
def classifier_logits(name: str, prompt: list[int]) -> Tensor:
    """[labels] of a row alone."""
    ids = torch.tensor([prompt])
    logits: Tensor = _classifier(name)(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0].float()
    return logits
