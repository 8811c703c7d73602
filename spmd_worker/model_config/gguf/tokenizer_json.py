"""Tokenizer files of a GGUF model, from the vocabulary in its metadata: tokenizer.json and tokenizer_config.json.

`tokenizer.ggml.model` is `gpt2`, BPE of bytes with merges, which `tokenizer.ggml.pre` splits into words first, or
`llama`, a SentencePiece vocabulary, whose scores are the order of its merges. Needs no tokenizers library.
"""

import json
from collections.abc import Iterator
from typing import Any, Final

from spmd_worker.base.errors import ModelConfigError
from spmd_worker.base.files import is_plain_name
from spmd_worker.model_config.byte_level_bpe import (
    CL100K,
    O200K,
    QWEN2,
    QWEN35,
    SEQUENCE,
    TEKKEN,
    added_token,
    around,
    bpe_model,
    byte_step,
    split_step,
)
from spmd_worker.model_config.gguf.model import GgufModel
from spmd_worker.model_config.gguf.tokens import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Tokens,
    read_tokens,
    token_id,
)

_GPT2, _DIGITS = "", "digits"
"""Splits of GPT-2, alone and behind one of digits."""
_SPLITS: Final = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "dbrx", "smaug-bpe"), CL100K),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), QWEN2),
    "qwen35": QWEN35,
    "tekken": TEKKEN,
    "gpt-4o": O200K,
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), _DIGITS),
}
"""`tokenizer.ggml.pre` -> the regular expression that splits a text into words."""
_TAKES_WORDS: Final = ("llama-bpe", "llama3", "llama-v3", "tekken")
"""Those whose words are tokens, if there is one, whatever the merges; and whose texts begin with a token by default."""
_COMPOSES: Final = ("qwen2", "qwen35")
"""Those whose texts are brought to NFC."""
_NAMED: Final = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
_UNSTRIPPED: Final = ("<unk>", "<s>", "<|endoftext|>")
_SPACE: Final = "\u2581"
WAY_OUT: Final = "put the model's own tokenizer.json beside the file and give model.path their folder"


def tokenizer_files(model: GgufModel) -> dict[str, bytes]:
    """Contents by name; {} for a model without a vocabulary. Raises ModelConfigError for a kind that is not known."""
    metadata = model.metadata
    tokens = read_tokens(metadata)
    if tokens is None:
        return {}
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        content = _byte_level(model, tokens)
    elif kind == "llama":
        content = _sentence_piece(model, tokens)
    else:
        raise metadata.error("tokenizer.ggml.model", f"is not supported, only gpt2 and llama: {WAY_OUT}")
    return {**tokenizer_settings(model), "tokenizer.json": _encoded(content)}


def tokenizer_settings(model: GgufModel) -> dict[str, bytes]:
    """`tokenizer_files` without tokenizer.json: tokens with a meaning, and chat templates. Raises ModelConfigError."""
    metadata = model.metadata
    tokens = read_tokens(metadata)
    if tokens is None:
        return {}
    named = {name: token_id(metadata, key) for key, name in _NAMED.items()}
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= {name: tokens.texts[number] for name, number in named.items() if number is not None}
    templates = {name: text.encode() for name, text in _templates(model)}
    return {**templates, "tokenizer_config.json": _encoded(config)}


def _encoded(content: dict[str, Any]) -> bytes:
    return json.dumps(content, ensure_ascii=False).encode()


def _templates(model: GgufModel) -> Iterator[tuple[str, str]]:
    """File name and text of each chat template. Raises ModelConfigError."""
    metadata, key = model.metadata, "tokenizer.chat_template"
    for name, text in metadata.config.items():
        if name != key and not name.startswith(f"{key}."):
            continue
        if not isinstance(text, str):
            raise metadata.error(name, "must be a text: download the model again")
        own = name[len(key) + 1 :]
        if not own:
            yield "chat_template.jinja", text
        elif is_plain_name(own):
            yield f"additional_chat_templates/{own}.jinja", text


def _byte_level(model: GgufModel, tokens: Tokens) -> dict[str, Any]:
    metadata, key = model.metadata, "tokenizer.ggml.pre"
    pre = metadata.get(key)
    if not isinstance(pre, str) or pre not in _SPLITS:
        raise metadata.error(key, f"is not known, only {', '.join(sorted(_SPLITS))}: {WAY_OUT}")
    split, takes_words = _SPLITS[pre], pre in _TAKES_WORDS
    steps: list[dict[str, Any]] = [byte_step(use_regex=split in (_GPT2, _DIGITS))]
    if split == _DIGITS:
        steps.insert(0, {"type": "Digits", "individual_digits": True})
    elif split:
        steps.insert(0, split_step(split))
    # Numbers of the embedding's rows that have no token.
    vocabulary = {text: i for i, text in enumerate(tokens.texts) if tokens.types[i] != UNUSED}
    return {
        **_outside(model, tokens, adds_first=takes_words),
        "normalizer": {"type": "NFC"} if pre in _COMPOSES else None,
        "pre_tokenizer": {"type": SEQUENCE, "pretokenizers": steps},
        "decoder": byte_step(use_regex=True),
        "model": bpe_model(vocabulary, _stored_merges(model), ignore_merges=takes_words),
    }


