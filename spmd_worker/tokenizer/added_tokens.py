"""Tokens that tokenizer_config.json and special_tokens_map.json name or list."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from spmd_worker.base.errors import TokenizerError
from spmd_worker.tokenizer.file_check import check_token

_MAX_ID_DIGITS: Final = 10


def named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token`, `unk_token`, ... -> text. A token is written as its text or as {"content": text}."""
    named = {name: _token_content(value) for name, value in config.items() if name.endswith("_token")}
    return {name: content for name, content in named.items() if content is not None}


def added_tokens(
    values: Mapping[str, Any], config: Mapping[str, Any], named: Mapping[str, str], path: Path
) -> list[dict[str, Any]]:
    """Tokens that the configuration, `path`, names and tokenizer.json does not, which are added as transformers adds
    them: the arguments of `AddedToken`. Raises TokenizerError.
    """
    tokens: dict[str, dict[str, Any]] = {}
    for _, token in listed_tokens(config):
        tokens.setdefault(token["content"], token)
    key = "additional_special_tokens" if config.get("additional_special_tokens") else "extra_special_tokens"
    extra = config.get(key) or []
    extra = list(extra.values()) if isinstance(extra, dict) else extra
    if not isinstance(extra, list):
        # A string is a sequence too: each of its letters would be a token.
        raise TokenizerError(f"{path}: {key}={str(extra)[:80]!r} must be a list of tokens, or an object of them")
    for content in (*named.values(), *(_token_content(value) for value in extra)):
        if content is not None:
            tokens.setdefault(content, {"content": content, "special": True, "normalized": False})
    for content in tokens:
        check_token(str(path), "a token", content)
    known = {token["content"] for token in values.get("added_tokens") or []}
    return [token for content, token in tokens.items() if content not in known]


def listed_tokens(config: Mapping[str, Any]) -> Iterator[tuple[int | None, dict[str, Any]]]:
    """Id, None for a key that is none, and arguments of `AddedToken` of each token of `added_tokens_decoder`."""
    listed = config.get("added_tokens_decoder")
    if not isinstance(listed, dict):
        return
    for key in sorted(listed, key=lambda key: _id(key) or 0):
        value = listed[key]
        content = _token_content(value)
        if content is not None and isinstance(value, dict):
            flags = {name: value.get(name, False) is True for name in ("lstrip", "rstrip", "single_word", "special")}
            normalized = value.get("normalized", not flags["special"]) is True
            yield _id(key), {"content": content, "normalized": normalized, **flags}


def _id(key: str) -> int | None:
    return int(key) if key.isdecimal() and len(key) <= _MAX_ID_DIGITS else None


def _token_content(value: Any) -> str | None:
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) and content else None
