"""Forms of answers, compiled by the engine of grammars: what a model may write under them, token by token."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from chat_models import CHAT_MODELS, MARKERS, TOOLS, write_chat_tokenizer

from spmd_worker.chat.answer_grammar import AnswerGrammar
from spmd_worker.chat.answer_parts import ToolCall
from spmd_worker.chat.answer_reader import AnswerReader
from spmd_worker.chat.chat_format import ChatFormat, chat_format_of
from spmd_worker.chat.chat_request import chat_request
from spmd_worker.replica.grammar.compiler import GrammarCompiler
from spmd_worker.replica.grammar.llguidance_input import GrammarError
from spmd_worker.replica.sequence.structured_outputs import StructuredOutputsParams
from spmd_worker.tokenizer.messages import InvalidRequestError
from spmd_worker.tokenizer.tokenizer import Tokenizer

NAMED = {"type": "function", "function": {"name": "add"}}
PERSON = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
AS_PERSON = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
Follows = Callable[[StructuredOutputsParams, str], bool]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizers")


class Model:
    def __init__(self, folder: Path, name: str) -> None:
        self.tokenizer = Tokenizer.open(write_chat_tokenizer(folder / name.replace(" ", "_"), name))
        self.format = chat_format_of("auto", "auto", self.tokenizer.chat_template_source)
        self._compiler = GrammarCompiler(lambda: self.tokenizer, self.tokenizer.vocab_size, (1,))

    def grammar(self, continued: str | None = None) -> AnswerGrammar:
        return AnswerGrammar(self.format, self.tokenizer.marker_id, continued)

    def form(self, prompt: str = "", continued: str | None = None, **body: Any) -> StructuredOutputsParams | None:
        request = chat_request(body)
        assert request is not None
        return self.grammar(continued).compile(request, prompt)

    def may_be(self, text: str, prompt: str = "", **body: Any) -> bool:
        """True if the text, and then the end, matches the grammar."""
        form = self.form(prompt, **body)
        assert form is not None
        return self.has_form(text, form)

    def has_form(self, text: str, form: StructuredOutputsParams) -> bool:
        return self.takes([text], form)

    def takes(self, texts: Sequence[str], form: StructuredOutputsParams) -> bool:
        """True if the texts, each of separate tokens, match the grammar."""
        self._compiler.check(form)
        state = self._compiler.start(form)
        state.advance([*(i for text in texts for i in self.tokenizer.encode(text, add_special_tokens=False)), 1])
        return not state.problem


@pytest.fixture(params=sorted(CHAT_MODELS))
def model(request: pytest.FixtureRequest, folder: Path) -> Model:
    return Model(folder, request.param)


def test_required_call_is_one_in_the_model_format(model: Model, request: pytest.FixtureRequest):
    text = CHAT_MODELS[request.node.callspec.params["model"]].call
    for choice in ("required", NAMED):
        asked = {"tools": TOOLS, "tool_choice": choice}
        assert model.may_be(text, **asked)
        (call,) = AnswerReader(model.format, chat_request(asked)).read(text).tool_calls
        assert call == ToolCall("add", '{"a": 1}')
        # The controls: another function, other arguments, more behind it, and none.
        for wrong in (text.replace("add", "sub"), text.replace("1", '"1"'), f"{text}x", "", "hello"):
            assert not model.may_be(wrong, **asked), wrong
    without = text.replace("add", "stop").replace('{"a": 1}', "{}")
    assert model.may_be(without, tools=TOOLS, tool_choice="required")
    assert not model.may_be(without, tools=TOOLS, tool_choice=NAMED)


SAY = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
    },
}


@pytest.mark.finding(number="A3")
@pytest.mark.parametrize("way", ["call", "content"])
def test_allowed_strings_survive_reading(model: Model, request: pytest.FixtureRequest, way: str):
    """Markers, spelled with tokens that are none: as a marker's token they cannot be in a string."""
    asked: dict[str, Any] = {"tools": [SAY], "tool_choice": "required"}
    text = CHAT_MODELS[request.node.callspec.params["model"]].call
    if way == "content":
        asked = {"tools": [SAY], "response_format": {"type": "json_object"}}
        text = ("<|channel|>final<|message|>" if model.format.is_harmony else "") + '{"a": 1}'
    form, chat_request_ = model.form(**asked), chat_request(asked)
    assert form is not None
    before, after = text.split('{"a": 1}')
    for marker in MARKERS:
        quoted = json.dumps({"a": f"{marker}x{marker}"}, ensure_ascii=False)
        assert model.takes([before, *quoted, after], form), marker
        answer = AnswerReader(model.format, chat_request_).read(before + quoted + after)
        if way == "call":
            assert answer.tool_calls == (ToolCall("add", quoted),), marker
        else:
            assert (answer.content, answer.tool_calls) == (quoted, ()), marker


