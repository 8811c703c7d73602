"""vLLM's `/tokenize` and `/detokenize`, answered without the engine."""

from collections.abc import Mapping
from typing import Any, Final

from spmd_worker.frontends.openai.openai_body import JsonObject
from spmd_worker.frontends.openai.openai_request import CHAT_URL
from spmd_worker.frontends.openai.prompt_ids import encode
from spmd_worker.frontends.openai.prompt_values import TEMPLATE_KEYS, check_keys, text_prompt, tokens_prompt
from spmd_worker.frontends.openai.row import ChatPrompt, ReadPrompt
from spmd_worker.frontends.openai.row_parser import parse_fields
from spmd_worker.frontends.serve.request_reader import RequestReader, naming_keys, parse_body
from spmd_worker.tokenizer.messages import InvalidRequestError, optional_flag
from spmd_worker.tokenizer.tokenizer import Tokenizer

TOKENIZE_URL: Final = "/tokenize"
DETOKENIZE_URL: Final = "/detokenize"

MAX_CHARACTERS: Final = 1 << 20
"""Most characters of a text, and most ids to decode: encoding a megabyte takes about a second."""

_CHAT_KEYS: Final = ("messages", "tools", *TEMPLATE_KEYS)
_FLAGS: Final = ("add_special_tokens", "return_token_strs")
_KEYS: Final = ("model", "prompt", *_CHAT_KEYS, *_FLAGS)


def answer_tokens(reader: RequestReader, url: str, data: bytes) -> JsonObject:
    """Body of the response to a request at either path. Any thread may call it. Raises InvalidRequestError."""
    body = parse_body(data, reader.context.limits)
    if reader.context.tokenizer is None:
        raise InvalidRequestError("the model folder has no tokenizer.json", "tokenizer_missing")
    with naming_keys(body):
        return (_tokenized if url == TOKENIZE_URL else _detokenized)(reader, reader.context.tokenizer, body)


def _tokenized(reader: RequestReader, tokenizer: Tokenizer, body: Mapping[str, Any]) -> JsonObject:
    check_keys(body, _KEYS, " in body")
    given = [key for key in ("prompt", "messages") if body.get(key) is not None]
    if len(given) != 1:
        code = "conflicting_prompts" if given else "missing_prompt"
        raise InvalidRequestError("the body needs one of prompt and messages", code)
    prompt: ReadPrompt = text_prompt("prompt", body["prompt"]) if given == ["prompt"] else _conversation(reader, body)
    # The tokenizer adds special tokens to text; a chat template has written them.
    adds = optional_flag(body, "add_special_tokens", default=not isinstance(prompt, ChatPrompt))
    shows_strings = optional_flag(body, "return_token_strs")
    _, token_ids = encode(prompt, tokenizer, _check_length, adds)
    return {
        "count": len(token_ids),
        "max_model_len": reader.context.engine.max_model_len,
        "tokens": list(token_ids),
        "token_strs": [tokenizer.token(each) or "" for each in token_ids] if shows_strings else None,
    }


def _detokenized(reader: RequestReader, tokenizer: Tokenizer, body: Mapping[str, Any]) -> JsonObject:
    check_keys(body, ("model", "tokens"), " in body")
    if body.get("tokens") == []:
        return {"prompt": ""}
    token_ids = tokens_prompt("tokens", body.get("tokens")).token_ids
    if len(token_ids) > MAX_CHARACTERS:
        raise InvalidRequestError(f"tokens has {len(token_ids)} ids, more than {MAX_CHARACTERS}", "limit_exceeded")
    size = max(reader.context.engine.vocab_size, tokenizer.vocab_size)
    if min(token_ids) < 0 or max(token_ids) >= size:
        message = f"tokens contains an id outside the vocabulary of {size} tokens"
        raise InvalidRequestError(message, "token_out_of_vocabulary")
    return {"prompt": tokenizer.decode(token_ids, skip_special_tokens=False)}


def _conversation(reader: RequestReader, body: Mapping[str, Any]) -> ChatPrompt:
    """The prompt of a chat body, parsed by the same code."""
    chat = {key: body[key] for key in _CHAT_KEYS if key in body}
    fields = {"custom_id": "tokens", "method": "POST", "url": CHAT_URL, "body": chat}
    row = parse_fields(0, fields, reader.defaults, reader.context.limits)
    assert isinstance(row.prompt, ChatPrompt), "of a chat body"
    if row.prompt.images:
        what = "images" if row.prompt.media[0] == "image" else "recordings"
        message = f"{what} are not counted here: send the request with max_tokens 1, whose usage counts their tokens"
        raise InvalidRequestError(message, "unsupported_value")
    return row.prompt


def _check_length(text: str) -> None:
    if len(text) > MAX_CHARACTERS:
        raise InvalidRequestError(f"the text has {len(text)} characters, more than {MAX_CHARACTERS}", "limit_exceeded")
