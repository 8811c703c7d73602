"""Chats with tools from a server: chunks of answers written by hand, and requests to a model that must call.

What is streamed is content and reasoning as they are certain, and each call in one piece.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chat_checkpoints import write_chat_model
from chat_models import CHAT_MODELS, MARKERS, TOOLS, write_chat_tokenizer
from content_templates import WALKING
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import TypeAdapter
from serving import JSON, ServedHere, joined, without_names
from tokenizer_folders import write_byte_level

from spmd_worker.chat.chat_format import chat_format_of
from spmd_worker.engine.validation import RequestLimits
from spmd_worker.frontends.openai.openai_stream import AnswerName, ChunkWriter, response_body
from spmd_worker.frontends.openai.row import EncodedRow
from spmd_worker.frontends.openai.row_encoding import RowContext
from spmd_worker.frontends.serve.request_reader import RequestReader
from spmd_worker.replica.grammar.compiler import GrammarCompiler
from spmd_worker.replica.sequence.outputs import CompletionOutput, RequestOutput
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.tokenizer.incremental_decoder import IncrementalDecoder
from spmd_worker.tokenizer.tokenizer import Tokenizer

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hello"}]
CHUNK, BODY = TypeAdapter(ChatCompletionChunk), TypeAdapter(ChatCompletion)
NAME = AnswerName("r", 0, "m")
EOS = 1


def served_row(tokenizer: Tokenizer, **body: Any) -> EncodedRow:
    chat_format = chat_format_of("auto", "auto", tokenizer.chat_template_source)
    grammars = GrammarCompiler(lambda: tokenizer, tokenizer.vocab_size, (EOS,))
    limits = RequestLimits(tokenizer.vocab_size, 4096, has_tokenizer=True, grammars=grammars)
    reader = RequestReader(SamplingParams(max_tokens=200), RowContext(tokenizer, limits, chat_format=chat_format))
    (row,) = reader.read(0, CHAT, json.dumps({"messages": USER, **body}).encode(), None).rows
    assert isinstance(row, EncodedRow), row
    return row


def outputs_of(tokenizer: Tokenizer, served: EncodedRow, *texts: str) -> Iterator[RequestOutput]:
    """An engine's outputs, token by token, cumulative. The first texts end first."""
    prompt = list(served.content.token_ids)
    samples = [[*tokenizer.encode(text, add_special_tokens=False), EOS] for text in texts]
    decoders = [IncrementalDecoder(tokenizer, prompt) for _ in texts]
    completions = [CompletionOutput(index, "", []) for index in range(len(texts))]
    for step in range(max(map(len, samples))):
        for index, token_ids in enumerate(samples):
            given = token_ids[: step + 1]
            is_end = len(given) == len(token_ids)
            text = tokenizer.decode(token_ids[:-1])
            if not is_end:
                text = completions[index].text + decoders[index].append([given[-1]])
            completions[index] = CompletionOutput(index, text, given, finish_reason="stop" if is_end else None)
        is_whole = all(each.finished() for each in completions)
        yield RequestOutput("0", served.content.text, prompt, list(completions), finished=is_whole)


def streamed_and_whole(tokenizer: Tokenizer, served: EncodedRow, *texts: str) -> tuple[list[JSON], JSON]:
    outputs = list(outputs_of(tokenizer, served, *texts))
    writer = ChunkWriter(served, NAME, False)
    chunks = [chunk for output in outputs for chunk in writer.chunks(output)]
    for chunk in chunks:
        CHUNK.validate_python(chunk, strict=True)
    return chunks, response_body([served], [outputs[-1]], NAME)


def test_requests_own_grammar_begins_behind_the_reasoning(tmp_path: Path):
    for name, is_behind in (("hermes", False), ("hermes with reasoning", True), ("harmony", True)):
        tokenizer = Tokenizer.open(write_chat_tokenizer(tmp_path / name, name))
        form = served_row(tokenizer, structured_outputs={"choice": ["yes", "no"]}).sampling.structured_outputs
        assert form is not None
        assert (form.choice, form.around is not None) == (("yes", "no"), is_behind)
        # Tools that may be called change nothing of it.
        tools = served_row(tokenizer, structured_outputs={"choice": ["yes", "no"]}, tools=TOOLS)
        assert tools.sampling.structured_outputs == form


