"""Checkpoints of random weights with the tokenizers of `chat_models`."""

from pathlib import Path

from chat_models import write_chat_tokenizer
from reference_models import CheckpointSpec, write_checkpoint
from transformers import LlamaConfig


def write_chat_model(folder: Path, name: str) -> Path:
    """A Llama whose answers end with the tokenizer's own end, and are drawn at temperature 1 unless a row says."""
    overrides = {"vocab_size": 340, "eos_token_id": 1, "num_hidden_layers": 2}
    write_checkpoint(folder, CheckpointSpec(LlamaConfig, overrides))
    (folder / "generation_config.json").unlink()
    return write_chat_tokenizer(folder, name)
