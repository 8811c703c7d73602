"""Detects the content format of a chat template: strings, or lists of text parts.

Some templates iterate over parts, and a string gives them its letters; most write strings, and would write a list as
Python prints it; some accept either, or one format for the system's message and another for the user's. A template's
syntax tree does not distinguish them for certain (macros, renamed variables, branches), so the conversation is rendered
with a mark instead of each text, and a format is good if the prompt shows every mark. The idea is that of llama.cpp's
minja, which probes a template once; here the conversation itself is tried.

Contents are passed unchanged wherever that shows it all: the prompt is then the one that transformers renders. Contents
with images or audio are always lists.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from itertools import count
from typing import Any, Final

from spmd_worker.tokenizer.messages import MEDIA_PARTS

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message]], str | None]
"""Text of a conversation; None where the template raises."""

FORMATS: Final = ("auto", "string", "openai")
"""vLLM's `chat_template_content_format`."""

_AS_GIVEN, _PARTS, _STRING, _ONE_PART = "as given", "parts", "string", "one part"
_CANDIDATES: Final[Mapping[str, tuple[str, ...]]] = {
    "auto": (_AS_GIVEN, _PARTS, _STRING, _ONE_PART),
    "openai": (_AS_GIVEN, _PARTS),
    "string": (_STRING,),
}
"""Candidates of each format; the first that shows the most marks is used. `string` joins parts by line ends, `openai`
keeps lists, and converts a string to one if the template does not accept strings.
"""
_SPEAKERS: Final = {"system": "system", "developer": "system", "assistant": "assistant", "tool": "tool"}
"""Messages of one speaker share a format; other roles count as the user's."""

_MARK: Final = "qzx{}xzq"
"""Letters and digits: templates change at most their case."""
_MARKS: Final = re.compile(r"qzx[0-9]+xzq", re.IGNORECASE)
_MARKS_OF_PARTS: Final = re.compile(r"""["']text["']\s*:\s*["'][^"']*?(qzx[0-9]+xzq)""", re.IGNORECASE)
_MAX_END: Final = 24
"""Characters of a text's beginning and end: templates that iterate over letters take longer for more."""
_MAX_TESTED: Final = 1000
"""Maximum messages to test with texts: with more, those templates could reach their limit."""
_MAX_CACHED: Final = 256

Choice = tuple[dict[str, str], bool]
"""The format of each speaker's contents, and whether the template renders them."""


def adapt_contents(
    messages: Sequence[Message],
    render: Render,
    content_format: str = "auto",
    cache: dict[bytes, Choice] | None = None,
    context: Mapping[str, Any] | None = None,
) -> list[Message]:
    """The conversation with its contents in the candidate formats that lose least of them.

    `render` is called once if the template accepts the contents unchanged, else up to 34 times. With `cache`, which is
    of one template, a conversation that differs from an earlier one only in its texts is not tried again; `context` is
    the template's other input.
    """
    formats = _CANDIDATES[content_format]
    masked, marks = _masked(messages)
    if not marks or len(formats) == 1:
        return _converted(messages, dict.fromkeys(marks, formats[0]))
    cache = {} if cache is None else cache
    key = blake2b(json.dumps([content_format, masked, context]).encode("ascii"), digest_size=16).digest()
    if key not in cache:
        cache[key] = _chosen(masked, marks, render, formats)
        if len(cache) > _MAX_CACHED:
            del cache[next(iter(cache))]
    chosen, is_rendered = cache[key]
    given = dict.fromkeys(marks, formats[0])
    if (is_rendered and chosen == given) or len(messages) > _MAX_TESTED:
        return _converted(messages, chosen)
    # The template may test a text or its beginning, which marks alone do not show.
    masked, marks = _masked(messages, keeps_texts=True)
    if not is_rendered:
        return _converted(messages, _chosen(masked, marks, render, formats)[0])
    shown = _shown(render(masked)) if all(marks.values()) else None
    shows_all = shown is not None and set().union(*marks.values()) <= shown
    return _converted(messages, given if shows_all else chosen)


