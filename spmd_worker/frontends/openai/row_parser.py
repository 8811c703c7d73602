"""Parses a line into a Row, and encodes a Row; any error becomes a RowError, never an exception."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any, Final

from spmd_worker.base.config.plain_values import shown
from spmd_worker.base.config.schema import RowLimits
from spmd_worker.base.files import JsonError, parse_json_object
from spmd_worker.chat.chat_format import ChatFormat, check_takes_tools
from spmd_worker.engine.request_error import RequestError
from spmd_worker.engine.validation import RequestLimits
from spmd_worker.frontends.openai.constrained_answer import answer_reader, constrained_sampling, error_message
from spmd_worker.frontends.openai.openai_request import BODY_KEYS, OPENAI_ROW_KEYS, parse_openai
from spmd_worker.frontends.openai.pooling_request import PLAIN_KEYS as POOLING_KEYS
from spmd_worker.frontends.openai.pooling_request import PLAIN_TASKS, plain_pooling_row
from spmd_worker.frontends.openai.prompt_ids import encode, encode_with_images, prepare_images
from spmd_worker.frontends.openai.prompt_values import (
    adapter_name,
    chat_prompt,
    check_keys,
    embeds_prompt,
    invalid_request,
    sampling_from,
    text_prompt,
    tokens_prompt,
    with_images,
)
from spmd_worker.frontends.openai.row import (
    Echo,
    EmbedsPrompt,
    EncodedRow,
    ErrorShape,
    Prompt,
    Row,
    RowError,
    row_error,
)
from spmd_worker.frontends.openai.served_models import ANY_MODEL, ServedModels
from spmd_worker.media.prepared import PreparedImage
from spmd_worker.replica.sequence.input_rows import PLACEHOLDER, PromptRows
from spmd_worker.replica.sequence.media_items import MediaItem
from spmd_worker.replica.sequence.resolved_params import resolve_params
from spmd_worker.replica.sequence.sampling_params import ALL_LOGPROBS, MAX_LOGPROBS, SAMPLING_KEYS, SamplingParams
from spmd_worker.tokenizer.incremental_decoder import num_unfinished
from spmd_worker.tokenizer.messages import InvalidRequestError
from spmd_worker.tokenizer.token_texts import TokenTexts
from spmd_worker.tokenizer.tokenizer import Tokenizer

_PROMPT_KEYS: Final = ("prompt", "prompt_token_ids", "prompt_embeds", "messages")
_PLAIN_KEYS: Final = (
    *_PROMPT_KEYS,
    "images",
    "custom_id",
    "adapter",
    "prompt_adapter",
    "chat_template_kwargs",
    *SAMPLING_KEYS,
)
ROW_KEYS: Final = tuple(dict.fromkeys((*_PLAIN_KEYS, *POOLING_KEYS, *OPENAI_ROW_KEYS)))


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
    row = (parse_openai if _is_openai(fields) else _parse_plain)(index, custom_id, fields, defaults)
    _check_limits(row.sampling, limits)
    return row


def _is_openai(fields: Mapping[str, Any]) -> bool:
    return any(key in fields for key in OPENAI_ROW_KEYS)


def _check_limits(sampling: SamplingParams, limits: RowLimits) -> None:
    for key, limit in _LIMITS.items():
        value, most = getattr(sampling, key) or 0, getattr(limits, limit)
        number = value if isinstance(value, int) else len(value)
        if most is not None and number > most:
            entries = "" if isinstance(value, int) else "entries of "
            raise InvalidRequestError(f"{entries}{key}: {number} is more than limits.{limit}={most}", "limit_exceeded")
    for key in ("logprobs", "prompt_logprobs"):
        if getattr(sampling, key) == ALL_LOGPROBS:
            message = f"{key}=-1 requests the entire vocabulary: give at most {MAX_LOGPROBS}"
            raise InvalidRequestError(message, "limit_exceeded")


def _parse_plain(index: int, custom_id: str | None, fields: Mapping[str, Any], defaults: SamplingParams) -> Row:
    if any(fields.get(task) is not None for task in PLAIN_TASKS) and not any(key in fields for key in _PROMPT_KEYS):
        return plain_pooling_row(index, custom_id, fields, defaults)
    for key in fields:
        if key in BODY_KEYS and key not in _PLAIN_KEYS:
            grammar = "; a plain row takes structured_outputs" if key == "response_format" else ""
            message = f"{key!r} is a key of an OpenAI row's body (custom_id, method, url, body), not of a plain row"
            raise InvalidRequestError(message + grammar, "unknown_key")
    check_keys(fields, _PLAIN_KEYS)
    prompt = _plain_prompt(fields)
    sampling = sampling_from(defaults, {key: fields[key] for key in SAMPLING_KEYS if key in fields})
    adapters = (adapter_name(fields), adapter_name(fields, "prompt_adapter"))
    return Row(index, custom_id, "plain", prompt, sampling, adapter=adapters[0], prompt_adapter=adapters[1])


def _plain_prompt(fields: Mapping[str, Any]) -> Prompt:
    given = [key for key in _PROMPT_KEYS if fields.get(key) is not None]
    if not given:
        raise InvalidRequestError(f"the row has no prompt: give one of {', '.join(_PROMPT_KEYS)}", "missing_prompt")
    if len(given) > 1:
        raise InvalidRequestError(f"the row has {' and '.join(given)}: give one of them", "conflicting_prompts")
    return with_images(_prompt_without_images(given[0], fields), fields.get("images"))


def _prompt_without_images(key: str, fields: Mapping[str, Any]) -> Prompt:
    value = fields[key]
    template_kwargs = fields.get("chat_template_kwargs")
    if template_kwargs is not None and key != "messages":
        raise InvalidRequestError(f"chat_template_kwargs goes with messages, this row has {key}", "conflicting_keys")
    if key == "prompt":
        return text_prompt("prompt", value)
    if key == "prompt_token_ids":
        return tokens_prompt("prompt_token_ids", value)
    if key == "prompt_embeds":
        return embeds_prompt("prompt_embeds", value)
    return chat_prompt(value, template_kwargs)


def resolve(
    row: Row,
    tokenizer: Tokenizer | None,
    engine: RequestLimits,
    limits: RowLimits = _DEFAULT_LIMITS,
    chat_format: ChatFormat = _NO_FORMAT,
    models: ServedModels = ANY_MODEL,
    media: Sequence[PreparedImage] | None = None,
) -> EncodedRow | RowError:
    """`encode_row`, with an error row for a row that cannot run."""
    try:
        return encode_row(row, tokenizer, engine, limits, chat_format, models, media)
    except InvalidRequestError as error:
        return row_error(row, error.code, str(error))


@invalid_request(errors=RequestError)
def encode_row(
    row: Row,
    tokenizer: Tokenizer | None,
    engine: RequestLimits,
    limits: RowLimits,
    chat_format: ChatFormat,
    models: ServedModels = ANY_MODEL,
    media: Sequence[PreparedImage] | None = None,
) -> EncodedRow:
    """Encode the row's prompt and make its limits concrete: a request within the limits of `engine`. Raises
    InvalidRequestError.

    `max_tokens` becomes the row's value or the rest of the engine's `max_model_len`, whichever is less; without a value
    at most `limits.max_tokens`. `chat_format` is the model's format of tool calls and reasoning. `media` are the row's
    images, prepared before; None: they are prepared here.
    """
    adapter_id, virtual = models.adapters_of(row)
    num_virtual = 0 if virtual is None else virtual.num_tokens
    engine.check_runner(None)
    if row.request is not None:
        check_takes_tools(row.request, chat_format)

    def check_text(text: str) -> None:
        if tokenizer is not None:
            is_cut = row.sampling.truncate_prompt_tokens is not None
            most = None if is_cut else limits.max_prompt_tokens
            engine.check_text(tokenizer, text, is_cut=is_cut, most=most, key=_MAX_TOKENS_KEY)

    rows, text = None, None
    items: tuple[MediaItem, ...] = ()
    if isinstance(row.prompt, EmbedsPrompt):
        rows = _read_rows(row, row.prompt, engine)
        token_ids = (PLACEHOLDER,) * rows.num_rows
    elif row.prompt.images:
        is_truncated = row.sampling.truncate_prompt_tokens is not None
        media = prepare_images(row.prompt, engine, is_truncated=is_truncated) if media is None else media
        text, (token_ids, items) = encode_with_images(
            row.prompt, media, tokenizer, engine, check_text, is_truncated=is_truncated
        )
    else:
        text, token_ids = encode(row.prompt, tokenizer, check_text)
    token_ids = tuple(engine.truncate(token_ids, row.sampling, rows, num_virtual))
    sampling = constrained_sampling(row, text, tokenizer, chat_format)
    try:
        engine.check(token_ids, sampling, rows=rows, num_virtual=num_virtual, media_items=items)
    except RequestError as error:
        raise InvalidRequestError(error_message(row, error), error.code) from None
    echo = _echo(row, text, token_ids, tokenizer)
    if limits.max_prompt_tokens is not None and len(token_ids) > limits.max_prompt_tokens:
        message = f"the prompt has {len(token_ids)} tokens, more than {_MAX_TOKENS_KEY}={limits.max_prompt_tokens}"
        raise InvalidRequestError(message, "prompt_too_long")
    # A prompt that is only scored may fill the length: its one token is not computed.
    num_left = max(engine.max_model_len - num_virtual - len(token_ids), 1)
    if limits.max_tokens is not None:
        num_left = min(num_left, limits.max_tokens)
    if sampling.min_tokens > num_left:
        raise InvalidRequestError(
            f"min_tokens={sampling.min_tokens} but only {num_left} tokens of model.max_model_len are left"
        )
    limit = num_left if sampling.max_tokens is None else min(sampling.max_tokens, num_left)
    is_text = sampling.detokenize and tokenizer is not None
    sampling = replace(sampling, max_tokens=limit, detokenize=is_text).frozen()
    # The engine's conversion of bad words, before admission.
    with invalid_request():
        resolve_params(sampling, tokenizer, engine.vocab_size)
    reader = answer_reader(row, text, tokenizer, sampling, chat_format)
    return EncodedRow(
        *(row.index, row.custom_id, row.kind, text, token_ids, sampling, row.model, reader),
        echo=echo,
        returns_token_ids=row.returns_token_ids,
        adapter_id=adapter_id,
        adapter=row.adapter,
        rows=rows,
        virtual=virtual,
        prompt_adapter=row.prompt_adapter,
        media=tuple(media or ()),
        media_items=items,
    )


def _read_rows(row: Row, prompt: EmbedsPrompt, engine: RequestLimits) -> PromptRows:
    if row.echo is not None:
        raise InvalidRequestError("echo repeats a prompt's text, and prompt_embeds have none: leave it out")
    assert engine.rows is not None, "an engine's limits have a reader"
    return engine.rows.of_value(prompt.value)


def _echo(row: Row, text: str | None, token_ids: tuple[int, ...], tokenizer: Tokenizer | None) -> Echo | None:
    if row.echo is None:
        return None
    if tokenizer is None:
        raise InvalidRequestError("echo needs the model's tokenizer.json: leave it out", "tokenizer_missing")
    if text is None or row.sampling.truncate_prompt_tokens is not None:
        skips_special = row.sampling.skip_special_tokens
        text = tokenizer.decode(token_ids, skip_special_tokens=skips_special)
        if row.echo != "prompt":
            # The unfinished character begins the completion's text.
            text = text[: len(text) - num_unfinished(tokenizer, token_ids, skips_special)]
    texts = TokenTexts(tokenizer, (), skip_special_tokens=False)
    ((first,),) = texts.decode([token_ids[:1]], is_last=len(token_ids) == 1)
    return Echo(text, first, row.echo == "prompt")


class CustomIds:
    """Stores every custom_id of a run, 16 bytes of digest for each, and rejects the second row that has it.

    Two ids of the billions a file may contain share a digest with a probability below 1e-18.
    """

    def __init__(self) -> None:
        self._seen: set[bytes] = set()

    def check(self, row: Row | RowError) -> Row | RowError:
        """The row, or an error row when an earlier row had its custom_id. An error row is unchanged."""
        if row.custom_id is None:
            return row
        digest = blake2b(row.custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        is_duplicate = digest in self._seen
        self._seen.add(digest)
        if not is_duplicate or isinstance(row, RowError):
            return row
        message = f"custom_id={shown(row.custom_id)} was used by an earlier row: every custom_id must be unique"
        return row_error(row, "duplicate_custom_id", message)
