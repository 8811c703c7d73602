"""Hand-written answers of every format: what is read out of them, whole and as they go on."""

import json
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from chat_models import ADD, MARKERS, OBJECT, TOOLS
from hypothesis import given
from hypothesis import strategies as st
from property_examples import examples

from spmd_worker.base.config.schema import ModelOptions
from spmd_worker.chat import answer_parts, answer_reader
from spmd_worker.chat.answer_parts import ToolCall, object_members
from spmd_worker.chat.answer_reader import AnswerReader, AnswerStream, ChatAnswer
from spmd_worker.chat.call_parsers import NoCalls
from spmd_worker.chat.chat_format import ChatFormat, chat_format_of, model_chat_format
from spmd_worker.chat.chat_request import ChatRequest, chat_request

REQUEST = chat_request({"tools": TOOLS})
CALL = ToolCall("add", '{"a": 1}')
HERMES, LLAMA = ChatFormat("hermes", "think", True), ChatFormat("llama3_json", "none", True)
MISTRAL, HARMONY = ChatFormat("mistral", "mistral", True), ChatFormat("harmony", "harmony", True)
BLOCK = f"<tool_call>\n{OBJECT}\n</tool_call>"
LIST = f"[TOOL_CALLS][{OBJECT}]"
PYTHON = "<|python_tag|>"


def reader(
    chat_format: ChatFormat, request: ChatRequest | None = REQUEST, *, is_open: bool = False, is_inside: bool = False
) -> AnswerReader:
    return AnswerReader(chat_format, request, is_open, is_inside=is_inside)


ANSWERS = [
    # Hermes and Qwen.
    (HERMES, BLOCK, ChatAnswer("", "", (CALL,))),
    (HERMES, f"Let me see.\n{BLOCK}\n", ChatAnswer("Let me see.", "", (CALL,))),
    (HERMES, f"{BLOCK}\n{BLOCK}", ChatAnswer("", "", (CALL, CALL))),
    (HERMES, f" a \n{BLOCK}\n b ", ChatAnswer(" a\nb ", "", (CALL,))),
    (HERMES, f"<tool_call>{OBJECT}", ChatAnswer("", "", (CALL,))),
    (HERMES, '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', ChatAnswer("", "", (CALL,))),
    (HERMES, '<tool_call>{"name": "stop"}</tool_call>', ChatAnswer("", "", (ToolCall("stop", "{}"),))),
    (HERMES, f"<think>\nwhy\n</think>\n\n{BLOCK}", ChatAnswer("", "why", (CALL,))),
    (HERMES, f"<think>{BLOCK}</think>yes", ChatAnswer("yes", BLOCK)),
    (HERMES, "<think>\n\n</think>\n\nyes ", ChatAnswer("yes ")),
    (HERMES, "<think>cut o", ChatAnswer("", "cut o")),
    (HERMES, " yes <think>no</think>", ChatAnswer(" yes <think>no</think>")),
    # Llama 3.
    (LLAMA, '{"name": "add", "parameters": {"a": 1}}', ChatAnswer("", "", (CALL,))),
    (LLAMA, f'{PYTHON}{{"name": "add", "parameters": {{"a": 1}}}}; {OBJECT}', ChatAnswer("", "", (CALL, CALL))),
    (LLAMA, '{"name": "Bob", "age": 3}', ChatAnswer('{"name": "Bob", "age": 3}')),
    (LLAMA, f"{OBJECT} and more", ChatAnswer(f"{OBJECT} and more")),
    (LLAMA, f"{PYTHON}print(1)", ChatAnswer(f"{PYTHON}print(1)")),
    (LLAMA, f"So: {OBJECT}", ChatAnswer(f"So: {OBJECT}")),
    # Mistral.
    (MISTRAL, LIST, ChatAnswer("", "", (CALL,))),
    (MISTRAL, f"Well. {LIST}", ChatAnswer("Well.", "", (CALL,))),
    (MISTRAL, f"[TOOL_CALLS] [{OBJECT}, {OBJECT}] ", ChatAnswer("", "", (CALL, CALL))),
    (
        MISTRAL,
        '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]stop[ARGS]{}',
        ChatAnswer("", "", (CALL, ToolCall("stop", "{}"))),
    ),
    (MISTRAL, '[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{"a": 1}', ChatAnswer("", "", (CALL,))),
    (MISTRAL, f"[THINK]why[/THINK]{LIST}", ChatAnswer("", "why", (CALL,))),
    # gpt-oss.
    (HARMONY, "<|channel|>final<|message|>Yes.<|return|>", ChatAnswer("Yes.")),
    (
        HARMONY,
        "<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
        ChatAnswer("Yes.", "why"),
    ),
    (
        HARMONY,
        '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>',
        ChatAnswer("", "", (CALL,)),
    ),
    (
        HARMONY,
        "<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>commentary<|message|>I add.<|end|>"
        '<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{"a": 1}',
        ChatAnswer("I add.", "why", (CALL,)),
    ),
    (HARMONY, "<|channel|>analysis<|message|>cut o", ChatAnswer("", "cut o")),
    (HARMONY, "<|channel|>analysis<|message|>why<|end|><|start|>assi", ChatAnswer("", "why")),
    (HARMONY, "no channel at all", ChatAnswer("no channel at all")),
]
"""Answers that are in their format, or in none."""

