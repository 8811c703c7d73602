"""Checks the values of both row formats: prompts, messages, sampling parameters, known keys."""

import contextlib
import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Final, TypeVar

from spmd_worker.base.config.plain_values import shown
from spmd_worker.base.config.schema import MAX_LOGPROBS
from spmd_worker.compat.encoder_prompts import OF_TEXT
from spmd_worker.engine.request_error import RequestError
from spmd_worker.frontends.openai.row import ChatPrompt, EmbedsPrompt, EncoderPrompt, Prompt, TextPrompt, TokensPrompt
from spmd_worker.replica.sequence.record_checks import INT64
from spmd_worker.replica.sequence.sampling_params import ALL_LOGPROBS, SamplingParams
from spmd_worker.tokenizer.messages import (
    InvalidRequestError,
    MediumName,
    checked_content,
    checked_message,
    checked_video,
    media_of_parts,
    optional_flag,
)
from spmd_worker.tokenizer.video_parts import VideoPart, is_open

_AnyPrompt = TypeVar("_AnyPrompt", bound=Prompt)

_KEYS_WITH_NULL: Final = (*(spec.name for spec in fields(SamplingParams) if spec.default is None), "max_tokens")
"""Sampling keys for which null is a value, not a missing key."""

_SCORE_KEYS: Final = ("prompt_logprob_token_ids", "prompt_logprob_start")
"""Keys of scores in arrays, which may have more alternatives."""
PRIORITY_KEY: Final = "priority"
TEMPLATE_KEYS: Final = ("chat_template_kwargs", "add_generation_prompt", "continue_final_message")
"""Keys of a conversation's rendering."""
LANGUAGE_KEYS: Final = ("target_language", "source_language")
"""Languages of a translator's answer and text."""
SPECIAL_TOKENS_KEY: Final = "add_special_tokens"
EFFORT_KEY: Final = "reasoning_effort"
_EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""OpenAI's values, and vLLM's."""
SPACES_KEY: Final = "spaces_between_special_tokens"
MAX_NAME: Final = 512
"""Most characters of a request's name, which is a header of the server's."""
DATA_URL: Final = "data:"
_MAX_INTEGER: Final = 2**31 - 1
"""The maximum of any sampling key except `seed`: kernels take 32 bits."""


_STRUCTURED_KEY: Final = "structured_outputs"
_GUIDED: Final = {
    **{f"guided_{name}": name for name in ("json", "regex", "choice", "grammar")},
    "guided_whitespace_pattern": "whitespace_pattern",
}
"""Keys of vLLM before 0.12 -> fields of `structured_outputs`."""


@contextlib.contextmanager
def invalid_request(prefix: str = "", errors: type[ValueError] = ValueError) -> Iterator[None]:
    """Convert `errors`, and always RequestError, to InvalidRequestError."""
    try:
        yield
    except InvalidRequestError:
        raise
    except RequestError as error:
        raise InvalidRequestError(str(error), error.code) from None
    except errors as error:
        raise InvalidRequestError(f"{prefix}{error}"[:500]) from None


def check_keys(given: Iterable[str], known: Sequence[str], where: str = "", param: str | None = None) -> None:
    """Raise InvalidRequestError for the first unknown key, with the nearest known key and all of them. `param` is the
    key of the body that holds them.
    """
    for key in given:
        if key in known:
            continue
        nearest = difflib.get_close_matches(key[:100], known, n=1)
        hint = f": did you mean {nearest[0]!r}?" if nearest else "."
        if key in _GUIDED and _STRUCTURED_KEY in known:
            hint = f': give "{_STRUCTURED_KEY}": {{"{_GUIDED[key]}": ...}}.'
        raise InvalidRequestError(
            f"unknown key {key[:100]!r}{where}{hint} Known keys: {', '.join(known)}", "unknown_key", param
        )


def text_prompt(name: str, value: Any) -> TextPrompt:
    """A prompt to encode; `name` is its key in messages."""
    if not isinstance(value, str):
        raise InvalidRequestError(f"{name}={shown(value)} must be a string")
    if not value:
        raise InvalidRequestError(f"{name} is empty: a prompt needs at least one token", "empty_prompt")
    return TextPrompt(value)


def tokens_prompt(name: str, value: Any) -> TokensPrompt:
    """Integers of any size and sign: the vocabulary is checked later."""
    if not isinstance(value, list):
        raise InvalidRequestError(f"{name}={shown(value)} must be a list of token ids")
    # No loop in the interpreter for long prompts.
    if list(map(type, value)).count(int) < len(value):
        index, token_id = next((i, each) for i, each in enumerate(value) if type(each) is not int)
        raise InvalidRequestError(f"{name}[{index}]={shown(token_id)} must be a token id, an integer")
    if not value:
        raise InvalidRequestError(f"{name} is empty: a prompt needs at least one token", "empty_prompt")
    return TokensPrompt(tuple(value))


def with_special_tokens(prompt: _AnyPrompt, given: Mapping[str, Any]) -> _AnyPrompt:
    """The prompt as `add_special_tokens` says, which token ids and embeddings have no text for."""
    adds = optional_flag(given, SPECIAL_TOKENS_KEY, default=True)
    return replace(prompt, adds_special_tokens=adds) if isinstance(prompt, TextPrompt) else prompt


def decoder_prompt(name: str, value: Any) -> TextPrompt | TokensPrompt | None:
    """The prompt of a decoder, text or ids; None for the model's own. Raises InvalidRequestError."""
    if value is None:
        return None
    return tokens_prompt(name, value) if isinstance(value, list) else text_prompt(name, value)


