"""Format of a model's tool calls and reasoning: detected from its chat template, or configured.

    hermes        <tool_call>{"name": ..., "arguments": {...}}</tool_call>          Hermes, Qwen 2.5 and 3
    llama3_json   {"name": ..., "parameters": {...}}, <|python_tag|> before it      Llama 3.1 and later
    mistral       [TOOL_CALLS][{"name": ..., "arguments": {...}}], or [TOOL_CALLS]name[ARGS]{...}
    harmony       <|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>     gpt-oss

Reasoning is `think` (<think>...</think>), `mistral` ([THINK]...[/THINK]) or harmony's analysis channel.
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from spmd_worker.base.config.schema import ModelOptions
from spmd_worker.base.metrics.log import SAME_ON_EVERY_RANK
from spmd_worker.chat.chat_request import ChatRequest
from spmd_worker.tokenizer.messages import InvalidRequestError
from spmd_worker.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

NONE: Final = "none"

PYTHON_TAG: Final = "<|python_tag|>"

REASONING_MARKERS: Final[Mapping[str, tuple[str, str]]] = {
    "think": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
}

THINKING_MARKERS: Final[Mapping[str, tuple[str, str]]] = {
    **REASONING_MARKERS,
    "harmony": ("<|channel|>analysis<|message|>", "<|end|>"),
}
"""Markers of what a budget of reasoning counts."""

_CALL_MARKERS: Final[Mapping[str, tuple[str, ...]]] = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "llama3_json": (PYTHON_TAG,),
    "mistral": ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
}
_HARMONY_MARKERS: Final = (
    *("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"),
    *("<|end|>", "<|call|>", "<|return|>"),
)
_OTHER_CALLS: Final = ("<function=", "<arg_key>")
"""Markers next to <tool_call> of calls in XML, which is an unsupported format."""


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """`tool_calls` and `reasoning` name formats, or `none`; `takes_tools`: the chat template reads `tools`."""

    tool_calls: str = NONE
    reasoning: str = NONE
    takes_tools: bool = False

    @property
    def is_harmony(self) -> bool:
        """Whether answers are messages in channels."""
        return "harmony" in (self.tool_calls, self.reasoning)

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that mark calls and reasoning; some are special tokens of the tokenizer."""
        if self.is_harmony:
            return _HARMONY_MARKERS
        return (*_CALL_MARKERS.get(self.tool_calls, ()), *REASONING_MARKERS.get(self.reasoning, ()))


def chat_format_of(tool_calls: str, reasoning: str, template: str | None) -> ChatFormat:
    """The format by `model.tool_call_format` and `model.reasoning_format`; `auto` is detected in the template."""
    text = template or ""
    takes_tools = re.search(r"\btools\b", text) is not None
    is_harmony = "<|channel|>" in text and "<|message|>" in text
    if tool_calls == "auto":
        tool_calls = "harmony" if is_harmony else _tool_calls_in(text)
    if reasoning == "auto":
        reasoning = "harmony" if is_harmony or tool_calls == "harmony" else _reasoning_in(text)
    return ChatFormat(tool_calls, reasoning, takes_tools)


def model_chat_format(options: ModelOptions, tokenizer: Tokenizer | None) -> ChatFormat:
    """Format of the model with these options and this tokenizer. Logs a warning for an unknown format."""
    template = None if tokenizer is None else tokenizer.chat_template_source
    found = chat_format_of(options.tool_call_format, options.reasoning_format, template)
    if options.tool_call_format == "auto" and found.takes_tools and found.tool_calls == NONE:
        logger.warning(
            "the chat template reads tools, but its tool call format is unknown: calls stay in the content; set "
            "model.tool_call_format to parse them",
            extra=SAME_ON_EVERY_RANK,
        )
    return found


def check_takes_tools(request: ChatRequest, chat_format: ChatFormat) -> None:
    """Raise InvalidRequestError for tools that the chat template would not write."""
    if request.tools and not chat_format.takes_tools:
        message = "the model's chat template does not read tools: leave tools out"
        raise InvalidRequestError(message, "tools_unsupported")


def prompt_opens_reasoning(chat_format: ChatFormat, prompt: str, continued: str | None = None) -> bool:
    """Whether the end of the prompt begins the reasoning that the answer continues, or the text of the message that
    the prompt leaves open, `continued`, is inside it.
    """
    markers = REASONING_MARKERS.get(chat_format.reasoning)
    if markers is None:
        return False
    begin, end = markers
    return prompt.rstrip().endswith(begin) or (continued or "").rfind(begin) > (continued or "").rfind(end)


def goes_on_inside(chat_format: ChatFormat, prompt: str, continued: str | None = None) -> bool:
    """Whether an answer begins inside a text: that of the message which the prompt leaves open, `continued`, or of a
    harmony message, whose head the prompt has.
    """
    if chat_format.is_harmony:
        return max(_HARMONY_MARKERS, key=prompt.rfind) == "<|message|>"
    return bool((continued or "").strip())


def _tool_calls_in(template: str) -> str:
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template:
        return NONE if any(each in template for each in _OTHER_CALLS) else "hermes"
    # Llama 3.2's has only the sentence that instructs the model how to call.
    is_llama = PYTHON_TAG in template or '"parameters": dictionary of argument name' in template
    return "llama3_json" if is_llama else NONE


def _reasoning_in(template: str) -> str:
    # The end marker alone: in some templates the prompt's end opens it.
    return next((name for name, (_, end) in REASONING_MARKERS.items() if end in template), NONE)