BROKEN = [
    *[
        (HERMES, f"<tool_call>{inner}</tool_call>")
        for inner in ("", "{", "{}", "[1]", "null", '{"name": 3}', '{"name": ""}')
    ],
    *[
        (HERMES, f'<tool_call>{{"name": "add", "arguments": {value}}}</tool_call>')
        for value in ("3", '"x"', "[1]", "NaN", '{"a": }')
    ],
    (HERMES, f"<tool_call>{OBJECT} x</tool_call>"),
    (HERMES, f"<tool_call>{OBJECT[:-1]}"),
    (HERMES, "<tool_call>" + "[" * 100_000),
    (HERMES, '<tool_call>{"name": "add", "arguments": ' + '{"a":' * 50_000),
    (LLAMA, '{"name": "add", "parameters": [1]}'),
    (LLAMA, '{"name": "add"}'),
    (LLAMA, '{"name": "unknown", "parameters": {}}'),
    (LLAMA, f"{OBJECT};"),
    (MISTRAL, "[TOOL_CALLS]"),
    (MISTRAL, f"[TOOL_CALLS][{OBJECT}"),
    (MISTRAL, f"[TOOL_CALLS][{OBJECT}] and more"),
    (MISTRAL, "[TOOL_CALLS]add[ARGS]{"),
    (HARMONY, "<|channel|>commentary to=functions.add<|message|>{<|call|>"),
]
"""Answers that begin a call and make none."""


def check_all(read: Callable[[AnswerReader, str], ChatAnswer]) -> None:
    for chat_format, text, expected in ANSWERS:
        assert read(reader(chat_format), text) == expected, text
    for chat_format, text in BROKEN:
        assert read(reader(chat_format), text) == ChatAnswer(text), text[:100]


@pytest.mark.guarantee("Calls and reasoning are read, other text stays content")
def test_answer_splits_into_calls_reasoning_and_content():
    """Text that is no call stays content, as it is."""
    check_all(AnswerReader.read)


@pytest.mark.control("Calls and reasoning are read, other text stays content")
@pytest.mark.parametrize(
    "broken",
    [
        lambda name, request: NoCalls(),
        lambda name, request: SimpleNamespace(read=lambda text, is_end: [ToolCall("add", '{"a": 1}')]),
        lambda name, request: SimpleNamespace(read=lambda text, is_end: [text.replace("<tool_call>", ""), CALL]),
    ],
)
def test_answer_check_detects_a_broken_reader(broken: Callable, monkeypatch: pytest.MonkeyPatch, control):
    """The control."""
    monkeypatch.setattr(answer_reader, "call_reader", broken)
    with control():
        check_all(AnswerReader.read)


@pytest.mark.parametrize("head", ["add", "add[CALL_ID]", "add[ARGS]", ""])
def test_trailing_spaces_cost_linear_time(head: str):
    """Half an hour, where each was tried as the beginning of what follows: the limit of a test is the control."""
    text = f"[TOOL_CALLS]{head}" + " " * 500_000
    assert reader(MISTRAL).read(text).tool_calls == ()


