"""The tokens of a GGUF model's metadata: their texts and types, and those with a meaning."""

from dataclasses import dataclass
from typing import Any, Final

from spmd_worker.base.errors import ModelConfigError
from spmd_worker.model_config.config_reader import ConfigReader, checked_integer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""llama.cpp's types of tokens."""
_NAMED: Final = {"bos": "bos_token_id", "padding": "pad_token_id"}
_ENDS: Final = ("eos", "eot", "eom")
_END_TEXTS: Final = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>"),
    *("<EOT>", "_<EOT>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<end_of_utterance>"),
)
"""Tokens that end an answer in llama.cpp, whatever the metadata name; old converters wrote some as user-defined."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """`texts` by id, as the metadata have them, and their `types`, 1 where the metadata have none."""

    texts: list[str]
    types: list[int]


def read_tokens(metadata: ConfigReader) -> Tokens | None:
    """The vocabulary; None if there is none. Raises ModelConfigError."""
    key, type_key = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
    texts = metadata.get(key)
    if texts is None:
        return None
    if not isinstance(texts, list) or not texts or not all(isinstance(each, str) for each in texts):
        raise metadata.error(key, "must be a list of texts: download the model again")
    types = metadata.get(type_key, [NORMAL] * len(texts))
    if not isinstance(types, list) or len(types) != len(texts) or not all(type(each) is int for each in types):
        raise ModelConfigError(f"{metadata.where(type_key)} must list a type for each of the {len(texts)} tokens")
    return Tokens(texts, types)


def token_id(metadata: ConfigReader, name: str) -> int | None:
    """`tokenizer.ggml.NAME_token_id`; None if it is missing. Raises ModelConfigError for one of no token."""
    key = f"tokenizer.ggml.{name}_token_id"
    value, tokens = metadata.get(key), metadata.get("tokenizer.ggml.tokens")
    most = len(tokens) - 1 if isinstance(tokens, list) and tokens else 2**31 - 1
    # Some writers' word for none.
    return None if value in (None, 2**32 - 1, -1) else checked_integer(value, metadata.where(key), 0, most)


def named_ids(metadata: ConfigReader) -> dict[str, int]:
    """config.json's ids of tokens but the last. Raises ModelConfigError."""
    found = {name: token_id(metadata, key) for key, name in _NAMED.items()}
    return {name: value for name, value in found.items() if value is not None}


def end_ids(metadata: ConfigReader) -> list[int] | None:
    """Ids that end an answer, the one that the metadata name first; None for none. Raises ModelConfigError."""
    found: list[Any] = [token_id(metadata, name) for name in _ENDS]
    tokens = read_tokens(metadata)
    if tokens is not None:
        found += [
            number
            for number, (text, kind) in enumerate(zip(tokens.texts, tokens.types, strict=True))
            if kind in (CONTROL, USER_DEFINED) and text in _END_TEXTS
        ]
    return list(dict.fromkeys(each for each in found if each is not None)) or None
