"""Contents as text or as text parts, whatever form the chat template takes: what transformers renders of that form."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from content_templates import EITHER, MIXED, STRINGS, WALKING
from tokenizer_folders import write_byte_level
from transformers import PreTrainedTokenizerFast

from spmd_worker.compat.chat import ChatOptions, render
from spmd_worker.tokenizer import chat_template
from spmd_worker.tokenizer.chat_template import ChatTemplate
from spmd_worker.tokenizer.content_format import adapt_contents
from spmd_worker.tokenizer.tokenizer import Tokenizer

pytestmark = pytest.mark.finding(number="A1")

TALKS = {
    "one": [("user", ["hello"])],
    "with a system": [("system", ["be brief"]), ("user", ["hello"])],
    "turns": [("user", ["a < b & 'c'"]), ("assistant", [" yes "]), ("user", ['naïve "你好" 😀'])],
    "parts": [("system", ["be brief"]), ("user", ["first", "second"]), ("assistant", ["ok"]), ("user", ["third"])],
    "empty": [("user", [""])],
}
TOOLS = [{"type": "function", "function": {"name": "add"}}]
Messages = list[dict[str, Any]]


def in_parts(talk: list[tuple[str, list[str]]]) -> Messages:
    return [{"role": role, "content": [{"type": "text", "text": text} for text in texts]} for role, texts in talk]


def in_strings(talk: list[tuple[str, list[str]]]) -> Messages:
    return [{"role": role, "content": "\n".join(texts)} for role, texts in talk]


@pytest.fixture
def open_both(tmp_path: Path) -> Callable[[str], tuple[Callable[[Messages], str], Callable[[Messages], str]]]:
    """Renderers of a template: ours, and transformers'."""

    def opened(template: str) -> tuple[Callable[[Messages], str], Callable[[Messages], str]]:
        folder = write_byte_level(tmp_path, chat_template=template)
        own, theirs = Tokenizer.open(folder), PreTrainedTokenizerFast.from_pretrained(folder)
        given = {"tools": TOOLS, "add_generation_prompt": True, "tokenize": False}
        return (
            lambda messages: own.apply_chat_template(messages, True, {"tools": TOOLS}),
            lambda messages: theirs.apply_chat_template(messages, **given),
        )

    return opened


@pytest.mark.guarantee("Texts reach a template in the form that it takes")
@pytest.mark.parametrize("name", WALKING)
def test_template_iterating_over_parts_gets_parts(name: str, open_both: Callable):
    ours, theirs = open_both(WALKING[name])
    for talk in TALKS.values():
        parts, strings = in_parts(talk), in_strings(talk)
        assert ours(parts) == theirs(parts), talk
        if all(len(texts) == 1 for _, texts in talk):
            assert ours(strings) == theirs(parts), talk
        # Some of either, in one conversation.
        mixed = [strings[i] if i % 2 and len(texts) == 1 else parts[i] for i, (_, texts) in enumerate(talk)]
        assert ours(mixed) == theirs(parts), talk


@pytest.mark.parametrize("name", EITHER)
def test_template_of_both_formats_gets_the_given_content(name: str, open_both: Callable):
    ours, theirs = open_both(EITHER[name])
    for talk in TALKS.values():
        for messages in (in_parts(talk), in_strings(talk)):
            assert ours(messages) == theirs(messages), messages


@pytest.mark.parametrize("name", STRINGS)
def test_template_of_strings_gets_joined_parts(name: str, open_both: Callable):
    ours, theirs = open_both(STRINGS[name])
    for talk in TALKS.values():
        for messages in (in_parts(talk), in_strings(talk)):
            assert ours(messages) == theirs(in_strings(talk)), messages


def test_content_format_is_chosen_per_role(open_both: Callable):
    ours, theirs = open_both(MIXED)
    for talk in (TALKS["with a system"], TALKS["parts"]):
        expected = theirs([in_strings(talk)[0], *in_parts(talk)[1:]])
        for messages in (in_strings(talk), in_parts(talk)):
            if messages[1]["content"] != "first\nsecond":
                assert ours(messages) == expected, messages


def test_template_reading_one_part_gets_all_joined():
    template = ChatTemplate("{% for m in messages %}{{ m.content[0].text }}{% endfor %}", {})
    assert template.render(in_parts([("user", ["a", "b"])])) == "a\nb"
    assert template.render(in_strings([("user", ["a"])])) == "a"


def test_tool_results_and_empty_contents_keep_their_meaning():
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    talk = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "4", "tool_call_id": "1"},
    ]
    walking = (
        "{% for m in messages %}<{{ m.role }}>{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}{% endif %}"
        "{% for p in m.content or [] %}{{ p.text }}{% endfor %}{% endfor %}"
    )
    assert ChatTemplate(walking, {}).render(talk) == "<user>go<assistant>f<tool>4"
    # A template that drops what an assistant says beside its calls drops it in every form.
    said = [talk[0], {**talk[1], "content": "hm"}, talk[2]]
    dropping = "{% for m in messages %}<{{ m.role }}>{% if not m.tool_calls %}{{ m.content }}{% endif %}{% endfor %}"
    assert ChatTemplate(dropping, {}).render(said) == "<user>go<assistant><tool>4"


