"""Finds the form in which a chat template takes the contents of messages: strings, or lists of text parts.

Some templates walk over parts, and a string gives them its letters; most write strings, and would write a list as
Python prints it; some take either, or one form of the system's message and another of the user's. A template's syntax
tree does not tell them apart for certain (macros, renamed variables, branches), so the conversation is rendered with a
mark in the place of each text, and a form is good where the prompt shows every mark. The idea is that of llama.cpp's
minja, which probes a template once; here the conversation itself is tried.

What is given goes through as it is wherever that shows it all: the prompt is then the one that transformers renders.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, Final

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message]], str | None]
"""The text of a conversation; None where the template raises."""

FORMATS: Final = ("auto", "string", "openai")
"""vLLM's `chat_template_content_format`."""

_AS_GIVEN, _PARTS, _STRING, _ONE_PART = "as given", "parts", "string", "one part"
_FORMS: Final[Mapping[str, tuple[str, ...]]] = {
    "auto": (_AS_GIVEN, _PARTS, _STRING, _ONE_PART),
    "openai": (_AS_GIVEN, _PARTS),
    "string": (_STRING,),
}
"""Of contents in each format, the first that shows most is taken: `string` joins parts by line ends, `openai` keeps
lists, and makes one of a string that the template does not take."""
_SPEAKERS: Final = {"system": "system", "developer": "system", "assistant": "assistant", "tool": "tool"}
"""Messages of one speaker have one form; other roles count as the user's."""

_MARK: Final = "qzx{}xzq"
"""Letters and digits, which nothing that templates do to texts changes."""
_MARKS: Final = re.compile(r"qzx[0-9]+xzq")
_MARKS_OF_PARTS: Final = re.compile(r"""["']text["']\s*:\s*["'](qzx[0-9]+xzq)""")


def fitted(messages: Sequence[Message], render: Render, content_format: str = "auto") -> list[Message]:
    """The conversation with its contents in the forms of a format that lose least of them.

    `render` is asked once where the template takes what is given, and 17 times at most.
    """
    forms = _FORMS[content_format]
    masked, marks = _masked(messages)
    if not marks or len(forms) == 1:
        return _in_forms(messages, dict.fromkeys(marks, forms[0]))
    tried: list[tuple[list[Message], dict[str, int] | None]] = []

    def lost(chosen: Mapping[str, str]) -> dict[str, int] | None:
        """How many marks are not shown, by speaker; None where the template raises."""
        conversation = _in_forms(masked, chosen)
        for earlier, result in tried:
            if earlier == conversation:
                return result
        text = render(conversation)
        found = None if text is None else _shown(text)
        result = None if found is None else {who: len(marks[who] - found) for who in marks}
        tried.append((conversation, result))
        return result

    best = dict.fromkeys(marks, forms[0])
    least = lost(best)
    if least is None:
        # It says nothing of the others' forms that one speaker's makes the template raise.
        together = _together(marks, forms[1:])
        best, least = next(((chosen, found) for chosen in together if (found := lost(chosen))), (best, None))
    for speaker in marks:
        for form in forms[1:]:
            if least is not None and not least[speaker]:
                break
            chosen = {**best, speaker: form}
            found = lost(chosen)
            if found is not None and (least is None or sum(found.values()) < sum(least.values())):
                best, least = chosen, found
    return _in_forms(messages, best)


def _together(speakers: Iterable[str], forms: Iterable[str]) -> Iterator[dict[str, str]]:
    """All in one form, or the system's message alone in another."""
    for form in forms:
        yield dict.fromkeys(speakers, form)
    yield {speaker: _AS_GIVEN if speaker == "system" else _PARTS for speaker in speakers}


def _masked(messages: Sequence[Message]) -> tuple[list[Message], dict[str, set[str]]]:
    """The conversation with a mark in the place of each text, and the marks by speaker. Others than texts stay."""
    masked: list[Message] = []
    marks: dict[str, set[str]] = {}
    number = count()
    for message in messages:
        content: Any = message.get("content")
        if not _is_text(content):
            masked.append(message)
            continue
        texts = [_MARK.format(next(number)) for _ in ([content] if isinstance(content, str) else content)]
        marks.setdefault(_speaker(message), set()).update(texts)
        parts = texts[0] if isinstance(content, str) else [{**part, "text": own} for part, own in zip(content, texts)]
        masked.append({**message, "content": parts})
    return masked, marks


def _shown(text: str) -> set[str]:
    """The marks in a text, but for those in what Python or JSON writes for a part."""
    return set(_MARKS.findall(text)) - set(_MARKS_OF_PARTS.findall(text))


def _in_forms(messages: Sequence[Message], forms: Mapping[str, str]) -> list[Message]:
    return [
        {**message, "content": _in_form(message["content"], forms[_speaker(message)])}
        if _is_text(message.get("content"))
        else message
        for message in messages
    ]


def _in_form(content: Any, form: str) -> Any:
    if form == _AS_GIVEN or (form == _PARTS and not isinstance(content, str)):
        return content
    text = content if isinstance(content, str) else "\n".join(part["text"] for part in content)
    return text if form == _STRING else [{"type": "text", "text": text}]


def _is_text(content: Any) -> bool:
    """A string, or parts that each have a text."""
    is_list = isinstance(content, list) and bool(content)
    has_texts = is_list and all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content)
    return isinstance(content, str) or has_texts


def _speaker(message: Message) -> str:
    return _SPEAKERS.get(str(message.get("role")), "user")
