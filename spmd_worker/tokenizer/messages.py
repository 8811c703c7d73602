"""Messages in the format of chat templates: contents as text or parts, arguments of tool calls as objects."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from spmd_worker.base.config.plain_values import shown
from spmd_worker.base.names import hint
from spmd_worker.base.picklable_error import PicklableError
from spmd_worker.tokenizer.video_parts import VIDEO_OPTIONS, VideoPart, video_part

_TEXT_TYPES: Final = ("text", "input_text", "output_text")
_IMAGE_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "image": ("image", "url", "path"),
    **dict.fromkeys(("image_url", "input_image"), ("image_url",)),
    "image_pil": ("image_pil",),
}
"""Type of an image part -> the keys that may hold the image: OpenAI's, Qwen's, transformers' and vLLM's notations."""
_AUDIO_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "audio": ("audio", "audio_url", "url", "path"),
    "audio_url": ("audio_url",),
    "input_audio": ("input_audio",),
}
"""The same of audio parts."""
_VIDEO_KEYS: Final[Mapping[str, tuple[str, ...]]] = {"video": ("video", "url", "path"), "video_url": ("video_url",)}
MEDIA_PARTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "image": {"type": "image"},
    # Templates look for the key.
    "audio": {"type": "audio", "audio": ""},
    "video": {"type": "video"},
}
"""Parts in the format of templates."""
MediumName = Literal["image", "audio"]
"""Media that are prepared alike: videos go with images."""
_MEDIA: Final[Mapping[str, MediumName]] = {"image": "image", "video": "image", "audio": "audio"}
"""Type of a part -> its medium."""
_DETAILS: Final = ("auto", "low", "high", "original")
"""OpenAI's levels of detail of an image."""
_AUDIO_FORMATS: Final = ("wav", "mp3", "flac", "ogg")
_IN_JSON: Final = (bool, int, float, list, Mapping)
"""Types of values in JSON that are neither URLs nor paths."""


