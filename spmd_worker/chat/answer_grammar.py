"""Compiles a chat request into a grammar for the sampler: the model's call syntax around each function's schema,
preceded by reasoning if the model reasons.

Grammars are in llguidance's Lark, with schemas as `%json`. A marker that is one token of the model is that token.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from spmd_worker.chat.chat_format import (
    NONE,
    PYTHON_TAG,
    REASONING_MARKERS,
    ChatFormat,
    goes_on_inside,
    prompt_opens_reasoning,
)
from spmd_worker.chat.chat_request import ANY_OBJECT, ChatRequest
from spmd_worker.chat.harmony import BODY_ENDS
from spmd_worker.replica.grammar.llguidance_input import DEFAULT_WHITESPACE
from spmd_worker.replica.sequence.structured_outputs import StructuredOutputsParams
from spmd_worker.tokenizer.messages import InvalidRequestError

_ANY_TEXT: Final = r"/(.|\n)*/"
_GAP: Final = r"/[ \n]{0,4}/"
_SPACES: Final = {"whitespace_pattern": DEFAULT_WHITESPACE}


@dataclass(frozen=True, slots=True)
class AnswerGrammar:
    """Writes the grammars of one model. `token_id` returns the id of the token with this text in the vocabulary.
    `continued` is the text of the message that the answers continue: grammars are of the continuation alone.
    """

    format: ChatFormat
    token_id: Callable[[str], int | None]
    continued: str | None = None

    def compile(self, request: ChatRequest, prompt: str) -> StructuredOutputsParams | None:
        """Grammar of the answers to a prompt, None if unconstrained. Raises InvalidRequestError and ValueError."""
        if request.must_call and self.format.tool_calls == NONE:
            raise InvalidRequestError(
                "tool_choice requires a call, but the model's tool call format is unknown: set model.tool_call_format, "
                "or use tool_choice='auto'",
                "unsupported_value",
            )
        if not request.must_call and request.schema is None:
            return None
        reasoning, head = self._reasoning(prompt), self._final(prompt)
        has_calls = request.wants_calls and self.format.tool_calls != NONE
        if not has_calls and not reasoning and not head:
            return json_grammar(request.schema or ANY_OBJECT)
        rules = [f"start: {reasoning}answer"]
        answers = []
        if has_calls and not request.must_call and self.format.tool_calls == "llama3_json":
            # Calls that begin like JSON content need a marker of their own.
            has_calls = self.token_id(PYTHON_TAG) is not None
        if has_calls:
            answers.append("calls")
            rules += self._call_rules(request, prompt)
        if not request.must_call:
            answers.append("content")
            rules += [f"content: {head}schema", f"schema: {_schema(request.schema or ANY_OBJECT)}"]
        rules += [f"answer: {' | '.join(answers)}", *self._reasoning_rules()]
        return StructuredOutputsParams(grammar="\n".join(rules) + "\n")

    def after_reasoning(self, params: StructuredOutputsParams, prompt: str) -> StructuredOutputsParams:
        """A row's own grammar, applied to the content after reasoning. Raises ValueError for a too long grammar."""
        reasoning, head = self._reasoning(prompt), self._final(prompt)
        if params.around is not None or (not reasoning and not head):
            return params
        rules = [f"start: {reasoning}{head}@form", *self._reasoning_rules()]
        return replace(params, around="\n".join(rules) + "\n")

    def _reasoning(self, prompt: str) -> str:
        """Rule before the answer: `reasoning`, which the model may leave out, `reasons`, which the prompt has opened,
        or nothing if the prompt's end closes it or the answer goes on inside content.
        """
        reasoning = "" if self._is_inside(prompt) else "reasoning? "
        if self.format.is_harmony:
            return reasoning
        markers = REASONING_MARKERS.get(self.format.reasoning)
        if markers is None or prompt.rstrip().endswith(markers[1]):
            return ""
        return "reasons " if prompt_opens_reasoning(self.format, prompt, self.continued) else reasoning

    def _reasoning_rules(self) -> list[str]:
        if self.format.is_harmony:
            head = f'{self._mark("<|channel|>")} "analysis" {self._mark("<|message|>")}'
            return [f"reasoning: {head} TEXT {self._turn()}", f"TEXT: {_text_without(*BODY_ENDS)}"]
        markers = REASONING_MARKERS.get(self.format.reasoning)
        if markers is None:
            return []
        begin, end = markers
        if self.token_id(end) is None:
            # Ordinary text: the shortest before the marker.
            body = [f"reasons: thought {_GAP}", f"thought[suffix={json.dumps(end)}]: {_ANY_TEXT}"]
        else:
            body = [f"reasons: TEXT {self._mark(end)} {_GAP}", f"TEXT: {_text_without(end)}"]
        return [f"reasoning: {self._mark(begin)} reasons", *body]

    def _is_inside(self, prompt: str) -> bool:
        return goes_on_inside(self.format, prompt, self.continued)

    def _turn(self) -> str:
        """End of a harmony message, and the beginning of the next one's head."""
        return f'{self._mark("<|end|>")} {self._mark("<|start|>")} "assistant"'

    def _final(self, prompt: str) -> str:
        """Head of a harmony message of content, if the prompt does not have it."""
        if not self.format.is_harmony or self._is_inside(prompt):
            return ""
        kind = f'(" "? {self._mark("<|constrain|>")} "json")?'
        return f'{self._mark("<|channel|>")} "final" {kind} {self._mark("<|message|>")} '

    def _call_rules(self, request: ChatRequest, prompt: str) -> list[str]:
        """`calls` and the rules it needs: one for each function's arguments."""
        functions = request.functions
        rules = [f"arguments_{number}: {_schema(schema)}" for number, schema in enumerate(functions.values())]
        one = [self._one_call(name, f"arguments_{number}") for number, name in enumerate(functions)]
        # A harmony call is a message of its own.
        turn = f"{self._turn()} " if self.format.is_harmony and self._is_inside(prompt) else ""
        return [*rules, f"call: {' | '.join(one)}", f"calls: {turn}{self._calls(request)}"]

    def _one_call(self, name: str, arguments: str) -> str:
        if self.format.tool_calls == "harmony":
            head = f'{json.dumps(f"{name} ")} {self._mark("<|constrain|>")} "json" {self._mark("<|message|>")}'
            return f"{head} {arguments}"
        if self._has_named_calls:
            return f"{self._mark('[TOOL_CALLS]')} {json.dumps(name)} {self._mark('[ARGS]')} {arguments}"
        key = "parameters" if self.format.tool_calls == "llama3_json" else "arguments"
        head = json.dumps(f'{{"name": {json.dumps(name)}, "{key}": ')
        return f'{head} {arguments} "}}"'

    def _calls(self, request: ChatRequest) -> str:
        """Several calls if the format has them: harmony and Llama 3 write one."""
        kind, is_parallel = self.format.tool_calls, request.is_parallel
        if kind == "harmony":
            return f'{self._mark("<|channel|>")} "commentary to=functions." call'
        if kind == "hermes":
            marked = f'{self._mark("<tool_call>")} "\\n" call "\\n" {self._mark("</tool_call>")}'
            return f'{marked} ("\\n" {marked})*' if is_parallel else marked
        if kind == "mistral" and self._has_named_calls:
            return "call+" if is_parallel else "call"
        if kind == "mistral":
            several = ' (", " call)*' if is_parallel else ""
            return f'{self._mark("[TOOL_CALLS]")} "[" call{several} "]"'
        return "call" if request.must_call else f"{self._mark(PYTHON_TAG)} call"

    @property
    def _has_named_calls(self) -> bool:
        """Whether Mistral's calls are [TOOL_CALLS]name[ARGS]: those of its newer tokenizers."""
        return self.format.tool_calls == "mistral" and self.token_id("[ARGS]") is not None

    def _mark(self, marker: str) -> str:
        token_id = self.token_id(marker)
        return json.dumps(marker) if token_id is None else f"<[{token_id}]>"


def json_grammar(schema: Mapping[str, Any]) -> StructuredOutputsParams:
    """Grammar of a text that is JSON and nothing else. Raises ValueError for one that is too long."""
    if schema is ANY_OBJECT:
        return StructuredOutputsParams(json_object=True)
    return StructuredOutputsParams(json=json.dumps(schema, ensure_ascii=False))


def _schema(schema: Mapping[str, Any]) -> str:
    theirs = schema.get("x-guidance")
    options = {**_SPACES, **theirs} if isinstance(theirs, Mapping) else _SPACES
    return f"%json {json.dumps({**schema, 'x-guidance': options}, ensure_ascii=False)}"


def _text_without(*markers: str) -> str:
    """Any text without a marker in ordinary tokens: readers would mistake it for the marker."""
    excluded = "|".join(re.escape(marker).replace("/", "\\/") for marker in markers)
    return f"{_ANY_TEXT} & ~/(.|\\n)*({excluded})(.|\\n)*/"
