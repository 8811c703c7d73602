"""Prompts in all accepted forms, encoded as token ids."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NotRequired, TypedDict

from spmd_worker.base.config.plain_values import plain_text, shown
from spmd_worker.base.errors import ConfigError
from spmd_worker.compat.image_prompts import (
    TRUNCATED,
    ImagePrompts,
    check_images,
    check_sizes,
    media_of,
)
from spmd_worker.compat.keywords import is_empty
from spmd_worker.compat.late_texts import encode_late_text
from spmd_worker.compat.media_keywords import sound_fault
from spmd_worker.compat.pooled_texts import encode_pooled_text
from spmd_worker.media.errors import MediaError
from spmd_worker.media.prompt_content import PromptContent
from spmd_worker.media.sent_audio import PreparedMedia
from spmd_worker.model_config.pooling import PoolingConfig
from spmd_worker.replica.sequence.decoder_prompt import RuledParams
from spmd_worker.replica.sequence.input_rows import PLACEHOLDER, PromptRows
from spmd_worker.replica.sequence.lora_request import LoRARequest
from spmd_worker.replica.sequence.pooling_params import PoolingParams, resolve_pooling, truncated_row
from spmd_worker.replica.sequence.prompt_adapter_request import PromptAdapterRequest
from spmd_worker.replica.sequence.request import as_token_ids
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.replica.sequence.structured_outputs import StructuredOutputsParams
from spmd_worker.replica.sequence.token_rules import TokenRules
from spmd_worker.tokenizer.messages import MediumName
from spmd_worker.tokenizer.tokenizer import Tokenizer

Prompt = str | Mapping[str, Any] | Sequence[int]
"""Text, `{"prompt": text}`, `{"prompt_token_ids": ids}`, `{"prompt_embeds": rows}`, or token ids. Text and ids in a
dict may have images, `"multi_modal_data": {"image": image or list}`, or audio in a model that hears, or both.
"""


class TextPrompt(TypedDict):
    """vLLM's name of a text prompt, a dict."""

    prompt: str
    multi_modal_data: NotRequired[Mapping[str, Any]]
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """vLLM's name of a prompt of token ids, a dict. `prompt` is their text, which the output repeats."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    multi_modal_data: NotRequired[Mapping[str, Any]]
    cache_salt: NotRequired[str]


class EmbedsPrompt(TypedDict):
    """vLLM's name of a prompt of embeddings, a dict: a tensor [tokens, width]. `prompt` is their text, which the output
    repeats.
    """

    prompt_embeds: Any
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


class ExplicitEncoderDecoderPrompt(TypedDict):
    """vLLM's name of a prompt of an encoder-decoder model, a dict. `decoder_prompt` None is the model's own."""

    encoder_prompt: Any
    decoder_prompt: NotRequired[Any]


PromptType = str | TextPrompt | TokensPrompt | EmbedsPrompt | ExplicitEncoderDecoderPrompt
"""vLLM's name."""
CheckText = Callable[..., None]
"""`RequestLimits.check_text`, called before texts are encoded."""
ReadRows = Callable[[Any], PromptRows]
"""Checks a tensor of `prompt_embeds`. Raises ValueError."""

_PROMPT_KEYS: Final = ("prompt", "prompt_token_ids", "prompt_embeds")
_PROCESSOR_KEY: Final = "mm_processor_kwargs"
_KEPT_SIZES: Final = {"do_resize": False}
"""Value of a prompt's `mm_processor_kwargs`, from callers that have resized its images (ms-swift)."""
_EMPTY_KEYS: Final = (_PROCESSOR_KEY, "token_type_ids")
"""Further keys of vLLM's, accepted if empty."""
_MEDIA_KEYS: Final = ("multi_modal_data", "multi_modal_uuids")
"""Images, and names of theirs, which are not used: an image has the name of its pixels."""
_SALT_KEY: Final = "cache_salt"


@dataclass(frozen=True, slots=True)
class TextPair:
    """Two texts encoded as one prompt, by the tokenizer's rule for pairs."""

    first: str
    second: str


@dataclass(slots=True, eq=False)
class Encoded(PromptContent):
    """An encoded prompt, or the `error` for which it is not one. `is_ids`: it was given as ids, and `text` is the
    caller's text of them. `num_first_tokens` are those of the first text of a `pair`. `form` constrains the answer of
    this prompt; `cache_salt` None is that of the parameters. `adapter` and `virtual` are set when its `lora_request`
    and its `prompt_adapter` are loaded. `rules` are those of an encoder-decoder model's answer, for parameters that
    have none. `continued` is the text of the message that the answer continues, None if it begins one.
    """

    error: str | None = None
    is_ids: bool = False
    pair: TextPair | None = None
    num_first_tokens: int | None = None
    form: StructuredOutputsParams | None = None
    cache_salt: str | None = None
    lora_request: LoRARequest | None = None
    prompt_adapter: PromptAdapterRequest | None = None
    rules: TokenRules | None = None
    continued: str | None = None

    @property
    def num_virtual_tokens(self) -> int:
        """Tokens of the prompt adapter, before it is loaded too."""
        if self.virtual is not None or self.prompt_adapter is None:
            return 0 if self.virtual is None else self.virtual.num_tokens
        return self.prompt_adapter.prompt_adapter_num_virtual_tokens

    def completed(self, params: SamplingParams, ruled: RuledParams) -> SamplingParams:
        """The parameters with the prompt's salt and rules. Raises ValueError for an invalid salt."""
        salted = params if self.cache_salt is None else replace(params, cache_salt=self.cache_salt).frozen()
        return ruled.of(salted, self.rules)


