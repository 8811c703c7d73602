"""Parses pooling rows: bodies of /v1/embeddings, /v1/score, /v1/rerank, /classify and /pooling, and plain rows with a
task as key.
"""

from collections.abc import Mapping
from typing import Any, Final

from spmd_worker.base.config.plain_values import shown
from spmd_worker.frontends.openai.prompt_values import (
    PRIORITY_KEY,
    SPECIAL_TOKENS_KEY,
    TEMPLATE_KEYS,
    adapter_name,
    chat_prompt,
    check_keys,
    check_neutral,
    invalid_request,
    model_name,
    text_prompt,
    tokens_prompt,
    with_media,
)
from spmd_worker.frontends.openai.row import ChatPrompt, PoolingInputs, PoolingKind, Row, TextPrompt, TokensPrompt
from spmd_worker.model_config.pooling import TOKEN_TASKS
from spmd_worker.replica.sequence.pooling_params import PoolingParams
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.tokenizer.messages import InvalidRequestError, optional_flag

PLAIN_TASKS: Final = ("embed", "classify", "reward", *TOKEN_TASKS)
"""Keys of plain rows that contain the text to pool."""

_PARAM_KEYS: Final = ("dimensions", "normalize", "use_activation", "truncate_prompt_tokens")
_TYPED_KEYS: Final = (*_PARAM_KEYS, "input_type", "late_chunking_params")
"""Those of rows whose texts may be queries or documents, or have vectors of chunks."""
_COMMON_KEYS: Final = ("model", "user", "metadata", "request_id", PRIORITY_KEY)
_CHAT_KEYS: Final = ("messages", *TEMPLATE_KEYS)
_UNSUPPORTED: Final[Mapping[str, tuple[Any, ...]]] = {
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "chat_template": (),
    "mm_processor_kwargs": ({},),
}
"""Keys of vLLM's bodies, with the values besides null that change nothing."""
_INPUT_KEYS: Final = ("input", *_CHAT_KEYS, SPECIAL_TOKENS_KEY, *_UNSUPPORTED)
_EMBEDDING_KEYS: Final = (*_INPUT_KEYS, "encoding_format", *_PARAM_KEYS, *_COMMON_KEYS)
_SCORE_KEYS: Final = ("text_1", "text_2", "use_activation", "truncate_prompt_tokens", *_COMMON_KEYS)
_RERANK_KEYS: Final = ("query", "documents", "top_n", "use_activation", "truncate_prompt_tokens", *_COMMON_KEYS)
_CLASSIFY_KEYS: Final = (*_INPUT_KEYS, "use_activation", "truncate_prompt_tokens", *_COMMON_KEYS)
_POOLING_KEYS: Final = (*_INPUT_KEYS, "task", "encoding_format", *_TYPED_KEYS, *_COMMON_KEYS)
PLAIN_KEYS: Final = (*PLAIN_TASKS, "images", "videos", "custom_id", "adapter", PRIORITY_KEY, *_TYPED_KEYS)

MAX_INPUTS: Final = 2048
"""Most texts of one row; OpenAI's limit for `input`."""

_Prompt = TextPrompt | TokensPrompt | ChatPrompt


def pooling_row(
    index: int, custom_id: str | None, kind: PoolingKind, body: Mapping[str, Any], defaults: SamplingParams
) -> Row:
    """Row of an OpenAI batch line. Raises InvalidRequestError."""
    parse = {
        "embedding": _embedding,
        "score": _score,
        "rerank": _rerank,
        "classify": _classification,
        "pooling": _pooled,
    }
    inputs = parse[kind](body)
    return Row(index, custom_id, kind, inputs.prompts[0], defaults, model_name(body), pooling=inputs)


def plain_pooling_row(index: int, custom_id: str | None, fields: Mapping[str, Any], defaults: SamplingParams) -> Row:
    """Row of a plain line with one of `PLAIN_TASKS`. Raises InvalidRequestError."""
    check_keys(fields, PLAIN_KEYS)
    (task, *others) = [key for key in PLAIN_TASKS if fields.get(key) is not None]
    if others:
        raise InvalidRequestError(f"the row has {task} and {others[0]}: give one of them", "conflicting_prompts")
    value = fields[task]
    if isinstance(value, dict):
        check_keys(value, _CHAT_KEYS, f" in {task}")
    if isinstance(value, list) and value and isinstance(value[0], str):
        way_out = "each of several texts needs a row of its own; a body of /v1/embeddings takes a list"
        raise InvalidRequestError(f"{task}={shown(value)} must be a text, or token ids: {way_out}")
    prompt = _conversation(value) if isinstance(value, dict) else _one(task, value)
    prompt = with_media(prompt, fields)
    inputs = PoolingInputs((prompt,), _params(fields, task))
    return Row(index, custom_id, "pooled", prompt, defaults, pooling=inputs, adapter=adapter_name(fields))


def _embedding(body: Mapping[str, Any]) -> PoolingInputs:
    check_keys(body, _EMBEDDING_KEYS, " in body")
    return PoolingInputs(_texts_or_conversation(body), _params(body, "embed"), is_base64=_is_base64(body))


