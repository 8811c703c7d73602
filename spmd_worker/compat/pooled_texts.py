"""Encodes texts and pairs of a pooling run as sentence-transformers does, with its prompts or chat template."""

import json
from itertools import takewhile
from operator import eq
from typing import Final
from weakref import WeakKeyDictionary

from spmd_worker.base.errors import ChatTemplateError
from spmd_worker.model_config.sentence_folder import TextTransform
from spmd_worker.tokenizer.tokenizer import Tokenizer

_PAIR_ROLES: Final = ("query", "document")
_PROBES: Final = (("alpha", "bravo"), ("charlie", "bravo"), ("alpha", "foxtrot"))
"""A pair, and pairs with another text of each role."""
_FILLERS: Final = ("0", "1 2 3 4")
"""Texts without a token in common."""
_PARTS: Final = ("content[0]", ".type", "'type'", '"type"', "item.type", "message.content[")
"""Markers by which sentence-transformers detects a template that reads contents as lists of parts."""

_CHECKED: Final[WeakKeyDictionary[Tokenizer, dict[TextTransform, str]]] = WeakKeyDictionary()
"""Roles whose messages a tokenizer's template ignores, or ""; cached, because the check renders it three times."""


def encode_pooled_text(
    form: TextTransform, tokenizer: Tokenizer, first: str, second: str | None, max_tokens: int | None
) -> tuple[list[int], int | None]:
    """`Tokenizer.encode_inside` with the folder's prompt or template. Raises ValueError if it cannot render them."""
    if not form.message_format:
        return tokenizer.encode_inside(form.prompt + first, second, max_tokens)
    texts = (first,) if second is None else (first, second)
    try:
        if second is not None:
            _check_pairs(form, tokenizer)
        token_ids = _encode(form, tokenizer, texts)
        if max_tokens is not None and len(token_ids) > max_tokens:
            token_ids = _truncate(form, tokenizer, token_ids, len(texts), max_tokens)
    except ChatTemplateError as error:
        raise ValueError(str(error)) from None
    return token_ids, len(token_ids)


def _encode(form: TextTransform, tokenizer: Tokenizer, texts: tuple[str, ...]) -> list[int]:
    return tokenizer.encode(_render(form, tokenizer, texts), add_special_tokens=False)


def _render(form: TextTransform, tokenizer: Tokenizer, texts: tuple[str, ...]) -> str:
    source = tokenizer.chat_template_source or ""
    has_parts = form.message_format == "structured"
    if form.message_format == "auto":
        has_parts = not source or any(each in source for each in _PARTS)
    contents = [("system", form.prompt)] if form.prompt else []
    contents += zip(("user",) if len(texts) == 1 else _PAIR_ROLES, texts, strict=True)
    messages = [
        {"role": role, "content": [{"type": "text", "text": text}] if has_parts else text} for role, text in contents
    ]
    variables = json.loads(form.template_variables)
    return tokenizer.apply_chat_template(messages, variables.pop("add_generation_prompt", False), variables)


def _check_pairs(form: TextTransform, tokenizer: Tokenizer) -> None:
    """Raise ValueError for a template that ignores one of the texts."""
    known = _CHECKED.setdefault(tokenizer, {})
    if form not in known:
        plain, *others = [_render(form, tokenizer, each) for each in _PROBES]
        lost = [role for role, other in zip(_PAIR_ROLES, others, strict=True) if other == plain]
        known[form] = " and ".join(lost)
    if known[form]:
        raise ValueError(
            f"the chat template ignores messages of the role {known[form]}, in which the texts of a pair are sent: "
            f"give the folder a chat_template.jinja that writes messages of the roles {' and '.join(_PAIR_ROLES)}"
        )


def _truncate(
    form: TextTransform, tokenizer: Tokenizer, token_ids: list[int], num_texts: int, max_tokens: int
) -> list[int]:
    """The first tokens, the last of them replaced by the template's suffix."""
    kept = token_ids[:max_tokens]
    if not form.restores_suffix:
        return kept
    first, second = [_encode(form, tokenizer, (filler,) * num_texts) for filler in _FILLERS]
    num_equal = sum(takewhile(bool, map(eq, reversed(first), reversed(second))))
    num_equal = 0 if num_equal == min(len(first), len(second)) else min(num_equal, max_tokens)
    return [*kept[: max_tokens - num_equal], *first[len(first) - num_equal :]]