@pytest.mark.gate("ok so-*")
@pytest.mark.parametrize("name", ["SmolVLM", "LLaVA", "a macro", "Qwen 2 VL", "stripped"])
@pytest.mark.parametrize("text", ["ok so", "ok so "])
def test_last_message_is_continued_in_every_format(tmp_path: Path, name: str, text: str):
    folder = write_byte_level(tmp_path, chat_template={**WALKING, **EITHER, **STRINGS}[name])
    own, theirs = Tokenizer.open(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    talk = [("user", ["hi"]), ("assistant", [text])]
    reference = in_strings(talk) if name in STRINGS else in_parts(talk)
    expected = theirs.apply_chat_template(reference, tokenize=False, continue_final_message=True)
    options = ChatOptions(add_generation_prompt=False, continue_final_message=True)
    for messages in (in_strings(talk), in_parts(talk)):
        assert render(messages, options, own) == expected, messages


def test_template_error_is_that_of_the_given_conversation():
    refusing = ChatTemplate("{{ raise_exception('no ' + messages[0].role) }}", {})
    with pytest.raises(chat_template.ChatTemplateError, match="no user"):
        refusing.render(in_strings(TALKS["one"]))


def test_template_is_tried_once_when_given_content_fits():
    asked: list[Any] = []

    def rendered(tried: Any) -> str:
        asked.append(tried)
        texts = [[m["content"]] if isinstance(m["content"], str) else [p["text"] for p in m["content"]] for m in tried]
        return str(texts)

    for messages in (in_strings(TALKS["turns"]), in_parts(TALKS["parts"])):
        asked.clear()
        assert adapt_contents(messages, rendered) == messages
        assert len(asked) == 1
    asked.clear()
    talk = [{"role": role, "content": [{"text": "a"}, {"text": "b"}]} for role in ("system", "user", "tool")]
    assert adapt_contents(talk, asked.append) == talk
    assert len(asked) <= 34


ASKING = {
    "a beginning": (
        "{% for m in messages %}{% if m.content is string %}{% if m.content.startswith('<') %}{{ m.content }}"
        "{% endif %}{% else %}{% for p in m.content %}[{{ p.text[:3] }}]{% endfor %}{% endif %}{% endfor %}"
    ),
    "an end that is needed": (
        "{% for m in messages %}{% if not m.content.endswith('!') %}{{ raise_exception('no') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    ),
    "a beginning that is needed": (
        "{% for m in messages %}{% if m.content is string and not m.content.startswith('<') %}"
        "{{ raise_exception('no') }}{% endif %}{% for p in m.content %}{{ p }}{% endfor %}{% endfor %}"
    ),
    "capitals": "{% for m in messages %}{{ m.content | upper }}{% endfor %}",
    "a title": "{% for m in messages %}{{ m.content.title() }}{% endfor %}",
}


@pytest.mark.parametrize("name", ASKING)
def test_template_testing_for_words_gets_given_content(name: str, open_both: Callable):
    """Templates may search the text or change its case."""
    ours, theirs = open_both(ASKING[name])
    talk = [("user", ["<tool> first of all, so many words that none of them is in the middle, and then the end!"])]
    assert ours(in_strings(talk)) == theirs(in_strings(talk))
    assert "FIRST OF ALL" in ours(in_strings(talk)).upper()
    if name in ("an end that is needed", "capitals", "a title"):
        assert ours(in_parts(talk)) == theirs(in_strings(talk))


def test_empty_content_stays_empty_when_tested(open_both: Callable):
    """gpt-oss' refuses a call with content and reasoning."""
    ours, theirs = open_both(
        "{% for m in messages %}{% if m.tool_calls and m.content and m.thinking %}{{ raise_exception('both') }}"
        "{% endif %}{{ '<' + m.role + '>' + (m.content or m.thinking) }}{% endfor %}"
    )
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    talk = in_strings([("user", ["go"]), ("assistant", [""])])
    talk[1] |= {"reasoning_content": "hm", "tool_calls": [call]}
    for content in (talk[0]["content"], [{"type": "text", "text": talk[0]["content"]}]):
        assert ours([{**talk[0], "content": content}, talk[1]]) == theirs(talk)


def test_conversations_of_one_structure_are_tried_once(monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []
    template = ChatTemplate(WALKING["strings refused"], {})
    render = template._render
    monkeypatch.setattr(template, "_render", lambda context: asked.append("") or render(context))
    for number, text in enumerate(("first", "second")):
        asked.clear()
        assert template.render(in_strings([("user", [text])])) == f"<user>{text}"
        # What is given, with texts in it, is tried each time.
        assert len(asked) == 4 - 2 * number
    # Tools and other names may make another shape of it.
    asked.clear()
    assert template.render(in_strings([("user", ["third"])]), variables={"tools": TOOLS}) == "<user>third"
    assert len(asked) == 4


def test_long_conversations_stay_within_the_limits(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chat_template, "_MAX_STEPS", 20_000)
    talk = in_strings([("user" if i % 2 == 0 else "assistant", ["so many words " * 9]) for i in range(1001)])
    text = ChatTemplate(WALKING["a variable"], {}).render(talk)
    assert text.count("so many words") == 9 * 1001


@pytest.mark.control("Texts reach a template in the form that it takes")
def test_format_check_detects_an_untried_template(monkeypatch: pytest.MonkeyPatch):
    """Negative control."""
    monkeypatch.setattr(chat_template, "adapt_contents", lambda messages, *_: messages)
    prompts = [ChatTemplate(WALKING["SmolVLM"], {}).render(in_strings([("user", [text])])) for text in ("a", "a" * 99)]
    assert prompts[0] == prompts[1]
