"""vLLM's `/tokenize` and `/detokenize`, answered without the engine."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from spmd_worker.base.files import JsonError, parse_json_object
from spmd_worker.frontends.openai.openai_body import JsonObject
from spmd_worker.frontends.openai.openai_request import CHAT_URL
from spmd_worker.frontends.openai.prompt_values import (
    RowProblem,
    refuse_unknown_keys,
    short,
    text_prompt,
    tokens_prompt,
)
from spmd_worker.frontends.openai.row import ChatPrompt, Prompt, RowError
from spmd_worker.frontends.openai.row_parser import encode, parse_fields
from spmd_worker.frontends.serve.request_reader import RequestReader
from spmd_worker.tokenizer.tokenizer import Tokenizer

TOKENIZE_URL: Final = "/tokenize"
DETOKENIZE_URL: Final = "/detokenize"

MAX_CHARACTERS: Final = 1 << 20
"""Most characters of a text, and most ids to decode: encoding a megabyte takes about a second."""

_CHAT_KEYS: Final = ("messages", "tools", "chat_template_kwargs")
_FLAGS: Final = ("add_special_tokens", "return_token_strs", "add_generation_prompt")
_KEYS: Final = ("model", "prompt", *_CHAT_KEYS, *_FLAGS)


def answer_tokens(reader: RequestReader, url: str, data: bytes) -> JsonObject | RowError:
    """Body of the response to a request at either path. Any thread may call it."""
    try:
        # The same depth as a row's body.
        body = parse_json_object(data, max_nesting=reader.limits.max_nesting - 1)
        if reader.tokenizer is None:
            raise RowProblem("tokenizer_missing", "the model folder has no tokenizer.json")
        answer = _tokenized if url == TOKENIZE_URL else _detokenized
        return answer(reader, reader.tokenizer, body)
    except JsonError as error:
        return RowError(0, None, "openai", error.code, f"the body {error}")
    except RowProblem as problem:
        return RowError(0, None, "openai", problem.code, str(problem))


def _tokenized(reader: RequestReader, tokenizer: Tokenizer, body: Mapping[str, Any]) -> JsonObject:
    refuse_unknown_keys(body, _KEYS, " in body")
    given = [key for key in ("prompt", "messages") if body.get(key) is not None]
    if len(given) != 1:
        code = "conflicting_prompts" if given else "missing_prompt"
        raise RowProblem(code, "the body needs one of prompt and messages")
    prompt: Prompt = text_prompt("prompt", body["prompt"]) if given == ["prompt"] else _conversation(reader, body)
    # The tokenizer adds special tokens to text; a chat template has written them.
    adds = _flag(body, "add_special_tokens", default=not isinstance(prompt, ChatPrompt))
    shows_strings = _flag(body, "return_token_strs", default=False)
    _, token_ids = encode(prompt, tokenizer, _check_length, adds)
    return {
        "count": len(token_ids),
        "max_model_len": reader.engine_limits.max_model_len,
        "tokens": list(token_ids),
        "token_strs": [tokenizer.token(each) or "" for each in token_ids] if shows_strings else None,
    }


def _detokenized(reader: RequestReader, tokenizer: Tokenizer, body: Mapping[str, Any]) -> JsonObject:
    refuse_unknown_keys(body, ("model", "tokens"), " in body")
    if body.get("tokens") == []:
        return {"prompt": ""}
    token_ids = tokens_prompt("tokens", body.get("tokens")).token_ids
    if len(token_ids) > MAX_CHARACTERS:
        raise RowProblem("limit_exceeded", f"tokens has {len(token_ids)} ids, more than {MAX_CHARACTERS}")
    size = max(reader.engine_limits.vocab_size, tokenizer.vocab_size)
    if min(token_ids) < 0 or max(token_ids) >= size:
        message = f"tokens holds an id outside the vocabulary of {size} tokens"
        raise RowProblem("token_out_of_vocabulary", message)
    return {"prompt": tokenizer.decode(token_ids, skip_special_tokens=False)}


def _conversation(reader: RequestReader, body: Mapping[str, Any]) -> ChatPrompt:
    """The prompt of a chat body, parsed by the same code."""
    chat = {key: body[key] for key in _CHAT_KEYS if key in body}
    fields = {"custom_id": "tokens", "method": "POST", "url": CHAT_URL, "body": chat}
    row = parse_fields(0, fields, reader.defaults, reader.limits)
    if isinstance(row, RowError):
        raise RowProblem(row.code, row.message)
    assert isinstance(row.prompt, ChatPrompt), "of a chat body"
    return replace(row.prompt, add_generation_prompt=_flag(body, "add_generation_prompt", default=True))


def _check_length(text: str) -> None:
    if len(text) > MAX_CHARACTERS:
        raise RowProblem("limit_exceeded", f"the text has {len(text)} characters, more than {MAX_CHARACTERS}")


def _flag(body: Mapping[str, Any], key: str, *, default: bool) -> bool:
    value = body.get(key)
    if not isinstance(value, bool | None):
        raise RowProblem("invalid_value", f"{key}={short(value)} must be true or false")
    return default if value is None else value
