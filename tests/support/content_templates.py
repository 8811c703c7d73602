"""Chat templates in the forms in which published models take contents: what `[{"type": "text", ...}]` is to them."""

SMOLVLM = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
LLAVA = (
    "{% for message in messages %}{% if message['role'] != 'system' %}{{ message['role'].upper() + ': ' }}{% endif %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% if message['role'] != 'assistant' %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] + ' ' }}"
    "{% endfor %}{% else %}{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{% generation %}{{ content['text'] + ' ' }}{% endgeneration %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
IDEFICS2 = (
    "{% for m in messages %}{{ m.role.capitalize() }}{% if m.content[0].type == 'image' %}{{ ':' }}"
    "{% else %}{{ ': ' }}{% endif %}{% for each in m.content %}{% if each.type == 'text' %}{{ each.text }}"
    "{% elif each.type == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
WALKING = {
    "SmolVLM": SMOLVLM,
    "LLaVA": LLAVA,
    "Idefics 2": IDEFICS2,
    "a variable": (
        "{% for turn in messages %}{% set content = turn['content'] %}<{{ turn['role'] }}>"
        "{% for c in content %}{{ c['text'] }}{% endfor %}{% endfor %}"
    ),
    "a macro": (
        "{% macro written(parts) %}{% for part in parts if part.type == 'text' %}{{ part.text | trim }};"
        "{% endfor %}{% endmacro %}{% for m in messages %}<{{ m.role }}>{{ written(m.content) }}{% endfor %}"
    ),
    "messages renamed": (
        "{% set loop_messages = messages[1:] if messages[0].role == 'system' else messages %}"
        "{% if messages[0].role == 'system' %}{{ messages[0]['content'][0]['text'] }}|{% endif %}"
        "{% for m in loop_messages %}{% for key in ['content'] %}{% for p in m[key] %}[{{ p.text }}]{% endfor %}"
        "{% endfor %}{% endfor %}"
    ),
    "map": "{% for m in messages %}<{{ m.role }}>{{ m.content | map(attribute='text') | join(' ') }}{% endfor %}",
    "strings refused": (
        "{% for m in messages %}{% if m.content is string %}{{ raise_exception('contents are parts') }}{% endif %}"
        "<{{ m.role }}>{% for p in m.content %}{{ p['text'] }}{% endfor %}{% endfor %}"
    ),
    "tools needed": (
        "{% for tool in tools %}{{ tool.function.name }}{% endfor %}"
        "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    ),
}
"""They lose a string."""

EITHER = {
    "Qwen 2 VL": (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
        "{{ message['content'] }}<|im_end|>\n{% else %}{% for content in message['content'] %}"
        "{% if content['type'] == 'image' %}<|vision_start|>{% elif 'text' in content %}{{ content['text'] }}"
        "{% endif %}{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "Gemma 3": (
        "{% for m in messages %}<start_of_turn>{{ m['role'] }}\n{%- if m['content'] is string -%}"
        "{{ m['content'] | trim }}{%- elif m['content'] is iterable -%}{%- for item in m['content'] -%}"
        "{%- if item['type'] == 'image' -%}{{ '<start_of_image>' }}{%- elif item['type'] == 'text' -%}"
        "{{ item['text'] | trim }}{%- endif -%}{%- endfor -%}{%- else -%}"
        "{{ raise_exception('Invalid content type') }}{%- endif -%}{{ '<end_of_turn>\n' }}{% endfor %}"
    ),
}
"""They take strings and parts."""

STRINGS = {
    "plain": "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}",
    "added": "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}{% endfor %}",
    "stripped": "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}",
    "json": "{% for m in messages %}<{{ m.role }}>{{ m.content | tojson }}{% endfor %}",
    "lines": (
        "{% for m in messages %}<{{ m.role }}>"
        "{% for line in m.content.split('\n') %}{{ line }}|{% endfor %}{% endfor %}"
    ),
    "the last alone": "{{ messages[-1].content }}",
}
"""They would write a list as Python or JSON has it, or fail."""

# A system's message in a string, a user's in parts: Llama 3.2 Vision's way, without its branch for strings.
MIXED = (
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] | trim + '\n' }}"
    "{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}{{ p['text'] }}{% endfor %}{% endfor %}"
)


def template_with(condition: str, written: str) -> str:
    """A chat template that has `written` in place of each part of a content of which `condition` is true."""
    return (
        "{% for message in messages %}<{{ message.role }}>{% if message.content is string %}{{ message.content }}"
        "{% else %}{% for part in message.content %}{% if "
        + condition
        + " %}"
        + written
        + "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<answer>{% endif %}"
    )
