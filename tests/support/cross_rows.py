"""Tiny encoder-decoder models of transformers, and logits of their decoders for given rows of the encoder."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
import transformers
from image_rows import ImageRow
from plain_models import new_model
from rows_of_encoders import HIDDEN_SIZE, VOCAB_SIZE
from run_folder import made_once
from torch import Tensor

from spmd_worker.model.decoder import DecoderForCausalLM
from spmd_worker.model_config.model_config import ModelConfig
from spmd_worker.ranks.communicator import GroupHandle
from spmd_worker.ranks.topology import Stage

if TYPE_CHECKING:
    # Importing it takes seconds, which ranks that run these files would pay for each.
    from transformers import PreTrainedModel

_HALVES: Final[dict[str, Any]] = {
    f"{part}_{key}": value
    for part in ("encoder", "decoder")
    for key, value in (("layers", 3), ("attention_heads", 4), ("ffn_dim", 96))
}
_OF_ALL: Final[dict[str, Any]] = {"vocab_size": VOCAB_SIZE, "d_model": HIDDEN_SIZE, "pad_token_id": 1}
_BART: Final[dict[str, Any]] = {**_OF_ALL, **_HALVES, "max_position_embeddings": 96}
_T5: Final[dict[str, Any]] = {
    "vocab_size": VOCAB_SIZE,
    "d_model": HIDDEN_SIZE,
    "d_kv": 32,
    "d_ff": 96,
    "num_heads": 4,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "relative_attention_max_distance": 20,
    "relative_attention_num_buckets": 8,
}
CASES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "bart": ("Bart", {**_BART, "scale_embedding": True}),
    "whisper": (
        "Whisper",
        {**_OF_ALL, **_HALVES, "num_mel_bins": 8, "max_source_positions": 32, "max_target_positions": 64}
        | dict.fromkeys(("bos_token_id", "eos_token_id", "decoder_start_token_id"), 2),
    ),
    "t5": ("T5", {**_T5, "feed_forward_proj": "relu"}),
    "t5 with gates": ("T5", {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "umt5": ("UMT5", {**_T5, "feed_forward_proj": "gated-gelu"}),
    "mbart": ("MBart", {**_BART, "scale_embedding": True}),
    "pegasus": ("Pegasus", _BART),
    "marian": ("Marian", {**_BART, "eos_token_id": 0, "decoder_start_token_id": 1}),
    "m2m100": ("M2M100", _BART),
    "blenderbot": ("Blenderbot", _BART),
}
"""Class of transformers, and its sizes."""
LENGTHS: Final = ((21, 19), (32, 5), (1, 33))
"""The encoder's rows and the decoder's tokens of each row."""


def cross_folder(name: str) -> Path:
    """The model of a case, written once a run."""
    return made_once(f"cross {name}", lambda folder: _write(folder, name))


def _class_of(name: str) -> Any:
    family = CASES[name][0]
    return getattr(transformers, "MarianMTModel" if family == "Marian" else f"{family}ForConditionalGeneration")


@cache
def cross_reference(name: str) -> "PreTrainedModel":
    """transformers' model of the folder."""
    model_class = _class_of(name)
    return model_class.from_pretrained(cross_folder(name), dtype=torch.float32, attn_implementation="eager").eval()


@torch.no_grad()
def _write(folder: Path, name: str) -> None:
    family, sizes = CASES[name]
    model = _class_of(name)(getattr(transformers, f"{family}Config")(**sizes))
    generator = torch.Generator().manual_seed(11)
    buffers = [(name, value) for name, value in model.named_buffers() if name == "final_logits_bias"]
    for key, value in sorted([*model.named_parameters(), *buffers]):
        noise = torch.randn(value.shape, generator=generator)
        is_norm = value.ndim == 1 and key.endswith("weight")
        size = 0.3 if min(value.shape) == 1 or value.ndim == 1 else 1.4 * value[0].numel() ** -0.5
        # Queries of T5 are not scaled.
        size *= 0.2 if key.endswith(".q.weight") else 1
        value.copy_(is_norm + size * noise)
    model.save_pretrained(folder)


@torch.no_grad()
def cross_logits(name: str, row: ImageRow) -> Tensor:
    """transformers' logits [T, vocabulary] of the decoder's tokens."""
    assert row.rows is not None
    ids = torch.tensor([row.token_ids[row.num_virtual :]])
    outputs = transformers.modeling_outputs.BaseModelOutput(last_hidden_state=row.rows.unsqueeze(0))
    logits: Tensor = cross_reference(name)(encoder_outputs=outputs, decoder_input_ids=ids, use_cache=False).logits[0]
    return logits


def cross_stages(
    name: str, *stages: Stage, group: GroupHandle | None = None, config: ModelConfig | None = None
) -> list[DecoderForCausalLM]:
    """Stages of the model, in plain torch, not packed."""
    return [new_model(cross_folder(name), group, stage, config) for stage in stages]


def with_layers(config: ModelConfig, **changes: Any) -> ModelConfig:
    """Each layer with these changes, for controls."""
    return replace(config, layers=tuple(replace(layer, **changes) for layer in config.layers))
