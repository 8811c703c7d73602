"""Encodes the prompt of a row, text, ids or a conversation, with its images, as token ids."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from spmd_worker.base.errors import ChatTemplateError, TokenizerError
from spmd_worker.compat.image_prompts import MediaPrompt, check_conversation, check_images
from spmd_worker.engine.validation import RequestLimits
from spmd_worker.frontends.openai.prompt_values import EFFORT_KEY, invalid_request
from spmd_worker.frontends.openai.row import ChatPrompt, ReadPrompt, TextPrompt, TokensPrompt
from spmd_worker.media.errors import MediaError
from spmd_worker.media.sent_audio import PreparedMedia
from spmd_worker.tokenizer.messages import InvalidRequestError
from spmd_worker.tokenizer.tokenizer import Tokenizer

CheckText = Callable[[str], None]


def encode(
    prompt: ReadPrompt,
    tokenizer: Tokenizer | None,
    check_text: CheckText = lambda text: None,
    adds_special_tokens: bool | None = None,
    language: str | None = None,
) -> tuple[str | None, tuple[int, ...]]:
    """Text of a prompt without images, None for token ids, and its ids. `check_text` is called with the text before it
    is encoded. `adds_special_tokens` replaces the prompt's own; for text in a `language` special tokens have its token.
    Raises InvalidRequestError, and what `check_text` raises.
    """
    if isinstance(prompt, TokensPrompt):
        return None, prompt.token_ids
    tokenizer = _needed(tokenizer)
    text = _text_of(prompt, tokenizer)
    check_text(text)
    if language is not None:
        with invalid_request():
            before, after = tokenizer.around_source(language)
        return text, (*before, *_encoded(tokenizer, text, adds_special_tokens=False), *after)
    adds = prompt.adds_special_tokens if adds_special_tokens is None else adds_special_tokens
    return text, _encoded(tokenizer, text, adds_special_tokens=adds)


def prepare_images(prompt: ReadPrompt, engine: RequestLimits, *, is_truncated: bool) -> tuple[PreparedMedia, ...]:
    """Prepare the images of a prompt. Raises InvalidRequestError."""
    try:
        name = engine.architecture
        images = check_images(engine.images, prompt.images, prompt.media, is_truncated=is_truncated, architecture=name)
        return images.prepare(prompt.images, prompt.media)
    except MediaError as error:
        raise InvalidRequestError(str(error), error.code) from None


def encode_with_images(
    prompt: ReadPrompt,
    media: Sequence[PreparedMedia],
    tokenizer: Tokenizer | None,
    engine: RequestLimits,
    check_text: CheckText,
    *,
    is_truncated: bool,
) -> tuple[str | None, MediaPrompt]:
    """`encode` of a prompt with its images, `media`, between its tokens. The text has their placeholders."""
    tokenizer = _needed(tokenizer)
    try:
        name = engine.architecture
        images = check_images(engine.images, prompt.images, prompt.media, is_truncated=is_truncated, architecture=name)
        if isinstance(prompt, TokensPrompt):
            return None, images.of_ids(prompt.token_ids, media, partial(_encoded, tokenizer, adds_special_tokens=False))
        if isinstance(prompt, ChatPrompt):
            check_conversation(images, prompt.messages)
            messages = images.for_template(prompt.messages, tokenizer.chat_template_source or "")
            prompt = replace(prompt, messages=tuple(messages))
        text = _text_of(prompt, tokenizer)
        check_text(text)
        of_text = partial(_encoded, tokenizer, adds_special_tokens=prompt.adds_special_tokens)
        return text, (images.of_chat if isinstance(prompt, ChatPrompt) else images.of_text)(text, media, of_text)
    except MediaError as error:
        raise InvalidRequestError(str(error), error.code) from None


def _needed(tokenizer: Tokenizer | None) -> Tokenizer:
    if tokenizer is None:
        raise InvalidRequestError("the model folder has no tokenizer.json: give prompt_token_ids", "tokenizer_missing")
    return tokenizer


def _encoded(tokenizer: Tokenizer, text: str, *, adds_special_tokens: bool) -> tuple[int, ...]:
    try:
        return tuple(tokenizer.encode(text, add_special_tokens=adds_special_tokens))
    except TokenizerError as error:
        raise InvalidRequestError(str(error), "tokenizer_error") from None
    except ValueError as error:
        raise InvalidRequestError(str(error), "invalid_unicode") from None


def _text_of(prompt: TextPrompt | ChatPrompt, tokenizer: Tokenizer) -> str:
    if isinstance(prompt, TextPrompt):
        return prompt.text
    if not tokenizer.has_chat_template:
        message = "the model folder has no chat template (chat_template.jinja or tokenizer_config.json): give prompt"
        raise InvalidRequestError(message, "chat_template_missing")
    variables = prompt.template_kwargs
    if prompt.reasoning_effort is not None:
        if EFFORT_KEY not in (tokenizer.chat_template_source or ""):
            message = (
                f"{EFFORT_KEY}={prompt.reasoning_effort!r}: the model's chat template does not read it: leave it out"
            )
            raise InvalidRequestError(message, "unsupported_value")
        variables = {**variables, EFFORT_KEY: prompt.reasoning_effort}
    try:
        return tokenizer.apply_chat_template(
            *(prompt.messages, prompt.add_generation_prompt, variables),
            continue_final_message=prompt.continue_final_message,
        )
    except ChatTemplateError as error:
        raise InvalidRequestError(str(error)[:500], "chat_template_error") from None
