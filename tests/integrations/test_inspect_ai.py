"""inspect_ai's provider: many samples ask at once, and each gets what `LLM.chat` gives it.

inspect_ai itself is not installed here: modules with the names that the provider uses stand in for it, and
docs/guides/evaluation.md says what was run with it.
"""

import asyncio
import importlib
import os
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import ranks
from adapter_folders import demo_adapters
from forked_child import in_child

from spmd_worker import LLM, LoRARequest, SamplingParams

MODULE = "spmd_worker.integrations.inspect_ai_model"
MODEL = ranks.REPOSITORY / "scripts" / "demo" / "model"
OPTIONS = {"num_blocks": 64, "max_model_len": 64, "dtype": "float32", "device": "cpu"}
RECORDS = ("ChatCompletionChoice", "ChatMessageAssistant", "Logprob", "Logprobs", "ModelOutput", "ModelUsage")
pytestmark = pytest.mark.matrix


class Record(SimpleNamespace):
    def __getattr__(self, name: str) -> None:
        return None


class ModelAPI:
    def __init__(self, model_name: str, base_url: Any, api_key: Any, api_key_vars: list[str], config: Any) -> None:
        self.model_name = model_name


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Any]:
    model, tool = ModuleType("inspect_ai.model"), ModuleType("inspect_ai.tool")
    records = dict.fromkeys((*RECORDS, "TopLogprob", "ChatMessage", "GenerateConfig"), Record)
    vars(model).update(records, ModelAPI=ModelAPI, modelapi=lambda name: lambda made: made)
    vars(tool).update(ToolChoice=str, ToolInfo=Record)
    for name, module in (
        ("inspect_ai", ModuleType("inspect_ai")),
        ("inspect_ai.model", model),
        ("inspect_ai.tool", tool),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    more = getattr(request, "param", dict)()
    api = importlib.import_module(MODULE).SpmdWorkerAPI(str(MODEL), **OPTIONS, **more)
    yield api
    api.shutdown()
    del sys.modules[MODULE]


def asked(api: Any, texts: list[str], **config: Any) -> list[Any]:
    async def ask_all() -> list[Any]:
        messages = [[Record(role="user", content=text)] for text in texts]
        return await asyncio.gather(*(api.generate(each, [], "auto", Record(**config)) for each in messages))

    return asyncio.run(ask_all())


def test_concurrent_samples_equal_one_call(provider: Any):
    texts = [f"add {number} 3 =" for number in range(40)]
    outputs = asked(provider, texts, temperature=0.0, max_tokens=6, logprobs=True, top_logprobs=2)
    with LLM(MODEL, **OPTIONS) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=2)
        expected = llm.chat([[{"role": "user", "content": text}] for text in texts], params, use_tqdm=False)
    for output, other in zip(outputs, expected, strict=True):
        (choice,), completion = output.choices, other.outputs[0]
        assert choice.message.content == completion.text
        assert choice.stop_reason == {"stop": "stop", "length": "max_tokens"}[completion.finish_reason]
        assert output.usage.total_tokens == len(other.prompt_token_ids) + len(completion.token_ids)
        chosen = [position[token].logprob for token, position in zip(completion.token_ids, completion.logprobs)]
        assert [each.logprob for each in choice.logprobs.content] == chosen
        assert {len(each.top_logprobs) for each in choice.logprobs.content} <= {2, 3}


def test_samples_depend_on_request_and_repetition_not_order(provider: Any):
    texts = [f"{number} z {number}" for number in range(6)] * 2
    config = {"temperature": 2.0, "max_tokens": 6, "num_choices": 2}

    def drawn(outputs: list[Any], order: list[int]) -> dict[str, list[list[str]]]:
        found: dict[str, list[list[str]]] = {}
        for index, output in zip(order, outputs, strict=True):
            found.setdefault(texts[index], []).append([each.message.content for each in output.choices])
        return found

    first = drawn(asked(provider, texts, **config), list(range(12)))
    provider._asked.clear()
    order = [5, 3, 0, 1, 11, 10, 2, 4, 9, 8, 7, 6]
    assert drawn(asked(provider, [texts[index] for index in order], **config), order) == first
    assert any(one != other for one, other in first.values()), "another epoch draws other numbers"


def test_unanswerable_request_is_reported(provider: Any):
    (output,) = asked(provider, ["add 3 " * 60], temperature=0.0)
    assert (output.choices[0].stop_reason, output.choices[0].message.content) == ("model_length", "")
    assert "64" in output.error
    with pytest.raises(ValueError, match=r"^1 tools"):
        asyncio.run(provider.generate([Record(role="user", content="a")], [Record()], "auto", Record()))
    image = Record(role="user", content=[Record(type="image", image="a.png")])
    with pytest.raises(ValueError, match="image"):
        asyncio.run(provider.generate([image], [], "none", Record()))
    with pytest.raises(ValueError, match="temperature"):
        asked(provider, ["a"], temperature=-1.0)


def test_forked_process_ends_nothing_at_its_exit(provider: Any, monkeypatch: pytest.MonkeyPatch):
    """`shutdown` is called there too, and took locks that the parent's threads may have held."""
    with monkeypatch.context() as patched:
        patched.setattr(provider, "_exchange", SimpleNamespace(end=lambda why: os._exit(7)))
        assert in_child(provider.shutdown) == 0
        # Negative control.
        patched.setattr(provider, "_owner", -1)
        assert in_child(lambda: (setattr(provider, "_owner", os.getpid()), provider.shutdown())) == 7


@pytest.mark.parametrize("provider", [lambda: {"adapters": demo_adapters("a", "b"), "adapter": "b"}], indirect=True)
def test_samples_get_the_adapter_that_is_named(provider: Any):
    texts = [f"add {number} 3 =" for number in range(6)]
    found = [output.choices[0].message.content for output in asked(provider, texts, temperature=0.0, max_tokens=6)]
    params = SamplingParams(temperature=0.0, max_tokens=6)
    adapter = LoRARequest("b", 1, demo_adapters("b")["b"])
    with LLM(MODEL, enable_lora=True, **OPTIONS) as llm:
        talks = [[{"role": "user", "content": text}] for text in texts]
        expected, plain = (
            [output.outputs[0].text for output in llm.chat(talks, params, use_tqdm=False, lora_request=given)]
            for given in (adapter, None)
        )
    assert found == expected != plain
    with pytest.raises(ValueError, match="adapter=c is not one of adapters or prompt_adapters: a"):
        type(provider)(str(MODEL), adapters={"a": "/a"}, adapter="c")
