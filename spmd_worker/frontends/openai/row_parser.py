"""Parses a line into a Row, and encodes a Row; any error becomes a RowError, never an exception."""

from collections.abc import Mapping
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

from spmd_worker.base.config.plain_values import shown
from spmd_worker.base.config.schema import RowLimits
from spmd_worker.base.digest_set import DigestSet
from spmd_worker.base.files import JsonError, parse_json_object
from spmd_worker.chat.chat_format import ChatFormat
from spmd_worker.frontends.openai.audio_request import PLAIN_KEYS as AUDIO_KEYS
from spmd_worker.frontends.openai.audio_request import plain_audio_row
from spmd_worker.frontends.openai.openai_request import BODY_KEYS, OPENAI_ROW_KEYS, check_supported, parse_openai
from spmd_worker.frontends.openai.pooling_request import PLAIN_KEYS as POOLING_KEYS
from spmd_worker.frontends.openai.pooling_request import PLAIN_TASKS, plain_pooling_row
from spmd_worker.frontends.openai.prompt_values import (
    LANGUAGE_KEYS,
    PRIORITY_KEY,
    SPACES_KEY,
    SPECIAL_TOKENS_KEY,
    TEMPLATE_KEYS,
    adapter_name,
    chat_prompt,
    check_keys,
    check_spaces,
    embeds_prompt,
    for_encoder,
    priority_of,
    request_id_of,
    sampling_from,
    text_prompt,
    tokens_prompt,
    with_media,
    with_special_tokens,
)
from spmd_worker.frontends.openai.row import (
    ErrorShape,
    Prompt,
    Row,
    RowError,
    shape_of,
)
from spmd_worker.replica.sequence.sampling_params import SAMPLING_KEYS, SamplingParams
from spmd_worker.tokenizer.messages import InvalidRequestError

_PROMPT_KEYS: Final = ("prompt", "prompt_token_ids", "prompt_embeds", "messages", "encoder_prompt")
_PLAIN_KEYS: Final = (
    *_PROMPT_KEYS,
    "images",
    "videos",
    "audios",
    "custom_id",
    "adapter",
    "prompt_adapter",
    PRIORITY_KEY,
    *TEMPLATE_KEYS,
    SPECIAL_TOKENS_KEY,
    SPACES_KEY,
    "decoder_prompt",
    *LANGUAGE_KEYS,
    *SAMPLING_KEYS,
)
ROW_KEYS: Final = tuple(dict.fromkeys((*_PLAIN_KEYS, *AUDIO_KEYS, *POOLING_KEYS, *OPENAI_ROW_KEYS)))

_OTHER_KEYS: Final[tuple[tuple[type, str], ...]] = (
    (int, "token ids are given as prompt_token_ids"),
    (dict, "a conversation is given as messages"),
    (object, "each of several prompts needs a row of its own"),
)
"""Type of the first element of a list as `prompt` -> what to write instead."""

_PLAIN_NAMES: Final = {
    "response_format": "structured_outputs",
    "model": "adapter",
    "max_completion_tokens": "max_tokens",
    "reasoning_effort": "chat_template_kwargs",
}
"""Keys of bodies -> those of plain rows."""

_DEFAULT_LIMITS: Final = RowLimits()
_NO_FORMAT: Final = ChatFormat()
_MAX_TOKENS_KEY: Final = "limits.max_prompt_tokens"


_LIMITS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("n", "best_of"), "max_n"),
    "max_tokens": "max_tokens",
    **dict.fromkeys(("stop", "stop_token_ids"), "max_stop_strings"),
    **dict.fromkeys(("logit_bias", "allowed_token_ids", "bad_words", "bad_words_ids", "token_rules"), "max_logit_bias"),
}
"""Sampling key -> the limit of its value, or of its number of entries."""


def parse_row(index: int, line: bytes, defaults: SamplingParams, limits: RowLimits = _DEFAULT_LIMITS) -> Row | RowError:
    """Parse a line. `defaults` apply to every sampling key that the row leaves out.

    In both formats null means the default, except for the keys whose null has a meaning of its own: `best_of`, `seed`,
    `max_tokens` (as many as the model's length allows), `logprobs`, `prompt_logprobs`, and those whose null is off.
    """
    custom_id: Any = None
    shape: ErrorShape = "plain"
    try:
        if len(line) > limits.num_line_bytes:
            message = f"the line is longer than limits.max_line_bytes={limits.num_line_bytes}"
            raise InvalidRequestError(message, "line_too_long")
        fields = parse_json_object(line, max_nesting=limits.max_nesting)
        custom_id, shape = fields.get("custom_id"), "openai" if _is_openai(fields) else "plain"
        return parse_fields(index, fields, defaults, limits)
    except JsonError as error:
        return RowError(index, None, "plain", error.code, f"the line {error}")
    except InvalidRequestError as error:
        return RowError(index, custom_id if isinstance(custom_id, str) else None, shape, error.code, str(error))


def parse_fields(index: int, fields: Mapping[str, Any], defaults: SamplingParams, limits: RowLimits) -> Row:
    """Parse the object of a line. Raises InvalidRequestError."""
    custom_id = fields.get("custom_id")
    if custom_id is not None and not isinstance(custom_id, str):
        raise InvalidRequestError(f"custom_id={shown(custom_id)} must be a string")
    is_openai = _is_openai(fields)
    row = (parse_openai if is_openai else _parse_plain)(index, custom_id, fields, defaults)
    _check_limits(row.sampling, limits)
    priority = priority_of(fields["body"] if is_openai else fields)
    request_id = request_id_of(fields["body"]) if is_openai else None
    return replace(row, priority=priority, request_id=request_id) if priority or request_id else row


