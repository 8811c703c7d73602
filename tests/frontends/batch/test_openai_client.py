"""The official `openai` package parses every body of a batch output, in its strict mode.

The job has a model of random weights, plain and chat rows with log-probabilities, several choices, stops of all kinds,
and rows that cannot run.
"""

import json

import pytest
import ranks
from jobs_of_rows import answers_of_job, openai_row
from openai.types import Completion
from openai.types.chat import ChatCompletion
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionParams
from pydantic import TypeAdapter

from spmd_worker.frontends.openai.row import Row, RowError
from spmd_worker.frontends.openai.row_parser import parse_row
from spmd_worker.replica.sequence.sampling_params import SamplingParams

MODEL = ranks.REPOSITORY / "scripts" / "demo" / "model"

COMPLETIONS = [
    {"prompt": "add 1 2 ="},
    {"prompt": ["add 3 4 ="], "max_tokens": 5},
    {"prompt": [220, 15, 21], "logprobs": 3},
    {"prompt": "add 5 6 =", "n": 3, "temperature": 0.9, "seed": 7, "logprobs": 0},
    {"prompt": "add 7 8 =", "best_of": 3, "n": 2, "seed": 1},
    {"prompt": "copy a b c =", "stop": ["b", "c"], "max_tokens": 20},
    {"prompt": "copy a b c =", "max_tokens": 1, "user": "someone", "model": "named"},
    {"prompt": "add 1 1 =", "suffix": "b"},
    {"prompt": "", "max_tokens": 3},
    {"prompt": "add 2 2 =", "max_tokens": -1},
]
CHATS = [
    {"messages": [{"role": "user", "content": "add 1 2 ="}]},
    {"messages": [{"role": "user", "content": "add 1 2 ="}], "logprobs": True},
    {"messages": [{"role": "user", "content": "add 1 2 ="}], "logprobs": True, "top_logprobs": 4, "n": 2, "seed": 3},
    {"messages": [{"role": "system", "content": "sums"}, {"role": "user", "content": [{"type": "text", "text": "1"}]}]},
    {"messages": [{"role": "user", "content": "add 9 9 ="}], "max_completion_tokens": 2, "model": "named"},
    {"messages": [{"role": "user", "content": "é你😀"}], "temperature": 1.5, "seed": 2, "max_tokens": 30},
    {"messages": [], "max_tokens": 3},
    {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]},
]
NUM_ROWS = 100


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    folder = tmp_path_factory.mktemp("openai")
    rows = []
    for index in range(NUM_ROWS):
        is_chat = index % 2
        bodies = CHATS if is_chat else COMPLETIONS
        url = "/v1/chat/completions" if is_chat else "/v1/completions"
        body = {"model": "demo", "max_tokens": 8, **bodies[index // 2 % len(bodies)]}
        if "max_completion_tokens" in body:
            del body["max_tokens"]
        rows.append(openai_row(f"row {index}", url, body))
    rows[50] = openai_row("e", "/v1/embeddings", {"model": "m", "input": "text"})
    return answers_of_job(folder, MODEL, rows)


PARSERS = {"text_completion": TypeAdapter(Completion), "chat.completion": TypeAdapter(ChatCompletion)}
"""The package's own types. They are used strictly, so that no value is made to fit."""


def test_every_body_of_batch_parses(answers: list[dict]):
    assert len(answers) == NUM_ROWS
    parsed = {"text_completion": 0, "chat.completion": 0}
    for answer in answers:
        assert set(answer) == {"id", "custom_id", "response", "error"}
        if answer["error"] is not None:
            assert answer["response"] is None
            assert set(answer["error"]) == {"code", "message"}
            continue
        assert answer["response"]["status_code"] == 200
        assert answer["response"]["request_id"]
        body = answer["response"]["body"]
        completion = PARSERS[body["object"]].validate_python(body, strict=True)
        parsed[body["object"]] += 1
        check(completion, body)
    assert sum(parsed.values()) + sum(answer["error"] is not None for answer in answers) == NUM_ROWS
    assert min(parsed.values()) > 30, parsed


def check(completion: Completion | ChatCompletion, body: dict) -> None:
    """A client reads the written values by the package's names."""
    usage = completion.usage
    assert usage is not None
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens > 0
    assert [choice.index for choice in completion.choices] == list(range(len(completion.choices)))
    for choice, written in zip(completion.choices, body["choices"], strict=True):
        assert choice.finish_reason in ("stop", "length")
        if isinstance(completion, ChatCompletion):
            assert choice.message.content == written["message"]["content"]
            assert choice.message.role == "assistant"
            assert choice.message.refusal is None
        else:
            assert choice.text == written["text"]
        if choice.logprobs is not None and isinstance(completion, ChatCompletion):
            assert all(each.logprob <= 0 and each.token is not None for each in choice.logprobs.content)


def test_rows_that_cannot_run_are_error_fields(answers: list[dict]):
    by_id = {answer["custom_id"]: answer for answer in answers}
    assert by_id["e"]["error"]["code"] == "wrong_runner"
    assert "model.runner=pooling" in by_id["e"]["error"]["message"]
    codes = {answer["error"]["code"] for answer in answers if answer["error"]}
    assert codes == {"wrong_runner", "unsupported_value", "empty_prompt", "invalid_value"}


def test_every_parameter_of_client_is_known():
    """Null is neutral, and keys of its cache have no effect on an answer."""
    own = {"prompt_cache_options": {"mode": "explicit", "ttl": "30m"}, "prompt_cache_retention": "24h"}
    for url, params, prompt in (
        ("/v1/completions", CompletionParams, {"prompt": "a"}),
        ("/v1/chat/completions", ChatParams, {"messages": [{"role": "user", "content": "a"}]}),
    ):
        body = {**dict.fromkeys(params.__annotations__), **own, **prompt}
        row = parse_row(0, json.dumps(openai_row("a", url, body)).encode(), SamplingParams())
        assert isinstance(row, Row), row
    for key, value, instead in (("function_call", {}, "tool_choice"), ("functions", [{}], "tools")):
        refused = parse_row(0, json.dumps(openai_row("a", url, {**prompt, key: value})).encode(), SamplingParams())
        assert isinstance(refused, RowError), refused
        assert f"is not supported: give {instead}" in refused.message


def test_parse_check_detects_body_lacking_required_fields(answers: list[dict]):
    """The control."""
    body = next(answer["response"]["body"] for answer in answers if answer["response"])
    for key in ("id", "choices", "created", "model", "object"):
        broken = {name: value for name, value in body.items() if name != key}
        with pytest.raises(ValueError):
            PARSERS[body["object"]].validate_python(broken, strict=True)