def for_encoder(prompt: Prompt, fields: Mapping[str, Any]) -> Prompt:
    """The prompt with the keys of encoder-decoder models, if there are any. Raises InvalidRequestError."""
    decoder = decoder_prompt("decoder_prompt", fields.get("decoder_prompt"))
    target, source = (fields.get(key) for key in LANGUAGE_KEYS)
    if decoder is None and target is None and source is None and fields.get("encoder_prompt") is None:
        return prompt
    if not isinstance(prompt, TextPrompt | TokensPrompt):
        message = f"decoder_prompt, {' and '.join(LANGUAGE_KEYS)} go with the text or ids of an encoder"
        raise InvalidRequestError(message, "conflicting_keys")
    for key, language in zip(LANGUAGE_KEYS, (target, source), strict=True):
        if not isinstance(language, str | None):
            raise InvalidRequestError(f"{key}={shown(language)} must be a string")
    if decoder is not None and target is not None:
        message = "decoder_prompt begins the answer, in its language: leave target_language out"
        raise InvalidRequestError(message, "conflicting_keys")
    if source is not None and not isinstance(prompt, TextPrompt):
        raise InvalidRequestError(OF_TEXT, "conflicting_keys")
    if source is not None and isinstance(prompt, TextPrompt) and not prompt.adds_special_tokens:
        message = f"source_language={source!r} is a special token, and {SPECIAL_TOKENS_KEY}=false adds none"
        raise InvalidRequestError(f"{message}: leave one of them out", "conflicting_keys")
    return EncoderPrompt(prompt, decoder, target, source)


def check_neutral(
    given: Mapping[str, Any], unsupported: Mapping[str, tuple[Any, ...]], instead: Mapping[str, str] | None = None
) -> None:
    """Raise InvalidRequestError for a key of `unsupported` whose value is neither null nor one of its neutral ones.
    `instead` has what to give in place of some.
    """
    for key, neutral in unsupported.items():
        value = given.get(key)
        # Types are compared too: true is not 1.
        if value is not None and not any(value == item and type(value) is type(item) for item in neutral):
            way_out = f"give {instead[key]}" if instead and key in instead else "leave it out"
            raise InvalidRequestError(f"{key}={shown(value)} is not supported: {way_out}", "unsupported_value")


def embeds_prompt(name: str, value: Any) -> EmbedsPrompt:
    """Embeddings, which are read later."""
    if not isinstance(value, str | dict):
        message = f"{name}={shown(value)} must be base64 text of a safetensors file, or an object with path"
        raise InvalidRequestError(message)
    return EmbedsPrompt(value)