def _pooled(body: Mapping[str, Any]) -> PoolingInputs:
    """vLLM's body of any task, by default the model's."""
    check_keys(body, _POOLING_KEYS, " in body")
    return PoolingInputs(_texts_or_conversation(body), _params(body, body.get("task")), is_base64=_is_base64(body))


def _is_base64(body: Mapping[str, Any]) -> bool:
    encoding = body.get("encoding_format")
    if encoding not in (None, "float", "base64"):
        raise InvalidRequestError(f"encoding_format={shown(encoding)} must be 'float' or 'base64'")
    return encoding == "base64"


def _classification(body: Mapping[str, Any]) -> PoolingInputs:
    check_keys(body, _CLASSIFY_KEYS, " in body")
    return PoolingInputs(_texts_or_conversation(body), _params(body, "classify"))


def _score(body: Mapping[str, Any]) -> PoolingInputs:
    _check_texts_alone(body, "text_1", "text_2")
    check_keys(body, _SCORE_KEYS, " in body")
    firsts, seconds = _texts(body, "text_1"), _texts(body, "text_2")
    if len(firsts) not in (1, len(seconds)):
        message = f"text_1 has {len(firsts)} texts and text_2 {len(seconds)}: give one, or the same number"
        raise InvalidRequestError(message)
    return PoolingInputs((*firsts, *seconds), _params(body, "score"), num_firsts=len(firsts))


def _rerank(body: Mapping[str, Any]) -> PoolingInputs:
    _check_texts_alone(body, "query", "documents")
    check_keys(body, _RERANK_KEYS, " in body")
    if not isinstance(body.get("query"), str):
        raise InvalidRequestError(f"query={shown(body.get('query'))} must be a string")
    documents, top_n = body.get("documents"), body.get("top_n")
    if isinstance(documents, list):
        documents = [each["text"] if isinstance(each, dict) and [*each] == ["text"] else each for each in documents]
    if top_n is not None and (type(top_n) is not int or top_n < 1):
        raise InvalidRequestError(f"top_n={shown(top_n)} must be an integer, 1 or more")
    texts = _texts({"documents": documents}, "documents")
    query = text_prompt("query", body["query"])
    return PoolingInputs((query, *texts), _params(body, "score"), num_firsts=1, top_n=top_n)


def _check_texts_alone(body: Mapping[str, Any], *names: str) -> None:
    """Reject images, and vLLM's `{"content": parts}`, which may have some."""
    given = [each for name in names for each in (body[name] if isinstance(body.get(name), list) else [body.get(name)])]
    if body.get("images") is not None or any(isinstance(each, dict) and "content" in each for each in given):
        raise InvalidRequestError(
            f"{' and '.join(names)} are texts alone: embed images in rows of /v1/embeddings and compare the vectors",
            "images_unsupported",
        )


def _params(given: Mapping[str, Any], task: Any) -> PoolingParams:
    with invalid_request():
        return PoolingParams(task=task, **{key: given[key] for key in _TYPED_KEYS if key in given})


def _texts_or_conversation(body: Mapping[str, Any]) -> tuple[_Prompt, ...]:
    check_neutral(body, _UNSUPPORTED)
    value = body.get("input")
    if value is None and body.get("messages") is None:
        raise InvalidRequestError("the body has no input", "missing_prompt")
    if value is not None and body.get("messages") is not None:
        raise InvalidRequestError("the body has input and messages: give one of them", "conflicting_prompts")
    if value is None:
        return (_conversation(body),)
    prompts = _inputs("input", value)
    adds = optional_flag(body, SPECIAL_TOKENS_KEY, default=True)
    if not adds and any(isinstance(each, TextPrompt) for each in prompts):
        message = f"{SPECIAL_TOKENS_KEY}=false is not supported with texts that are pooled"
        raise InvalidRequestError(f"{message}: leave it out, or give token ids", "unsupported_value")
    return prompts


def _inputs(name: str, value: Any) -> tuple[_Prompt, ...]:
    if not isinstance(value, list) or (value and not isinstance(value[0], str | list)):
        return (_one(name, value),)
    _check_number(name, value)
    return tuple(_one(f"{name}[{index}]", each) for index, each in enumerate(value))


def _conversation(given: Mapping[str, Any]) -> ChatPrompt:
    """A conversation that is pooled, as vLLM's bodies have it."""
    return chat_prompt(given, add_generation_prompt=False)


def _one(name: str, value: Any) -> TextPrompt | TokensPrompt:
    return tokens_prompt(name, value) if isinstance(value, list) else text_prompt(name, value)


def _texts(body: Mapping[str, Any], name: str) -> tuple[TextPrompt, ...]:
    value = body.get(name)
    if value is None:
        raise InvalidRequestError(f"the body has no {name}", "missing_prompt")
    if not isinstance(value, list):
        return (text_prompt(name, value),)
    _check_number(name, value)
    return tuple(text_prompt(f"{name}[{index}]", each) for index, each in enumerate(value))


def _check_number(name: str, value: list[Any]) -> None:
    if not value:
        raise InvalidRequestError(f"{name} is empty: give at least one text", "empty_prompt")
    if len(value) > MAX_INPUTS:
        raise InvalidRequestError(
            f"{name} has {len(value)} texts, more than {MAX_INPUTS}: write more rows", "limit_exceeded"
        )