@pytest.mark.finding(number="A3")
@pytest.mark.parametrize("name", ["hermes with reasoning", "mistral with names", "harmony"])
def test_allowed_reasoning_ends_at_the_reader_end(folder: Path, name: str):
    model, call = Model(folder, name), CHAT_MODELS[name].call
    begin, end = {"think": ("<think>", "</think>"), "mistral": ("[THINK]", "[/THINK]")}.get(
        model.format.reasoning, ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant")
    )
    rest = call.partition(end)[2]
    asked = {"tools": TOOLS, "tool_choice": "required"}
    form = model.form(**asked)
    assert form is not None
    ends = [end] if name != "harmony" else ["<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>"]
    for marker in (*MARKERS, *ends):
        thought = f"I say {marker}!"
        is_allowed = model.takes([begin, *thought, end, rest], form)
        assert is_allowed == (marker not in ends), marker
        if is_allowed:
            answer = AnswerReader(model.format, chat_request(asked)).read(f"{begin}{thought}{end}{rest}")
            assert (answer.reasoning, answer.content, len(answer.tool_calls)) == (thought, "", 1), marker


def test_json_answer_matches_its_schema_after_reasoning(model: Model):
    head = "<|channel|>final<|message|>" if model.format.is_harmony else ""
    good, bad = '{"name": "x"}', '{"name": 3}'
    assert model.may_be(head + good, response_format=AS_PERSON)
    assert model.may_be(head + '{"b": [1]}', response_format={"type": "json_object"})
    assert not model.may_be(head + bad, response_format=AS_PERSON)
    assert not model.may_be(head + "[]", response_format={"type": "json_object"})
    assert not model.may_be(f"{head}{good}.", response_format=AS_PERSON)
    markers = {"think": ("<think>", "</think>\n"), "mistral": ("[THINK]", "[/THINK]")}.get(model.format.reasoning)
    if markers is not None:
        begin, end = markers
        assert model.may_be(f"{begin}why {{{end}{good}", response_format=AS_PERSON)
        # As the prompt's end has it: open, or closed.
        assert model.may_be(f"why{end}{good}", f"assistant\n{begin}\n", response_format=AS_PERSON)
        assert not model.may_be(good, f"assistant\n{begin}\n", response_format=AS_PERSON)
        assert not model.may_be(f"{begin}why{end}{good}", f"{begin}\n\n{end}\n", response_format=AS_PERSON)


