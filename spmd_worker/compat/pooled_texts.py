"""A text, or a pair of texts, of a run that pools -> its token ids, as sentence-transformers makes them: behind the
folder's prompt, or as messages that the chat template writes.
"""

import json
from collections.abc import Mapping
from functools import partial
from typing import Any, Final
from weakref import WeakKeyDictionary

from spmd_worker.base.errors import ChatTemplateError
from spmd_worker.model_config.sentence_folder import TextForm
from spmd_worker.tokenizer.tokenizer import Tokenizer

_PAIR_ROLES: Final = ("query", "document")
_PROBES: Final = (("alpha", "bravo"), ("charlie", "bravo"), ("alpha", "foxtrot"))
"""A pair, and one with another text of each role."""
_FILLERS: Final = ("0", "1 2 3 4")
"""Texts without a token in common."""
_PARTS: Final = ("content[0]", ".type", "'type'", '"type"', "item.type", "message.content[")
"""By one of these in a template sentence-transformers knows that it takes contents as lists of parts."""

_CHECKED: Final[WeakKeyDictionary[Tokenizer, dict[TextForm, str]]] = WeakKeyDictionary()
"""Why pairs cannot be written by a tokenizer's template, "" where they can: three renderings are made to find out."""


def encode_pooled_text(
    form: TextForm, tokenizer: Tokenizer, first: str, second: str | None, max_tokens: int | None
) -> tuple[list[int], int | None]:
    """As `Tokenizer.encode_inside`; of messages all tokens are of the first text. Raises ValueError for texts that the
    template cannot write.
    """
    if not form.message_format:
        return tokenizer.encode_inside(form.prompt + first, second, max_tokens)
    texts = (first,) if second is None else (first, second)
    try:
        if second is not None:
            _check_pairs(form, tokenizer)
        token_ids = _encode(form, tokenizer, texts)
        if max_tokens is not None and len(token_ids) > max_tokens:
            token_ids = _cut(form, tokenizer, token_ids, len(texts), max_tokens)
    except ChatTemplateError as error:
        raise ValueError(str(error)) from None
    return token_ids, len(token_ids)


def _encode(form: TextForm, tokenizer: Tokenizer, texts: tuple[str, ...]) -> list[int]:
    return tokenizer.encode(_render(form, tokenizer, texts), add_special_tokens=False)


def _render(form: TextForm, tokenizer: Tokenizer, texts: tuple[str, ...]) -> str:
    message = partial(_message, _has_parts(form, tokenizer))
    messages = [message("system", form.prompt)] if form.prompt else []
    roles = ("user",) if len(texts) == 1 else _PAIR_ROLES
    messages += [message(role, text) for role, text in zip(roles, texts, strict=True)]
    variables = json.loads(form.template_variables)
    return tokenizer.apply_chat_template(messages, variables.pop("add_generation_prompt", False), variables)


def _message(has_parts: bool, role: str, text: str) -> Mapping[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": text}] if has_parts else text}


def _has_parts(form: TextForm, tokenizer: Tokenizer) -> bool:
    if form.message_format != "auto":
        return form.message_format == "structured"
    source = tokenizer.chat_template_source or ""
    return not source or any(each in source for each in _PARTS)


def _check_pairs(form: TextForm, tokenizer: Tokenizer) -> None:
    """Raise ValueError for a template that writes the same for other texts."""
    known = _CHECKED.setdefault(tokenizer, {})
    if form not in known:
        plain, *others = [_render(form, tokenizer, each) for each in _PROBES]
        lost = [role for role, other in zip(_PAIR_ROLES, others, strict=True) if other == plain]
        known[form] = " and ".join(lost)
    if known[form]:
        raise ValueError(
            f"the chat template writes nothing of messages of the role {known[form]}, as which texts of a pair come: "
            f"give the folder a chat_template.jinja that writes messages of the roles {' and '.join(_PAIR_ROLES)}"
        )


def _cut(form: TextForm, tokenizer: Tokenizer, token_ids: list[int], num_texts: int, max_tokens: int) -> list[int]:
    """The first tokens, the last of them replaced by those with which the template ends."""
    kept = token_ids[:max_tokens]
    if not form.restores_suffix:
        return kept
    first, second = [_encode(form, tokenizer, (filler,) * num_texts) for filler in _FILLERS]
    num_equal = 0
    for one, other in zip(reversed(first), reversed(second)):
        if one != other:
            break
        num_equal += 1
    num_equal = 0 if num_equal == min(len(first), len(second)) else min(num_equal, max_tokens)
    return [*kept[: max_tokens - num_equal], *first[len(first) - num_equal :]]
