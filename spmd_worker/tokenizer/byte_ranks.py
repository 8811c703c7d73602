"""Byte-level BPE that a file gives by ranks, as tiktoken's: the tokenizer.json of the same ids.

tiktoken merges two neighbours again and again: those that are together the token of the lowest rank, of several the
leftmost. The library merges pairs of a list in its order. Both give the same ids if the list has all pairs that make a
token, by its rank: neighbours are merged to a token only if the token alone would come to the same two parts, so of the
pairs of one token a text has one. A word that is a token is that token, whatever the merges (`ignore_merges`).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from spmd_worker.base.errors import TokenizerError
from spmd_worker.model_config.byte_level_bpe import SEQUENCE, around, bpe_model, byte_step, byte_text, split_step
from spmd_worker.tokenizer.file_check import WAY_OUT

_MAX_TOKEN_BYTES: Final = 1024
"""Models have tokens of some hundred bytes."""
_MAX_BYTES: Final = 8 * 1024 * 1024
"""Maximum of all tokens together, each of whose bytes may begin the second part of a pair: a million bytes in models of
160,000 tokens.
"""
_MAX_MERGES: Final = 2_000_000
_MAX_MERGED_BYTES: Final = 32 * 1024 * 1024
"""Maximum of the pairs, and of the bytes that they make: models of 160,000 tokens have 400,000 pairs of 7 bytes."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens of a file: `ranks` of those that texts are made of, `first_id` the id of rank 0, `added` those that are
    matched before, as in a tokenizer.json.
    """

    ranks: Mapping[bytes, int]
    added: Sequence[Mapping[str, Any]]
    first_id: int = 0


def tokenizer_of_ranks(
    name: str, vocabulary: Vocabulary, pattern: str, *, composes: bool = False, first: str | None = None
) -> bytes:
    """Contents of a tokenizer.json. `name`: the file's, for errors; `pattern` splits a text into words; `composes`
    brings it to NFC before; `first` is the added token that begins a text. Raises TokenizerError.
    """
    _check(name, vocabulary)
    added = {token["content"]: token["id"] for token in vocabulary.added}
    # A token of the same text has no id by it: a text that has it is cut there before.
    ordered = sorted((rank, token) for token, rank in vocabulary.ranks.items() if byte_text(token) not in added)
    texts = {token: byte_text(token) for _, token in ordered}
    ids = {texts[token]: rank + vocabulary.first_id for rank, token in ordered}
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": sorted(vocabulary.added, key=lambda token: int(token["id"])),
        "normalizer": {"type": "NFC"} if composes else None,
        "pre_tokenizer": {"type": SEQUENCE, "pretokenizers": [split_step(pattern), byte_step(use_regex=False)]},
        "post_processor": around(first, None, added),
        "decoder": byte_step(use_regex=True),
        "model": bpe_model(ids | added, _merges(name, texts), ignore_merges=True),
    }
    try:
        return json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        fault = "an added token or the regular expression contains a lone surrogate, which UTF-8 cannot encode"
        raise TokenizerError(f"{name}: {fault}: {WAY_OUT}") from None


def _check(name: str, vocabulary: Vocabulary) -> None:
    tokens = vocabulary.ranks
    longest, total = max(map(len, tokens), default=0), sum(map(len, tokens))
    if longest > _MAX_TOKEN_BYTES or total > _MAX_BYTES:
        raise TokenizerError(
            f"{name} has a token of {longest} bytes, and {total} bytes of tokens in all: at most {_MAX_TOKEN_BYTES} "
            f"and {_MAX_BYTES} are read: {WAY_OUT}"
        )
    missing = next((value for value in range(256) if bytes([value]) not in tokens), None)
    if missing is not None:
        raise TokenizerError(f"{name} has no token for the byte {missing:#04x} and must have all 256: {WAY_OUT}")
    used = {rank + vocabulary.first_id: f"the token of rank {rank}" for rank in tokens.values()}
    if len(used) < len(tokens):
        raise TokenizerError(f"{name}: a rank belongs to two tokens and must belong to one: {WAY_OUT}")
    texts: dict[str, int] = {}
    for token in vocabulary.added:
        number, text = int(token["id"]), str(token["content"])
        other = used.get(number) or (f"{text!a:.80}, which is also {texts[text]}" if text in texts else None)
        if other is not None:
            raise TokenizerError(
                f"{name}: the added token {text!a:.80} has the id {number}, which must be its own and its only one, "
                f"and not that of {other}: {WAY_OUT}"
            )
        used[number], texts[text] = f"{text!a:.80}", number


def _merges(name: str, texts: Mapping[bytes, str]) -> list[list[str]]:
    """Pairs of tokens that make a token. `texts`: bytes -> text of each token, by rank."""
    merges: list[list[str]] = []
    total = 0
    for token in texts:
        before = len(merges)
        for at in range(1, len(token)):
            left, right = texts.get(token[:at]), texts.get(token[at:])
            if left is not None and right is not None:
                merges.append([left, right])
        total += (len(merges) - before) * len(token)
        if len(merges) > _MAX_MERGES or total > _MAX_MERGED_BYTES:
            raise TokenizerError(
                f"{name} makes its tokens of more than {_MAX_MERGES} pairs or {_MAX_MERGED_BYTES} bytes: {WAY_OUT}"
            )
    return merges
