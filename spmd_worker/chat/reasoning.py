"""Reasoning at the beginning of an answer's text, between two markers."""

from typing import NamedTuple

from spmd_worker.chat.answer_parts import num_held


class Reasoned(NamedTuple):
    """An answer's reasoning, "" where there is none, and what comes behind it."""

    reasoning: str
    answer: str


def split_reasoning(text: str, is_whole: bool, markers: tuple[str, str], *, is_open: bool) -> Reasoned:
    """`is_open`: the prompt's end has opened the reasoning. Without its end all is reasoning. Only what begins the text
    counts: a marker behind the first words is content.

    Of a text that may go on (`is_whole` false): what is certain.
    """
    begin, end = markers
    head = text.lstrip()
    # Some models open what the prompt has opened once more.
    is_marked = head.startswith(begin)
    if not is_whole and not is_marked and begin.startswith(head):
        return Reasoned("", "")
    if not is_marked and not is_open:
        return Reasoned("", text)
    inside = head[len(begin) :] if is_marked else text
    place = inside.find(end)
    if place >= 0:
        return Reasoned(inside[:place].strip(), inside[place + len(end) :].lstrip())
    certain = inside if is_whole else inside[: len(inside) - num_held(inside, end)]
    return Reasoned(certain.strip(), "")
