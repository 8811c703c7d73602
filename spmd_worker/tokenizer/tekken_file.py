"""Mistral's tekken.json: tokens in base64 by rank, special tokens before them, and the expression that splits a text.

`config` has `pattern`, `default_vocab_size`, `default_num_special_tokens` and `num_vocab_tokens`; `vocab` a list of
`rank`, `token_bytes` and `token_str`; `special_tokens` one of `rank` and `token_str`. Ids of special tokens are their
ranks, those of the others follow. The vocabulary may be longer than what the model has rows for.
"""

import base64
import binascii
from collections.abc import Mapping
from typing import Any, Final

from spmd_worker.base import files
from spmd_worker.base.config.plain_values import shown
from spmd_worker.base.errors import TokenizerError
from spmd_worker.model_config.byte_level_bpe import added_token
from spmd_worker.tokenizer.byte_ranks import Vocabulary, tokenizer_of_ranks
from spmd_worker.tokenizer.file_check import WAY_OUT, check_size

TEKKEN_FILE: Final = "tekken.json"
NAMED: Final = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
"""Special tokens of all its models by their names, which the file does not have."""
_OF_OLDER_FILES: Final = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
"""Special tokens of files without a list of them (Mistral Nemo's first), in the order of their ids."""
_MAX_NESTING: Final = 16
_MAX_SIZE: Final = 1 << 22
_MAX_SPECIAL: Final = 1 << 16
"""Maximum of `default_num_special_tokens`: files have 1,000."""


def tokenizer_of_tekken(name: str, content: bytes) -> bytes:
    """Contents of a tokenizer.json. `content` is that of the file `name`. Raises TokenizerError: key, value, rule."""
    check_size(name, content)
    try:
        values = files.parse_json_object(content, max_nesting=_MAX_NESTING)
    except files.JsonError as error:
        raise TokenizerError(f"{name} {error}: {WAY_OUT}") from None
    config, entries = values.get("config"), values.get("vocab")
    if not isinstance(config, dict) or not isinstance(entries, list):
        raise TokenizerError(f"{name} must have an object config and a list vocab: {WAY_OUT}")
    pattern = config.get("pattern")
    if not isinstance(pattern, str) or not pattern:
        raise TokenizerError(f"{name}: config.pattern={shown(pattern)} must be a regular expression: {WAY_OUT}")
    special = _special_tokens(name, values.get("special_tokens"))
    num_special = _size(name, config, "default_num_special_tokens", len(special), _MAX_SPECIAL)
    num_tokens = _size(name, config, "default_vocab_size", num_special + len(entries)) - num_special
    if not (len(special) <= num_special and 0 < num_tokens <= len(entries)):
        raise TokenizerError(
            f"{name}: config.default_vocab_size={num_tokens + num_special} must be more than "
            f"config.default_num_special_tokens={num_special}, which must be at least the number of special_tokens, "
            f"{len(special)}, by at most the number of tokens in vocab, {len(entries)}: {WAY_OUT}"
        )
    special += [f"<SPECIAL_{number}>" for number in range(len(special), num_special)]
    ranks = {_token_bytes(name, number, entry): number for number, entry in enumerate(entries[:num_tokens])}
    if len(ranks) < num_tokens:
        raise TokenizerError(f"{name}: vocab has a token twice: {WAY_OUT}")
    added = [added_token(number, text) for number, text in enumerate(special)]
    first = NAMED["bos_token"]
    vocabulary = Vocabulary(ranks, added, num_special)
    return tokenizer_of_ranks(name, vocabulary, pattern, first=first if first in special else None)


def _special_tokens(name: str, given: Any) -> list[str]:
    """Texts of the special tokens by rank."""
    if given is None:
        return list(_OF_OLDER_FILES)
    entries = given if isinstance(given, list) else []
    texts = {
        entry.get("rank"): entry.get("token_str")
        for entry in entries
        if isinstance(entry, dict) and type(entry.get("rank")) is int
    }
    found = [texts.get(number) for number in range(len(entries))]
    strings = [each for each in found if isinstance(each, str) and each]
    if not entries or len(strings) < len(entries):
        raise TokenizerError(
            f"{name}: special_tokens must be a list of objects with token_str, a text, and rank, each number from 0 on "
            f"once: {WAY_OUT}"
        )
    return strings


def _size(name: str, config: Mapping[str, Any], key: str, usual: int, most: int = _MAX_SIZE) -> int:
    value = config.get(key)
    if value is None:
        return usual
    if type(value) is not int or not 0 <= value <= most:
        raise TokenizerError(f"{name}: config.{key}={shown(value)} must be an integer from 0 to {most}: {WAY_OUT}")
    return value


def _token_bytes(name: str, number: int, entry: Any) -> bytes:
    """Bytes of the token at this index, whose rank must be the index."""
    text = entry.get("token_bytes") if isinstance(entry, dict) and entry.get("rank") == number else None
    try:
        token = base64.b64decode(text, validate=True) if isinstance(text, str) else b""
    except (ValueError, binascii.Error):
        token = b""
    if not token:
        raise TokenizerError(
            f"{name}: vocab[{number}]={shown(entry)} must have its index as rank, and token_bytes in base64: {WAY_OUT}"
        )
    return token
