"""Encodes the prompts and conversations of a call, and gives each its sampling parameters."""

import contextlib
from collections.abc import Iterable, Mapping, Sequence, Set
from functools import partial
from typing import Any, Final, NamedTuple

from spmd_worker.base.config.plain_values import plain_int
from spmd_worker.base.errors import ChatTemplateError, ConfigError
from spmd_worker.base.liveness.deferred_signals import deliver_signals
from spmd_worker.base.names import counted
from spmd_worker.compat.call_arguments import priorities_of
from spmd_worker.compat.call_images import images_of_call
from spmd_worker.compat.chat import ChatOptions, answer_form, prepared_messages, render, warn_unread_tools
from spmd_worker.compat.encoder_prompts import NO_CHAT
from spmd_worker.compat.image_prompts import ImagePrompts, check_conversation, check_images, media_of
from spmd_worker.compat.prompts import Encoded, Prompt, TextPair
from spmd_worker.engine.calls.given_prompts import encode_given
from spmd_worker.engine.engine import Engine
from spmd_worker.media.errors import MediaError
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.tokenizer.continued_message import continued_text
from spmd_worker.tokenizer.messages import MediumName, media_of_parts
from spmd_worker.tokenizer.video_parts import is_open

Messages = Sequence[Mapping[str, Any]]
Params = SamplingParams | Sequence[SamplingParams] | None
"""Parameters of all prompts, of each prompt, or None for the model's defaults."""
_MAX_AHEAD: Final = 8
"""Prompts whose images are being prepared while those before them are encoded."""


class PromptEncoder:
    """Encodes prompts with the tokenizer and the limits of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.max_pixel_bytes = 0.0
        """Bytes of the pixels that the next call holds of its images."""

    def encode(self, prompts: Prompt | Sequence[Prompt | TextPair], params: Any = None) -> list[Encoded]:
        """Encode one prompt or a list; `params` decide on truncation. Raises TypeError for an invalid type."""
        listed, images = as_list(prompts), self._images_of_call()
        sources = [_sources_of(each, images) if images is not None else _NO_SOURCES for each in listed]
        return [
            self.encode_one(each, _is_truncated(params, index), _ahead(images, sources, index))
            for index, each in enumerate(listed)
        ]

    def set_priorities(self, encoded: Sequence[Encoded], priority: Any) -> None:
        """Give prompts their priorities, one of all or a list. Raises ValueError for anything else, or where the policy
        has none.
        """
        for each, number in zip(encoded, priorities_of(len(encoded), priority), strict=True):
            self._engine.limits.check_priority(number)
            each.priority = number

    def render(self, messages: Messages | Sequence[Messages], options: ChatOptions, params: Any) -> list[Encoded]:
        """Render and encode one conversation or a list of them, with `params` as in `encode`."""
        if self._engine.tokenizer is not None:
            warn_unread_tools(options, self._engine.tokenizer)
        listed, images = [_Conversation.of(each) for each in _as_conversations(messages)], self._images_of_call()
        sources = [(each.images, media_of_parts(each.messages)) for each in listed]
        return [
            self._render(each, options, _is_truncated(params, index), _ahead(images, sources, index))
            for index, each in enumerate(listed)
        ]

    def _images_of_call(self) -> ImagePrompts | None:
        images = self._engine.limits.images
        return None if images is None else images_of_call(images, self.max_pixel_bytes)

    def encode_one(self, prompt: Prompt | TextPair, is_truncated: bool, images: ImagePrompts | None = None) -> Encoded:
        """Encode a prompt; `images` are those of its call, None for the engine's."""
        # Encoding many prompts takes a while, and may be interrupted between two of them.
        deliver_signals()
        return encode_given(prompt, self._engine, is_truncated=is_truncated, images=images)

    def _render(
        self, given: "_Conversation", options: ChatOptions, is_truncated: bool, images: ImagePrompts | None
    ) -> Encoded:
        deliver_signals()
        messages, sources = given.messages, given.images
        try:
            if self._engine.limits.encoder_prompts is not None:
                raise ValueError(NO_CHAT)
            tokenizer = self._engine.need_tokenizer()
            if given.error is not None:
                raise given.error
            if sources:
                name = self._engine.limits.architecture
                media = media_of_parts(messages)
                images = check_images(images, sources, media, is_truncated=is_truncated, architecture=name)
                check_conversation(images, messages)
                template = options.template or tokenizer.chat_template_source or ""
                messages = images.for_template(messages, tokenizer.chat_templates.sources.get(template, template))
            text = render(messages, options, tokenizer)
            if not is_truncated:
                self._engine.limits.check_text(tokenizer, text)
            encode = partial(tokenizer.encode, add_special_tokens=False)
            if sources and images is not None:
                made = images.of_chat(text, images.prepare(sources, media), encode)
                encoded = Encoded(made.token_ids, text, media=made.media, media_items=made.items)
            else:
                encoded = Encoded(tuple(encode(text)), text)
            encoded.continued = continued_text(messages) if options.continue_final_message else None
            encoded.form = answer_form(text, encoded.continued, options, tokenizer)
            return encoded
        except (ConfigError, ChatTemplateError, ValueError) as error:
            return Encoded((), error=str(error))

    def params(self, given: Params, num_prompts: int) -> list[SamplingParams]:
        """Parameters of each prompt, frozen. Raises TypeError or ValueError unless they fit the prompts."""
        if given is None or isinstance(given, SamplingParams):
            return [(given or self._engine.default_sampling).frozen()] * num_prompts
        if not isinstance(given, Sequence):
            raise TypeError(f"sampling_params is a {type(given).__name__}: give SamplingParams, or a list of them")
        if len(given) != num_prompts:
            raise ValueError(
                f"{len(given)} sampling params for {counted(num_prompts, 'prompt')}: give one, or one for each prompt"
            )
        for index, each in enumerate(given):
            if not isinstance(each, SamplingParams):
                raise TypeError(f"sampling_params[{index}] is a {type(each).__name__}: give SamplingParams")
        return [each.frozen() for each in given]


