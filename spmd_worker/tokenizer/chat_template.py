"""Renders a conversation with a model's chat template, in Jinja's sandbox and within limits.

A template comes with a model folder and is not trusted: it sees plain JSON values only, reaches no Python attribute,
and its loops, calls and text are counted, so that a mistake ends in an error that explains it. Anything that escapes
these limits ends with the process in which templates are rendered (`template_process.py`).

`strftime_now` is undefined on purpose: an answer must not depend on the day it was computed. Templates that test
`strftime_now is defined` use their own constant date; others get an error that explains it.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial, wraps
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Final

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from spmd_worker.base.errors import ChatTemplateError
from spmd_worker.tokenizer.content_format import Choice, Message, adapt_contents

MAX_OUTPUT_CHARACTERS: Final = 4 * 1024 * 1024
_MAX_WORK_CHARACTERS: Final = 4 * MAX_OUTPUT_CHARACTERS
_MAX_STEPS: Final = 1_000_000
_MAX_ARGUMENT: Final = 100_000
_MAX_NUMBER_BITS: Final = 256
_WIDE_FIELD: Final = re.compile(r"[0-9]{6}|%[^a-zA-Z]*\*")
_FILTERS_WITH_WIDTHS: Final = ("batch", "center", "indent", "slice", "truncate", "wordwrap")

_MAX_EXPLAINED: Final = 500
_WITHOUT_TEXT: Final = (Iterator, BuiltinFunctionType, FunctionType, MethodType)
_REASONING_KEYS: Final = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message, in the order in which transformers looks for them."""


