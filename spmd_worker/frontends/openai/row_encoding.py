"""Encodes a Row within the limits of an engine; any error becomes a RowError, never an exception."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from spmd_worker.base.config.schema import RowLimits
from spmd_worker.chat.chat_format import ChatFormat, check_takes_tools
from spmd_worker.compat.encoder_prompts import NO_CHAT, NO_TRUNCATION, EncoderPrompts
from spmd_worker.compat.prompts import Encoded
from spmd_worker.engine.request_error import RequestError
from spmd_worker.engine.validation import RequestLimits
from spmd_worker.frontends.openai.constrained_answer import answer_reader, constrained_sampling, error_message
from spmd_worker.frontends.openai.prompt_ids import CheckText, encode, encode_with_images, prepare_images
from spmd_worker.frontends.openai.prompt_values import invalid_request
from spmd_worker.frontends.openai.row import (
    AudioPrompt,
    ChatPrompt,
    Echo,
    EmbedsPrompt,
    EncodedRow,
    EncoderPrompt,
    Row,
    RowError,
    TextPrompt,
    TokensPrompt,
    row_error,
)
from spmd_worker.frontends.openai.served_models import ANY_MODEL, RowAdapters, ServedModels
from spmd_worker.media.sent_audio import PreparedMedia
from spmd_worker.replica.sequence.decoder_prompt import RuledParams
from spmd_worker.replica.sequence.input_rows import PLACEHOLDER, PromptRows
from spmd_worker.replica.sequence.resolved_params import resolve_params
from spmd_worker.tokenizer.incremental_decoder import num_unfinished
from spmd_worker.tokenizer.messages import InvalidRequestError
from spmd_worker.tokenizer.token_texts import TokenTexts
from spmd_worker.tokenizer.tokenizer import Tokenizer

_DEFAULT_LIMITS: Final = RowLimits()
_NO_FORMAT: Final = ChatFormat()
_MAX_TOKENS_KEY: Final = "limits.max_prompt_tokens"


@dataclass(frozen=True, slots=True)
class RowContext:
    """All that rows are encoded with: the limits of an engine and of rows, the model's tokenizer and format of tool
    calls and reasoning, and the names that rows may give.
    """

    tokenizer: Tokenizer | None
    engine: RequestLimits
    limits: RowLimits = _DEFAULT_LIMITS
    chat_format: ChatFormat = _NO_FORMAT
    models: ServedModels = ANY_MODEL


def resolve(row: Row, context: RowContext, media: Sequence[PreparedMedia] | None = None) -> EncodedRow | RowError:
    """`encode_row`, with an error row for a row that cannot run."""
    try:
        return encode_row(row, context, media)
    except InvalidRequestError as error:
        return row_error(row, error.code, str(error))


@invalid_request(errors=RequestError)
def encode_row(row: Row, context: RowContext, media: Sequence[PreparedMedia] | None = None) -> EncodedRow:
    """Encode the row's prompt and make its limits concrete: a request within the limits of the engine. Raises
    InvalidRequestError.

    `max_tokens` becomes the row's value or the rest of the engine's `max_model_len`, whichever is less; without a value
    at most `limits.max_tokens`. `media` are the row's images, prepared before; None: they are prepared here.
    """
    adapters = context.models.adapters_of(row)
    context.engine.check_runner(None)
    if row.request is not None:
        check_takes_tools(row.request, context.chat_format)
    prompts = context.engine.encoder_prompts
    given = _read(row, context, media) if prompts is None else _read_for_encoder(row, context, prompts)
    return finish_row(row, given, adapters, context)


def text_check(row: Row, context: RowContext) -> CheckText:
    """The check of a row's text, before it is encoded."""

    def check_text(text: str) -> None:
        if context.tokenizer is not None:
            is_cut = row.sampling.truncate_prompt_tokens is not None
            most = None if is_cut else context.limits.max_prompt_tokens
            context.engine.check_text(context.tokenizer, text, is_cut=is_cut, most=most, key=_MAX_TOKENS_KEY)

    return check_text