def _reject_rows(value: Any) -> PromptRows:
    raise ValueError("prompt_embeds are not supported here: give text or token ids")


@dataclass(frozen=True, slots=True)
class PromptReader:
    """Encodes the prompts of a decoder alone. `need_tokenizer` is called for text only, and raises ConfigError if there
    is no tokenizer. `check_text` is None for prompts that will be truncated, `images` for a model without images, whose
    `architecture` errors name.
    """

    need_tokenizer: Callable[[], Tokenizer]
    check_text: CheckText | None = None
    read_rows: ReadRows = _reject_rows
    images: ImagePrompts | None = None
    architecture: str = ""

    def encode(self, prompt: Any) -> Encoded:
        """The prompt, or the TextPair, or the error for which it is not one."""
        if isinstance(prompt, Mapping):
            return self._encode_mapping(prompt)
        pair = prompt if isinstance(prompt, TextPair) else None
        text = plain_text(prompt)
        if pair is None and text is None:
            return _encode_ids(prompt)
        encoded = Encoded((), text, pair=pair)
        try:
            tokenizer = self.need_tokenizer()
            if self.check_text is not None:
                self.check_text(tokenizer, *((text,) if pair is None else (pair.first, pair.second)))
            if pair is None:
                encoded.token_ids = tuple(tokenizer.encode(text or ""))
            else:
                token_ids, encoded.num_first_tokens = tokenizer.encode_inside(pair.first, pair.second)
                encoded.token_ids = tuple(token_ids)
        except (ConfigError, ValueError) as error:
            encoded.error = str(error)
        return encoded

    def _encode_mapping(self, prompt: Mapping[str, Any]) -> Encoded:
        if _SALT_KEY in prompt:
            salted = self._encode_mapping({key: each for key, each in prompt.items() if key != _SALT_KEY})
            salted.cache_salt = prompt[_SALT_KEY]
            return salted
        given = [key for key in prompt if key not in _EMPTY_KEYS or not is_empty(prompt[key])]
        given = [key for key in given if key not in ("prompt_embeds", *_MEDIA_KEYS) or prompt[key] is not None]
        given = [key for key in given if key != _PROCESSOR_KEY or prompt[key] != _KEPT_SIZES]
        unknown = [str(key) for key in given if key not in (*_PROMPT_KEYS, *_MEDIA_KEYS)]
        if unknown:
            known = ", ".join((*_PROMPT_KEYS, _MEDIA_KEYS[0]))
            if _PROCESSOR_KEY in unknown:
                if fault := sound_fault(prompt[_PROCESSOR_KEY]):
                    return Encoded((), error=fault)
                return Encoded((), error=f"{_PROCESSOR_KEY} of a prompt may be {_KEPT_SIZES}: give others to LLM(...)")
            return Encoded((), error=f"a prompt has no key {', '.join(unknown)}: give {known} and nothing else")
        try:
            sources, media = media_of(prompt.get("multi_modal_data"), self.images)
        except MediaError as error:
            return Encoded((), error=str(error))
        if sources:
            return self._encode_with_images(prompt, sources, media)
        if prompt.get("prompt_embeds") is not None:
            if "prompt_token_ids" in prompt:
                return Encoded((), error="a prompt has prompt_token_ids or prompt_embeds: leave one out")
            return _encode_rows(prompt, self.read_rows)
        if "prompt_token_ids" in prompt:
            encoded = _encode_ids(prompt["prompt_token_ids"])
            encoded.is_ids, encoded.text = True, prompt["prompt"] if isinstance(prompt.get("prompt"), str) else None
            return encoded
        if isinstance(prompt.get("prompt"), str):
            return self.encode(prompt["prompt"])
        if prompt.get("prompt") is not None:
            text = f"prompt={shown(prompt['prompt'])} must be text: token ids are given as prompt_token_ids"
            return Encoded((), error=text)
        keys = "text under prompt, prompt_token_ids or prompt_embeds"
        return Encoded((), error=f"a prompt needs {keys}; this one has {[*prompt]}")

    def _encode_with_images(
        self, prompt: Mapping[str, Any], sources: Sequence[Any], media: Sequence[MediumName]
    ) -> Encoded:
        text = prompt["prompt"] if isinstance(prompt.get("prompt"), str) else None
        encoded = Encoded((), text, is_ids="prompt_token_ids" in prompt)
        try:
            is_cut, name = self.check_text is None, self.architecture
            images = check_images(self.images, sources, media, is_truncated=is_cut, architecture=name)
            if prompt.get("prompt_embeds") is not None or (text is None and not encoded.is_ids):
                raise ValueError("a prompt with images or audio is text under prompt, or prompt_token_ids")
            tokenizer = self.need_tokenizer()
            if encoded.is_ids:
                token_ids = as_token_ids(prompt["prompt_token_ids"])
                encoded.media = _prepared(prompt, sources, media, images)
                made = images.of_ids(token_ids, encoded.media, partial(tokenizer.encode, add_special_tokens=False))
            else:
                if self.check_text is not None:
                    self.check_text(tokenizer, text)
                encoded.media = _prepared(prompt, sources, media, images)
                made = images.of_text(text or "", encoded.media, tokenizer.encode)
            encoded.token_ids, encoded.media_items, encoded.media = made
        except (ConfigError, ValueError, TypeError) as error:
            encoded.error = str(error)
        return encoded