@pytest.mark.finding(number="A1")
def test_texts_reach_template_that_iterates_over_parts(tmp_path: Path):
    tokenizer = Tokenizer.open(write_byte_level(tmp_path, chat_template=WALKING["SmolVLM"]))
    for text in ("hi", "long " * 90):
        for content in (text, [{"type": "text", "text": text}]):
            row = served_row(tokenizer, messages=[{"role": "user", "content": content}])
            assert isinstance(row, EncodedRow), row
            assert row.content.text == f"<|im_start|>User: {text}<end_of_utterance>\nAssistant:"


def without_usage(body: JSON) -> JSON:
    return {name: value for name, value in body.items() if name != "usage"}


@pytest.mark.parametrize("name", sorted(CHAT_MODELS))
def test_joined_chunks_equal_the_complete_answer(name: str, tmp_path: Path):
    tokenizer = Tokenizer.open(write_chat_tokenizer(tmp_path, name))
    call = CHAT_MODELS[name].call
    served = served_row(tokenizer, tools=TOOLS, n=3)
    texts = (call, f"{call.replace('{', '[')} é ", "hello é <to")
    chunks, whole = streamed_and_whole(tokenizer, served, *texts)
    assert without_usage(joined(chunks)) == without_usage(whole)
    messages = [choice["message"] for choice in whole["choices"]]
    assert [len(message.get("tool_calls", ())) for message in messages] == [1, 0, 0]
    assert messages[2]["content"] == "hello é <to"


@pytest.mark.finding(number="A3")
@pytest.mark.parametrize("name", sorted(CHAT_MODELS))
def test_call_quoting_markers_is_streamed_and_complete(name: str, tmp_path: Path):
    tokenizer = Tokenizer.open(write_chat_tokenizer(tmp_path, name))
    served = served_row(tokenizer, tools=TOOLS)
    arguments = json.dumps({"a": "".join(MARKERS)})
    chunks, whole = streamed_and_whole(tokenizer, served, CHAT_MODELS[name].call.replace('{"a": 1}', arguments))
    assert without_usage(joined(chunks)) == without_usage(whole)
    (choice,) = whole["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": arguments}
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)


def test_empty_answer_has_empty_content(tmp_path: Path):
    """Regression: chunks of an empty answer had no `content`, which clients read as null."""
    tokenizer = Tokenizer.open(write_chat_tokenizer(tmp_path, "hermes with reasoning"))
    for more in ({}, {"tools": TOOLS}, {"n": 2}):
        served = served_row(tokenizer, **more)
        texts = [""] * served.sampling.n
        chunks, whole = streamed_and_whole(tokenizer, served, *texts)
        assert [choice["message"] for choice in whole["choices"]] == [{"role": "assistant", "content": ""}] * len(texts)
        assert without_usage(joined(chunks)) == without_usage(whole)
        state: ChatCompletionStreamState[None] = ChatCompletionStreamState()
        for chunk in chunks:
            state.handle_chunk(CHUNK.validate_python(chunk, strict=True))
        assert [choice.message.content for choice in state.get_final_completion().choices] == [""] * len(texts)


@pytest.mark.parametrize("name", sorted(CHAT_MODELS))
def test_first_delta_has_role_and_content(name: str, tmp_path: Path):
    tokenizer = Tokenizer.open(write_chat_tokenizer(tmp_path, name))
    for text in (CHAT_MODELS[name].call, "hello"):
        first, *others = streamed_and_whole(tokenizer, served_row(tokenizer, tools=TOOLS), text)[0]
        delta = first["choices"][0]["delta"]
        assert delta["role"] == "assistant"
        assert isinstance(delta["content"], str)
        assert not any("role" in each["choices"][0]["delta"] for each in others)


@pytest.mark.parametrize("name", ["hermes with reasoning", "mistral with names", "harmony"])
def test_reasoning_is_left_out_when_not_included(name: str, tmp_path: Path):
    tokenizer = Tokenizer.open(write_chat_tokenizer(tmp_path, name))
    call = CHAT_MODELS[name].call
    for text in (call, *([f"{call} and"] if name == "hermes with reasoning" else [])):
        found: dict[bool, tuple[JSON, JSON]] = {}
        for includes in (True, False):
            served = served_row(tokenizer, tools=TOOLS, include_reasoning=includes, return_token_ids=True)
            chunks, whole = streamed_and_whole(tokenizer, served, text)
            ids = [each for chunk in chunks for each in chunk["choices"][0]["token_ids"]]
            assert ids == whole["choices"][0]["token_ids"]
            found[includes] = joined(chunks)["choices"][0]["message"], whole["choices"][0]["message"]
        for with_reasoning, without in zip(*found.values(), strict=True):
            assert with_reasoning.pop("reasoning_content")
            assert with_reasoning == without
    # All of an answer may be reasoning.
    served = served_row(tokenizer, include_reasoning=False)
    start = text[: text.index("a <") + 3] if name == "hermes with reasoning" else text[: text.index("so") + 2]
    chunks, whole = streamed_and_whole(tokenizer, served, start)
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": None}
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [{"role": "assistant", "content": ""}, {}]


