"""Checks the values of both row formats: prompts, messages, sampling parameters, known keys."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Final

from spmd_worker.frontends.openai.row import ChatPrompt, TextPrompt, TokensPrompt
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.tokenizer.messages import MessageProblem, checked_content, with_parsed_arguments

_KEYS_WITH_NULL: Final = (*(spec.name for spec in fields(SamplingParams) if spec.default is None), "max_tokens")
"""Sampling keys for which null is a value of its own, and not an absent one."""

_MAX_WHOLE_NUMBER: Final = 2**31 - 1
"""The maximum of any sampling key except `seed`: kernels take 32 bits."""


class RowProblem(ValueError):
    """A row that cannot run: the error code of the row, and a message for its author."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def short(value: Any) -> str:
    """A value for a message: complete when short, cut when long."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def refuse_unknown_keys(given: Iterable[str], known: Sequence[str], where: str = "") -> None:
    """Raise RowProblem for the first unknown key, with the nearest known one and all of them."""
    for key in given:
        if key in known:
            continue
        nearest = difflib.get_close_matches(key[:100], known, n=1)
        hint = f": did you mean {nearest[0]!r}?" if nearest else "."
        raise RowProblem("unknown_key", f"unknown key {key[:100]!r}{where}{hint} Known keys: {', '.join(known)}")


def text_prompt(name: str, value: Any) -> TextPrompt:
    """A prompt to encode; `name` is its key in messages."""
    if not isinstance(value, str):
        raise RowProblem("invalid_value", f"{name}={short(value)} must be a string")
    if not value:
        raise RowProblem("empty_prompt", f"{name} is empty: a prompt needs at least one token")
    return TextPrompt(value)


def tokens_prompt(name: str, value: Any) -> TokensPrompt:
    """Integers of any size and sign: the vocabulary is checked later."""
    if not isinstance(value, list):
        raise RowProblem("invalid_value", f"{name}={short(value)} must be a list of token ids")
    # Fast path: long prompts need no loop in the interpreter.
    if list(map(type, value)).count(int) < len(value):
        for position, token_id in enumerate(value):
            if type(token_id) is int:
                continue
            raise RowProblem(
                "invalid_value", f"{name}[{position}]={short(token_id)} must be a token id, a whole number"
            )
    if not value:
        raise RowProblem("empty_prompt", f"{name} is empty: a prompt needs at least one token")
    return TokensPrompt(tuple(value))


def chat_prompt(value: Any, template_kwargs: Any) -> ChatPrompt:
    """A conversation of at least one message. Raises RowProblem naming the invalid message and key."""
    if not isinstance(value, list):
        raise RowProblem("invalid_value", f"messages={short(value)} must be a list of messages")
    if not value:
        raise RowProblem("empty_prompt", "messages is empty: a conversation needs at least one message")
    if template_kwargs is not None and not isinstance(template_kwargs, dict):
        raise RowProblem("invalid_value", f"chat_template_kwargs={short(template_kwargs)} must be an object")
    return ChatPrompt(tuple(_message(position, item) for position, item in enumerate(value)), template_kwargs or {})


def sampling_from(defaults: SamplingParams, given: Mapping[str, Any]) -> SamplingParams:
    """The defaults, overridden by the row's values. Raises RowProblem with the violated rule."""
    overrides = {key: value for key, value in given.items() if value is not None or key in _KEYS_WITH_NULL}
    for key, value in overrides.items():
        if key != "seed" and isinstance(value, int) and abs(value) > _MAX_WHOLE_NUMBER:
            raise RowProblem("invalid_value", f"{key}={short(value)} must be at most {_MAX_WHOLE_NUMBER}")
    try:
        return replace(defaults, **overrides)
    except ValueError as error:
        raise RowProblem("invalid_value", str(error)[:500]) from None


def _message(position: int, value: Any) -> dict[str, Any]:
    """A message with its content as text or text parts and the arguments of its tool calls as objects; keys with null
    are dropped, as chat templates expect.
    """
    name = f"messages[{position}]"
    if not isinstance(value, dict):
        raise RowProblem("invalid_value", f"{name}={short(value)} must be an object with role and content")
    if not isinstance(value.get("role"), str) or not value["role"]:
        raise RowProblem("invalid_value", f"{name}.role={short(value.get('role'))} must be a string such as 'user'")
    message = {key: item for key, item in value.items() if item is not None}
    if len(message) == 1:
        raise RowProblem("invalid_value", f"{name} has no content")
    try:
        message = with_parsed_arguments(name, message)
        if "content" in message:
            message["content"] = checked_content(f"{name}.content", message["content"])
    except MessageProblem as problem:
        raise RowProblem(problem.code, str(problem)) from None
    return message