def test_arguments_keep_the_model_text():
    text = '<tool_call>{"name": "add", "arguments": {"a":  1e400, "b": 00}}</tool_call>'
    assert reader(HERMES).read(text).tool_calls == ()
    own = '{"a":  1e400,\n "b": 123456789012345678901234567890, "c": "\\u00e9", "a": 2}'
    (call,) = reader(HERMES).read(f'<tool_call>{{"arguments": {own}, "name": "add"}}</tool_call>').tool_calls
    assert call.arguments == own
    digits = "9" * 10_000
    (call,) = (
        reader(HERMES).read(f'<tool_call>{{"name": "add", "arguments": {{"a": {digits}}}}}</tool_call>').tool_calls
    )
    assert digits in call.arguments


def test_calls_are_read_only_when_requested():
    for request in (None, chat_request({"tools": TOOLS, "tool_choice": "none"})):
        for chat_format, text in ((HERMES, BLOCK), (LLAMA, OBJECT), (MISTRAL, LIST)):
            assert reader(chat_format, request).read(text) == ChatAnswer(text)
        message = '<|channel|>commentary to=functions.add<|message|>{"a": 1}'
        assert reader(HARMONY, request).read(message) == ChatAnswer('{"a": 1}')
    assert not reader(ChatFormat("hermes", "none", True), None).reads
    one = chat_request({"tools": TOOLS, "parallel_tool_calls": False})
    assert reader(HERMES, one).read(f"{BLOCK}\n{BLOCK}") == ChatAnswer("", "", (CALL,))


def test_json_answer_is_a_call_only_with_tag():
    asked = chat_request({"tools": TOOLS, "response_format": {"type": "json_object"}})
    assert reader(LLAMA, asked).read(OBJECT) == ChatAnswer(OBJECT)
    assert reader(LLAMA, asked).read(PYTHON + OBJECT) == ChatAnswer("", "", (CALL,))


def test_reasoning_opened_by_prompt_needs_no_begin_marker():
    assert reader(HERMES, is_open=True).read(f"why</think>{BLOCK}") == ChatAnswer("", "why", (CALL,))
    assert reader(HERMES, is_open=True).read("<think>why</think>yes") == ChatAnswer("yes", "why")
    assert reader(HERMES, is_open=True).read("cut o") == ChatAnswer("", "cut o")


CONTINUED = [
    (HERMES, False, " so ", ChatAnswer(" so ")),
    (HERMES, False, "<think>no</think>", ChatAnswer("<think>no</think>")),
    (HERMES, False, f" so\n{BLOCK}", ChatAnswer(" so", "", (CALL,))),
    (HERMES, True, " it is.\n</think>\n\nyes", ChatAnswer("yes", " it is.")),
    (MISTRAL, True, " cut o", ChatAnswer("", " cut o")),
    (HARMONY, False, " so <|return|>", ChatAnswer(" so ")),
    (
        HARMONY,
        False,
        ' so<|end|><|start|>assistant<|channel|>commentary to=functions.add<|message|>{"a": 1}<|call|>',
        ChatAnswer(" so", "", (CALL,)),
    ),
]
"""Answers that go on inside a text of the prompt: content, or with True reasoning."""


def test_continued_message_keeps_its_beginning():
    for chat_format, is_open, text, expected in CONTINUED:
        found = reader(chat_format, is_open=is_open, is_inside=True)
        assert found.read(text) == expected, text
        check_cuts(found, text, range(len(text)))
    # Negative control: as the beginning of an answer it is another one.
    assert reader(HERMES).read("<think>no</think>") == ChatAnswer("", "no")


def as_it_comes(chat_reader: AnswerReader, pieces: Sequence[str]) -> list[ChatAnswer]:
    """All that is certain after each piece, and then with the end."""
    stream, found = AnswerStream(chat_reader), [ChatAnswer("")]
    for number in range(len(pieces) + 1):
        # Some answers end with a piece, some with nothing behind their last.
        new = stream.read(pieces[number] if number < len(pieces) else "", is_end=number == len(pieces))
        before = found[-1]
        calls = (*before.tool_calls, *new.tool_calls)
        found.append(ChatAnswer(before.content + new.content, before.reasoning + new.reasoning, calls))
    assert len(found[-1].tool_calls) == stream.num_calls
    return found[1:]