class InvalidRequestError(PicklableError, ValueError):
    """A request that cannot run. `code` is that of its error row or response, `param` the key of a body at fault."""

    def __init__(self, message: str, code: str = "invalid_value", param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.param = code, param


def optional_flag(given: Mapping[str, Any], key: str, *, default: bool = False, prefix: str = "") -> bool:
    """The boolean of `key`, `default` where it is missing or null. Raises InvalidRequestError."""
    value = given.get(key)
    if not isinstance(value, bool | None):
        raise InvalidRequestError(f"{prefix}{key}={shown(value)} must be true or false")
    return default if value is None else value


def checked_content(name: str, value: Any, images: list[Any]) -> str | list[dict[str, Any]]:
    """Text unchanged, and a list of parts in the format of templates: objects of type `text`, `image`, `video` or
    `audio`; an empty list becomes the empty text. `images` gets the image of each image part and the audio of each
    audio part, None for a part without one, and the `VideoPart` of each video part. Raises InvalidRequestError, naming
    the part, for anything else.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, list | tuple):
        raise InvalidRequestError(f"{name}={shown(value)} must be a string or a list of parts: text, media")
    return [_part(f"{name}[{index}]", part, images) for index, part in enumerate(value)] or ""


def media_of_parts(messages: Sequence[Mapping[str, Any]]) -> tuple[MediumName, ...]:
    """The medium of each image, video and audio part of messages in the format of templates, in order."""
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return tuple([medium for part in parts for name, medium in _MEDIA.items() if part == MEDIA_PARTS[name]])


def checked_message(name: str, value: Any) -> dict[str, Any]:
    """A message with a role and something to say, and its tool calls as `with_parsed_arguments` leaves them; what its
    content is, is not checked. Raises InvalidRequestError, also for a misspelled role or content.
    """
    if not isinstance(value, Mapping):
        raise InvalidRequestError(f"{name}={shown(value)} must be an object with role and content")
    if not isinstance(value.get("role"), str) or not value["role"]:
        near = "" if "role" in value else _near_key("role", value)
        raise InvalidRequestError(f"{name}.role={shown(value.get('role'))} must be a string such as 'user'{near}")
    near = "" if "content" in value else _near_key("content", value)
    num_given = sum(item is not None for item in value.values())
    # Clients send an answer that was only reasoning back without anything.
    if near or (num_given == 1 and value["role"] != "assistant"):
        raise InvalidRequestError(f"{name} has no content{near}")
    return with_parsed_arguments(name, value)


def _near_key(wanted: str, message: Mapping[str, Any]) -> str:
    found = next((key for key in message if isinstance(key, str) and hint(key.lower(), [wanted])), None)
    return "" if found is None else f": it has {shown(found)}: did you mean {wanted}?"


def with_parsed_arguments(name: str, message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with its tool calls' JSON arguments as objects, for templates. Raises InvalidRequestError."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list | tuple):
        return dict(message)
    return {**message, "tool_calls": [_parsed_call(f"{name}.tool_calls[{i}]", call) for i, call in enumerate(calls)]}


def _parsed_call(name: str, call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    arguments = function["arguments"]
    try:
        parsed = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        raise InvalidRequestError(
            f"{name}.function.arguments={shown(arguments)} must be an object, or one as JSON"
        ) from None
    return {**call, "function": {**function, "arguments": parsed}}


def _part(name: str, value: Any, images: list[Any]) -> dict[str, Any]:
    if isinstance(value, str):
        return {"type": "text", "text": value}
    kind = value.get("type") if isinstance(value, Mapping) else None
    for medium, keys in (("image", _IMAGE_KEYS), ("audio", _AUDIO_KEYS)):
        if isinstance(kind, str) and kind in keys:
            images.append(_medium(name, value, keys[kind], medium))
            return dict(MEDIA_PARTS[medium])
    if isinstance(kind, str) and kind in _VIDEO_KEYS:
        images.append(checked_video(name, value))
        return dict(MEDIA_PARTS["video"])
    if kind == "refusal" and isinstance(value.get("refusal"), str):
        # An answer of OpenAI's models that is sent back.
        return {"type": "text", "text": value["refusal"]}
    if kind not in _TEXT_TYPES:
        raise InvalidRequestError(
            f"{name} has type {shown(kind)}: only text, images, videos and audio are supported", "unsupported_value"
        )
    if not isinstance(value.get("text"), str):
        raise InvalidRequestError(f"{name}.text={shown(value.get('text'))} must be a string")
    return {**value, "type": "text"}


def _medium(name: str, part: Mapping[str, Any], keys: tuple[str, ...], medium: str) -> Any:
    """The image or audio of a part: a URL, a path, or what a caller in the same process has; None for a part that has
    its type alone.
    """
    given = [key for key in keys if part.get(key) is not None]
    if not given and part["type"] == medium:
        return None
    if len(given) != 1:
        raise InvalidRequestError(f"{name} needs {' or '.join(keys)}, and nothing else, for its {medium}")
    found, where = part[given[0]], f"{name}.{given[0]}"
    if given[0] == "input_audio":
        return _audio_url(where, found)
    if given[0].endswith("_url") and isinstance(found, Mapping):
        # `detail` is for OpenAI's models: the size of an image is that of the model's own rule.
        detail = found.get("detail")
        if detail is not None and detail not in _DETAILS:
            raise InvalidRequestError(f"{where}.detail={shown(detail)} must be one of {', '.join(_DETAILS)}")
        found = found.get("url")
    if found is None or isinstance(found, _IN_JSON) or (isinstance(found, tuple) and medium == "image"):
        raise InvalidRequestError(f"{where}={shown(found)} must be a data URL or a path")
    return found


def checked_video(name: str, part: Mapping[str, Any]) -> VideoPart:
    """The video of a part of `_VIDEO_KEYS`. Raises InvalidRequestError."""
    keys = _VIDEO_KEYS[part["type"]]
    unknown = [key for key in part if key not in ("type", *keys, *VIDEO_OPTIONS) and part[key] is not None]
    if unknown:
        known = ", ".join((*keys, *VIDEO_OPTIONS))
        message = f"{name} has {shown(unknown[0])}: a video part takes {known}"
        raise InvalidRequestError(message, "unsupported_value")
    given = [key for key in keys if part.get(key) is not None]
    if len(given) != 1 and (given or part["type"] != "video"):
        raise InvalidRequestError(f"{name} needs {' or '.join(keys)}, and nothing else, for its video")
    options = [key for key in VIDEO_OPTIONS if part.get(key) is not None]
    if options and not given:
        raise InvalidRequestError(f"{name} has {options[0]} and no video: give both in one object")
    found = part[given[0]] if given else None
    if given and given[0].endswith("_url") and isinstance(found, Mapping):
        unknown = [key for key in found if key != "url" and found[key] is not None]
        if unknown:
            message = f"{name}.{given[0]} has {shown(unknown[0])}: it takes url alone, numbers of frames go beside it"
            raise InvalidRequestError(message, "unsupported_value")
        found = found.get("url")
    listed = found if isinstance(found, list | tuple) else [found]
    if given and any(each is None or isinstance(each, _IN_JSON) for each in listed):
        rule = "must be a data URL, a path, or a list of frames"
        raise InvalidRequestError(f"{name}.{given[0]}={shown(found)} {rule}")
    try:
        return video_part(found, part)
    except ValueError as error:
        raise InvalidRequestError(f"{name} {error}") from None


def _audio_url(name: str, value: Any) -> str:
    """OpenAI's audio in base64 as a data URL. The bytes decide the format, not its name."""
    data = value.get("data") if isinstance(value, Mapping) else None
    if not isinstance(data, str) or not data:
        raise InvalidRequestError(f"{name}={shown(value)} must be an object with data, audio in base64")
    given = value.get("format")
    if given is not None and given not in _AUDIO_FORMATS:
        raise InvalidRequestError(f"{name}.format={shown(given)} must be one of {', '.join(_AUDIO_FORMATS)}")
    return data if data.startswith("data:") else f"data:audio/{given or 'wav'};base64,{data}"
