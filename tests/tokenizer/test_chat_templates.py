"""The chat templates of a folder that has several, and reasoning under its three names: transformers' choice."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizer_folders import CHATML, write_byte_level
from transformers import PreTrainedTokenizerFast

from spmd_worker.base.errors import ChatTemplateError, TokenizerError
from spmd_worker.tokenizer.chat_template import ChatTemplate
from spmd_worker.tokenizer.tokenizer import Tokenizer

pytestmark = pytest.mark.finding(number="A2")

USER = [{"role": "user", "content": "hello"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
SOURCES = {
    "default": CHATML,
    "tool_use": f"{{{{ tools | tojson }}}}{CHATML}",
    "rag": "{% for d in documents or [] %}{{ d.text }}{% endfor %}" + CHATML,
}


def write_templates(folder: Path, names: list[str], where: str) -> Path:
    """A tokenizer with these templates: in a list, or in files of their own, beside a configuration that has one."""
    if where == "list":
        listed = [{"name": name, "template": SOURCES[name]} for name in names]
        return write_byte_level(folder, chat_template=listed)
    write_byte_level(folder, chat_template="of the configuration")
    (folder / "additional_chat_templates").mkdir()
    for name in names:
        file = "chat_template.jinja" if name == "default" else f"additional_chat_templates/{name}.jinja"
        (folder / file).write_text(SOURCES[name])
    return folder


@pytest.mark.gate("names1-list", "names2-files", "names3-files")
@pytest.mark.parametrize("where", ["list", "files"])
@pytest.mark.parametrize("names", [["default", "tool_use", "rag"], ["default", "rag"], ["default"], ["tool_use"]])
def test_chosen_template_equals_transformers(tmp_path: Path, names: list[str], where: str):
    folder = write_templates(tmp_path, names, where)
    ours, theirs = Tokenizer.open(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    assert ours.has_chat_template
    for tools in (None, TOOLS):
        for chosen in (None, *names, "{{ messages[0].content }}"):
            variables = {"documents": [{"text": "d"}], **({} if tools is None else {"tools": tools})}
            given: dict[str, Any] = {"documents": variables["documents"], "tools": tools, "chat_template": chosen}
            if names == ["tool_use"] and tools is None and chosen is None:
                with pytest.raises(ValueError, match="no default"):
                    theirs.apply_chat_template(USER, tokenize=False, **given)
                with pytest.raises(ChatTemplateError, match="tool_use but no default"):
                    ours.apply_chat_template(USER, False, variables)
                continue
            expected = theirs.apply_chat_template(USER, tokenize=False, **given)
            if chosen == "default" and names == ["default"]:
                # transformers forgets the name of a template that is alone.
                expected = theirs.apply_chat_template(USER, tokenize=False, **{**given, "chat_template": None})
            assert ours.apply_chat_template(USER, False, variables, chosen) == expected, (tools, chosen)
    with_tools = ours.chat_template_source
    assert with_tools == SOURCES["tool_use" if "tool_use" in names else "default"]


def test_fingerprint_covers_additional_templates(tmp_path: Path):
    folder = write_templates(tmp_path, ["default", "tool_use"], "files")
    before = Tokenizer.open(folder).fingerprint()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("another")
    changed = Tokenizer.open(folder).fingerprint()
    assert changed != before
    (folder / "additional_chat_templates" / "tool_use.jinja").write_bytes(b"\xff")
    with pytest.raises(TokenizerError, match=r"additional_chat_templates/tool_use\.jinja cannot be read"):
        Tokenizer.open(folder)


THOUGHTS = {
    "gpt-oss": "{% for m in messages %}<{{ m.role }}>{{ m.thinking or '' }}|{{ m.content or '' }}{% endfor %}",
    "others": (
        "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content is defined %}<think>{{ m.reasoning_content }}"
        "</think>{% endif %}{{ m.content or '' }}{% endfor %}"
    ),
}


@pytest.mark.gate("thoughts0-*", "thoughts3-others", "thoughts6-gpt-oss", "thoughts7-others")
@pytest.mark.parametrize("name", THOUGHTS)
@pytest.mark.parametrize(
    "thoughts",
    [
        {"reasoning_content": "why"},
        {"reasoning": "why"},
        {"thinking": "why"},
        {"thinking": "one", "reasoning": "two"},
        {"reasoning_content": "one", "thinking": "two"},
        {"reasoning_content": None, "reasoning": "two"},
        {"reasoning": ""},
        {},
    ],
)
def test_reasoning_reaches_the_template_under_every_name(tmp_path: Path, name: str, thoughts: dict[str, Any]):
    folder = write_byte_level(tmp_path, chat_template=THOUGHTS[name])
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {}}}
    talk = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call], **thoughts},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]
    expected = PreTrainedTokenizerFast.from_pretrained(folder).apply_chat_template(talk, tokenize=False)
    assert Tokenizer.open(folder).apply_chat_template(talk, False) == expected
    # The names that were given stay, as json of a message shows.
    written = json.loads(ChatTemplate("{{ messages[1] | tojson }}", {}).render(talk))
    assert {key: written[key] for key in thoughts if key != "reasoning_content" and thoughts[key] is not None} == {
        key: value for key, value in thoughts.items() if key != "reasoning_content" and value is not None
    }


LACKING = {
    # DeepSeek's.
    "null": (
        "{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}<call>"
        "{% else %}{{ m.role[0] + m.content }}{% endif %}{% endfor %}",
        "uhello<call>uhelloaso",
    ),
    # Qwen2.5's.
    "text": ("{% for m in messages %}{{ m.role[0] + m.content }}{% endfor %}", "uhelloauhelloaso"),
    "tolerant": ("{% for m in messages %}{{ m.role[0] ~ m.content }}{% endfor %}", "uhelloauhelloaso"),
}


@pytest.mark.parametrize("name", LACKING)
def test_answer_without_content_is_rendered(name: str):
    """Regression: an error of the template, for a call with `"content": null`, as OpenAI's clients send it back."""
    template, expected = LACKING[name]
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {}}}
    for message in ({"content": None, "tool_calls": [call]}, {"content": None}, {}):
        talk = [*USER, {"role": "assistant", **message}, *USER, {"role": "assistant", "content": "so"}]
        assert ChatTemplate(template, {}).render(talk, False) == expected
    # The first error is reported.
    with pytest.raises(ChatTemplateError, match="nothing is right"):
        ChatTemplate("{{ raise_exception('nothing is right') }}", {}).render(talk, False)