PIECES = [
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]", PYTHON),
    *("<|start|>", "assistant", "<|channel|>", "analysis", "final", "commentary", " to=functions.add", "<|message|>"),
    *(
        "<|constrain|>",
        "<|end|>",
        "<|call|>",
        OBJECT,
        '{"a": 1}',
        "[",
        "]",
        "{",
        "}",
        ";",
        ", ",
        " ",
        "\n",
        "x",
        "<",
        "é",
    ),
    *(BLOCK, LIST, f"<|channel|>commentary to=functions.add<|message|>{json.dumps(ADD)}<|call|>"),
]


def check_cuts(chat_reader: AnswerReader, text: str, cuts: Sequence[int]) -> None:
    """The parsed answer, and the certain part of it, do not depend on how the text is cut."""
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    found = as_it_comes(chat_reader, [text[start:end] for start, end in pairwise(places)])
    assert found[-1] == chat_reader.read(text), (text, places)
    for end, part in zip(places[1:], found):
        assert part == as_it_comes(chat_reader, [text[:end]])[0], (text, places, end)


EACH_FORMAT = st.sampled_from([HERMES, LLAMA, MISTRAL, HARMONY])
CUTS = st.lists(st.integers(0, 400), max_size=12)


@examples(150)
@given(st.lists(st.sampled_from(PIECES), max_size=9), EACH_FORMAT, *[st.booleans()] * 3, CUTS)
def test_streamed_answer_is_independent_of_the_cuts(
    pieces: Sequence[str],
    chat_format: ChatFormat,
    is_open: bool,
    is_inside: bool,
    is_parallel: bool,
    cuts: Sequence[int],
):
    request = REQUEST if is_parallel else chat_request({"tools": TOOLS, "parallel_tool_calls": False})
    check_cuts(reader(chat_format, request, is_open=is_open, is_inside=is_inside), "".join(pieces), cuts)


def test_written_answers_stream_character_by_character():
    for chat_format, text, expected in ANSWERS:
        check_cuts(reader(chat_format), text, range(len(text)))
        assert as_it_comes(reader(chat_format), list(text))[-1] == expected