def chat_prompt(given: Mapping[str, Any], *, add_generation_prompt: bool = True) -> ChatPrompt:
    """The conversation of a row or body, of at least one message, with a default of `add_generation_prompt`. Raises
    InvalidRequestError naming the invalid message and key.
    """
    value, template_kwargs = given.get("messages"), given.get("chat_template_kwargs")
    if not isinstance(value, list):
        raise InvalidRequestError(f"messages={shown(value)} must be a list of messages")
    if not value:
        raise InvalidRequestError("messages is empty: a conversation needs at least one message", "empty_prompt")
    if template_kwargs is not None and not isinstance(template_kwargs, dict):
        raise InvalidRequestError(f"chat_template_kwargs={shown(template_kwargs)} must be an object")
    generates = optional_flag(given, "add_generation_prompt", default=add_generation_prompt)
    continues = optional_flag(given, "continue_final_message")
    if generates and continues:
        default = ", the default," if add_generation_prompt else ""
        raise InvalidRequestError(
            f"continue_final_message=true continues the last message, but add_generation_prompt=true{default} begins "
            f"another: give add_generation_prompt=false with it",
            "conflicting_keys",
        )
    adds_special_tokens = optional_flag(given, SPECIAL_TOKENS_KEY)
    images: list[Any] = []
    messages = tuple([_message(index, item, images) for index, item in enumerate(value)])
    media = media_of_parts(messages)
    return ChatPrompt(messages, template_kwargs or {}, generates, continues, tuple(images), media, adds_special_tokens)


def with_effort(prompt: ChatPrompt, body: Mapping[str, Any]) -> ChatPrompt:
    """The prompt with OpenAI's `reasoning_effort`, as a variable of its template. Raises InvalidRequestError."""
    effort = body.get(EFFORT_KEY)
    if effort is None:
        return prompt
    if effort not in _EFFORTS:
        raise InvalidRequestError(f"{EFFORT_KEY}={shown(effort)} must be one of {', '.join(_EFFORTS)}")
    if prompt.template_kwargs.get(EFFORT_KEY, effort) != effort:
        message = f"{EFFORT_KEY} and chat_template_kwargs.{EFFORT_KEY} differ: give one"
        raise InvalidRequestError(message, "conflicting_keys")
    return replace(prompt, reasoning_effort=effort)


def with_media(prompt: _AnyPrompt, fields: Mapping[str, Any]) -> _AnyPrompt:
    """The prompt with the images, videos and recordings of a plain row. In a conversation they belong to the parts that
    have none.
    """
    for part in ("image", "video", "audio"):
        value, key = fields.get(f"{part}s"), f"{part}s"
        given = [] if value is None else list(value) if isinstance(value, list) else [value]
        named = [(f"{key}[{index}]", each) for index, each in enumerate(given)]
        sources = [_video(*each) if part == "video" else media_source(*each, _TYPES[part]) for each in named]
        prompt = _with_sources(prompt, part, sources)
    return prompt


def _with_sources(prompt: _AnyPrompt, part: str, sources: Sequence[str | VideoPart]) -> _AnyPrompt:
    """The prompt with images, videos or recordings; in a conversation `part` is the type of their parts."""
    key = f"{part}s"
    if not sources:
        return prompt
    if not isinstance(prompt, TextPrompt | TokensPrompt | ChatPrompt):
        raise InvalidRequestError(
            f"{key} go with text, ids or messages, this row has prompt_embeds", "conflicting_keys"
        )
    medium: MediumName = "audio" if part == "audio" else "image"
    if not isinstance(prompt, ChatPrompt):
        return replace(prompt, images=(*prompt.images, *sources), media=(*prompt.media, *[medium] * len(sources)))
    own = ["video" if isinstance(each, VideoPart) else name for each, name in zip(prompt.images, prompt.media)]
    are_open = [is_open(each) and name == part for each, name in zip(prompt.images, own)]
    if sum(are_open) != len(sources):
        raise InvalidRequestError(
            f"{key} has {len(sources)} {key}, and messages have {sum(are_open)} {part} parts without one: give a part "
            f'{{"type": "{part}"}} for each',
            "placeholder_mismatch",
        )
    left = iter(sources)
    filled = [next(left) if is_empty else each for each, is_empty in zip(prompt.images, are_open, strict=True)]
    return replace(prompt, images=tuple(filled))


_TYPES: Final = {"image": "image/png", "audio": "audio/wav"}


def _video(name: str, value: Any) -> VideoPart:
    """A list of frames, a data URL or a path, or an object with the keys of a conversation's part."""
    found = checked_video(name, {**(value if isinstance(value, dict) else {"video": value}), "type": "video"})
    if is_open(found):
        raise InvalidRequestError(f"{name}={shown(value)} must be a list of frames, a data URL or a path")
    return found