class ChatTemplate:
    """One template, compiled when first used. `variables` are the special tokens by name (`bos_token`, ...)."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        self.source = source
        self._variables = dict(variables)
        self._environment = _BoundedEnvironment()
        self._stream: Callable[..., Iterator[str]] | None = None
        self._formats: dict[bytes, Choice] = {}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        content_format: str | None = "auto",
    ) -> str:
        """Prompt text, at most `MAX_OUTPUT_CHARACTERS` long. Contents are converted to `content_format`, and with None
        stay unchanged. Raises ChatTemplateError.
        """
        try:
            context = _plain({**self._variables, **(variables or {})})
            # Templates test whether a key exists, and would write "None" for one that is null.
            given = [{key: value for key, value in message.items() if value is not None} for message in messages]
            context = {"tools": None, "documents": None, **context, "add_generation_prompt": add_generation_prompt}
            plain = [_with_reasoning(message) for message in _plain(given)]
            return self._rendered(plain, context, content_format)
        except Exception as error:  # foreign code
            raise ChatTemplateError(explained(error)) from error

    def _rendered(self, messages: list[Message], context: dict[str, Any], content_format: str | None) -> str:
        """The text of `messages`, of which those of an assistant may have no content: a call or reasoning alone."""
        errors: list[Exception] = []
        for filled in _fillings(messages):
            try:
                if content_format is not None:
                    tried = partial(self._tried, context)
                    filled = adapt_contents(filled, tried, content_format, self._formats, context)
                return self._render({**context, "messages": filled})
            except (SecurityError, MemoryError, RecursionError):
                raise
            except Exception as error:  # foreign code
                errors.append(error)
        raise errors[0]

    def _tried(self, context: Mapping[str, Any], messages: Sequence[Message]) -> str | None:
        """The rendered text; None where the template raises. Exceeded limits, which no content format avoids, raise."""
        try:
            return self._render({**context, "messages": messages})
        except (SecurityError, MemoryError, RecursionError):
            raise
        except Exception:  # foreign code
            return None

    def _render(self, context: dict[str, Any]) -> str:
        if self._stream is None:
            self._stream = self._environment.from_string(self.source).generate
        pieces: list[str] = []
        num_left = MAX_OUTPUT_CHARACTERS
        self._environment.restart()
        for piece in self._stream(context):
            num_left -= len(piece)
            if num_left < 0:
                raise SecurityError(f"the chat template wrote more than {MAX_OUTPUT_CHARACTERS} characters")
            pieces.append(piece)
        return "".join(pieces)


def explained(error: BaseException) -> str:
    """The error of a template that raises `error`, cut to the length of an error message."""
    message = str(error) or type(error).__name__
    if isinstance(error, RecursionError):
        message = f"it is nested, or its macros call each other, too deeply ({message})"
    if isinstance(error, SyntaxError):
        # Python's error in the code that Jinja generates, whose lines are not the template's.
        is_deep = error.msg in ("too many statically nested blocks", "too many levels of indentation")
        deep = f"its loops and conditions are nested too deeply ({error.msg})"
        message = deep if is_deep else f"it cannot be compiled: {error.msg}"
    if len(message) > _MAX_EXPLAINED:
        message = f"{message[: _MAX_EXPLAINED - 3]}..."
    if "strftime_now" in message:
        message += " (today's date is not available: pass the date in chat_template_kwargs or edit the template)"
    return f"chat template: {message}"


def _fillings(messages: list[Message]) -> Iterator[list[Message]]:
    """The conversation as transformers gives it, and, for templates that raise, with the contents that it lacks: null,
    which DeepSeek's test, and "", which vLLM gives.
    """
    yield messages
    is_open = [message.get("role") == "assistant" and "content" not in message for message in messages]
    for content in (None, "") if any(is_open) else ():
        yield [{**each, "content": content} if lacks else each for each, lacks in zip(messages, is_open, strict=True)]


def _with_reasoning(message: Message) -> Message:
    """A message with its reasoning under `thinking` (gpt-oss) and `reasoning_content` (others), as in transformers."""
    reasoning = next((message[key] for key in _REASONING_KEYS if message.get(key) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _plain(value: Any) -> Any:
    """A copy made of JSON's own types, so that a template gets no object with methods of its own."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    raise TypeError(f"a conversation holds plain JSON values, not {type(value).__name__}")


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's text; it changes nothing here."""

    tags = {"generation"}  # noqa: RUF012 the type Jinja declares

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, which also counts loop turns, calls and written text, and limits multiplication."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, loopcontrols],
            finalize=self._count_text,
        )
        self._num_steps_left = _MAX_STEPS
        self._num_characters_left = _MAX_WORK_CHARACTERS
        self.filters |= {name: _with_small_numbers(self.filters[name]) for name in _FILTERS_WITH_WIDTHS}
        self.filters |= {"format": _format, "tojson": _to_json, _COUNTED: self._counted, _JOINED: _joined}
        # An answer must not depend on the run it was computed in.
        del self.filters["random"], self.globals["lipsum"]
        self.globals |= {"raise_exception": _raise_exception, "namespace": _TemplateNamespace}

    def restart(self) -> None:
        self._num_steps_left = _MAX_STEPS
        self._num_characters_left = _MAX_WORK_CHARACTERS

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]  # any arguments
        """Called for every call a template makes. The names of Jinja's parameters are private, hence the override."""
        self._count_step()
        _check_numbers(args, kwargs)
        return super().call(context, function, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Called for the operators whose result may be far bigger than their operands."""
        _check_operation(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Called for every method that a template reads; Jinja wraps `str.format`."""
        wrapper = super().wrap_str_format(value)
        if wrapper is not None:
            _check_format(value.__self__)
        return wrapper

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Insert a counter on every loop's iterable, and a check on every concatenation."""
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            if loop.recursive:
                raise SecurityError(f"line {loop.lineno}: recursive loops are not supported")
            loop.iter = nodes.Filter(loop.iter, _COUNTED, [], [], None, None, lineno=loop.lineno)
        _replace_concatenations(tree)
        tree.set_environment(self)
        return tree

    def _counted(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self._count_step()
            yield item

    def _count_step(self) -> None:
        self._num_steps_left -= 1
        if self._num_steps_left < 0:
            raise SecurityError(f"the chat template took more than {_MAX_STEPS} loop iterations and calls")

    def _count_text(self, value: Any) -> Any:
        """Called for every value that is written, into the output or into a variable or macro."""
        _check_written(value)
        self._num_characters_left -= len(value) if isinstance(value, str) else 1
        if self._num_characters_left < 0:
            raise SecurityError(f"the chat template wrote more than {_MAX_WORK_CHARACTERS} characters into variables")
        return value


_COUNTED: Final = "counted items of a loop"
_JOINED: Final = "joined strings"
"""Names of internal filters: the space keeps templates from naming them."""


def _replace_concatenations(parent: nodes.Node) -> None:
    """Make `a ~ b` a filter over (a, b), which can check the length of the result."""
    for name, value in list(parent.iter_fields()):
        if isinstance(value, nodes.Node):
            setattr(parent, name, _without_concatenation(value))
        elif isinstance(value, list):
            setattr(parent, name, [_without_concatenation(v) if isinstance(v, nodes.Node) else v for v in value])


def _without_concatenation(node: nodes.Node) -> nodes.Node:
    _replace_concatenations(node)
    if not isinstance(node, nodes.Concat):
        return node
    parts = nodes.List(node.nodes, lineno=node.lineno)
    return nodes.Filter(parts, _JOINED, [], [], None, None, lineno=node.lineno)


def _joined(parts: list[Any]) -> str:
    for part in parts:
        _check_written(part)
    texts = [str(part) for part in parts]
    _check_length(sum(map(len, texts)))
    return "".join(texts)


def _with_small_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    # `wraps` keeps the marks by which Jinja knows a filter that takes the context or the environment.
    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        _check_numbers(args, kwargs)
        return function(*args, **kwargs)

    return checked


def _check_numbers(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Check widths, counts and ranges: a big one makes a big result."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, int) and abs(value) > _MAX_ARGUMENT:
            raise SecurityError(f"a number beyond {_MAX_ARGUMENT} in a call")


def _check_operation(operator: str, left: Any, right: Any) -> None:
    sizes = [len(value) for value in (left, right) if isinstance(value, str | list | tuple)]
    counts = [value for value in (left, right) if isinstance(value, int)]
    if operator == "+":
        _check_length(sum(sizes))
    elif operator == "*" and sizes and counts:
        _check_length(sizes[0] * counts[0])
    elif operator == "%" and isinstance(left, str):
        _check_format(left)
    elif operator in ("*", "**") and len(counts) == 2:
        num_bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
        if num_bits > _MAX_NUMBER_BITS:
            raise SecurityError(f"a number of more than {_MAX_NUMBER_BITS} bits")


def _check_format(pattern: str) -> None:
    if _WIDE_FIELD.search(pattern):
        raise SecurityError(f"a format with a field wider than {_MAX_ARGUMENT} characters")


def _check_written(value: Any) -> None:
    """Reject a value whose text is its address, which differs between runs."""
    if isinstance(value, _WITHOUT_TEXT):
        raise TemplateError(f"it writes a {type(value).__name__}, which has no text: call it, or use `| list`")


def _check_length(length: int) -> None:
    if length > MAX_OUTPUT_CHARACTERS:
        raise SecurityError(f"a value of more than {MAX_OUTPUT_CHARACTERS} characters or items")


def _format(pattern: str, *args: Any, **kwargs: Any) -> str:
    _check_format(pattern)
    return pattern % (kwargs or args)


def _raise_exception(message: Any) -> None:
    raise TemplateError(str(message)[: _MAX_EXPLAINED + 1])


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON for prompts; Jinja's own filter escapes HTML and sorts keys."""
    _check_numbers((indent,), {})
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _TemplateNamespace(Namespace):
    """A namespace that rejects names with a leading underscore, which give access to Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # The signature of Jinja's own, so that `namespace(self=...)` works.
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_public(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)


def _check_public(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot contain {name!r}: the name starts with an underscore")
