"""tiktoken's file of ranks, a token in base64 and its rank a line, and what the classes of its models add to it.

Such a file has neither the expression that splits a text into words nor the tokens behind the ranks: a folder has both
in code, which is not executed. They are known here by the class, that tokenizer_config.json names, or by the model.
"""

import base64
import binascii
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from spmd_worker.base.config.plain_values import shown
from spmd_worker.base.errors import TokenizerError
from spmd_worker.model_config.byte_level_bpe import KIMI, QWEN2, added_token
from spmd_worker.tokenizer.added_tokens import listed_tokens
from spmd_worker.tokenizer.byte_ranks import Vocabulary, tokenizer_of_ranks
from spmd_worker.tokenizer.file_check import WAY_OUT, check_token

TIKTOKEN_FILES: Final = ("tiktoken.model", "hy.tiktoken", "qwen.tiktoken")
_MAX_RANK_DIGITS: Final = 7
_NUM_RESERVED: Final = 256
_EXTRAS: Final = tuple(f"<|extra_{number}|>" for number in range(205))


def _reserved(first_id: int) -> Sequence[str]:
    return [f"<|reserved_token_{first_id + number}|>" for number in range(_NUM_RESERVED)]


@dataclass(frozen=True, slots=True)
class _TokenizerClass:
    """`pattern` splits a text; `behind`: the tokens behind the ranks, whose first id it takes; `composes`: texts are
    brought to NFC; `counts_lines`: ranks are counted by line, repeated tokens left out, whatever number a line has.
    """

    pattern: str
    behind: Callable[[int], Sequence[str]]
    composes: bool = False
    counts_lines: bool = False


_CLASSES: Final = {
    "TikTokenTokenizer": _TokenizerClass(KIMI, _reserved),
    "HYTokenizer": _TokenizerClass(
        QWEN2,
        lambda _: ("<|endoftext|>", "<|startoftext|>", "<|bos|>", "<|eos|>", "<|pad|>", *_EXTRAS),
        composes=True,
        counts_lines=True,
    ),
    "QWenTokenizer": _TokenizerClass(
        QWEN2, lambda _: ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *_EXTRAS), composes=True
    ),
}
"""Class in the folder's code -> the class: Kimi's, Hunyuan's, that of the first Qwen."""
_OF_FILES: Final = {"hy.tiktoken": "HYTokenizer", "qwen.tiktoken": "QWenTokenizer"}
_OF_MODELS: Final = dict.fromkeys(("kimi_k2", "kimi_k25", "kimi_linear", "kimi_vl"), "TikTokenTokenizer")
"""File, and `model_type`, whose class is known where the configuration names none."""
_GENERAL: Final = ("PreTrainedTokenizer", "PreTrainedTokenizerFast", "PythonBackend", "TokenizersBackend")
"""Classes of transformers that say nothing of the file."""


Settings = Callable[[], Mapping[str, Any]]
"""config.json, which is read if it is needed."""


def tokenizer_of_tiktoken(path: Path, content: bytes, config: Mapping[str, Any], model: Settings) -> bytes:
    """Contents of a tokenizer.json. `content` is that of the file `path`, `config` tokenizer_config.json. Raises
    TokenizerError, also for a class that is not known.
    """
    kind = _class_of(path, config, model)
    ranks = _ranks(str(path), content, counts_lines=kind.counts_lines)
    start = max(ranks.values(), default=-1) + 1
    added = {start + number: added_token(start + number, text) for number, text in enumerate(kind.behind(start))}
    numbers = {rank: token for token, rank in ranks.items()}
    for number, token in listed_tokens(config):
        check_token(str(path.with_name("tokenizer_config.json")), "a token", token["content"])
        # A token of the file may be listed by its own text.
        if number is not None and numbers.get(number) != token["content"].encode("utf-8", "surrogatepass"):
            added[number] = {"id": number, **token}
    vocabulary = Vocabulary(ranks, list(added.values()))
    return tokenizer_of_ranks(str(path), vocabulary, kind.pattern, composes=kind.composes)


def _class_of(path: Path, config: Mapping[str, Any], model: Settings) -> _TokenizerClass:
    named, model_type = _named_class(config), None
    if named is None or named in _GENERAL:
        named = _OF_FILES.get(path.name)
    if named is None:
        model_type = model().get("model_type")
        named = _OF_MODELS.get(model_type) if isinstance(model_type, str) else None
    if named is None or named not in _CLASSES:
        raise TokenizerError(
            f"{path}: how a text is split into words is known for tokenizers of the classes {', '.join(_CLASSES)}, and "
            f"tokenizer_config.json names {shown(named)}"
            + (f" with model_type={shown(model_type)} in config.json" if named is None else "")
            + ": give a tokenizer.json, or prompt_token_ids"
        )
    return _CLASSES[named]


def _named_class(config: Mapping[str, Any]) -> str | None:
    """The class that tokenizer_config.json names, or that it has code for; None for none."""
    named = config.get("tokenizer_class")
    if isinstance(named, str):
        return named
    code = config.get("auto_map")
    code = code.get("AutoTokenizer") if isinstance(code, dict) else None
    code = code[0] if isinstance(code, list) and code else code
    return code.rpartition(".")[2] if isinstance(code, str) else None


def _ranks(name: str, content: bytes, *, counts_lines: bool) -> dict[bytes, int]:
    """Bytes -> rank of each token. Raises TokenizerError."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), 1):
        parts = line.split()
        if not parts:
            continue
        try:
            text, rank = parts
            token = base64.b64decode(text, validate=True)
        except (ValueError, binascii.Error):
            token, rank = b"", b""
        if not token or not rank.isdigit() or len(rank) > _MAX_RANK_DIGITS:
            raise TokenizerError(
                f"{name}: line {number}, {shown(line[:60])}, must be a token in base64 and its rank: {WAY_OUT}"
            )
        if counts_lines:
            ranks.setdefault(token, len(ranks))
        elif token in ranks:
            raise TokenizerError(f"{name}: line {number} has a token of a line before: {WAY_OUT}")
        else:
            ranks[token] = int(rank)
    return ranks
