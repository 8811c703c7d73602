"""A server with adapters: its list of models, and requests that name one, by OpenAI's client."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from adapter_folders import DEMO, demo_adapters, demo_prompt_adapters
from context_fixtures import fixture_of
from jobs_of_rows import answers_of_job, openai_row
from serving import KEY, ServedHere

ADAPTERS = demo_adapters("a", "b")
PROMPT_ADAPTERS = demo_prompt_adapters(soft=9)
OPTIONS: dict[str, Any] = {"adapters": ADAPTERS, "prompt_adapters": PROMPT_ADAPTERS}
BODY: dict[str, Any] = {"prompt": "add 1 2 =", "max_tokens": 8, "temperature": 0}
TALK: list[Any] = [{"role": "user", "content": "add 12 3 ="}]
MODELS = ("model", "a", "b", "model", "b", "soft")

server = fixture_of(lambda: ServedHere(options=OPTIONS, max_queued=8))


@pytest.fixture(scope="module")
def client(server: ServedHere) -> Iterator[openai.OpenAI]:
    url = f"http://127.0.0.1:{server.client.port}/v1"
    with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0) as made:
        yield made


def test_list_of_models_has_the_adapters(server: ServedHere, client: openai.OpenAI):
    listed = {each.id: each for each in client.models.list()}
    assert list(listed) == ["model", "a", "b", "soft"]
    extra = {name: (each.model_extra or {}) for name, each in listed.items()}
    parents = [each["parent"] for each in extra.values()]
    assert parents == [None, *["model"] * 3]
    assert {name: each["root"] for name, each in extra.items()} == {"model": str(DEMO), **ADAPTERS, **PROMPT_ADAPTERS}
    assert client.models.retrieve("a") == listed["a"]
    with pytest.raises(openai.NotFoundError, match="unknown model 'c': use model, a, b, soft"):
        client.models.retrieve("c")


def test_request_gets_the_model_that_it_names(client: openai.OpenAI, tmp_path: Any):
    """As a job's rows do, when all are asked at once."""
    rows = [openai_row(str(number), "/v1/completions", {**BODY, "model": name}) for number, name in enumerate(MODELS)]
    answers = answers_of_job(tmp_path, DEMO, rows, options=OPTIONS)
    expected = [answer["response"]["body"]["choices"][0]["text"] for answer in answers]
    assert len(set(expected)) == 4
    with ThreadPoolExecutor(len(MODELS)) as pool:
        found = list(pool.map(lambda name: client.completions.create(model=name, **BODY), MODELS))
    assert [each.choices[0].text for each in found] == expected
    assert [each.model for each in found] == list(MODELS)


def test_streamed_chat_gets_the_model_that_it_names(client: openai.OpenAI):
    texts = {}
    for name in ("model", "a"):
        whole = client.chat.completions.create(model=name, messages=TALK, max_tokens=8, temperature=0)
        chunks = list(
            client.chat.completions.create(model=name, messages=TALK, max_tokens=8, temperature=0, stream=True)
        )
        assert {chunk.model for chunk in chunks} == {name}
        texts[name] = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert texts[name] == whole.choices[0].message.content
    assert texts["a"] != texts["model"]


def test_unknown_model_is_not_found(server: ServedHere, client: openai.OpenAI):
    with pytest.raises(openai.NotFoundError) as refused:
        client.completions.create(model="c", **BODY)
    assert refused.value.code == "model_not_found"
    assert "model 'c' is not served; served are model, a, b, soft" in str(refused.value)
    with pytest.raises(openai.NotFoundError, match="model 'c' is not served"):
        client.chat.completions.create(model="c", messages=TALK, stream=True)
    # A body without a model is the base model's.
    status, body, _ = server.client.ask("/v1/completions", BODY)
    assert (status, body["model"]) == (200, "model")
