"""Parses a row of the OpenAI batch format: custom_id, method, url, body."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from spmd_worker.chat.chat_request import ChatRequest, chat_request, response_schema
from spmd_worker.frontends.openai.pooling_request import pooling_row
from spmd_worker.frontends.openai.prompt_values import (
    RowProblem,
    chat_prompt,
    refuse_unknown_keys,
    sampling_from,
    short,
    text_prompt,
    tokens_prompt,
)
from spmd_worker.frontends.openai.row import ChatPrompt, PoolingKind, Prompt, Row, TextPrompt, TokensPrompt
from spmd_worker.replica.sequence.sampling_params import SAMPLING_KEYS, SamplingParams
from spmd_worker.tokenizer.messages import MessageProblem

OPENAI_ROW_KEYS: Final = ("method", "url", "body")
"""A row with any of these is an OpenAI batch row."""

COMPLETIONS_URL: Final = "/v1/completions"
CHAT_URL: Final = "/v1/chat/completions"
_POOLING_URLS: Final[Mapping[str, PoolingKind]] = {
    "/v1/embeddings": "embedding",
    **dict.fromkeys(("/v1/score", "/score"), "score"),
    **dict.fromkeys(("/v1/rerank", "/rerank", "/v2/rerank"), "rerank"),
}
"""OpenAI's names and vLLM's."""
COMPLETION_URLS: Final = (COMPLETIONS_URL, CHAT_URL)
URLS: Final = (*COMPLETION_URLS, *_POOLING_URLS)

IGNORED_KEYS: Final = (
    "model",
    "user",
    "metadata",
    "store",
    "service_tier",
    "stream_options",
    "safety_identifier",
    "prompt_cache_key",
)
"""Accepted, without effect on the answer (`model` is repeated in it)."""

_UNSUPPORTED: Final[Mapping[str, tuple[Any, ...]]] = {
    "stream": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
}
"""Keys of unsupported features, with the values besides null that are neutral."""

_FORM_KEYS: Final = ("tools", "tool_choice", "parallel_tool_calls")
"""Keys of the answer's grammar that only a chat body has."""

_UNSUPPORTED_IN_CHAT: Final[Mapping[str, tuple[Any, ...]]] = {
    **{key: neutral for key, neutral in _UNSUPPORTED.items() if key not in _FORM_KEYS},
    # OpenAI ranks only completions: a chat body has one sample per choice.
    "best_of": (1,),
    "echo": (False,),
}

_COMMON_KEYS: Final = (
    *(*SAMPLING_KEYS, "max_completion_tokens", "response_format", "return_token_ids", "echo"),
    *(*IGNORED_KEYS, *_UNSUPPORTED),
)
_COMPLETION_KEYS: Final = ("prompt", *_COMMON_KEYS)
_CHAT_KEYS: Final = ("messages", "top_logprobs", "chat_template_kwargs", *_COMMON_KEYS)


def parse_openai(index: int, custom_id: str | None, fields: Mapping[str, Any], defaults: SamplingParams) -> Row:
    """The row of an OpenAI batch line. Raises RowProblem with the code and message of the error row."""
    refuse_unknown_keys(fields, ("custom_id", *OPENAI_ROW_KEYS))
    for key in ("custom_id", *OPENAI_ROW_KEYS):
        if fields.get(key) is None:
            raise RowProblem(
                "missing_key", f"the row has no {key}: an OpenAI batch row has custom_id, method, url, body"
            )
    if fields["method"] != "POST":
        raise RowProblem("invalid_value", f"method={short(fields['method'])} must be 'POST'")
    body = fields["body"]
    if not isinstance(body, dict):
        raise RowProblem("invalid_value", f"body={short(body)} must be an object")
    url = fields["url"]
    if url == COMPLETIONS_URL:
        return _completion_row(index, custom_id, body, defaults)
    if url == CHAT_URL:
        return _chat_row(index, custom_id, body, defaults)
    if isinstance(url, str) and url in _POOLING_URLS:
        return pooling_row(index, custom_id, _POOLING_URLS[url], body, defaults)
    raise RowProblem("unsupported_url", f"url={short(url)} is not supported: use one of {', '.join(URLS)}")


def _completion_row(index: int, custom_id: str | None, body: Mapping[str, Any], defaults: SamplingParams) -> Row:
    _check_keys(body, _COMPLETION_KEYS, _UNSUPPORTED)
    if body.get("prompt") is None:
        raise RowProblem("missing_prompt", "the body has no prompt")
    prompt = _completion_prompt(body["prompt"])
    given, echo = _sampling_values(body), _flag(body, "echo")
    is_alone = echo and type(given.get("max_tokens")) is int and given["max_tokens"] == 0
    if is_alone:
        # The minimum of an engine; it is not shown.
        given["max_tokens"] = 1
    sampling = sampling_from(defaults, given)
    if echo and sampling.logprobs is not None and sampling.prompt_logprobs is None:
        sampling = replace(sampling, prompt_logprobs=sampling.logprobs)
    return Row(
        *(index, custom_id, "completion", prompt, sampling, _model_name(body)),
        request=_response_format(body),
        echo=("prompt" if is_alone else "both") if echo else None,
        returns_token_ids=_flag(body, "return_token_ids"),
    )


