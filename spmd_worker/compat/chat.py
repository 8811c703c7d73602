"""A conversation as `LLM.chat` takes it -> the prompt's text: content parts, tools, templates of the caller's, and the
last message continued; and an answer's text -> the message that goes on with it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from spmd_worker.chat.answer_reader import AnswerReader
from spmd_worker.chat.chat_format import ChatFormat, prompt_opens_reasoning
from spmd_worker.chat.chat_request import chat_request
from spmd_worker.chat.message import CallIds, chat_message
from spmd_worker.errors import ChatTemplateError, ConfigError
from spmd_worker.sequence.outputs import RequestOutput
from spmd_worker.sequence.sampling_params import SamplingParams
from spmd_worker.tokenizer.messages import MessageProblem, check_parts, text_content, with_parsed_arguments
from spmd_worker.tokenizer.template_process import IsolatedTemplate
from spmd_worker.tokenizer.tokenizer import Tokenizer

_FORMATS: Final = ("auto", "string", "openai")

_MARK: Final = "\ue0f1\ue0f2"
"""Ends the message that is continued, while it is rendered. A space goes behind it, to see whether it is kept."""


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How conversations become prompts. `template` None is the model folder's. `content_format` string and auto make
    one string of a list of text parts, openai hands the list to the template.
    """

    template: str | None = None
    content_format: str = "auto"
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Sequence[Mapping[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises ValueError for what cannot be together, TypeError for what is of another type."""
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError(
                "continue_final_message=True goes on with the last message, and add_generation_prompt=True begins "
                "another: pass add_generation_prompt=False with it"
            )
        if self.content_format not in _FORMATS:
            raise ValueError(
                f"chat_template_content_format={self.content_format!r} must be one of {', '.join(_FORMATS)}"
            )
        if not isinstance(self.template, str | None):
            raise TypeError(f"chat_template is a {type(self.template).__name__}: give the template's text")
        if not isinstance(self.tools, list | tuple | None):
            raise TypeError(f"tools is a {type(self.tools).__name__}: give a list of tools as JSON schemas")
        if not isinstance(self.variables, Mapping):
            raise TypeError(f"chat_template_kwargs is a {type(self.variables).__name__}: give a dict")


class ChatRenderer:
    """Renders with the model's tokenizer, and remembers the last template that was not the model folder's."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._template: IsolatedTemplate | None = None

    def render(self, messages: Sequence[Mapping[str, Any]], options: ChatOptions) -> str:
        """The prompt's text; encode it with `add_special_tokens=False`. Raises ChatTemplateError and ValueError."""
        prepared = [_prepared(index, message, options) for index, message in enumerate(messages)]
        if options.continue_final_message:
            _mark_end(prepared)
        variables = {**({"tools": list(options.tools)} if options.tools else {}), **options.variables}
        text = self._render(prepared, options, variables)
        return _before_mark(text) if options.continue_final_message else text

    def _render(self, messages: list[dict[str, Any]], options: ChatOptions, variables: dict[str, Any]) -> str:
        if options.template is None:
            return self._tokenizer.apply_chat_template(messages, options.add_generation_prompt, variables)
        if self._template is None or self._template.source != options.template:
            self._template = IsolatedTemplate(options.template, self._tokenizer.special_tokens)
        return self._template.render(messages, options.add_generation_prompt, variables)


def answer_messages(
    output: RequestOutput,
    tokenizer: Tokenizer,
    chat_format: ChatFormat,
    tools: Sequence[Mapping[str, Any]] | None,
    sampling: SamplingParams,
) -> list[dict[str, Any]]:
    """The message of each completion, in OpenAI's shape. Raises ValueError for what is no tool of OpenAI's."""
    request = chat_request({"tools": list(tools or ())})
    is_open = prompt_opens_reasoning(chat_format, output.prompt or "")
    reader = AnswerReader(chat_format, request, is_open, tokenizer)
    messages = []
    for completion in output.outputs:
        text = reader.marked_text(output.prompt_token_ids, sampling).read(completion)
        ids = CallIds(output.request_id, completion.index, chat_format.tool_calls)
        messages.append(chat_message(reader.read(text), ids))
    return messages


def load_template(given: Any) -> str | None:
    """A template's text, from the file of it or as it is: what holds a brace or a line end is no file's name. Raises
    ConfigError for a file that is not there.
    """
    if given is None:
        return None
    text = str(given)
    if isinstance(given, str) and any(each in text for each in "{}\n"):
        return text
    try:
        return Path(text).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"chat_template={text!r} is neither a template's text nor a file of one: {error}") from None


def _prepared(index: int, message: Any, options: ChatOptions) -> dict[str, Any]:
    name = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise MessageProblem(
            "invalid_value", f"{name} is a {type(message).__name__}: give a dict with role and content"
        )
    made = with_parsed_arguments(name, message)
    content = made.get("content")
    if content is not None and options.content_format == "openai":
        check_parts(f"{name}.content", content)
    elif content is not None:
        made["content"] = text_content(f"{name}.content", content)
    return made


def _mark_end(messages: list[dict[str, Any]]) -> None:
    """Put the mark behind the text of the last message."""
    content = messages[-1].get("content") if messages else None
    if isinstance(content, str):
        messages[-1]["content"] = f"{content}{_MARK} "
        return
    parts = [dict(part) if isinstance(part, Mapping) else {"type": "text", "text": part} for part in content or ()]
    if not parts:
        raise ChatTemplateError("continue_final_message=True, and the last message has no content to go on with")
    parts[-1]["text"] = f"{parts[-1]['text']}{_MARK} "
    messages[-1]["content"] = parts


def _before_mark(text: str) -> str:
    """What stands before the mark: without the spaces at its end where the template strips its messages."""
    place = text.rfind(_MARK)
    if place < 0:
        raise ChatTemplateError(
            "continue_final_message=True, and the chat template does not write the last message: pass "
            "continue_final_message=False"
        )
    keeps_spaces = text.startswith(f"{_MARK} ", place)
    return text[:place] if keeps_spaces else text[:place].rstrip()
