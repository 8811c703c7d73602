"""`LLM.chat` with tools: the message of an answer goes on with its conversation."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chat_checkpoints import write_chat_model
from chat_models import CHAT_MODELS, TOOLS

from spmd_worker import LLM, SamplingParams, StructuredOutputsParams
from spmd_worker.base.errors import ConfigError
from spmd_worker.replica.sequence.sampling_params import DIFFERENT_FIELDS

pytestmark = pytest.mark.matrix

CALL = CHAT_MODELS["hermes"].call
TALK = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(write_chat_model(tmp_path_factory.mktemp("chat"), "hermes"), num_blocks=100) as made:
        yield made


def test_tool_call_round_trips_through_the_template(llm: LLM):
    begin, end = [llm.llm_engine.need_tokenizer().marker_id(each) for each in ("<tool_call>", "</tool_call>")]
    inner = json.dumps(CALL.removeprefix("<tool_call>").removesuffix("</tool_call>"))
    form = StructuredOutputsParams(grammar=f'start: "I add.\\n" <[{begin}]> {inner} <[{end}]>')
    params = SamplingParams(max_tokens=200, structured_outputs=form)
    (output,) = llm.chat(TALK, params, use_tqdm=False, tools=TOOLS)
    assert output.error is None, output.error
    (message,) = llm.chat_messages(output, TOOLS, params)
    (call,) = message["tool_calls"]
    assert message == {"role": "assistant", "content": "I add.", "tool_calls": [call]}
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert call["id"].startswith("call_")
    told = [*TALK, message, {"role": "tool", "tool_call_id": call["id"], "content": "2"}]
    (following,) = llm.chat(told, replace(params, max_tokens=1), use_tqdm=False, tools=TOOLS)
    assert 'I add.add{"a": 1}' in (following.prompt or "")
    # Without tools, or in another form, it is content.
    for messages in (llm.chat_messages(output), llm.chat_messages(output, TOOLS, tool_call_format="mistral")):
        assert messages == [{"role": "assistant", "content": f"I add.\n{CALL}"}]
    with pytest.raises(ConfigError, match=r"^tool_call_format=xml .*not .*auto"):
        llm.chat_messages(output, TOOLS, tool_call_format="xml")
    with pytest.raises(ValueError, match=r"^tools\[0\]=3 must .*object"):
        llm.chat_messages(output, [3])


# Answers that must be calls.

NAMED = {"type": "function", "function": {"name": "add"}}
DRAWN = SamplingParams(max_tokens=200, temperature=1.0, seed=3)
ENDS = {"</think>", "<|end|>", "]", "}", "</s>"}
"""Tokens that end reasoning, a list of calls, an integer and the answer."""


@pytest.fixture(scope="module", params=["hermes with reasoning", "mistral", "llama3_json", "harmony"])
def calling(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(write_chat_model(tmp_path_factory.mktemp("calling"), request.param), num_blocks=200) as made:
        yield made


@pytest.mark.gate("hermes with reasoning-required", "llama3_json-*", "mistral-tool_choice1", "harmony-required")
@pytest.mark.finding(number="D12")
@pytest.mark.parametrize("tool_choice", ["required", NAMED])
def test_tool_choice_constrains_the_answer(calling: LLM, tool_choice: Any):
    """Regression: without a bias on every end, one answer in five of these random weights was a list of calls that
    reached `max_tokens`, and rounding decided which.
    """
    vocabulary = calling.llm_engine.need_tokenizer().vocabulary()
    params = replace(DRAWN, logit_bias={vocabulary[each]: 100.0 for each in ENDS & vocabulary.keys()})
    left_open = {"add_generation_prompt": False, "continue_final_message": True}
    for talk, ends in (([*TALK, {"role": "assistant", "content": "So: "}], left_open), (TALK, {})):
        (output,) = calling.chat(talk, params, use_tqdm=False, tools=TOOLS, tool_choice=tool_choice, **ends)
        assert output.outputs[0].finish_reason == "stop", output
        (message,) = calling.chat_messages(output, TOOLS, params, tool_choice=tool_choice)
        names = [call["function"]["name"] for call in message["tool_calls"]]
        assert names
        assert set(names) <= ({"add"} if tool_choice is NAMED else {"add", "stop"})
        for call in message["tool_calls"]:
            arguments = json.loads(call["function"]["arguments"])
            assert set(arguments) == ({"a"} if call["function"]["name"] == "add" else set())
    # With none nothing is looked for, and the template still writes the tools.
    (free,) = calling.chat(TALK, replace(DRAWN, max_tokens=3), use_tqdm=False, tools=TOOLS, tool_choice="none")
    assert '"add"' in (free.prompt or "")
    assert "tool_calls" not in calling.chat_messages(output, TOOLS, params, tool_choice="none")[0]


@pytest.mark.finding(number="D12")
def test_free_choice_changes_no_answer(llm: LLM):
    outputs = [
        llm.chat(TALK, replace(DRAWN, max_tokens=20), use_tqdm=False, tools=TOOLS, tool_choice=choice)[0]
        .outputs[0]
        .token_ids
        for choice in (None, "auto", "none")
    ]
    assert outputs[0] == outputs[1] == outputs[2]


@pytest.mark.finding(number="D12")
def test_invalid_tool_choice_is_rejected(llm: LLM):
    form = StructuredOutputsParams(regex="a")
    for given, params, words in (
        ({"tools": TOOLS, "tool_choice": "always"}, DRAWN, r"tool_choice='always' .*'auto'"),
        ({"tool_choice": "required"}, DRAWN, "tool_choice='required' needs tools"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "sub"}}},
            DRAWN,
            r"tool_choice names 'sub', .*: add, stop",
        ),
        (
            {"tools": TOOLS, "tool_choice": "required"},
            replace(DRAWN, structured_outputs=form),
            r"structured_outputs and tool_choice .*constrain",
        ),
        (
            {"tools": TOOLS, "tool_choice": "required", "tool_call_format": "none"},
            DRAWN,
            "set tool_call_format, or",
        ),
        (
            {"tools": TOOLS, "tool_choice": "auto", "chat_template": "{{ messages[0].content }}"},
            DRAWN,
            r"template .*not .*tools",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            llm.chat(TALK, params, use_tqdm=False, **given)


@pytest.mark.parametrize(
    ("begun", "expected"),
    [
        ("<think>So ", {"content": "yes", "reasoning_content": "hm"}),
        ("It is ", {"content": "hm</think>yes"}),
        ("<think>So</think>It is ", {"content": "hm</think>yes"}),
    ],
)
def test_continued_message_is_read_where_it_ends(tmp_path: Path, begun: str, expected: dict[str, str]):
    """Regression: within reasoning, the answer was read as a new one."""
    with LLM(write_chat_model(tmp_path, "hermes with reasoning"), num_blocks=100) as llm:
        end = llm.llm_engine.need_tokenizer().marker_id("</think>")
        params = SamplingParams(
            max_tokens=200, structured_outputs=StructuredOutputsParams(grammar=f'start: "hm" <[{end}]> "yes"')
        )
        talks = [[*TALK, {"role": "assistant", "content": each}] for each in (begun, "other")]
        output, other = llm.chat(
            talks, params, use_tqdm=False, add_generation_prompt=False, continue_final_message=True
        )
        assert llm.chat_messages(output, sampling_params=params) == [{"role": "assistant", **expected}]
        assert llm.chat_messages(other, sampling_params=params)[0]["content"] == "hm</think>yes"


# Stop strings in reasoning.


@pytest.mark.finding(number="D14")
@pytest.mark.parametrize("includes", [False, True])
def test_stop_in_reasoning_leaves_content_null(tmp_path: Path, includes: bool):
    with LLM(write_chat_model(tmp_path, "hermes with reasoning"), num_blocks=100) as llm:
        begin, end = [llm.llm_engine.need_tokenizer().marker_id(each) for each in ("<think>", "</think>")]
        form = StructuredOutputsParams(grammar=f'start: <[{begin}]> "hm, Question: why" <[{end}]> "yes. Question: no"')
        params = SamplingParams(
            max_tokens=200, structured_outputs=form, stop=["Question:"], include_stop_str_in_output=includes
        )
        (output,) = llm.chat(TALK, params, use_tqdm=False)
        (completion,) = output.outputs
        assert (completion.finish_reason, completion.stop_reason) == ("stop", "Question:")
        (message,) = llm.chat_messages(output, sampling_params=params)
        thought = "hm, Question:" if includes else "hm,"
        assert message == {"role": "assistant", "content": None, "reasoning_content": thought}
        # Behind the reasoning it ends the content.
        form = replace(form, grammar=(form.grammar or "").replace("hm, Question: why", "hm"))
        (output,) = llm.chat(TALK, replace(params, structured_outputs=form), use_tqdm=False)
        (message,) = llm.chat_messages(output, sampling_params=params)
        assert message["reasoning_content"] == "hm"
        assert message["content"] == ("yes. Question:" if includes else "yes. ")
    # The table of what differs from vLLM says it.
    assert "`content` is null" in DIFFERENT_FIELDS["stop"]