def test_streaming_check_detects_pieces_read_in_isolation(monkeypatch: pytest.MonkeyPatch):
    """The control: without what a reader keeps of the pieces before."""
    right = answer_parts.PassOn.read

    def read_by_itself(self: answer_parts.PassOn, text: str, *, is_end: bool = False) -> tuple[str, str | None]:
        self._held = ""
        return right(self, text, is_end=is_end)

    monkeypatch.setattr(answer_parts.PassOn, "read", read_by_itself)
    with pytest.raises(AssertionError):
        check_cuts(reader(HERMES), f"x{BLOCK}", range(20))


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of characters that patterns were searched in."""
    count = [0]

    class Counting:
        def __init__(self, pattern: re.Pattern[str]) -> None:
            self._pattern = pattern
            self.pattern = pattern.pattern

        def search(self, text: str, at: int = 0) -> Any:
            found = self._pattern.search(text, at)
            count[0] += (len(text) if found is None else found.end()) - at
            return found

    init = answer_parts.PassOn.__init__
    monkeypatch.setattr(
        answer_parts.PassOn, "__init__", lambda self, marker, *rest: init(self, Counting(marker), *rest)
    )
    compile_pattern = re.compile
    counting = SimpleNamespace(
        compile=lambda text: Counting(compile_pattern(text)), escape=re.escape, Pattern=re.Pattern
    )
    monkeypatch.setattr(answer_parts, "re", counting)
    return count


def test_long_answer_is_searched_once(searched: list[int]):
    """Work is linear in the text in each format, for content, reasoning and an open call."""
    for chat_format, beginning in (
        *((HERMES, ""), (HERMES, "<think>"), (HERMES, '<tool_call>{"name": "')),
        *((LLAMA, "{"), (MISTRAL, ""), (MISTRAL, "[TOOL_CALLS]"), (HARMONY, "")),
        *((HARMONY, "<|channel|>final<|message|>"), (HARMONY, "<|channel|>analysis<|message|>")),
        *((HARMONY, "<|channel|>x to=functions.add<|message|>{"), (HARMONY, '<|channel|>x to=f<|message|>{"a": "')),
    ):
        for piece in ("words of it ", '"a" , "b" , ', "</tool_call>", "<|end|> a b "):
            if piece == "<|end|> a b " and beginning == "<|channel|>final<|message|>":
                continue
            searched[0] = 0
            as_it_comes(reader(chat_format), [beginning, *[piece] * 500])
            assert searched[0] <= 4 * 12 * 500, (chat_format, beginning, piece)


@pytest.mark.finding(number="A3")
def test_unterminated_calls_are_searched_three_times_at_most(searched: list[int]):
    """A string that goes on through later calls makes these be read again."""
    pieces = ('{"a": "', '\\"', '"" ""', "", '{"a": "b"}', '{"name": "add')
    for inner in pieces:
        for first in pieces:
            text, searched[0] = "".join(f"<tool_call>{each}</tool_call>" for each in (first, *[inner] * 500)), 0
            reader(HERMES).read(text)
            assert searched[0] <= 3 * len(text), (first, inner)


# Markers inside the JSON of a call.

TEXTS = st.lists(st.sampled_from([*MARKERS, "x", " ", "say "]), max_size=6).map("".join)
ARGUMENTS = st.dictionaries(
    TEXTS, TEXTS | st.lists(TEXTS, max_size=2) | st.dictionaries(TEXTS, TEXTS, max_size=2), max_size=3
)


def written(chat_format: ChatFormat, name: str, arguments: str) -> list[str]:
    """A call as the format has it, in each of its ways."""
    call = f'{{"name": "{name}", "arguments": {arguments}}}'
    if chat_format is HERMES:
        return [f"<tool_call>\n{call}\n</tool_call>", f"<tool_call>{call}</tool_call>"]
    if chat_format is LLAMA:
        return [call, f"{PYTHON}{call}"]
    if chat_format is MISTRAL:
        return [f"[TOOL_CALLS][{call}]", f"[TOOL_CALLS]{name}[ARGS]{arguments}", f"[TOOL_CALLS]{name}{arguments}"]
    head = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}"
    return [head, f"{head}<|call|>", f"<|start|>assistant{head}<|end|>"]


@pytest.mark.guarantee("Arguments come back whatever they quote")
@pytest.mark.finding(number="A3")
@examples(150)
@given(EACH_FORMAT, st.lists(ARGUMENTS, min_size=1, max_size=3), st.sampled_from([None, 1]), st.booleans(), CUTS)
def test_arguments_survive_any_quoted_text(
    chat_format: ChatFormat, arguments: list[dict[str, Any]], indent: int | None, is_ascii: bool, cuts: Sequence[int]
):
    texts = [json.dumps(each, indent=indent, ensure_ascii=is_ascii) for each in arguments]
    between = {LLAMA: "; ", HERMES: "\n"}.get(chat_format, "")
    for way in range(len(written(chat_format, "add", "{}"))):
        calls = [written(chat_format, "add", text)[way] for text in texts]
        if chat_format is LLAMA:
            calls[1:] = [call.removeprefix(PYTHON) for call in calls[1:]]
        if chat_format is HARMONY and way == 0:
            # Without an end of its own the next message ends it.
            calls[1:] = [f"<|start|>assistant{call}" for call in calls[1:]]
        answer = between.join(calls)
        expected = ChatAnswer("", "", tuple(ToolCall("add", text) for text in texts))
        assert reader(chat_format).read(answer) == expected, answer
        check_cuts(reader(chat_format), answer, cuts)
        if chat_format is HERMES:
            for is_open, thought in ((True, "why"), (False, "<think>why")):
                found = reader(chat_format, is_open=is_open).read(f"{thought}</think>{answer}")
                assert found == ChatAnswer("", "why", expected.tool_calls)


@pytest.mark.control("Arguments come back whatever they quote")
@pytest.mark.finding(number="A3")
def test_argument_check_detects_a_reader_without_strings(monkeypatch: pytest.MonkeyPatch):
    """Negative control."""
    text = written(HERMES, "add", '{"a": "</tool_call>"}')[0]
    assert len(reader(HERMES).read(text).tool_calls) == 1
    monkeypatch.setattr(answer_parts, "_STATES", ("(?!)",) * 3)
    assert reader(HERMES).read(text) == ChatAnswer(text)


QUOTING = '{"a": "</tool_call>[TOOL_CALLS]<|end|></think>"}'


@pytest.mark.finding(number="A3")
def test_broken_call_quoting_a_marker_hides_no_other():
    good = {each: written(each, "add", '{"a": 1}')[0] for each in (HERMES, MISTRAL, HARMONY)}
    for chat_format, call in good.items():
        for broken in (QUOTING[:-1], QUOTING[:-2], QUOTING.replace('": "', '" "'), QUOTING.replace("<|end|>", "\\x")):
            if chat_format is HARMONY and broken == QUOTING[:-2]:
                # From the marker on, which may be one, it is no message.
                continue
            text = written(chat_format, "add", broken)[-2]
            next_call = f"<|start|>assistant{call}" if chat_format is HARMONY else call
            answer = reader(chat_format).read(f"{text}{next_call}")
            assert CALL in answer.tool_calls, (chat_format, broken, answer)
            check_cuts(reader(chat_format), f"{text}{next_call}", range(0, 300, 3))


@pytest.mark.finding(number="A3")
@examples(60)
@given(EACH_FORMAT, ARGUMENTS, CUTS)
def test_json_content_survives_any_quoted_text(chat_format: ChatFormat, content: dict[str, Any], cuts: Sequence[int]):
    asked = chat_request({"tools": TOOLS, "response_format": {"type": "json_object"}})
    text = json.dumps(content)
    head = "<|channel|>final<|message|>" if chat_format is HARMONY else ""
    assert reader(chat_format, asked).read(head + text) == ChatAnswer(text)
    check_cuts(reader(chat_format, asked), head + text, cuts)


VALUES = st.sampled_from([None, True, -1, 1.5, "", "}", '"', [], [1, "]"], {"a": {}}])


@examples(30)
@given(st.dictionaries(st.sampled_from(["", "a", "{", '"', "é"]), VALUES, max_size=4))
def test_object_members_equal_json_of_python(value: dict):
    for indent in (None, 1):
        text = json.dumps(value, indent=indent)
        found = object_members(f"..{text}..", 2)
        assert found is not None
        assert ({name: json.loads(each) for name, each in found[0].items()}, found[1]) == (value, len(text) + 2)
    for broken in (text[:-1], text[1:], text.replace("{", "{,", 1), text[:-1] + ",}"):
        assert object_members(broken) is None or broken == text


FORMATS = {
    "{{ tools }}<tool_call>": ChatFormat("hermes", "none", True),
    "{{ tools }}<tool_call></think>": ChatFormat("hermes", "think", True),
    "{{ tools }}<tool_call><function=": ChatFormat("none", "none", True),
    "{{ tools }}<|python_tag|>": ChatFormat("llama3_json", "none", True),
    '{{ tools }}{"name": function name, "parameters": dictionary of argument name and its value}': ChatFormat(
        "llama3_json", "none", True
    ),
    "{{ tools }}[TOOL_CALLS]": ChatFormat("mistral", "none", True),
    "{{ tools }}[TOOL_CALLS][/THINK]": ChatFormat("mistral", "mistral", True),
    "{{ tools }}<|channel|><|message|>": ChatFormat("harmony", "harmony", True),
    "{{ messages }}": ChatFormat("none", "none", False),
    None: ChatFormat("none", "none", False),
}


def test_chat_format_follows_template_unless_configured():
    for template, expected in FORMATS.items():
        assert chat_format_of("auto", "auto", template) == expected, template
    assert chat_format_of("mistral", "none", "{{ tools }}<tool_call></think>") == ChatFormat("mistral", "none", True)


def test_unknown_tool_format_is_logged_once(caplog: pytest.LogCaptureFixture):
    tokenizer: Any = SimpleNamespace(chat_template_source="{{ tools }}<tool_call><function=")
    assert model_chat_format(ModelOptions(), tokenizer) == ChatFormat("none", "none", True)
    assert "model.tool_call_format" in caplog.text
    caplog.clear()
    assert model_chat_format(ModelOptions(tool_call_format="none"), tokenizer) == ChatFormat("none", "none", True)
    assert model_chat_format(ModelOptions(), None) == ChatFormat()
    assert caplog.text == ""
