"""Tokenizers with the chat templates of models that call tools, and answers written by hand as such models write them.

The templates are short; what they share with the published ones are the words by which a format is known.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from tokenizer_folders import write_byte_level

_MESSAGES = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"


@dataclass(frozen=True)
class ChatModel:
    """`special` and `ordinary` are added tokens; `call` is a text that calls add({"a": 1}) and nothing else."""

    template: str
    special: tuple[str, ...]
    ordinary: tuple[str, ...]
    call: str


ADD = {"a": 1}
OBJECT = '{"name": "add", "arguments": {"a": 1}}'
HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")

CHAT_MODELS = {
    "hermes": ChatModel(
        f"{_TOOLS}{{# <tool_call> #}}{_MESSAGES}",
        (),
        ("<tool_call>", "</tool_call>"),
        f"<tool_call>\n{OBJECT}\n</tool_call>",
    ),
    "hermes with reasoning": ChatModel(
        f"{_TOOLS}{{# <tool_call> </think> #}}{_MESSAGES}",
        (),
        ("<tool_call>", "</tool_call>", "<think>", "</think>"),
        f"<think>\nhm, a < b\n</think>\n\n<tool_call>\n{OBJECT}\n</tool_call>",
    ),
    "llama3_json": ChatModel(
        f"{_TOOLS}{{# <|python_tag|> #}}{_MESSAGES}",
        ("<|python_tag|>",),
        (),
        '{"name": "add", "parameters": {"a": 1}}',
    ),
    "mistral": ChatModel(f"{_TOOLS}{{# [TOOL_CALLS] #}}{_MESSAGES}", ("[TOOL_CALLS]",), (), f"[TOOL_CALLS][{OBJECT}]"),
    "mistral with names": ChatModel(
        f"{_TOOLS}{{# [TOOL_CALLS] [ARGS] [/THINK] #}}{_MESSAGES}",
        ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
        (),
        '[THINK]so[/THINK][TOOL_CALLS]add[ARGS]{"a": 1}',
    ),
    "harmony": ChatModel(
        f"{_TOOLS}{{# <|channel|>commentary<|message|> #}}"
        "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}<|start|>assistant",
        HARMONY,
        (),
        "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant<|channel|>commentary to=functions.add "
        '<|constrain|>json<|message|>{"a": 1}',
    ),
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "adds",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}},
                "required": ["a"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "stop"}},
]


MARKERS = (
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]"),
    *("[/THINK]", "<|python_tag|>", *HARMONY, "; ", "{", "}", "]", '"', "\\", "\n", "<", "</tool_cal", "é😀"),
)
"""What arguments may quote: the markers of all formats, and what JSON is made of."""


def write_chat_tokenizer(folder: Path, name: str) -> Path:
    """A byte-level tokenizer with the template and the added tokens of one of `CHAT_MODELS`."""
    model = CHAT_MODELS[name]
    write_byte_level(folder, chat_template=model.template)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    added = {
        str(1000 + number): {"content": token, "special": token in model.special, "normalized": False}
        for number, token in enumerate((*model.special, *model.ordinary))
    }
    path.write_text(json.dumps(config | {"added_tokens_decoder": added}))
    return folder