def test_continued_message_is_constrained_without_head(model: Model, request: pytest.FixtureRequest):
    good, own = '{"name": "x"}', StructuredOutputsParams(choice=["yes"])
    call = CHAT_MODELS[request.node.callspec.params["model"]].call
    markers = {"think": ("<think>", "</think>\n"), "mistral": ("[THINK]", "[/THINK]")}.get(model.format.reasoning)
    if model.format.is_harmony:
        # The call is a message of its own.
        call = f"<|end|><|start|>assistant{call.partition('<|start|>assistant')[2]}"
    elif markers is not None:
        call = call.partition(markers[1].strip())[2].strip()
    inside = {"prompt": "<|start|>assistant<|message|>So: ", "continued": "So: "}
    assert model.may_be(good, **inside, response_format=AS_PERSON)
    assert not model.may_be(f"<|channel|>final<|message|>{good}", **inside, response_format=AS_PERSON)
    assert model.has_form("yes", model.grammar("So: ").after_reasoning(own, inside["prompt"]))
    for asked in ({"tool_choice": "required"}, {"response_format": AS_PERSON}):
        if model.format.tool_calls != "llama3_json" or "tool_choice" in asked:
            assert model.may_be(call, **inside, tools=TOOLS, **asked)
            assert not model.may_be(f"!{call}", **inside, tools=TOOLS, **asked)
    if markers is not None:
        begin, end = markers
        assert not model.may_be(f"{begin}why{end}{good}", **inside, response_format=AS_PERSON)
        for continued in (f"{begin}\nhm", f"a{end}{begin}hm"):
            ends = {"prompt": continued, "continued": continued}
            assert model.may_be(f" why{end}{good}", **ends, response_format=AS_PERSON)
            assert not model.may_be(good, **ends, response_format=AS_PERSON)
            around = model.grammar(continued).after_reasoning(own, continued)
            assert (model.has_form(f" why{end}yes", around), model.has_form("yes", around)) == (True, False)
        # An empty message may begin with reasoning.
        assert model.may_be(f"{begin}why{end}{good}", continued="", response_format=AS_PERSON)


OWN_FORMS = {
    "json": ({"json": PERSON}, '{"name": "x"}'),
    "object": ({"json_object": True}, '{"b": [1]}'),
    "regex": ({"regex": "[0-9]{2}"}, "12"),
    "choice": ({"choice": ["yes", "no"]}, "yes"),
    "lark": ({"grammar": 'start: "x" reasons\nreasons: /[0-9]/'}, "x1"),
    "ebnf": ({"grammar": 'root ::= "x" [0-9]'}, "x1"),
    "engine": ({"grammar": '{"grammars": [{"name": "mine", "lark_grammar": "start: \\"x1\\""}]}'}, "x1"),
}


@pytest.mark.gate("hermes with reasoning-*", "harmony-*", "*-json", "*-choice")
@pytest.mark.parametrize("name", OWN_FORMS)
def test_row_grammar_begins_after_the_reasoning(model: Model, name: str):
    given, good = OWN_FORMS[name]
    form = StructuredOutputsParams(**given)

    def may_be(text: str, prompt: str = "") -> bool:
        around = AnswerGrammar(model.format, model.tokenizer.marker_id).after_reasoning(form, prompt)
        return model.has_form(text, around)

    head = "<|channel|>final<|message|>" if model.format.is_harmony else ""
    assert may_be(head + good)
    assert not may_be(f"{head}!{good}")
    if model.format.is_harmony:
        assert may_be(f"<|channel|>analysis<|message|>why<|end|><|start|>assistant{head}{good}")
        assert not may_be(good)
    markers = {"think": ("<think>", "</think>\n"), "mistral": ("[THINK]", "[/THINK]")}.get(model.format.reasoning)
    if markers is None:
        assert may_be(f"why</think>{good}") is False
        return
    begin, end = markers
    assert may_be(f"{begin}why {good[0]}{end}{good}")
    assert not may_be(f"{begin}why{end}!{good}")
    assert may_be(f"why{end}{good}", f"assistant\n{begin}\n")
    assert not may_be(good, f"assistant\n{begin}\n")
    assert not may_be(f"{begin}why{end}{good}", f"{begin}\n\n{end}\n")


def test_invalid_llguidance_json_is_rejected(folder: Path):
    model = Model(folder, "hermes with reasoning")
    for text in ("{", "{}", '{"grammars": []}', '{"grammars": [3]}', "{" * 9000):
        form = AnswerGrammar(model.format, model.tokenizer.marker_id).after_reasoning(
            StructuredOutputsParams(grammar=text), ""
        )
        with pytest.raises(GrammarError, match=r"structured_outputs\.grammar .*not .*llguidance JSON"):
            model.has_form("x", form)


