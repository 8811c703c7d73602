"""Chat rows with tools and response formats: hand-written answers of every family as lines of a batch, and a job of a
random model with constrained answers.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chat_checkpoints import write_chat_model
from chat_models import CHAT_MODELS, TOOLS, write_chat_tokenizer
from content_templates import WALKING
from jobs_of_rows import answers_of_job, openai_row
from openai.types.chat import ChatCompletion
from pydantic import TypeAdapter
from tokenizer_folders import write_byte_level
from transformers import PreTrainedTokenizerFast

from spmd_worker import LLM
from spmd_worker.base.config.speculation import SpeculativeConfig
from spmd_worker.chat.chat_format import ChatFormat, chat_format_of
from spmd_worker.engine.validation import RequestLimits
from spmd_worker.frontends.openai.row import EncodedRow, RowError
from spmd_worker.frontends.openai.row_encoding import RowContext, resolve
from spmd_worker.frontends.openai.row_parser import parse_row
from spmd_worker.frontends.openai.row_writer import format_result
from spmd_worker.replica.sequence.outputs import CompletionOutput, RequestOutput
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.tokenizer.tokenizer import Tokenizer

PARSER = TypeAdapter(ChatCompletion)
USER = [{"role": "user", "content": "hello"}]
NAMED = {"type": "function", "function": {"name": "add"}}
EOS = 1


class Chat:
    """The two ends of a row, without a model: `answers` writes the line of an answer with this text."""

    def __init__(self, folder: Path, name: str) -> None:
        self.tokenizer = Tokenizer.open(write_chat_tokenizer(folder, name))
        self.format = chat_format_of("auto", "auto", self.tokenizer.chat_template_source)

    def row(self, custom_id: str = "a", **body: Any) -> EncodedRow | RowError:
        body = {"messages": USER, "max_tokens": 100, **body}
        row = {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}
        parsed = parse_row(0, json.dumps(row).encode(), SamplingParams())
        if isinstance(parsed, RowError):
            return parsed
        limits = RequestLimits(self.tokenizer.vocab_size, 65536, has_tokenizer=True)
        return resolve(parsed, RowContext(self.tokenizer, limits, chat_format=self.format))

    def completion(self, text: str, index: int = 0) -> CompletionOutput:
        token_ids = [*self.tokenizer.encode(text, add_special_tokens=False), EOS]
        shown = self.tokenizer.decode(token_ids[:-1])
        return CompletionOutput(index, shown, token_ids, finish_reason="stop")

    def answer(self, row: EncodedRow, *completions: CompletionOutput) -> ChatCompletion:
        prompt = list(row.content.token_ids)
        line = format_result(row, RequestOutput("0", row.content.text, prompt, list(completions), finished=True), "m")
        return PARSER.validate_python(json.loads(line)["response"]["body"], strict=True)


@pytest.mark.parametrize("name", sorted(CHAT_MODELS))
def test_handwritten_call_has_openai_shape(name: str, tmp_path: Path):
    chat = Chat(tmp_path, name)
    text = CHAT_MODELS[name].call
    row = chat.row(tools=TOOLS, n=2)
    assert isinstance(row, EncodedRow), row
    assert '"add"' in (row.content.text or "")
    first, second = chat.answer(row, chat.completion(text), chat.completion(text, 1)).choices
    for choice in (first, second):
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        (call,) = choice.message.tool_calls or ()
        assert (call.type, call.function.name, json.loads(call.function.arguments)) == ("function", "add", {"a": 1})
        assert re.fullmatch(r"[0-9a-f]{9}" if "mistral" in name else r"call_[0-9a-f]{24}", call.id)
    reasons = {"harmony": "I add.", "hermes with reasoning": "hm, a < b", "mistral with names": "so"}
    assert getattr(first.message, "reasoning_content", None) == reasons.get(name)
    # Ids say whose call it is, and nothing else.
    assert first.message.tool_calls[0].id != second.message.tool_calls[0].id
    assert chat.answer(row, chat.completion(text)).choices[0].message == first.message
    other = chat.answer(replace(row, custom_id="b"), chat.completion(text)).choices[0].message
    assert other.tool_calls[0].id != first.message.tool_calls[0].id


@pytest.mark.parametrize("name", sorted(CHAT_MODELS))
def test_broken_or_unrequested_call_stays_content(name: str, tmp_path: Path):
    chat = Chat(tmp_path, name)
    text = CHAT_MODELS[name].call
    broken = text.replace('{"a": 1}', '{"a": 1')
    row = chat.row(tools=TOOLS)
    assert isinstance(row, EncodedRow), row
    (choice,) = chat.answer(row, chat.completion(broken)).choices
    assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
    assert '{"a": 1' in (choice.message.content or "")
    assert text.endswith((choice.message.content or "").replace('{"a": 1', '{"a": 1}'))
    for body in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        row = chat.row(**body)
        assert isinstance(row, EncodedRow), row
        (choice,) = chat.answer(row, chat.completion(text)).choices
        assert choice.message.tool_calls is None
        assert '"a": 1' in (choice.message.content or "")


def test_truncated_answer_has_no_incomplete_call(tmp_path: Path):
    chat = Chat(tmp_path, "mistral")
    row = chat.row(tools=TOOLS, stop=["}"])
    assert isinstance(row, EncodedRow), row
    whole = chat.completion(CHAT_MODELS["mistral"].call)
    stopped = replace(whole, text=whole.text.partition("}")[0], stop_reason="}")
    (choice,) = chat.answer(row, stopped).choices
    # The special token is shown, because it was no call.
    assert choice.message.content == '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1'
    (choice,) = chat.answer(row, replace(whole, finish_reason="length", stop_reason=None)).choices
    assert choice.finish_reason == "length"


def test_special_token_that_marks_nothing_leaves_content(tmp_path: Path):
    chat = Chat(tmp_path, "mistral")
    row = chat.row(tools=TOOLS)
    assert isinstance(row, EncodedRow), row
    (choice,) = chat.answer(row, chat.completion("<|im_start|>hello</s> x")).choices
    assert choice.message.content == "hello x"


def test_tools_are_error_row_when_template_ignores_them(tmp_path: Path):
    chat = Chat(tmp_path, "hermes")
    chat.format = ChatFormat()
    row = chat.row(tools=TOOLS)
    assert isinstance(row, RowError)
    assert (row.code, row.message[:43]) == ("tools_unsupported", "the model's chat template does not read too")
    row = chat.row(tools=TOOLS, chat_template_kwargs={"tools": []})
    assert isinstance(row, RowError)
    assert row.code == "conflicting_keys"
    many = [{"type": "function", "function": {"name": f"f{number}"}} for number in range(2000)]
    chat.format = ChatFormat("hermes", "none", True)
    row = chat.row(tools=many, tool_choice="required")
    assert isinstance(row, RowError)
    assert row.message.startswith("tools: grammar is ")
    row = chat.row(response_format={"type": "json_object"}, structured_outputs={"regex": "a"})
    assert isinstance(row, RowError)
    assert row.message.startswith("structured_outputs and response_format both")


@pytest.mark.finding(number="A1")
@pytest.mark.parametrize("shape", ["chat", "plain"])
def test_texts_reach_template_that_iterates_over_parts(tmp_path: Path, shape: str):
    folder = write_byte_level(tmp_path, chat_template=WALKING["SmolVLM"])
    own, theirs = Tokenizer.open(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    limits = RequestLimits(own.vocab_size, 4096, has_tokenizer=True)
    for texts in (["hi"], ["long " * 90], ["first", "second"]):
        parts = [{"role": "user", "content": [{"type": "text", "text": text} for text in texts]}]
        expected = theirs.apply_chat_template(parts, tokenize=False, add_generation_prompt=True)
        given: Any = [{"type": "input_text", "text": texts[0]}, *texts[1:]]
        forms = [parts[0]["content"], given, *(texts if len(texts) == 1 else [])]
        for content in forms:
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 3}
            row = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
            line = json.dumps(row if shape == "chat" else body).encode()
            parsed = parse_row(0, line, SamplingParams())
            assert not isinstance(parsed, RowError), parsed
            encoded = resolve(parsed, RowContext(own, limits))
            assert isinstance(encoded, EncodedRow), encoded
            assert encoded.content.text == expected, content


@pytest.mark.finding(number="A2")
def test_tools_choose_their_own_template(tmp_path: Path):
    chat = Chat(tmp_path, "hermes")
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    named = [{"name": "tool_use", "template": config["chat_template"]}, {"name": "default", "template": "plain"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": named}))
    chat.tokenizer = Tokenizer.open(tmp_path)
    chat.format = chat_format_of("auto", "auto", chat.tokenizer.chat_template_source)
    with_tools, without = chat.row(tools=TOOLS), chat.row()
    assert isinstance(with_tools, EncodedRow), with_tools
    assert isinstance(without, EncodedRow), without
    assert '"add"' in (with_tools.content.text or "")
    assert without.content.text == "plain"


def test_returned_calls_are_objects_for_the_template(tmp_path: Path):
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    row = Chat(tmp_path, "hermes").row(messages=[*USER, {"role": "assistant", "content": None, "tool_calls": [call]}])
    assert isinstance(row, EncodedRow), row
    assert 'add{"a": 1}' in (row.content.text or "")


# Messages that the answer continues.

LEFT_OPEN = {"add_generation_prompt": False, "continue_final_message": True}


@pytest.mark.parametrize(
    ("name", "content", "said", "message"),
    [
        ("hermes", "So: ", " yes", (" yes", None)),
        ("hermes with reasoning", "So: ", " <think>no</think>", (" <think>no</think>", None)),
        ("hermes with reasoning", "<think>\nI", " add.\n</think>\n\nyes", ("yes", " add.")),
        ("hermes with reasoning", "<think>\nI add.\n</think>\n\nSo", " yes", (" yes", None)),
        ("harmony", "So: ", " yes<|return|>", (" yes", None)),
    ],
)
def test_continued_row_answers_with_the_rest(name: str, content: str, said: str, message: Any, tmp_path: Path):
    chat = Chat(tmp_path, name)
    talk = [*USER, {"role": "assistant", "content": content}]
    row = chat.row(messages=talk, **LEFT_OPEN)
    assert isinstance(row, EncodedRow), row
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    expected = theirs.apply_chat_template(talk, continue_final_message=True, return_dict=False)
    assert list(row.content.token_ids) == expected
    assert (row.content.text or "").endswith(content)
    (choice,) = chat.answer(row, chat.completion(said)).choices
    assert (choice.message.content, getattr(choice.message, "reasoning_content", None)) == message


def test_message_without_text_cannot_be_continued(tmp_path: Path):
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    row = Chat(tmp_path, "hermes").row(messages=[*USER, {"role": "assistant", "tool_calls": [call]}], **LEFT_OPEN)
    assert isinstance(row, RowError)
    assert (row.code, "the last message has no content to continue" in row.message) == ("chat_template_error", True)


def test_continued_rows_equal_chat_of_llm(chat_folder: Path, tmp_path: Path):
    talk = [*USER, {"role": "assistant", "content": "So: it is "}]
    asked = {"max_tokens": 12, "temperature": 0}
    body = {"messages": talk, **asked, **LEFT_OPEN}
    rows = [openai_row("a", "/v1/chat/completions", {**body, "return_token_ids": True}), {"custom_id": "b", **body}]
    rows.append(openai_row("c", "/v1/chat/completions", {"messages": talk, **asked, "return_token_ids": True}))
    chat, plain, begun = answers_of_job(tmp_path, chat_folder, rows)
    with LLM(chat_folder, dtype="float32", num_blocks=64) as llm:
        (output,) = llm.chat(talk, SamplingParams(**asked), use_tqdm=False, **LEFT_OPEN)
    (choice,), (completion,) = chat["response"]["body"]["choices"], output.outputs
    assert chat["response"]["body"]["prompt_token_ids"] == output.prompt_token_ids
    assert choice["token_ids"] == plain["outputs"][0]["token_ids"] == completion.token_ids
    assert choice["message"]["content"] == plain["outputs"][0]["text"] == completion.text
    # Negative control: the answer in a message of its own has another prompt.
    assert begun["response"]["body"]["prompt_token_ids"] != output.prompt_token_ids


# A job. The model's weights are random: what has a form has it from the sampler alone.

PERSON = {
    "type": "object",
    "properties": {"sex": {"enum": ["f", "m"]}, "adult": {"type": "boolean"}},
    "required": ["sex", "adult"],
    "additionalProperties": False,
}
AS_PERSON = {"type": "json_schema", "json_schema": {"name": "p", "strict": True, "schema": PERSON}}
BODIES: dict[str, dict[str, Any]] = {
    "required": {"tools": TOOLS, "tool_choice": "required"},
    "one": {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "n": 2},
    "named": {"tools": TOOLS, "tool_choice": NAMED},
    "schema": {"response_format": AS_PERSON, "max_tokens": 320},  # Longer than any text of the schema.
    "schema or call": {"response_format": AS_PERSON, "tools": TOOLS, "parallel_tool_calls": False},
    "object": {"response_format": {"type": "json_object"}},
    "auto": {"tools": TOOLS},
    "none": {"tools": TOOLS, "tool_choice": "none"},
    "text": {"response_format": {"type": "text"}},
    "bad tool": {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": 3}}}]},
    "bad schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": {"type": "no"}}}},
    "bad parameters": {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "no"}}}}}],
        "tool_choice": "required",
    },
}


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("chat"), "hermes")


@pytest.fixture(scope="module")
def answers(chat_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("job")
    return {answer["custom_id"]: answer for answer in answers_of_job(folder, chat_folder, job_rows())}


def job_rows() -> list[dict[str, Any]]:
    return [
        openai_row(
            f"{name} {seed}", "/v1/chat/completions", {"messages": USER, "max_tokens": 150, "seed": seed, **body}
        )
        for name, body in BODIES.items()
        for seed in range(4)
    ]


def choices(answers: dict[str, Any], name: str) -> Iterator[Any]:
    for seed in range(4):
        answer = answers[f"{name} {seed}"]
        assert answer["error"] is None, answer
        yield from PARSER.validate_python(answer["response"]["body"], strict=True).choices


def is_person(value: Any) -> bool:
    return list(value) == ["sex", "adult"] and value["sex"] in ("f", "m") and isinstance(value["adult"], bool)


def check_call(call: Any) -> None:
    arguments = json.loads(call.function.arguments)
    assert list(arguments) == (["a"] if call.function.name == "add" else [])
    assert all(type(value) is int for value in arguments.values())


@pytest.mark.guarantee("Required calls and JSON formats are kept to")
def test_required_call_is_made(answers: dict[str, Any]):
    for name, most in (("required", 50), ("one", 1)):
        ended = [choice for choice in choices(answers, name) if choice.finish_reason != "length"]
        assert ended
        for choice in ended:
            assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
            assert 1 <= len(choice.message.tool_calls) <= most
            for call in choice.message.tool_calls:
                check_call(call)
    assert {call.function.name for choice in choices(answers, "one") for call in choice.message.tool_calls or ()} <= {
        *("add", "stop")
    }


def test_named_function_is_called_and_answer_stops(answers: dict[str, Any]):
    ended = [choice for choice in choices(answers, "named") if choice.finish_reason != "length"]
    assert ended
    for choice in ended:
        assert (choice.finish_reason, choice.message.content) == ("stop", None)
        (call,) = choice.message.tool_calls
        assert call.function.name == "add"
        check_call(call)


@pytest.mark.guarantee("Required calls and JSON formats are kept to")
def test_answer_has_the_requested_schema(answers: dict[str, Any]):
    for choice in choices(answers, "schema"):
        assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
        assert is_person(json.loads(choice.message.content))
    for choice in choices(answers, "schema or call"):
        if choice.finish_reason != "length":
            assert choice.message.tool_calls or is_person(json.loads(choice.message.content))
    for choice in choices(answers, "object"):
        assert choice.message.content.startswith("{")
        assert choice.finish_reason == "length" or isinstance(json.loads(choice.message.content), dict)


@pytest.mark.control("Required calls and JSON formats are kept to")
def test_model_makes_no_call_or_json_without_grammar(answers: dict[str, Any]):
    """The control."""
    for name in ("auto", "none", "text"):
        for choice in choices(answers, name):
            assert choice.message.tool_calls is None
            with pytest.raises(ValueError):
                json.loads(choice.message.content)


@pytest.mark.gate("draft_model-1")
@pytest.mark.parametrize(
    ("method", "num_accepted"),
    [("suffix", 20), pytest.param("ngram", 20, marks=pytest.mark.stress), ("draft_model", 1)],
)
def test_drafts_change_no_call(
    method: str, num_accepted: int, answers: dict[str, Any], chat_folder: Path, tmp_path: Path
):
    """The draft model is the model itself, and knows no grammar. Where one forced two ids that it had drafted, the job
    ended with an AssertionError.
    """
    model = {"model": str(chat_folder)} if method == "draft_model" else {}
    speculation = SpeculativeConfig(method, 4, max_step_tokens=200, **model)
    assert answers_of_job(tmp_path, chat_folder, job_rows(), speculation=speculation) == list(answers.values())
    counts = json.loads((tmp_path / "out.jsonl.run" / "metrics.json").read_text())["speculation"]
    assert counts["drafted_tokens"] > counts["accepted_tokens"] >= num_accepted


def test_unanswerable_request_is_error_row_with_reason(answers: dict[str, Any]):
    for name, code, words in (
        ("bad tool", "invalid_value", "tools[0].function.parameters="),
        ("bad schema", "grammar_refused", "response_format: json"),
        ("bad parameters", "grammar_refused", "tools: grammar"),
    ):
        error = answers[f"{name} 0"]["error"]
        assert (error["code"], error["message"][: len(words)]) == (code, words)
