"""Renders the conversations of `LLM.chat`, and parses answers into assistant messages."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spmd_worker.base.config.plain_values import required_bool, shown
from spmd_worker.base.config.schema import ModelOptions
from spmd_worker.base.metrics.log import SAME_ON_EVERY_RANK
from spmd_worker.chat.answer_grammar import AnswerGrammar
from spmd_worker.chat.answer_reader import AnswerReader
from spmd_worker.chat.chat_format import (
    ChatFormat,
    chat_format_of,
    check_takes_tools,
    goes_on_inside,
    prompt_opens_reasoning,
)
from spmd_worker.chat.chat_request import ChatRequest, chat_request
from spmd_worker.chat.message import CallIds, chat_message
from spmd_worker.replica.sequence.outputs import RequestOutput
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.replica.sequence.structured_outputs import StructuredOutputsParams
from spmd_worker.tokenizer.content_format import FORMATS
from spmd_worker.tokenizer.messages import InvalidRequestError, checked_content, checked_message, with_parsed_arguments
from spmd_worker.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """Options of rendering. `template` is None for the model folder's, else the name of one of its templates, or a
    text. `content_format` string joins text parts, openai makes lists of parts, auto does what the template reads;
    `keeps_contents` passes contents unchanged.
    """

    template: str | None = None
    content_format: str = "auto"
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Sequence[Mapping[str, Any]] | None = None
    tool_choice: Any = None
    model: ModelOptions = field(default_factory=ModelOptions)
    variables: Mapping[str, Any] = field(default_factory=dict)
    keeps_contents: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError for conflicting or invalid values, TypeError for invalid types."""
        for name in ("add_generation_prompt", "continue_final_message"):
            # Templates see plain values only.
            object.__setattr__(self, name, required_bool(name, getattr(self, name)))
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError(
                "continue_final_message=True continues the last message, but add_generation_prompt=True begins "
                "another: pass add_generation_prompt=False with it"
            )
        if self.content_format not in FORMATS:
            raise ValueError(
                f"chat_template_content_format={self.content_format!r} must be one of {', '.join(FORMATS)}"
            )
        for name, value, kinds, wanted in (
            ("chat_template", self.template, str | None, "the template's text"),
            ("tools", self.tools, list | tuple | None, "a list of tools as JSON schemas"),
            ("chat_template_kwargs", self.variables, Mapping, "a dict"),
        ):
            if not isinstance(value, kinds):
                raise TypeError(f"{name} is a {type(value).__name__}: give {wanted}")
        if self.tool_choice is not None:
            _request(self)


def prepared_messages(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[Any]]:
    """Messages in the format of templates, and the images of their image parts, in order. Raises ValueError."""
    images: list[Any] = []
    return [_prepared(index, message, images) for index, message in enumerate(messages)], images


def render(messages: Sequence[Mapping[str, Any]], options: ChatOptions, tokenizer: Tokenizer) -> str:
    """Text of the prompt, to be encoded with `add_special_tokens=False`. Raises ChatTemplateError and ValueError."""
    if options.keeps_contents:
        prepared = [_parsed(index, message) for index, message in enumerate(messages)]
    else:
        prepared, _ = prepared_messages(messages)
    variables = {**({"tools": list(options.tools)} if options.tools else {}), **options.variables}
    content_format = None if options.keeps_contents else options.content_format
    return tokenizer.apply_chat_template(
        *(prepared, options.add_generation_prompt, variables, options.template, content_format),
        continue_final_message=options.continue_final_message,
    )


def warn_unread_tools(options: ChatOptions, tokenizer: Tokenizer) -> None:
    """Log a warning if the template does not read the tools, once per call."""
    if options.tools and not _chat_format(options, tokenizer).takes_tools:
        logger.warning("the chat template does not read tools: the model does not see them", extra=SAME_ON_EVERY_RANK)


def answer_form(
    prompt: str, continued: str | None, options: ChatOptions, tokenizer: Tokenizer
) -> StructuredOutputsParams | None:
    """Grammar that constrains the answers to a prompt, which continue the text `continued`; None without one. Raises
    ValueError for an invalid `tool_choice`, and, with one, for tools that are not OpenAI's or that the template does
    not read.
    """
    if options.tool_choice is None:
        return None
    request, chat_format = _request(options), _chat_format(options, tokenizer)
    if request is None:
        return None
    check_takes_tools(request, chat_format)
    return AnswerGrammar(chat_format, tokenizer.marker_id, continued).compile(request, prompt)


def answer_messages(
    output: RequestOutput, options: ChatOptions, tokenizer: Tokenizer, sampling: SamplingParams
) -> list[dict[str, Any]]:
    """Assistant message of each completion, as in OpenAI's API. Raises ValueError for tools that are not OpenAI's."""
    request, chat_format = _request(options), _chat_format(options, tokenizer)
    given = (chat_format, output.prompt or "", output.continued)
    is_open, is_inside = prompt_opens_reasoning(*given), goes_on_inside(*given)
    reader = AnswerReader(chat_format, request, is_open, tokenizer, is_inside)
    messages = []
    for completion in output.outputs:
        text = reader.marked_text(output.prompt_token_ids, sampling).read(completion)
        ids = CallIds(output.request_id, completion.index, chat_format.tool_calls)
        messages.append(chat_message(reader.read(text), ids))
    return messages


def _request(options: ChatOptions) -> ChatRequest | None:
    return chat_request({"tools": list(options.tools or ()), "tool_choice": options.tool_choice})


def _chat_format(options: ChatOptions, tokenizer: Tokenizer) -> ChatFormat:
    """Format of tool calls and reasoning, given or detected from the template."""
    template = options.template
    source = tokenizer.chat_template_source if template is None else tokenizer.chat_templates.source(template)
    return chat_format_of(options.model.tool_call_format, options.model.reasoning_format, source)


def _prepared(index: int, message: Any, images: list[Any]) -> dict[str, Any]:
    made = checked_message(f"messages[{index}]", message)
    if made.get("content") is not None:
        made["content"] = checked_content(f"messages[{index}].content", made["content"], images)
    return made


def _parsed(index: int, message: Any) -> dict[str, Any]:
    name = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"{name}={shown(message)} must be an object with role and content")
    return with_parsed_arguments(name, message)