def _is_openai(fields: Mapping[str, Any]) -> bool:
    return any(key in fields for key in OPENAI_ROW_KEYS)


def _check_limits(sampling: SamplingParams, limits: RowLimits) -> None:
    for key, limit in _LIMITS.items():
        value, most = getattr(sampling, key) or 0, getattr(limits, limit)
        number = value if isinstance(value, int) else len(value)
        if most is not None and number > most:
            entries = "" if isinstance(value, int) else "entries of "
            raise InvalidRequestError(f"{entries}{key}: {number} is more than limits.{limit}={most}", "limit_exceeded")


def _parse_plain(index: int, custom_id: str | None, fields: Mapping[str, Any], defaults: SamplingParams) -> Row:
    prompts = _prompts(fields)
    for key in (*PLAIN_TASKS, "audio"):
        if fields.get(key) is not None and prompts:
            message = f"the row has {key} and {' and '.join(prompts)}: give one of them"
            raise InvalidRequestError(message, "conflicting_prompts")
    if any(fields.get(task) is not None for task in PLAIN_TASKS):
        # A table's rows may have null in the columns of other rows.
        of_task = {key: value for key, value in fields.items() if value is not None or key not in _PROMPT_KEYS}
        return plain_pooling_row(index, custom_id, of_task, defaults)
    if fields.get("audio") is not None:
        return plain_audio_row(index, custom_id, fields, defaults)
    fields = {key: value for key, value in fields.items() if key not in (*PLAIN_TASKS, "audio")}
    check_supported({key: fields[key] for key in fields if key not in _PLAIN_KEYS})
    for key in fields:
        if key in BODY_KEYS and key not in _PLAIN_KEYS:
            own = f"; a plain row takes {_PLAIN_NAMES[key]}" if key in _PLAIN_NAMES else ""
            message = (
                f"{key!r} is a key of an OpenAI row's body (custom_id, method, url, body), not of a plain row{own}"
            )
            raise InvalidRequestError(message, "unknown_key")
        if key == "multi_modal_data":
            raise InvalidRequestError(
                f"{key!r} is a key of prompts in Python: a row takes images, videos or audio", "unknown_key"
            )
    check_keys(fields, (*_PLAIN_KEYS, "audio", *PLAIN_TASKS))
    prompt = _plain_prompt(fields)
    sampling = sampling_from(defaults, {key: fields[key] for key in SAMPLING_KEYS if key in fields})
    check_spaces(fields, sampling)
    adapters = (adapter_name(fields), adapter_name(fields, "prompt_adapter"))
    return Row(index, custom_id, "plain", prompt, sampling, adapter=adapters[0], prompt_adapter=adapters[1])


def _prompts(fields: Mapping[str, Any]) -> list[str]:
    return [key for key in _PROMPT_KEYS if fields.get(key) is not None]


def _plain_prompt(fields: Mapping[str, Any]) -> Prompt:
    given = _prompts(fields)
    if not given:
        every = ", ".join((*_PROMPT_KEYS, "audio", *PLAIN_TASKS))
        raise InvalidRequestError(f"the row has no prompt: give one of {every}", "missing_prompt")
    if len(given) > 1:
        raise InvalidRequestError(f"the row has {' and '.join(given)}: give one of them", "conflicting_prompts")
    prompt = with_special_tokens(_prompt_without_media(given[0], fields), fields)
    return with_media(for_encoder(prompt, fields), fields)


def _prompt_without_media(key: str, fields: Mapping[str, Any]) -> Prompt:
    value = fields[key]
    for name in TEMPLATE_KEYS:
        if fields.get(name) is not None and key != "messages":
            raise InvalidRequestError(f"{name} goes with messages, this row has {key}", "conflicting_keys")
    if key == "prompt" and isinstance(value, list) and value:
        way_out = next(each for kind, each in _OTHER_KEYS if isinstance(value[0], kind))
        raise InvalidRequestError(f"prompt={shown(value)} must be a string: {way_out}")
    if key == "prompt_token_ids" and isinstance(value, str):
        raise InvalidRequestError(f"{key}={shown(value)} must be a list of token ids: text is given as prompt")
    if key == "prompt" or (key == "encoder_prompt" and not isinstance(value, list)):
        return text_prompt(key, value)
    if key in ("prompt_token_ids", "encoder_prompt"):
        return tokens_prompt(key, value)
    if key == "prompt_embeds":
        return embeds_prompt("prompt_embeds", value)
    return chat_prompt(fields)


def custom_id_digest(custom_id: str) -> bytes:
    """Digest of 16 bytes. Two ids of the billions that a job may have share one with a probability below 1e-18."""
    return blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()


DUPLICATE_CODE: Final = "duplicate_custom_id"


def duplicate_error(index: int, custom_id: str | None, shape: ErrorShape) -> RowError:
    """Error of a row whose custom_id an earlier row had."""
    message = f"custom_id={shown(custom_id)} was used by an earlier row: every custom_id must be unique"
    return RowError(index, custom_id, shape, DUPLICATE_CODE, message)


class CustomIds:
    """Stores every custom_id of a run, as its digest, and rejects the second row that has it. `folder` is for the file
    of many digests.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._seen = DigestSet(folder)

    def check(self, row: Row | RowError) -> Row | RowError:
        """The row, or an error row when an earlier row had its custom_id. An error row is unchanged. Raises OSError."""
        if row.custom_id is None:
            return row
        is_duplicate = self._seen.add(custom_id_digest(row.custom_id))
        if not is_duplicate or isinstance(row, RowError):
            return row
        return duplicate_error(row.index, row.custom_id, shape_of(row))

    def close(self) -> None:
        self._seen.close()