def test_json_answer_or_call_is_allowed_with_tools(model: Model, request: pytest.FixtureRequest):
    head = "<|channel|>final<|message|>" if model.format.is_harmony else ""
    asked = {"tools": TOOLS, "response_format": AS_PERSON}
    tag = "<|python_tag|>" if model.format.tool_calls == "llama3_json" else ""
    assert model.may_be(tag + CHAT_MODELS[request.node.callspec.params["model"]].call, **asked)
    assert model.may_be(f'{head}{{"name": "x"}}', **asked)
    assert not model.may_be(f"{head}hello", **asked)
    call = tag + CHAT_MODELS[request.node.callspec.params["model"]].call
    assert not model.may_be(call, **asked, tool_choice="none")


def test_parallel_calls_can_be_limited_to_one(folder: Path):
    hermes, mistral = Model(folder, "hermes"), Model(folder, "mistral")
    block = CHAT_MODELS["hermes"].call
    inner = CHAT_MODELS["mistral"].call.removeprefix("[TOOL_CALLS][").removesuffix("]")
    for model, one, two in (
        (hermes, block, f"{block}\n{block}"),
        (mistral, f"[TOOL_CALLS][{inner}]", f"[TOOL_CALLS][{inner}, {inner}]"),
    ):
        asked = {"tools": TOOLS, "tool_choice": "required"}
        assert model.may_be(one, **asked)
        assert model.may_be(two, **asked)
        assert model.may_be(one, **asked, parallel_tool_calls=False)
        assert not model.may_be(two, **asked, parallel_tool_calls=False)
        assert not model.may_be(two, tools=TOOLS, tool_choice=NAMED)


def test_names_with_a_common_prefix_are_distinguished(model: Model, request: pytest.FixtureRequest):
    tools = [{"type": "function", "function": {"name": name}} for name in ("add", "add_two", "a")]
    text = CHAT_MODELS[request.node.callspec.params["model"]].call.replace('{"a": 1}', "{}")
    for name in ("add", "add_two", "a"):
        assert model.may_be(text.replace("add", name), tools=tools, tool_choice="required")
    assert not model.may_be(text.replace("add", "add_t"), tools=tools, tool_choice="required")


def test_unconstrained_request_has_no_grammar(folder: Path):
    model = Model(folder, "hermes")
    for choice in ("auto", "none"):
        assert model.form(tools=TOOLS, tool_choice=choice) is None
    assert model.form(response_format={"type": "json_object"}) == StructuredOutputsParams(json_object=True)
    assert model.form(response_format=AS_PERSON) == StructuredOutputsParams(json=PERSON)


def test_markers_without_a_token_are_text():
    grammar = AnswerGrammar(ChatFormat("hermes", "think", True), lambda text: None)
    request = chat_request({"tools": TOOLS, "tool_choice": "required"})
    assert request is not None
    form = grammar.compile(request, "")
    assert form is not None
    assert '"<tool_call>" "\\n" call' in (form.grammar or "")
    assert f"suffix={json.dumps('</think>')}" in (form.grammar or "")


def test_text_markers_compile_and_end_reasoning(folder: Path):
    model = Model(folder, "hermes")
    model.format = ChatFormat("mistral", "mistral", True)
    good = '[THINK]a [/ b[/THINK] [TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]'
    assert model.may_be(good, tools=TOOLS, tool_choice="required")
    assert not model.may_be(good.replace("[/THINK]", ""), tools=TOOLS, tool_choice="required")


def test_required_call_is_rejected_without_known_format():
    request = chat_request({"tools": TOOLS, "tool_choice": "required"})
    assert request is not None
    with pytest.raises(InvalidRequestError, match=r"set model\.tool_call_format"):
        AnswerGrammar(ChatFormat("none", "none", True), lambda text: None).compile(request, "")