def media_source(name: str, value: Any, media_type: str = "image/png") -> str:
    """A data URL or a path; an object has either under `bytes` and `path`, as the media columns of datasets do."""
    found = value
    if isinstance(value, dict):
        check_keys(value, ("bytes", "path"), f" in {name}")
        found = value.get("path") if value.get("bytes") is None else value["bytes"]
        if value.get("bytes") is not None and not str(found).startswith(DATA_URL):
            raise InvalidRequestError(f"{name}.bytes={shown(found)} must be a data URL: data:{media_type};base64,...")
    if not isinstance(found, str) or not found:
        raise InvalidRequestError(f"{name}={shown(value)} must be a data URL or a path")
    return found


def model_name(body: Mapping[str, Any]) -> str | None:
    """The model that a body names. Raises InvalidRequestError."""
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise InvalidRequestError(f"model={shown(model)} must be a string")
    return model


def priority_of(fields: Mapping[str, Any]) -> int:
    """The priority of a row or body; null is 0. Raises InvalidRequestError."""
    priority = fields.get(PRIORITY_KEY)
    if priority is None:
        return 0
    if type(priority) is not int or priority not in INT64:
        raise InvalidRequestError(f"priority={shown(priority)} must be a whole number of 64 bits")
    return priority


def request_id_of(body: Mapping[str, Any]) -> str | None:
    """The client's name for an answer. Raises InvalidRequestError."""
    given = body.get("request_id")
    if given is None:
        return None
    # A header's value has no spaces around it.
    is_printable = isinstance(given, str) and given.isascii() and given.isprintable() and given == given.strip()
    if not isinstance(given, str) or not is_printable or not 0 < len(given) <= MAX_NAME:
        rule = f"1 to {MAX_NAME} printable characters of ASCII, without spaces around them"
        raise InvalidRequestError(f"request_id={shown(given)} must be {rule}")
    return given


def check_spaces(given: Mapping[str, Any], sampling: SamplingParams) -> None:
    """Raise InvalidRequestError for texts of special tokens without the spaces that the tokenizers library writes."""
    if not optional_flag(given, SPACES_KEY, default=True) and not sampling.skip_special_tokens:
        raise InvalidRequestError(
            f"{SPACES_KEY}=false is not supported with skip_special_tokens=false: the tokenizers library decides where "
            f"it writes spaces; leave it out",
            "unsupported_value",
        )


def adapter_name(fields: Mapping[str, Any], key: str = "adapter") -> str | None:
    """The adapter that a plain row names under `key`. Raises InvalidRequestError."""
    adapter = fields.get(key)
    if adapter is not None and not isinstance(adapter, str):
        raise InvalidRequestError(f"{key}={shown(adapter)} must be a string, a name of model.{key}s")
    return adapter


def check_num_logprobs(name: str, value: Any) -> None:
    """Raise InvalidRequestError for a number of alternatives that no row gets: -1, all of them, is for Python alone."""
    if type(value) is not int or 0 <= value <= MAX_LOGPROBS:
        return
    if value == ALL_LOGPROBS:
        message = f"{name}=-1 requests the entire vocabulary: give at most {MAX_LOGPROBS}"
        raise InvalidRequestError(message, "limit_exceeded")
    raise InvalidRequestError(f"{name}={shown(value)} must be from 0 to {MAX_LOGPROBS}")


def sampling_from(defaults: SamplingParams, given: Mapping[str, Any]) -> SamplingParams:
    """The defaults, overridden by the row's values. Raises InvalidRequestError with the violated rule."""
    overrides = {key: value for key, value in given.items() if value is not None or key in _KEYS_WITH_NULL}
    for key, value in overrides.items():
        if key != "seed" and isinstance(value, int) and abs(value) > _MAX_INTEGER:
            raise InvalidRequestError(f"{key}={shown(value)} must be at most {_MAX_INTEGER}")
    check_num_logprobs("logprobs", overrides.get("logprobs"))
    if overrides.get("logprob_token_ids"):
        # These replace a default number.
        overrides.setdefault("logprobs", None)
    if all(overrides.get(key) is None for key in _SCORE_KEYS):
        check_num_logprobs("prompt_logprobs", overrides.get("prompt_logprobs"))
    with invalid_request():
        return replace(defaults, **overrides)


def _message(index: int, value: Any, images: list[Any]) -> dict[str, Any]:
    """A message in the format of chat templates, without keys that are null."""
    name = f"messages[{index}]"
    message = {key: item for key, item in checked_message(name, value).items() if item is not None}
    if "content" in message:
        message["content"] = checked_content(f"{name}.content", message["content"], images)
    return message