class _Conversation(NamedTuple):
    """A conversation's messages for templates and its images, or the error in it."""

    messages: list[dict[str, Any]]
    images: list[Any]
    error: ValueError | None = None

    @staticmethod
    def of(messages: Messages) -> "_Conversation":
        try:
            if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
                raise ValueError(f"messages is a {type(messages).__name__}: give a list of messages")
            if not messages:
                raise ValueError("messages is empty: a conversation needs at least one message")
            return _Conversation(*prepared_messages(messages))
        except ValueError as error:
            return _Conversation([], [], error)


_Sources = tuple[Sequence[Any], Sequence[MediumName]]
"""Images and recordings of a prompt, and the medium of each."""
_NO_SOURCES: Final[_Sources] = ((), ())


def _sources_of(prompt: Any, images: ImagePrompts) -> _Sources:
    """Those of a prompt of any type; an error in them is raised when it is encoded."""
    with contextlib.suppress(MediaError):
        return media_of(prompt.get("multi_modal_data"), images) if isinstance(prompt, Mapping) else _NO_SOURCES
    return _NO_SOURCES


def _ahead(images: ImagePrompts | None, sources: Sequence[_Sources], index: int) -> ImagePrompts | None:
    """`images`, which begin to prepare those of the next prompts."""
    if images is not None:
        for each, media in sources[index : index + _MAX_AHEAD]:
            if each and images.takes(media) and not any(map(is_open, each)):
                images.submit(each, media)
    return images


def _is_truncated(params: Any, index: int) -> bool:
    """Whether the prompt at `index` is truncated, as all queries and documents are. Invalid parameters are rejected
    later.
    """
    if isinstance(params, Sequence):
        params = params[index] if index < len(params) else None
    return any(getattr(params, name, None) is not None for name in ("truncate_prompt_tokens", "input_type"))


def as_list(prompts: Any) -> list[Any]:
    """A list of prompts; a single prompt becomes a list of one. Raises TypeError for an invalid type."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    # A set has another order in each process.
    if not isinstance(prompts, Iterable) or isinstance(prompts, bytes | Set):
        raise TypeError(f"prompts is a {type(prompts).__name__}: give a prompt or a list of prompts")
    listed = list(prompts)
    # A list that begins with a number is one prompt of token ids; an invalid id in it is that prompt's error.
    return [listed] if listed and (isinstance(listed[0], int) or plain_int(listed[0]) is not None) else listed


def _as_conversations(messages: Any) -> list[Any]:
    """A list of conversations; a single one becomes a list of one. Raises TypeError for an invalid type."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise TypeError(f"messages is a {type(messages).__name__}: give a list of messages, or a list of such lists")
    return [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
