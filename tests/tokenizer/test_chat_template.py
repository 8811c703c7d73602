import gc

import pytest
from tokenizer_folders import CHATML, write_byte_level
from transformers import PreTrainedTokenizerFast

from spmd_worker.base.errors import ChatTemplateError
from spmd_worker.tokenizer import chat_template
from spmd_worker.tokenizer.chat_template import MAX_OUTPUT_CHARACTERS, ChatTemplate
from spmd_worker.tokenizer.tokenizer import Tokenizer

LLAMA3_LIKE = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date_string }}
{{- "\\n\\n" + system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

MISTRAL_LIKE = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
    {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
        {{- raise_exception("roles must alternate user and assistant") }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- else %}
        {% generation %}{{- " " + message["content"] + eos_token}}{% endgeneration %}
    {%- endif %}
{%- endfor %}
"""

ODDITIES = """
  {% for message in messages if message.role != 'skip' %}
    {%- if loop.index0 == 6 %}{% break %}{% endif %}
    {{ loop.index ~ '/' ~ loop.length ~ ' ' ~ message.role }} {{ message | tojson }} {{ message | tojson(indent=2) }}
    {{ loop.previtem.role if loop.previtem is defined else 'first' }} {{ loop.revindex }} {{ loop.cycle('a', 'b') }}
    {% for key, value in message.items() | sort %}{{ key }}={{ value }};{% else %}empty{% endfor %}
  {% else %}
    nobody
  {% endfor %}
{% macro shout(text, times=2) %}{{ (text | upper ~ '!') * times }}{% endmacro %}
{{ shout('hi') }} {{ '%s-%d' % ('a', 3) }} {{ '{:>4}|'.format('x') }} {{ '%5.1f' | format(2.25) }} {{ range(3) | list }}
{{ undefined_thing }}{{ none }} {{ 'a,b'.split(',') | join('+') }} {{ messages | map(attribute='role') | list }}
{% set text %}block {{ messages[0].role }}{% endset %}{{ text | indent(4, true) }}
{{ 2 ** 10 }} {{ 'é<&>' }} {{ 7 // 2 }}
"""

CONVERSATIONS = [
    [{"role": "user", "content": "hello"}],
    [{"role": "system", "content": " be brief "}, {"role": "user", "content": "a < b & 'c'"}],
    [
        {"role": "user", "content": "naïve 你好 😀"},
        {"role": "assistant", "content": "yes", "name": None},
        {"role": "user", "content": "\n more \n"},
    ],
]


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("template", [CHATML, MISTRAL_LIKE, ODDITIES], ids=["chatml", "mistral", "oddities"])
def test_rendered_prompts_equal_transformers(tmp_path, template, add_generation_prompt):
    folder = write_byte_level(tmp_path, chat_template=template)
    reference, ours = PreTrainedTokenizerFast.from_pretrained(folder), Tokenizer.open(folder)
    for messages in CONVERSATIONS:
        expected = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
        text = ours.apply_chat_template(messages, add_generation_prompt)
        assert text == expected
        ids = reference.apply_chat_template(messages, tokenize=True, add_generation_prompt=add_generation_prompt)
        assert ours.encode(text, add_special_tokens=False) == list(ids["input_ids"])


def test_template_with_a_date_equals_transformers(tmp_path):
    folder = write_byte_level(tmp_path, chat_template=LLAMA3_LIKE)
    reference, ours = PreTrainedTokenizerFast.from_pretrained(folder), Tokenizer.open(folder)
    for messages in CONVERSATIONS:
        expected = reference.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, date_string="01 Jan 2025"
        )
        assert ours.apply_chat_template(messages, True, {"date_string": "01 Jan 2025"}) == expected


def test_template_without_a_date_uses_its_default():
    text = ChatTemplate(LLAMA3_LIKE, {}).render(CONVERSATIONS[0])
    assert "Today Date: 26 Jul 2024" in text


def test_template_requiring_todays_date_is_rejected():
    template = ChatTemplate("{{ strftime_now('%d') }}", {})
    with pytest.raises(ChatTemplateError, match=r"'strftime_now' .*date .*chat_template_kwargs"):
        template.render(CONVERSATIONS[0])


def test_template_exception_keeps_its_own_words():
    messages = [{"role": "assistant", "content": "x"}]
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        ChatTemplate(MISTRAL_LIKE, {}).render(messages)


@pytest.mark.parametrize(
    "source",
    [
        "{% for %}",
        "{{ messages | nonsense }}",
        "{{ messages[9].role.x }}",
        "{{ 1 / 0 }}",
        "{{ messages + 1 }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
        "{{ 'joined strings' | joined strings }}",
    ],
)
def test_failing_template_raises_chat_template_error(source):
    # At the end of the stack other tests' garbage would be collected, whose finalizers fail there.
    gc.disable()
    try:
        with pytest.raises(ChatTemplateError):
            ChatTemplate(source, {}).render(CONVERSATIONS[0])
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages['__class__'] }}",
        "{{ (messages | attr('__class__')) }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ raise_exception.__globals__ }}",
        "{{ namespace(_private=1) }}",
        "{% set ns = namespace() %}{% set ns.__html__ = 1 %}",
        "{{ self.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('true') }}",
        "{{ lipsum.__globals__ }}",
    ],
)
def test_template_cannot_reach_python(source):
    messages = [dict(CONVERSATIONS[0][0])]
    try:
        text = ChatTemplate(source, {}).render(messages)
    except ChatTemplateError:
        text = ""
    # An unsafe attribute is an error or, as in Jinja, nothing at all: never the thing itself.
    assert text.strip() == ""
    assert messages == CONVERSATIONS[0]


BOMBS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops over text": "{% set s = 'a' * 9999 %}{% for a in s %}{% for b in s %}{% endfor %}{% endfor %}",
    "range": "{% for a in range(10 ** 9) %}{% endfor %}",
    "recursive loop": "{% for a in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
    "macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "output": "{% for a in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
    "plain output": "{% for a in range(99999) %}" + "x" * 1000 + "{% endfor %}",
    "repeat": "{{ 'x' * 10 ** 12 }}",
    "repeat a list": "{{ [1] * 10 ** 12 }}",
    "power": "{{ 10 ** 10 ** 10 }}",
    "squares": "{% set ns = namespace(x=10) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "doubling": "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "adding": "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "blocks": "{% set x = 'ab' %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 60,
    "width": "{{ 'x' | center(10 ** 11) }}",
    "method": "{{ 'x'.ljust(10 ** 11) }}",
    "format": "{{ '%99999999999d' % 1 }}",
    "format filter": "{{ '%99999999999d' | format(1) }}",
    "format method": "{{ '{:99999999999}'.format(1) }}",
    "format star": "{{ '%*d' % (99999999999, 1) }}",
    "indent": "{{ [1] | tojson(indent=10 ** 11) }}",
}


FEW_STEPS = 100_000
"""Lower limits for quick tests; "loops" uses the real ones."""


@pytest.mark.parametrize("name", sorted(BOMBS))
def test_endless_or_oversized_template_is_stopped(name, monkeypatch):
    if name != "loops":
        monkeypatch.setattr(chat_template, "_MAX_STEPS", FEW_STEPS)
    with pytest.raises(ChatTemplateError):
        ChatTemplate(BOMBS[name], {}).render(CONVERSATIONS[0])


def test_each_rendering_has_its_own_budget(monkeypatch):
    monkeypatch.setattr(chat_template, "_MAX_STEPS", FEW_STEPS)
    template = ChatTemplate("{% for i in range(9999) %}{% for j in range(4) %}{% endfor %}{% endfor %}ok", {})
    assert [template.render(CONVERSATIONS[0]) for _ in range(4)] == ["ok"] * 4


def test_long_conversation_is_within_bounds():
    messages = [{"role": "user", "content": "x" * 1000}] * 2000
    assert len(ChatTemplate(CHATML, {}).render(messages)) < MAX_OUTPUT_CHARACTERS
    messages = [{"role": "user", "content": "x" * MAX_OUTPUT_CHARACTERS}]
    with pytest.raises(ChatTemplateError, match="more than"):
        ChatTemplate(CHATML, {}).render(messages)


def test_template_rejects_objects_with_methods():
    with pytest.raises(ChatTemplateError, match=r"JSON .*not object$"):
        ChatTemplate("{{ messages }}", {}).render([{"role": "user", "content": object()}])


@pytest.mark.finding(number="A6")
@pytest.mark.parametrize(
    ("written", "why"),
    [
        ("[1, 2, 3, 4, 5, 6, 7] | random", "random"),
        ("lipsum()", "lipsum"),
        ("messages[0].content.strip", "builtin_function_or_method"),
        ("'a' ~ messages[0].content.strip", "builtin_function_or_method"),
        ("messages | map(attribute='role')", "generator"),
        ("messages | reverse", "list_reverseiterator"),
    ],
)
def test_template_rejects_values_that_differ_by_run(written: str, why: str):
    with pytest.raises(ChatTemplateError, match=why):
        ChatTemplate(f"{{{{ {written} }}}}{{{{ messages[0].content }}}}", {}).render([{"role": "user", "content": "x"}])