def done_calls(chunks: list[JSON]) -> list[str]:
    """Names of the calls that the official client reports as complete."""
    state: ChatCompletionStreamState[None] = ChatCompletionStreamState()
    events = [event for chunk in chunks for event in state.handle_chunk(CHUNK.validate_python(chunk, strict=True))]
    return [event.name for event in events if event.type == "tool_calls.function.arguments.done"]


@pytest.mark.parametrize("name", sorted(CHAT_MODELS))
def test_client_reports_call_of_the_last_step(name: str, tmp_path: Path):
    """A step of forced tokens may end the call and the answer; the client needs a chunk after the call's."""
    tokenizer = Tokenizer.open(write_chat_tokenizer(tmp_path, name))
    served = served_row(tokenizer, tools=TOOLS, return_token_ids=True)
    *_, last = outputs_of(tokenizer, served, CHAT_MODELS[name].call)
    chunks = ChunkWriter(served, NAME, False).chunks(last)
    assert done_calls(chunks) == ["add"]
    whole = response_body([served], [last], NAME)
    (choice,) = whole["choices"]
    assert joined(chunks)["choices"][0]["message"] == choice["message"]
    assert [token_id for chunk in chunks for token_id in chunk["choices"][0]["token_ids"]] == choice["token_ids"]


@pytest.mark.finding(number="D3")
def test_chunks_of_calls_have_all_ids(tmp_path: Path):
    """Held-back text is in no chunk; its ids come with the next."""
    tokenizer = Tokenizer.open(write_chat_tokenizer(tmp_path, "hermes"))
    served = served_row(tokenizer, tools=TOOLS, n=2, return_token_ids=True)
    chunks, whole = streamed_and_whole(tokenizer, served, CHAT_MODELS["hermes"].call, "hello")
    shown: dict[int, list[int]] = {0: [], 1: []}
    prompts: list[int] = []
    for chunk in chunks:
        (choice,) = chunk["choices"]
        shown[choice["index"]] += choice["token_ids"]
        if "prompt_token_ids" in chunk:
            assert chunk["prompt_token_ids"] == whole["prompt_token_ids"] == list(served.content.token_ids)
            prompts.append(choice["index"])
    assert sorted(prompts) == [0, 1]
    assert [shown[index] for index in (0, 1)] == [choice["token_ids"] for choice in whole["choices"]]


@pytest.mark.guarantee("A stream sends a call in one chunk", is_control_inside=True)
def test_content_is_streamed_and_call_is_one_chunk(tmp_path: Path):
    tokenizer = Tokenizer.open(write_chat_tokenizer(tmp_path, "hermes"))
    served = served_row(tokenizer, tools=TOOLS)
    call = CHAT_MODELS["hermes"].call
    chunks, _ = streamed_and_whole(tokenizer, served, f"I will add them.\n{call}")
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    contents = [delta["content"] for delta in deltas if "content" in delta]
    assert "".join(contents) == "I will add them."
    assert len(contents) > 3
    (calls,) = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    assert json.loads(calls[0]["function"]["arguments"]) == {"a": 1}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "tool_calls"
    assert done_calls(chunks) == ["add"]
    # The control: without tools the same text is content, marks and all.
    chunks, _ = streamed_and_whole(tokenizer, served_row(tokenizer), f"I will add them.\n{call}")
    assert joined(chunks)["choices"][0]["message"]["content"].endswith("</tool_call>")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedHere]:
    folder = write_chat_model(tmp_path_factory.mktemp("chat"), "hermes")
    with ServedHere(model=folder) as served:
        yield served


