"""Folders with a tokenizer of ranks alone, in the formats of Kimi, Hunyuan, the first Qwen and Mistral, and their ids.

`ids_of_ranks` is tiktoken's algorithm: the special tokens, the words, and in each the merge of the lowest rank.
"""

import json
import unicodedata
from base64 import b64encode
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import regex

from spmd_worker.model_config.byte_level_bpe import KIMI, QWEN2, TEKKEN

WORDS = (
    " hello",
    "hello",
    " world",
    "World",
    "你好",
    "世界",
    " 你",
    "123",
    "'s",
    "    ",
    "\n\n",
    "café",
    " it's",
    "/-",
)
KINDS = ("kimi", "hunyuan", "qwen", "tekken")
PATTERNS = {"kimi": KIMI, "hunyuan": QWEN2, "qwen": QWEN2, "tekken": TEKKEN}
FILES = {"kimi": "tiktoken.model", "hunyuan": "hy.tiktoken", "qwen": "qwen.tiktoken", "tekken": "tekken.json"}
CLASSES = {"kimi": "TikTokenTokenizer", "hunyuan": "HYTokenizer", "qwen": "QWenTokenizer"}
NUM_SPECIAL = 24
"""Of tekken.json: the listed ones, and more without a name."""
SPECIAL = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[IMG]", "<pad>")
KIMI_ADDED = {0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|im_user|>", 4: "<|tool_call_begin|>", 255: "[PAD]"}
"""Kimi's names behind the ranks; the others are reserved, that of the tool calls is not special."""


def tokens() -> list[bytes]:
    """Bytes, the beginnings of words, shortest first, and a word that no merges make."""
    found = [bytes([value]) for value in range(256)]
    for size in range(2, 9):
        found += [part for word in WORDS if len(part := word.encode()[:size]) == size and part not in found]
    return [*dict.fromkeys(found), b" wholeword"]


def write_ranks(folder: Path, kind: str, ranked: Sequence[bytes] | None = None, **config: Any) -> Path:
    """The folder of a kind, with these tokens by rank. `config`: values of tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    ranked = tokens() if ranked is None else ranked
    texts = [b64encode(token).decode() for token in ranked]
    if kind == "tekken":
        (folder / FILES[kind]).write_text(json.dumps(tekken(texts)))
    else:
        lines = "".join(f"{text} {rank}\n" for rank, text in enumerate(texts))
        (folder / FILES[kind]).write_text(lines)
        config = {"tokenizer_class": CLASSES[kind], **config}
    if kind == "kimi":
        added = {
            str(len(ranked) + number): {"content": text, "special": number != 4, "normalized": False}
            for number, text in KIMI_ADDED.items()
        }
        config = {
            "bos_token": "[BOS]",
            "eos_token": "[EOS]",
            "pad_token": "[PAD]",
            "added_tokens_decoder": added,
        } | config
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def tekken(texts: Sequence[str]) -> dict[str, Any]:
    """Contents of a tekken.json whose model has no row for its last token."""
    texts = [*texts, b64encode(b"beyond").decode()]
    return {
        "config": {
            "pattern": TEKKEN,
            "num_vocab_tokens": len(texts),
            "default_vocab_size": NUM_SPECIAL + len(texts) - 1,
            "default_num_special_tokens": NUM_SPECIAL,
            "version": "v3",
        },
        "vocab": [{"rank": rank, "token_bytes": text, "token_str": None} for rank, text in enumerate(texts)],
        "special_tokens": [{"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate(SPECIAL)],
    }


def special_ids(kind: str, num_ranks: int) -> dict[str, int]:
    """Text -> id of tokens that a text may have."""
    if kind == "tekken":
        return {text: rank for rank, text in enumerate(SPECIAL)} | {"<SPECIAL_20>": 20}
    if kind == "kimi":
        named = {text: num_ranks + number for number, text in KIMI_ADDED.items()}
        return named | {f"<|reserved_token_{num_ranks + 9}|>": num_ranks + 9}
    named = ("<|endoftext|>", "<|startoftext|>", "<|bos|>", "<|eos|>", "<|pad|>", "<|extra_0|>")
    if kind == "qwen":
        named = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|extra_0|>")
    return {text: num_ranks + number for number, text in enumerate(named)}


def ids_of_ranks(kind: str, ranked: Sequence[bytes], text: str, pattern: str | None = None) -> list[int]:
    """Ids of a text, without those that begin it."""
    ranks, special = {token: rank for rank, token in enumerate(ranked)}, special_ids(kind, len(ranked))
    shift = NUM_SPECIAL if kind == "tekken" else 0
    text = unicodedata.normalize("NFC", text) if kind in ("hunyuan", "qwen") else text
    words = regex.compile(pattern or PATTERNS[kind], flags=regex.VERSION1)
    ids = []
    for part in regex.split("(" + "|".join(map(regex.escape, special)) + ")", text):
        if part in special:
            ids.append(special[part])
            continue
        for word in words.findall(part):
            ids += [rank + shift for rank in merged(ranks, word.encode())]
    return ids


def merged(ranks: Mapping[bytes, int], word: bytes) -> list[int]:
    """Ranks of a word's tokens."""
    if word in ranks:
        return [ranks[word]]
    parts = [bytes([value]) for value in word]
    while True:
        pairs = [(ranks[a + b], at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]
        if not pairs:
            return [ranks[part] for part in parts]
        _, at = min(pairs)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