def apply_pooling(
    encoded: Encoded,
    params: PoolingParams,
    config: PoolingConfig | None,
    max_model_len: int,
    need_tokenizer: Callable[[], Tokenizer],
) -> None:
    """Set a prompt's `pooling`, and truncate it as `params` say. Raises ValueError for an unsupported task, and for a
    length that leaves no token of an encoder's text.
    """
    encoded.pooling = pooling = resolve_pooling(params, config)
    assert config is not None, "checked by resolve_pooling"
    if config.late is not None and params.input_type is not None and encoded.text is not None and not encoded.is_ids:
        if params.num_attended_tokens is not None:
            raise ValueError(
                f"num_attended_tokens={params.num_attended_tokens} is for queries of token ids: a text that is written "
                f"with input_type={params.input_type} has its own number: leave it out"
            )
        if encoded.error is None:
            length = max_model_len if params.truncate_prompt_tokens == -1 else params.truncate_prompt_tokens
            given = (config.late, need_tokenizer(), encoded.text, params.input_type, length, max_model_len)
            encoded.token_ids, _, num_attended = encode_late_text(*given)
            encoded.pooling = replace(pooling, num_attended_tokens=num_attended)
        return
    length, pair = params.truncate_prompt_tokens, encoded.pair
    most = max_model_len if length == -1 else length
    is_text = (encoded.text is not None and not encoded.is_ids) or pair is not None
    if encoded.media and is_text:
        if config.text.changes_texts:
            raise ValueError(
                "the folder puts a prompt or messages around each text, which texts with images do not get: give "
                "messages with image parts, or prompt_token_ids"
            )
        is_text = False
    if is_text and ((most is not None and config.encodes_inside) or config.text.changes_texts):
        if encoded.error is None:
            # Again, with the folder's prompt or messages, and at most `most` tokens.
            first, second = (encoded.text or "", None) if pair is None else (pair.first, pair.second)
            token_ids, encoded.num_first_tokens = encode_pooled_text(config.text, need_tokenizer(), first, second, most)
            encoded.token_ids = tuple(token_ids)
    else:
        if encoded.rows is not None and length is not None:
            raise ValueError("truncate_prompt_tokens cuts token ids, and this prompt has prompt_embeds: cut its rows")
        if encoded.media and length is not None:
            raise ValueError(TRUNCATED)
        num_tokens, encoded.token_ids = len(encoded.token_ids), truncated_row(encoded.token_ids, length, max_model_len)
        num_dropped = num_tokens - len(encoded.token_ids)
        # Ids are truncated from the left, where the caller has counted those of the first text.
        if num_dropped and pooling.num_first_tokens is not None:
            encoded.pooling = replace(pooling, num_first_tokens=max(0, pooling.num_first_tokens - num_dropped))
    if pair is not None and encoded.error is None and config.outputs_token_types:
        if encoded.num_first_tokens is None:
            raise ValueError("the tokenizer's order of token types is not supported by any model here")
        encoded.pooling = replace(encoded.pooling, num_first_tokens=encoded.num_first_tokens)


def _prepared(
    prompt: Mapping[str, Any], sources: Sequence[Any], media: Sequence[MediumName], images: ImagePrompts
) -> tuple[PreparedMedia, ...]:
    made = images.prepare(sources, media)
    if prompt.get(_PROCESSOR_KEY) == _KEPT_SIZES:
        check_sizes(made)
    return made


def _encode_rows(prompt: Mapping[str, Any], read_rows: ReadRows) -> Encoded:
    text = prompt["prompt"] if isinstance(prompt.get("prompt"), str) else None
    try:
        rows = read_rows(prompt["prompt_embeds"])
    except (TypeError, ValueError) as error:
        return Encoded((), text, str(error))
    return Encoded((PLACEHOLDER,) * rows.num_rows, text, is_ids=True, rows=rows)


def _encode_ids(token_ids: Any) -> Encoded:
    try:
        return Encoded(as_token_ids(token_ids))
    except (TypeError, ValueError) as error:
        return Encoded((), error=str(error))
