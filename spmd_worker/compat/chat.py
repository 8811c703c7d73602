"""Renders the conversations of `LLM.chat`, and parses answers into assistant messages."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from spmd_worker.base.config.plain_values import asks, shown
from spmd_worker.base.config.schema import ModelOptions
from spmd_worker.base.errors import ChatTemplateError, ConfigError
from spmd_worker.base.metrics.log import SAME_ON_EVERY_RANK
from spmd_worker.chat.answer_grammar import AnswerGrammar
from spmd_worker.chat.answer_reader import AnswerReader
from spmd_worker.chat.chat_format import ChatFormat, chat_format_of, check_takes_tools, prompt_opens_reasoning
from spmd_worker.chat.chat_request import ChatRequest, chat_request
from spmd_worker.chat.message import CallIds, chat_message
from spmd_worker.replica.sequence.outputs import RequestOutput
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.replica.sequence.structured_outputs import StructuredOutputsParams
from spmd_worker.tokenizer.content_format import FORMATS
from spmd_worker.tokenizer.messages import InvalidRequestError, checked_content, with_parsed_arguments
from spmd_worker.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_MARK: Final = "\ue0f1\ue0f2"
"""End of the continued message while it is rendered. A space is appended, to detect templates that strip it."""


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
            object.__setattr__(self, name, asks(getattr(self, name)))
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
        prepared = [_checked_message(index, message) for index, message in enumerate(messages)]
    else:
        prepared, _ = prepared_messages(messages)
    if options.continue_final_message:
        _mark_end(prepared)
    variables = {**({"tools": list(options.tools)} if options.tools else {}), **options.variables}
    content_format = None if options.keeps_contents else options.content_format
    text = tokenizer.apply_chat_template(
        prepared, options.add_generation_prompt, variables, options.template, content_format
    )
    return _before_mark(text) if options.continue_final_message else text


def warn_unread_tools(options: ChatOptions, tokenizer: Tokenizer) -> None:
    """Log a warning if the template does not read the tools, once per call."""
    if options.tools and not _chat_format(options, tokenizer).takes_tools:
        logger.warning("the chat template does not read tools: the model does not see them", extra=SAME_ON_EVERY_RANK)


def answer_form(prompt: str, options: ChatOptions, tokenizer: Tokenizer) -> StructuredOutputsParams | None:
    """Grammar that constrains the answers to a prompt; None without one. Raises ValueError for an invalid
    `tool_choice`, and, with one, for tools that are not OpenAI's or that the template does not read.
    """
    if options.tool_choice is None:
        return None
    request, chat_format = _request(options), _chat_format(options, tokenizer)
    if request is None:
        return None
    check_takes_tools(request, chat_format)
    return AnswerGrammar(chat_format, tokenizer.marker_id).compile(request, prompt)


def answer_messages(
    output: RequestOutput, options: ChatOptions, tokenizer: Tokenizer, sampling: SamplingParams
) -> list[dict[str, Any]]:
    """Assistant message of each completion, as in OpenAI's API. Raises ValueError for tools that are not OpenAI's."""
    request, chat_format = _request(options), _chat_format(options, tokenizer)
    is_open = prompt_opens_reasoning(chat_format, output.prompt or "")
    reader = AnswerReader(chat_format, request, is_open, tokenizer)
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


def load_template(given: Any, tokenizer: Tokenizer | None) -> str | None:
    """Load a chat template: the text (anything with a brace or newline), the name of one of the folder's templates, or
    the content of a file. Raises ConfigError for a missing file.
    """
    if given is None:
        return None
    text, names = str(given), [] if tokenizer is None else sorted(tokenizer.chat_templates.sources)
    if isinstance(given, str) and (any(each in text for each in "{}\n") or text in names):
        return text
    try:
        return Path(text).read_text(encoding="utf-8")
    except OSError as error:
        why = error.strerror
    except ValueError as error:  # an invalid file name, or text that is not UTF-8
        why = str(error)
    raise ConfigError(
        f"chat_template={shown(text)} is neither a template's text nor a file, nor the name of one of the model "
        f"folder's templates ({', '.join(names) or 'none'}): {why}"
    )


def _prepared(index: int, message: Any, images: list[Any]) -> dict[str, Any]:
    made = _checked_message(index, message)
    if made.get("content") is not None:
        made["content"] = checked_content(f"messages[{index}].content", made["content"], images)
    return made


def _checked_message(index: int, message: Any) -> dict[str, Any]:
    name = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"{name} is a {type(message).__name__}: give a dict with role and content")
    return with_parsed_arguments(name, message)


def _mark_end(messages: list[dict[str, Any]]) -> None:
    """Append the mark to the text of the last message."""
    content = messages[-1].get("content") if messages else None
    if isinstance(content, str):
        messages[-1]["content"] = f"{content}{_MARK} "
        return
    parts = [dict(part) if isinstance(part, Mapping) else {"type": "text", "text": part} for part in content or ()]
    texts = [part for part in parts if isinstance(part.get("text"), str)]
    if not texts:
        raise ChatTemplateError("continue_final_message=True, but the last message has no content to continue")
    texts[-1]["text"] += f"{_MARK} "
    messages[-1]["content"] = parts


def _before_mark(text: str) -> str:
    """Text before the mark, without trailing spaces if the template strips its messages."""
    before, mark, after = text.rpartition(_MARK)
    if not mark:
        raise ChatTemplateError(
            "continue_final_message=True, but the chat template does not write the last message: pass "
            "continue_final_message=False"
        )
    return before if after.startswith(" ") else before.rstrip()