def _chat_row(index: int, custom_id: str | None, body: Mapping[str, Any], defaults: SamplingParams) -> Row:
    _check_keys(body, _CHAT_KEYS, _UNSUPPORTED_IN_CHAT)
    if body.get("messages") is None:
        raise RowProblem("missing_prompt", "the body has no messages")
    prompt = chat_prompt(body["messages"], body.get("chat_template_kwargs"))
    request = _chat_request(body, prompt)
    if request is not None and request.tools:
        prompt = replace(prompt, template_kwargs={**prompt.template_kwargs, "tools": list(request.tools)})
    given = _sampling_values(body)
    if "best_of" in body:
        # A chat body's 1 is not a limit of its n.
        given["best_of"] = None
    if "logprobs" in body or "top_logprobs" in body:
        given["logprobs"] = _chat_logprobs(body.get("logprobs"), body.get("top_logprobs"))
    return Row(
        *(index, custom_id, "chat", prompt, sampling_from(defaults, given), _model_name(body)),
        request=request,
        returns_token_ids=_flag(body, "return_token_ids"),
    )


def _response_format(body: Mapping[str, Any]) -> ChatRequest | None:
    """Grammar of a completion; None for free text."""
    try:
        schema = response_schema(body.get("response_format"))
    except MessageProblem as problem:
        raise RowProblem(problem.code, str(problem)) from None
    if schema is None:
        return None
    _check_one_form(body, "response_format")
    return ChatRequest(schema=schema)


def _chat_request(body: Mapping[str, Any], prompt: ChatPrompt) -> ChatRequest | None:
    try:
        request = chat_request(body)
    except MessageProblem as problem:
        raise RowProblem(problem.code, str(problem)) from None
    if request is None:
        return None
    if request.tools and "tools" in prompt.template_kwargs:
        raise RowProblem("conflicting_keys", "tools and chat_template_kwargs.tools are both given: leave one out")
    if request.schema is not None or request.must_call:
        _check_one_form(body, "response_format" if request.schema is not None else "tool_choice")
    return request


def _check_one_form(body: Mapping[str, Any], key: str) -> None:
    if body.get("structured_outputs"):
        raise RowProblem("conflicting_keys", f"structured_outputs and {key} both constrain the answer: leave one out")


def _flag(body: Mapping[str, Any], key: str) -> bool:
    value = body.get(key)
    if not isinstance(value, bool | None):
        raise RowProblem("invalid_value", f"{key}={short(value)} must be true or false")
    return bool(value)


def _check_keys(body: Mapping[str, Any], known: tuple[str, ...], unsupported: Mapping[str, tuple[Any, ...]]) -> None:
    refuse_unknown_keys(body, known, " in body")
    for key, neutral in unsupported.items():
        value = body.get(key)
        # Types are compared too: true is not 1.
        if value is not None and not any(value == item and type(value) is type(item) for item in neutral):
            raise RowProblem("unsupported_value", f"{key}={short(value)} is not supported")


def _completion_prompt(value: Any) -> Prompt:
    """Text, or token ids, or a list of one of either."""
    if not isinstance(value, list):
        return text_prompt("prompt", value)
    if any(isinstance(item, str | list) for item in value):
        if len(value) > 1:
            message = f"prompt is a list of {len(value)} prompts: write one row for each"
            raise RowProblem("unsupported_value", message)
        return _single_prompt(value[0])
    return tokens_prompt("prompt", value)


def _single_prompt(value: str | list[Any]) -> TextPrompt | TokensPrompt:
    return text_prompt("prompt[0]", value) if isinstance(value, str) else tokens_prompt("prompt[0]", value)


def _sampling_values(body: Mapping[str, Any]) -> dict[str, Any]:
    given = {key: body[key] for key in SAMPLING_KEYS if key in body}
    limit = body.get("max_completion_tokens")
    if limit is None:
        return given
    if body.get("max_tokens") is not None and body["max_tokens"] != limit:
        message = f"max_tokens={short(body['max_tokens'])} and max_completion_tokens={short(limit)} differ: give one"
        raise RowProblem("conflicting_keys", message)
    given["max_tokens"] = limit
    return given


def _chat_logprobs(logprobs: Any, top_logprobs: Any) -> int | None:
    """Alternatives per token; None for none. Chat bodies have a flag and a number."""
    if logprobs is not None and not isinstance(logprobs, bool):
        raise RowProblem("invalid_value", f"logprobs={short(logprobs)} must be true or false in a chat body")
    if top_logprobs is not None and type(top_logprobs) is not int:
        raise RowProblem("invalid_value", f"top_logprobs={short(top_logprobs)} must be a whole number")
    if top_logprobs and not logprobs:
        raise RowProblem("conflicting_keys", f"top_logprobs={short(top_logprobs)} needs logprobs=true")
    return (top_logprobs or 0) if logprobs else None


def _model_name(body: Mapping[str, Any]) -> str | None:
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise RowProblem("invalid_value", f"model={short(model)} must be a string")
    return model
