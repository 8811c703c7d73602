"""`LLM.chat` with tools: the message of an answer goes on with its conversation."""

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
from chat_checkpoints import write_chat_model
from chat_models import CHAT_MODELS, TOOLS

from spmd_worker import LLM, SamplingParams, StructuredOutputsParams
from spmd_worker.errors import ConfigError

pytestmark = pytest.mark.matrix

CALL = CHAT_MODELS["hermes"].call
TALK = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(write_chat_model(tmp_path_factory.mktemp("chat"), "hermes"), num_blocks=100) as made:
        yield made


def test_a_call_in_an_answer_becomes_one_that_the_template_takes_back(llm: LLM):
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
    with pytest.raises(ConfigError, match=r"model\.tool_call_format=xml is not one of auto"):
        llm.chat_messages(output, TOOLS, tool_call_format="xml")
    with pytest.raises(ValueError, match=r"tools\[0\]=3 must be an object"):
        llm.chat_messages(output, [3])