@pytest.mark.matrix
def test_tool_requests_are_answered_alike_when_streamed(server: ServedHere):
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    body: JSON
    for body in (
        {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "n": 2, "logprobs": True},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "add"}}},
        {"response_format": form},
        {"tools": TOOLS, "max_tokens": 20},
    ):
        asked = {"messages": USER, "max_tokens": 150, "seed": 3, **body}
        status, whole, _ = server.client.ask(CHAT, asked)
        assert status == 200, whole
        parsed = BODY.validate_python(whole, strict=True)
        chunks = server.client.stream(CHAT, asked)
        assert without_usage(without_names(joined(chunks))) == without_usage(without_names(whole))
        if "tool_choice" in body:
            assert all(choice.message.tool_calls for choice in parsed.choices if choice.finish_reason != "length")
        if "response_format" in body:
            assert json.loads(parsed.choices[0].message.content or "") in ({"a": 1}, {"a": 2})


@pytest.mark.matrix
@pytest.mark.parametrize("stop", ["bcd", "😀"])
@pytest.mark.parametrize("tools", [TOOLS, []])
def test_logprobs_wait_for_possible_stop_string(server: ServedHere, tools: list[Any], stop: str):
    """Regression: a stream sent bytes which the stop string then removed: of a chat that may have calls, and of tokens
    that are parts of a character.
    """
    body = {"messages": USER, "tools": tools, "structured_outputs": {"choice": [f"so a{stop}"]}, "stop": [stop]}
    asked = {**body, "max_tokens": 30, "temperature": 0, "logprobs": True}
    _, whole, _ = server.client.ask(CHAT, asked)
    (choice,) = whole["choices"]
    assert (choice["message"]["content"], choice["stop_reason"]) == ("so a", stop)
    assert joined(server.client.stream(CHAT, asked))["choices"] == whole["choices"]


@pytest.mark.matrix
def test_invalid_tools_are_an_error_response(server: ServedHere):
    status, body, _ = server.client.ask(CHAT, {"messages": USER, "tools": [{"type": "function"}]})
    assert status == 400
    assert body["error"]["code"] == "invalid_value"
    assert body["error"]["message"].startswith("tools[0].function=None must be")
    wrong = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "no"}}}
    status, body, _ = server.client.ask(CHAT, {"messages": USER, "response_format": wrong})
    assert (status, body["error"]["code"]) == (400, "grammar_refused")


def test_marked_text_contains_special_tokens_in_order(tmp_path: Path):
    """A stream reads each token once."""
    tokenizer = Tokenizer.open(write_chat_tokenizer(tmp_path, "mistral with names"))
    served = served_row(tokenizer, tools=TOOLS)
    assert served.reader is not None
    text = CHAT_MODELS["mistral with names"].call
    marked = served.reader.marked_text(served.content.token_ids, served.sampling)
    outputs = list(outputs_of(tokenizer, served, text))
    assert "".join([marked.read(output.outputs[0]) for output in outputs]) == text
    # A stop string holds the end of the text back.
    sampling = replace(served.sampling, stop=("}",))
    for shown, expected in (("so", "[THINK]so[/THINK][TOOL_CALLS]"), ("s", "[THINK]s"), ("soad", text[:31])):
        fresh = served.reader.marked_text(served.content.token_ids, sampling)
        cut = replace(outputs[-1].outputs[0], text=shown)
        assert fresh.read(cut) == expected


def test_marker_from_other_tokens_is_plain_text(tmp_path: Path):
    tokenizer = Tokenizer.open(write_chat_tokenizer(tmp_path, "mistral with names"))
    served = served_row(tokenizer, tools=TOOLS)
    assert served.reader is not None
    sampling = replace(served.sampling, stop=("zz",))
    token_id = tokenizer.special_ids(["[THINK]"])["[THINK]"]
    spelled = [*tokenizer.encode("[THI", False), *tokenizer.encode("NK]", False)]
    assert token_id not in spelled
    end = tokenizer.encode("so zz, and on", False)
    for opening, shown in ((spelled, "[THINK]so "), ([token_id], "so "), ([token_id, *spelled], "[THINK]so ")):
        whole = CompletionOutput(0, shown, [*opening, *end], finish_reason="stop", stop_reason="zz")
        assert tokenizer.decode(whole.token_ids).startswith(shown)
        marked = served.reader.marked_text(served.content.token_ids, sampling)
        assert marked.read(whole) == "[THINK]" * (token_id in opening) + shown
        # The same of a stream.
        marked, given = served.reader.marked_text(served.content.token_ids, sampling), ""
        for num_tokens in range(1, len(whole.token_ids)):
            text = tokenizer.decode(whole.token_ids[:num_tokens])[: len(shown)]
            given += marked.read(CompletionOutput(0, text, whole.token_ids[:num_tokens]))
        assert given + marked.read(whole) == "[THINK]" * (token_id in opening) + shown