def _sentence_piece(model: GgufModel, tokens: Tokens) -> dict[str, Any]:
    metadata = model.metadata
    is_gemma = model.key.startswith("gemma")
    if is_gemma:
        # Files have runs of spaces as such.
        texts = [_SPACE * len(text) if text and not text.strip(" ") else text for text in tokens.texts]
        types = [NORMAL if text.strip(_SPACE) == "" else kind for text, kind in zip(texts, tokens.types, strict=True)]
        tokens = Tokens(texts, types)
    has_prefix = metadata.flag("tokenizer.ggml.add_space_prefix", True)
    prefix = [{"type": "Prepend", "prepend": _SPACE}] if has_prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if has_prefix else []
    space = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    unknown = token_id(metadata, "unknown")
    vocabulary = {text: i for i, text in enumerate(tokens.texts)}
    merges = _stored_merges(model) if "tokenizer.ggml.merges" in metadata.config else _merges(model, tokens, vocabulary)
    return {
        **_outside(model, tokens, adds_first=True),
        "normalizer": {
            "type": SEQUENCE,
            "normalizers": [*prefix, {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}],
        },
        "pre_tokenizer": None,
        "decoder": {"type": SEQUENCE, "decoders": [space, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        "model": bpe_model(
            *(vocabulary, merges),
            unk_token=tokens.texts[unknown or 0],
            fuse_unk=True,
            byte_fallback=BYTE in tokens.types,
        ),
    }


def _stored_merges(model: GgufModel) -> list[list[str]]:
    """The merges of the metadata, each two texts with a space between. Raises ModelConfigError."""
    metadata, key = model.metadata, "tokenizer.ggml.merges"
    merges = metadata.get(key)
    if not isinstance(merges, list) or not all(isinstance(each, str) for each in merges):
        raise ModelConfigError(f"{metadata.where(key)} must be a list of texts: download the model again")
    # A first part may be a space.
    pairs = [[each[: (at := each.find(" ", 1))], each[at + 1 :]] for each in merges if each.find(" ", 1) > 0]
    if len(pairs) != len(merges):
        raise ModelConfigError(f"{metadata.where(key)} must have a space in each text: download the model again")
    return pairs


def _merges(model: GgufModel, tokens: Tokens, vocabulary: dict[str, int]) -> list[list[str]]:
    """Merges that make each token of two others, in the order of SentencePiece: the highest score first. Scores of
    Gemma are not its order, which is that of the ids.
    """
    metadata, key = model.metadata, "tokenizer.ggml.scores"
    scores = metadata.get(key)
    if model.key.startswith("gemma"):
        scores = [float(-number) for number in range(len(tokens.texts))]
    if not isinstance(scores, list) or len(scores) != len(tokens.texts) or not all(type(s) is float for s in scores):
        raise ModelConfigError(f"{metadata.where(key)} must list a number for each token: download the model again")
    found = []
    for number, text in enumerate(tokens.texts):
        if tokens.types[number] not in (NORMAL, USER_DEFINED) or len(text) > _MAX_PIECE:
            continue
        parts = ((text[:at], text[at:]) for at in range(1, len(text)))
        found += [
            (-scores[number], number, vocabulary[left], vocabulary[right], left, right)
            for left, right in parts
            if left in vocabulary and right in vocabulary
        ]
    return [[left, right] for *_, left, right in sorted(found)]


_MAX_PIECE: Final = 64
"""Characters of a token that merges make: pieces of SentencePiece have 16, runs of spaces 31."""


def _outside(model: GgufModel, tokens: Tokens, *, adds_first: bool) -> dict[str, Any]:
    """The parts of tokenizer.json around the model: added tokens, and tokens before and behind a text. `adds_first`:
    there is one before it if the metadata say nothing.
    """
    # Phi-3's, of which llama.cpp knows it, too.
    strips = model.key == "phi3" and model.metadata.get("tokenizer.ggml.model") == "llama"
    added = [
        added_token(
            *(number, text),
            rstrip=strips and kind == CONTROL and text not in _UNSTRIPPED,
            special=kind != USER_DEFINED,
        )
        for number, (text, kind) in enumerate(zip(tokens.texts, tokens.types, strict=True))
        if kind in (CONTROL, USER_DEFINED, UNKNOWN) and text
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "post_processor": _processor(model, tokens, adds_first=adds_first),
    }


def _processor(model: GgufModel, tokens: Tokens, *, adds_first: bool) -> dict[str, Any] | None:
    metadata = model.metadata
    bos, eos = token_id(metadata, "bos"), token_id(metadata, "eos")
    first = bos if metadata.flag("tokenizer.ggml.add_bos_token", adds_first) else None
    last = eos if metadata.flag("tokenizer.ggml.add_eos_token", False) else None
    before, behind = (None if number is None else tokens.texts[number] for number in (first, last))
    ids = {tokens.texts[number]: number for number in (first, last) if number is not None}
    return around(before, behind, ids)