def _chosen(masked: Sequence[Message], marks: Mapping[str, set[str]], render: Render, formats: Sequence[str]) -> Choice:
    tried: list[tuple[list[Message], dict[str, int] | None]] = []

    def lost(chosen: Mapping[str, str]) -> dict[str, int] | None:
        """Number of hidden marks by speaker; None where the template raises, or writes parts unrendered."""
        conversation = _converted(masked, chosen)
        for earlier, result in tried:
            if earlier == conversation:
                return result
        found = _shown(render(conversation))
        result = None if found is None else {who: len(marks[who] - found) for who in marks}
        tried.append((conversation, result))
        return result

    best = dict.fromkeys(marks, formats[0])
    least = lost(best)
    if least is None:
        # If one speaker's format makes the template raise, all are tried in one format, and the system's in another.
        together = [dict.fromkeys(marks, each) for each in formats[1:]]
        together.append({speaker: _AS_GIVEN if speaker == "system" else _PARTS for speaker in marks})
        best, least = next(((chosen, found) for chosen in together if (found := lost(chosen))), (best, None))
    for speaker in marks:
        for each in formats[1:]:
            if least is not None and not least[speaker]:
                break
            chosen = {**best, speaker: each}
            found = lost(chosen)
            if found is not None and (least is None or sum(found.values()) < sum(least.values())):
                best, least = chosen, found
    return best, least is not None


def _masked(messages: Sequence[Message], *, keeps_texts: bool = False) -> tuple[list[Message], dict[str, set[str]]]:
    """The conversation with a mark instead of each text, and the marks by speaker. Anything but texts stays.
    `keeps_texts`: the mark is inside each text, which keeps its beginning and end, and empty ones stay.
    """
    masked: list[Message] = []
    marks: dict[str, set[str]] = {}
    number = count()
    for message in messages:
        content: Any = message.get("content")
        if not (_is_text(content) or _has_images(content)):
            masked.append(message)
            continue
        own_marks = marks.setdefault(_speaker(message), set())

        def marked(text: str, own_marks: set[str] = own_marks) -> str:
            if keeps_texts and not text:
                return text
            mark = _MARK.format(next(number))
            own_marks.add(mark)
            if not keeps_texts:
                return mark
            # Between the text's beginning and end, each as long as a template may test.
            num_first = min(_MAX_END, len(text) // 2)
            return text[:num_first] + mark + text[num_first:][-_MAX_END:]

        is_one = isinstance(content, str)
        parts = marked(content) if is_one else [_with_text(part, marked) for part in content]
        masked.append({**message, "content": parts})
    return masked, marks


def _shown(text: str | None) -> set[str] | None:
    """The marks in a text; None without a text, or if it shows a part as Python or JSON writes it."""
    if text is None or _MARKS_OF_PARTS.search(text) is not None:
        return None
    return {mark.lower() for mark in _MARKS.findall(text)}


def _converted(messages: Sequence[Message], formats: Mapping[str, str]) -> list[Message]:
    """The conversation with each speaker's contents in its format."""
    found = []
    for message in messages:
        content: Any = message.get("content")
        if _is_text(content) and (to := formats[_speaker(message)]) != _AS_GIVEN:
            if to != _PARTS or isinstance(content, str):
                text = content if isinstance(content, str) else "\n".join(part["text"] for part in content)
                content = text if to == _STRING else [{"type": "text", "text": text}]
            message = {**message, "content": content}
        found.append(message)
    return found


def _is_text(content: Any) -> bool:
    if isinstance(content, str):
        return True
    is_list = isinstance(content, list) and bool(content)
    return is_list and all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content)


def _has_images(content: Any) -> bool:
    """Whether a content is a list of text parts and parts of images or audio, and not all of them are text."""
    images = [part for part in content if _is_medium(part)] if isinstance(content, list) else []
    others = [part for part in content if not _is_medium(part)] if images else []
    return bool(images) and (not others or _is_text(others))


def _is_medium(part: Any) -> bool:
    return part in MEDIA_PARTS.values()


def _with_text(part: Message, change: Callable[[str], str]) -> Message:
    return part if _is_medium(part) else {**part, "text": change(part["text"])}


def _speaker(message: Message) -> str:
    return _SPEAKERS.get(str(message.get("role")), "user")