def _read(row: Row, context: RowContext, media: Sequence[PreparedMedia] | None) -> Encoded:
    """The prompt of a decoder alone."""
    prompt, tokenizer, engine, check_text = row.prompt, context.tokenizer, context.engine, text_check(row, context)
    if isinstance(prompt, EncoderPrompt | AudioPrompt):
        kind = "audio" if isinstance(prompt, AudioPrompt) else "encoder_prompt, decoder_prompt or language"
        message = f"this model has no encoder: give a prompt, and no {kind}"
        raise InvalidRequestError(message, "encoder_unsupported")
    if isinstance(prompt, EmbedsPrompt):
        rows = _read_rows(row, prompt, engine)
        return Encoded((PLACEHOLDER,) * rows.num_rows, rows=rows)
    if prompt.images:
        is_truncated = row.sampling.truncate_prompt_tokens is not None
        images = prepare_images(prompt, engine, is_truncated=is_truncated) if media is None else tuple(media)
        given = (prompt, images, tokenizer, engine, check_text)
        text, made = encode_with_images(*given, is_truncated=is_truncated)
        return Encoded(made.token_ids, text, media=made.media, media_items=made.items)
    text, token_ids = encode(prompt, tokenizer, check_text)
    return Encoded(token_ids, text)


def _read_for_encoder(row: Row, context: RowContext, prompts: EncoderPrompts) -> Encoded:
    """The text of an encoder, and the prompt of the decoder."""
    tokenizer, check_text = context.tokenizer, text_check(row, context)
    if row.sampling.truncate_prompt_tokens is not None:
        raise InvalidRequestError(NO_TRUNCATION, "conflicting_keys")
    if isinstance(row.prompt, ChatPrompt):
        raise InvalidRequestError(NO_CHAT, "chat_template_missing")
    if prompts.audio is not None:
        message = "this model's encoder reads audio: give audio, or a body of /v1/audio/transcriptions"
        raise InvalidRequestError(message, "encoder_input_missing")
    given = EncoderPrompt(row.prompt) if isinstance(row.prompt, TextPrompt | TokensPrompt) else row.prompt
    if not isinstance(given, EncoderPrompt) or given.encoder.images:
        raise InvalidRequestError("the model's encoder reads text or audio alone", "encoder_unsupported")
    encoder_text, encoder_ids = encode(given.encoder, tokenizer, check_text, language=given.source_language)
    with invalid_request():
        text, made = None, None
        encoder = prompts.of_ids(encoder_ids)
        if given.decoder is None:
            made = prompts.text_decoder(tokenizer, given.target_language)
        else:
            text, token_ids = encode(given.decoder, tokenizer, check_text, adds_special_tokens=False)
            made = prompts.decoder_of(token_ids)
    return Encoded(made.token_ids, text, encoder=encoder, encoder_text=encoder_text, rules=made.rules)


@invalid_request(errors=RequestError)
def finish_row(row: Row, given: Encoded, adapters: RowAdapters, context: RowContext) -> EncodedRow:
    """A row with its prompt, `given`, and concrete limits. Raises InvalidRequestError."""
    tokenizer, engine, limits, chat_format = context.tokenizer, context.engine, context.limits, context.chat_format
    given.adapter, given.virtual = adapters
    given.priority, text = row.priority, given.text
    given.token_ids = token_ids = engine.truncate(given, row.sampling)
    engine.check_priority(row.priority)
    own = constrained_sampling(row, text, tokenizer, chat_format)
    with invalid_request():
        sampling = given.completed(own, RuledParams())
    try:
        engine.check(given, sampling)
    except RequestError as error:
        raise InvalidRequestError(error_message(row, error), error.code) from None
    echo = _echo(row, text, token_ids, tokenizer)
    num_tokens = len(token_ids) + (0 if given.encoder is None or given.media else given.encoder.num_rows)
    if limits.max_prompt_tokens is not None and num_tokens > limits.max_prompt_tokens:
        message = f"the prompt has {num_tokens} tokens, more than {_MAX_TOKENS_KEY}={limits.max_prompt_tokens}"
        raise InvalidRequestError(message, "prompt_too_long")
    # A prompt that is only scored may fill the length: its one token is not computed.
    num_left = max(engine.max_model_len - given.num_virtual_tokens - len(token_ids), 1)
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
        *(row.index, row.custom_id, row.kind, given, sampling, row.model, reader),
        echo=echo,
        returns_token_ids=row.returns_token_ids,
        adapter=row.adapter,
        prompt_adapter=row.prompt_adapter,
        request_id=row.request_id,
        includes_reasoning=row.includes_reasoning,
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
