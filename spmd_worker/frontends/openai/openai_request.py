"""Parses a row of the OpenAI batch format: custom_id, method, url, body."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from spmd_worker.base.config.plain_values import shown
from spmd_worker.chat.chat_request import ChatRequest, chat_request, response_schema
from spmd_worker.frontends.openai.audio_request import AUDIO_TASKS, audio_row
from spmd_worker.frontends.openai.pooling_request import pooling_row
from spmd_worker.frontends.openai.prompt_values import (
    EFFORT_KEY,
    LANGUAGE_KEYS,
    PRIORITY_KEY,
    SPACES_KEY,
    SPECIAL_TOKENS_KEY,
    TEMPLATE_KEYS,
    chat_prompt,
    check_keys,
    check_neutral,
    check_num_logprobs,
    check_spaces,
    embeds_prompt,
    for_encoder,
    model_name,
    sampling_from,
    text_prompt,
    tokens_prompt,
    with_effort,
    with_special_tokens,
)
from spmd_worker.frontends.openai.row import ChatPrompt, PoolingKind, Prompt, Row
from spmd_worker.replica.sequence.sampling_params import SAMPLING_KEYS, SamplingParams
from spmd_worker.tokenizer.messages import InvalidRequestError, optional_flag

OPENAI_ROW_KEYS: Final = ("method", "url", "body")
"""A row with any of these is an OpenAI batch row."""

COMPLETIONS_URL: Final = "/v1/completions"
CHAT_URL: Final = "/v1/chat/completions"
_POOLING_URLS: Final[Mapping[str, PoolingKind]] = {
    "/v1/embeddings": "embedding",
    **dict.fromkeys(("/v1/score", "/score"), "score"),
    **dict.fromkeys(("/v1/rerank", "/rerank", "/v2/rerank"), "rerank"),
    "/classify": "classify",
    "/pooling": "pooling",
}
"""OpenAI's names and vLLM's."""
URLS: Final = (COMPLETIONS_URL, CHAT_URL, *_POOLING_URLS, *AUDIO_TASKS)

IGNORED_KEYS: Final = (
    "model",
    "user",
    "metadata",
    "store",
    "service_tier",
    "stream_options",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "session_id",
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
    EFFORT_KEY: (),
    "verbosity": ("medium",),
    "web_search_options": (),
    "moderation": (),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "truncation_side": ("left",),
    "return_tokens_as_token_ids": (False,),
    "return_weight_versions": (False,),
    "kv_transfer_params": (),
    "vllm_xargs": ({},),
}
"""Keys of unsupported features, OpenAI's and then vLLM's, with the values besides null that are neutral."""

_INSTEAD: Final = {
    "use_beam_search": "a script that calls LLM.beam_search",
    "return_tokens_as_token_ids": "return_token_ids",
    "return_weight_versions": "a script: weight_versions of LLM.generate's outputs",
    "truncation_side": "a text that is cut at its end",
}

_UNSUPPORTED_IN_CHAT: Final[Mapping[str, tuple[Any, ...]]] = {
    **{
        key: neutral
        for key, neutral in _UNSUPPORTED.items()
        if key not in ("tools", "tool_choice", "parallel_tool_calls", EFFORT_KEY)
    },
    # OpenAI ranks only completions: a chat body has one sample per choice.
    "best_of": (1,),
    "echo": (False,),
    "chat_template": (),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
}

_INSTEAD_IN_CHAT: Final = {
    **_INSTEAD,
    "chat_template": "chat_template_kwargs to the folder's template",
    "documents": "them in messages",
    "functions": "tools",
    "function_call": "tool_choice",
}

_COMMON_KEYS: Final = (
    *(*SAMPLING_KEYS, "max_completion_tokens", "response_format", "return_token_ids", "echo", PRIORITY_KEY),
    *(SPECIAL_TOKENS_KEY, SPACES_KEY, "request_id", *IGNORED_KEYS, *_UNSUPPORTED),
)
_COMPLETION_KEYS: Final = ("prompt", "prompt_embeds", *LANGUAGE_KEYS, *_COMMON_KEYS)
_CHAT_KEYS: Final = tuple(
    dict.fromkeys(
        ("messages", "top_logprobs", "include_reasoning", *TEMPLATE_KEYS, *_COMMON_KEYS, *_UNSUPPORTED_IN_CHAT)
    )
)
BODY_KEYS: Final = (*_COMPLETION_KEYS, *_CHAT_KEYS)


def parse_openai(index: int, custom_id: str | None, fields: Mapping[str, Any], defaults: SamplingParams) -> Row:
    """The row of an OpenAI batch line. Raises InvalidRequestError."""
    check_keys(fields, ("custom_id", *OPENAI_ROW_KEYS))
    for key in ("custom_id", *OPENAI_ROW_KEYS):
        if fields.get(key) is None:
            raise InvalidRequestError(
                f"the row has no {key}: an OpenAI batch row has custom_id, method, url, body", "missing_key"
            )
    if fields["method"] != "POST":
        raise InvalidRequestError(f"method={shown(fields['method'])} must be 'POST'")
    body = fields["body"]
    if not isinstance(body, dict):
        raise InvalidRequestError(f"body={shown(body)} must be an object")
    for key in ("adapter", "prompt_adapter"):
        if body.get(key) is not None:
            message = f"{key} is a key of a plain row: a body names its adapter in model"
            raise InvalidRequestError(message, "unknown_key")
    url = fields["url"]
    if url == COMPLETIONS_URL:
        return _completion_row(index, custom_id, body, defaults)
    if url == CHAT_URL:
        return _chat_row(index, custom_id, body, defaults)
    if isinstance(url, str) and url in AUDIO_TASKS:
        return audio_row(index, custom_id, url, body, defaults)
    if isinstance(url, str) and url in _POOLING_URLS:
        return pooling_row(index, custom_id, _POOLING_URLS[url], body, defaults)
    raise InvalidRequestError(f"url={shown(url)} is not supported: use one of {', '.join(URLS)}", "unsupported_url")


def check_supported(fields: Mapping[str, Any]) -> None:
    """Raise InvalidRequestError for a key that no body takes either, unless its value is neutral."""
    of_none = {key: fields[key] for key in fields if key in _UNSUPPORTED and key in _UNSUPPORTED_IN_CHAT}
    check_neutral(of_none, _UNSUPPORTED_IN_CHAT, _INSTEAD_IN_CHAT)


def _completion_row(index: int, custom_id: str | None, body: Mapping[str, Any], defaults: SamplingParams) -> Row:
    check_keys(body, _COMPLETION_KEYS, " in body")
    check_neutral(body, _UNSUPPORTED, _INSTEAD)
    text, embeds = body.get("prompt"), body.get("prompt_embeds")
    if text is None and embeds is None:
        raise InvalidRequestError("the body has no prompt", "missing_prompt")
    # Older clients of OpenAI's always send a prompt.
    if text not in (None, "") and embeds is not None:
        raise InvalidRequestError("the body has prompt and prompt_embeds: give one of them", "conflicting_prompts")
    prompt = _completion_prompt(text) if embeds is None else embeds_prompt("prompt_embeds", embeds)
    prompt = for_encoder(with_special_tokens(prompt, body), body)
    given, echo = _sampling_values(body), optional_flag(body, "echo")
    is_alone = echo and type(given.get("max_tokens")) is int and given["max_tokens"] == 0
    if is_alone:
        # The minimum of an engine; the token is not part of the answer.
        given["max_tokens"] = 1
    _set_listed_ids(given, body)
    sampling = sampling_from(defaults, given)
    check_spaces(body, sampling)
    if echo and sampling.logprobs is not None and sampling.prompt_logprobs is None:
        sampling = replace(sampling, prompt_logprobs=sampling.logprobs)
    return Row(
        *(index, custom_id, "completion", prompt, sampling, model_name(body)),
        request=_response_format(body),
        echo=("prompt" if is_alone else "both") if echo else None,
        returns_token_ids=optional_flag(body, "return_token_ids"),
    )


def _chat_row(index: int, custom_id: str | None, body: Mapping[str, Any], defaults: SamplingParams) -> Row:
    check_keys(body, _CHAT_KEYS, " in body")
    check_neutral(body, _UNSUPPORTED_IN_CHAT, _INSTEAD_IN_CHAT)
    if body.get("messages") is None:
        raise InvalidRequestError("the body has no messages", "missing_prompt")
    prompt = with_effort(chat_prompt(body), body)
    request = _chat_request(body, prompt)
    if request is not None and request.tools:
        prompt = replace(prompt, template_kwargs={**prompt.template_kwargs, "tools": list(request.tools)})
    given = _sampling_values(body)
    if "best_of" in body:
        # best_of=1 does not limit the n of a chat body.
        given["best_of"] = None
    if "logprobs" in body or "top_logprobs" in body:
        given["logprobs"] = _chat_logprobs(body.get("logprobs"), body.get("top_logprobs"))
    _set_listed_ids(given, body)
    sampling = sampling_from(defaults, given)
    check_spaces(body, sampling)
    return Row(
        *(index, custom_id, "chat", prompt, sampling, model_name(body)),
        request=request,
        returns_token_ids=optional_flag(body, "return_token_ids"),
        includes_reasoning=optional_flag(body, "include_reasoning", default=True),
    )


def _set_listed_ids(given: dict[str, Any], body: Mapping[str, Any]) -> None:
    """`logprob_token_ids` of a body replace the number of alternatives. Raises InvalidRequestError as vLLM does, for a
    body that asks for no log-probabilities, and for one that has its prompt echoed.
    """
    if not given.get("logprob_token_ids"):
        return
    if given.get("logprobs") is None:
        flag = "true" if "messages" in body else "0"
        raise InvalidRequestError(f"logprob_token_ids needs logprobs: add logprobs={flag}", "conflicting_keys")
    if body.get("echo"):
        message = "logprob_token_ids with echo: a prompt's log-probabilities are of its top tokens: leave one out"
        raise InvalidRequestError(message, "conflicting_keys")
    given["logprobs"] = None


def _response_format(body: Mapping[str, Any]) -> ChatRequest | None:
    schema = response_schema(body.get("response_format"))
    if schema is None:
        return None
    _check_one_grammar(body, "response_format")
    return ChatRequest(schema=schema)


def _chat_request(body: Mapping[str, Any], prompt: ChatPrompt) -> ChatRequest | None:
    request = chat_request(body)
    if request is None:
        return None
    if request.tools and "tools" in prompt.template_kwargs:
        message = "tools and chat_template_kwargs.tools are both given: leave one out"
        raise InvalidRequestError(message, "conflicting_keys")
    if request.schema is not None or request.must_call:
        _check_one_grammar(body, "response_format" if request.schema is not None else "tool_choice")
    return request


def _check_one_grammar(body: Mapping[str, Any], key: str) -> None:
    if body.get("structured_outputs"):
        message = f"structured_outputs and {key} both constrain the answer: leave one out"
        raise InvalidRequestError(message, "conflicting_keys")


def _completion_prompt(value: Any) -> Prompt:
    """Text, or token ids, or a list of one of either."""
    name = "prompt"
    if isinstance(value, list) and any(isinstance(item, str | list) for item in value):
        if len(value) > 1:
            message = f"prompt is a list of {len(value)} prompts: write one row for each"
            raise InvalidRequestError(message, "unsupported_value")
        name, value = "prompt[0]", value[0]
    return tokens_prompt(name, value) if isinstance(value, list) else text_prompt(name, value)


def _sampling_values(body: Mapping[str, Any]) -> dict[str, Any]:
    given = {key: body[key] for key in SAMPLING_KEYS if key in body}
    limit = body.get("max_completion_tokens")
    if limit is not None:
        if type(limit) is not int or limit < (0 if body.get("echo") else 1):
            raise InvalidRequestError(f"max_completion_tokens={shown(limit)} must be a whole number, 1 or more")
        if body.get("max_tokens") not in (None, limit):
            both = f"max_tokens={shown(body['max_tokens'])} and max_completion_tokens={shown(limit)}"
            raise InvalidRequestError(f"{both} differ: give one", "conflicting_keys")
        given["max_tokens"] = limit
    return given


def _chat_logprobs(logprobs: Any, top_logprobs: Any) -> int | None:
    """Number of alternatives per token; None without log-probabilities. Chat bodies have a flag and a number."""
    if logprobs is not None and not isinstance(logprobs, bool):
        raise InvalidRequestError(f"logprobs={shown(logprobs)} must be true or false in a chat body")
    if top_logprobs is not None and type(top_logprobs) is not int:
        raise InvalidRequestError(f"top_logprobs={shown(top_logprobs)} must be an integer")
    check_num_logprobs("top_logprobs", top_logprobs)
    if top_logprobs and not logprobs:
        raise InvalidRequestError(f"top_logprobs={shown(top_logprobs)} needs logprobs=true", "conflicting_keys")
    return (top_logprobs or 0) if logprobs else None
