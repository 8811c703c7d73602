"""Requests of vLLM's clients: several prompts, `echo`, ids, tokens, grammars; vLLM's paths."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from jobs_of_rows import answers_of_job, openai_row
from pooling_models import pooling_folder
from serving import JSON, KEY, MODEL, Client, ServedHere, joined, without_names
from transformers import AutoTokenizer
from waiting import wait_until

from spmd_worker.base.version import version
from spmd_worker.frontends.serve.token_requests import MAX_CHARACTERS

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPTS = ["add 1 2 =", "copy a b c =", "add 7 8 ="]
PERSON = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["age"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}


@pytest.fixture(scope="module")
def server() -> Iterator[ServedHere]:
    with ServedHere(max_queued=24) as served:
        yield served
        wait_until(lambda: served.num_used_blocks == 0 and served.exchange.num_sequences == 0)


@pytest.fixture
def client(server: ServedHere) -> Client:
    return server.client


@pytest.fixture
def asked(client: Client) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{client.port}/v1", api_key=KEY, max_retries=0)


@pytest.fixture(scope="module")
def oracle() -> Any:
    return AutoTokenizer.from_pretrained(str(MODEL))


def choices_alone(client: Client, prompt: Any, body: JSON) -> list[JSON]:
    return client.ask(TEXT, {**body, "prompt": prompt})[1]["choices"]


BODIES: dict[str, JSON] = {
    "greedy": {"max_tokens": 6, "temperature": 0},
    "several samples": {"max_tokens": 6, "temperature": 1.2, "seed": 3, "n": 2, "logprobs": 1},
    "echo": {"max_tokens": 6, "temperature": 0, "echo": True, "logprobs": 1},
    "echo alone": {"max_tokens": 0, "temperature": 0, "echo": True, "logprobs": 1},
    "ids": {"max_tokens": 6, "temperature": 0, "return_token_ids": True},
}


@pytest.mark.gate("*-texts", "greedy-ids")
@pytest.mark.finding(number="D3")
@pytest.mark.parametrize("kind", ["texts", "ids"])
@pytest.mark.parametrize("name", BODIES)
def test_several_prompts_are_answered_as_each_alone(client: Client, oracle: Any, kind: str, name: str):
    prompts: list[Any] = PROMPTS if kind == "texts" else [oracle.encode(each) for each in PROMPTS]
    alone = [choice for each in prompts for choice in choices_alone(client, each, BODIES[name])]
    expected = [{**choice, "index": index} for index, choice in enumerate(alone)]
    status, body, _ = client.ask(TEXT, {**BODIES[name], "prompt": prompts})
    assert (status, body["choices"]) == (200, expected)
    usage = [client.ask(TEXT, {**BODIES[name], "prompt": each})[1]["usage"] for each in prompts]
    assert body["usage"] == {key: sum(each[key] for each in usage) for key in usage[0]}


@pytest.mark.finding(number="D3")
@pytest.mark.parametrize("name", BODIES)
def test_stream_of_several_prompts_is_the_body(client: Client, name: str):
    body = {**BODIES[name], "prompt": PROMPTS}
    whole = client.ask(TEXT, body)[1]
    chunks = client.stream(TEXT, {**body, "stream_options": {"include_usage": True}})
    ids: dict[int, JSON] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            known = ids.setdefault(choice["index"], {"token_ids": []})
            known["token_ids"] += choice.pop("token_ids", [])
            if "prompt_token_ids" in choice:
                assert "prompt_token_ids" not in known, "once"
                known["prompt_token_ids"] = choice.pop("prompt_token_ids")
    found = joined(chunks)
    if "return_token_ids" in body:
        for choice in found["choices"]:
            choice |= ids[choice["index"]]
    expected = without_names(whole)
    assert without_names(found) == {key: value for key, value in expected.items() if key != "prompt_logprobs"}


@pytest.mark.finding(number="D3")
def test_openai_client_takes_several_prompts(asked: openai.OpenAI):
    whole = asked.completions.create(model="m", prompt=PROMPTS, max_tokens=4, n=2, temperature=1, seed=1, echo=True)
    assert [choice.index for choice in whole.choices] == list(range(6))
    for choice in whole.choices:
        assert choice.text.startswith(PROMPTS[choice.index // 2])
    texts = [""] * 6
    for chunk in asked.completions.create(
        model="m", prompt=PROMPTS, max_tokens=4, n=2, temperature=1, seed=1, echo=True, stream=True
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]


@pytest.mark.finding(number="D3")
def test_wrong_prompt_among_several_is_named(client: Client):
    for prompts, words in (
        (["a", ""], "prompt[1]: prompt is empty"),
        (["a", "b " * 300], "prompt[1]: the prompt has 600 tokens"),
        ([[1], [2, -1]], "prompt[1]: token id -1 is outside the vocabulary"),
        (["a", 5], "prompt[1]: prompt=5 must be a string"),
        ([5, "a"], "prompt[0]: prompt=5 must be a string"),
        ([], "prompt is empty"),
        (["a"] * 33, "33 sequences"),
        (["a"] * 2049, "prompt has 2049 prompts, more than 2048"),
    ):
        status, body, _ = client.ask(TEXT, {"prompt": prompts, "max_tokens": 2})
        assert status == 400
        assert words in body["error"]["message"]


@pytest.mark.finding(number="D3")
@pytest.mark.parametrize("more", [{}, {"echo": True}], ids=["plain", "echo"])
def test_prompt_logprobs_of_several_prompts_are_complete(client: Client, more: JSON):
    body = {"max_tokens": 2, "temperature": 0, "prompt_logprobs": 1, **more}
    alone = [client.ask(TEXT, {**body, "prompt": each})[1]["prompt_logprobs"] for each in PROMPTS]
    assert client.ask(TEXT, {**body, "prompt": PROMPTS})[1]["prompt_logprobs"] == alone
    for prompt in (PROMPTS, PROMPTS[0]):
        status, refused, _ = client.ask(TEXT, {**body, "prompt": prompt, "stream": True})
        assert (status, "prompt_logprobs cannot be streamed" in refused["error"]["message"]) == (400, True)


# Echo.


@pytest.mark.gate("False-3-*", "True-0-*")
@pytest.mark.finding(number="D3")
@pytest.mark.parametrize("way", ["whole", "stream", "row"])
@pytest.mark.parametrize("max_tokens", [3, 0])
@pytest.mark.parametrize("is_ids", [False, True])
def test_echo_puts_the_prompt_before_its_completion(
    client: Client, tmp_path: Any, oracle: Any, way: str, max_tokens: int, is_ids: bool
):
    token_ids = oracle.encode(PROMPTS[0])
    plain: JSON = {"prompt": token_ids if is_ids else PROMPTS[0], "temperature": 0, "logprobs": 2}
    behind = client.ask(TEXT, {**plain, "max_tokens": 3, "prompt_logprobs": 2})[1]
    body = {**plain, "max_tokens": max_tokens, "echo": True}
    if way == "row":
        (answer,) = answers_of_job(tmp_path, MODEL, [openai_row("a", TEXT, body)])
        found = answer["response"]["body"]
    elif way == "stream":
        found = joined(client.stream(TEXT, {**body, "stream_options": {"include_usage": True}}))
    else:
        found = client.ask(TEXT, body)[1]
    (choice,), (expected,) = found["choices"], behind["choices"]
    assert choice["text"] == PROMPTS[0] + (expected["text"] if max_tokens else "")
    assert choice["finish_reason"] == "length"
    logprobs, num_prompt = choice["logprobs"], len(token_ids)
    num_shown = num_prompt + (len(expected["logprobs"]["tokens"]) if max_tokens else 0)
    assert {len(each) for each in logprobs.values()} == {num_shown}
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
    assert logprobs["token_logprobs"][1:num_prompt] == [each[0]["logprob"] for each in behind["prompt_logprobs"][1:]]
    if max_tokens:
        assert logprobs["token_logprobs"][num_prompt:] == expected["logprobs"]["token_logprobs"]
    assert found["usage"]["completion_tokens"] == (behind["usage"]["completion_tokens"] if max_tokens else 0)
    assert [choice["text"][offset:][:1] for offset in logprobs["text_offset"]] == [t[:1] for t in logprobs["tokens"]]


# Ids.


@pytest.mark.finding(number="D3")
def test_answers_have_the_requested_ids(client: Client, oracle: Any, tmp_path: Any):
    text = {"prompt": PROMPTS[0], "max_tokens": 5, "temperature": 0, "return_token_ids": True}
    chat = {"messages": [{"role": "user", "content": PROMPTS[0]}], "max_tokens": 5, "temperature": 0}
    chat |= {"return_token_ids": True}
    bodies = [client.ask(TEXT, text)[1], client.ask(CHAT, chat)[1]]
    rows = answers_of_job(tmp_path, MODEL, [openai_row("a", TEXT, text), openai_row("b", CHAT, chat)])
    assert [without_names(each["response"]["body"]) for each in rows] == [without_names(each) for each in bodies]
    (choice,) = bodies[0]["choices"]
    assert choice["prompt_token_ids"] == oracle.encode(PROMPTS[0])
    assert oracle.decode(choice["token_ids"], skip_special_tokens=True) == choice["text"]
    (choice,) = bodies[1]["choices"]
    assert oracle.decode(choice["token_ids"], skip_special_tokens=True) == choice["message"]["content"]
    rendered = oracle.apply_chat_template(chat["messages"], add_generation_prompt=True, tokenize=False)
    assert bodies[1]["prompt_token_ids"] == oracle.encode(rendered, add_special_tokens=False)
    first, *others = client.stream(CHAT, chat)
    assert first["prompt_token_ids"] == bodies[1]["prompt_token_ids"]
    assert not any("prompt_token_ids" in chunk for chunk in others)
    streamed = [i for chunk in (first, *others) for each in chunk["choices"] for i in each["token_ids"]]
    assert streamed == choice["token_ids"]
    # Negative control: who does not ask gets none.
    assert "token_ids" not in client.ask(TEXT, {**text, "return_token_ids": False})[1]["choices"][0]


# Names and usage.


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_request_id_names_the_answer(client: Client, asked: openai.OpenAI, tmp_path: Any, path: str):
    """It says nothing of the answer."""
    prompt: JSON = {"prompt": PROMPTS[0]} if path == TEXT else {"messages": [{"role": "user", "content": PROMPTS[0]}]}
    body: JSON = {"model": "m", "max_tokens": 6, "temperature": 1.5, **prompt}
    create = asked.completions.create if path == TEXT else asked.chat.completions.create
    named = create(**body, extra_body={"request_id": "run-7"})
    head = "cmpl" if path == TEXT else "chatcmpl"
    assert (named.id, named._request_id) == (f"{head}-run-7", "run-7")
    assert named.choices == create(**body).choices
    stream = list(create(**body, stream=True, extra_body={"request_id": "run-8"}))
    assert {chunk.id for chunk in stream} == {f"{head}-run-8"}
    rows = answers_of_job(tmp_path, MODEL, [openai_row("a", path, {**body, "request_id": "run-7"})])
    assert rows[0]["response"]["body"]["id"] == named.id


@pytest.mark.parametrize(("path", "echo"), [(TEXT, False), (TEXT, True), (CHAT, False)])
def test_chunks_have_the_usage_so_far(client: Client, asked: openai.OpenAI, oracle: Any, path: str, echo: bool):
    messages = [{"role": "user", "content": PROMPTS[0]}]
    more: JSON = {"prompt": PROMPTS, "echo": echo} if path == TEXT else {"messages": messages}
    create = asked.completions.create if path == TEXT else asked.chat.completions.create
    body = {"model": "m", "max_tokens": 6, "n": 2, "seed": 1, "stream": True, **more}
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = create(**body, stream_options=options, extra_body={"return_token_ids": True})
    lengths, counts = dict.fromkeys(range(6 if path == TEXT else 2), 0), dict[int, tuple[int, int]]()
    for chunk in chunks:
        (choice,) = chunk.choices
        lengths[choice.index] += len(choice.token_ids)
        counts[choice.index] = (chunk.usage.prompt_tokens, chunk.usage.completion_tokens)
        assert chunk.usage.completion_tokens == lengths[choice.index]
        assert chunk.usage.total_tokens == sum(counts[choice.index])
    assert sorted(counts) == list(lengths)
    if path == TEXT:
        assert [counts[2 * index][0] for index in range(3)] == [len(oracle.encode(each)) for each in PROMPTS]
    assert last.choices == []
    assert last.usage.completion_tokens == sum(lengths.values())
    # As in vLLM it adds to the usage at the end, and is nothing without it.
    assert all(chunk.usage is None for chunk in create(**body, stream_options={"continuous_usage_stats": True}))
    *others, _ = create(**body, stream_options={"include_usage": True, "continuous_usage_stats": False})
    assert all(chunk.usage is None for chunk in others)


# Tokens.


@pytest.mark.finding(number="D3")
@pytest.mark.parametrize("text", ["add 1 2 =", "é你😀  \n", "a"])
@pytest.mark.parametrize("adds", [None, True, False])
def test_tokenize_equals_transformers(client: Client, oracle: Any, text: str, adds: bool | None):
    more = {} if adds is None else {"add_special_tokens": adds}
    status, body, _ = client.ask("/tokenize", {"model": "m", "prompt": text, "return_token_strs": True, **more})
    expected = oracle.encode(text, add_special_tokens=adds is not False)
    assert (status, body) == (
        200,
        {
            "count": len(expected),
            "max_model_len": 256,
            "tokens": expected,
            "token_strs": oracle.convert_ids_to_tokens(expected),
        },
    )
    assert client.ask("/detokenize", {"tokens": expected})[1] == {"prompt": oracle.decode(expected)}
    assert client.ask("/tokenize", {"prompt": text})[1]["token_strs"] is None


@pytest.mark.finding(number="D3")
@pytest.mark.parametrize(("generates", "continues"), [(True, False), (False, False), (False, True)])
def test_tokenize_of_conversation_equals_transformers(client: Client, oracle: Any, generates: bool, continues: bool):
    messages = [{"role": "user", "content": "add 1 2 ="}, {"role": "assistant", "content": "it is "}]
    ends = {"add_generation_prompt": generates, "continue_final_message": continues}
    rendered = oracle.apply_chat_template(messages, tokenize=False, **ends)
    expected = oracle.encode(rendered, add_special_tokens=False)
    assert client.ask("/tokenize", {"messages": messages, **ends})[1]["tokens"] == expected
    asked = {"messages": messages, **ends, "max_tokens": 5, "temperature": 0, "return_token_ids": True}
    body, chunks = client.ask(CHAT, asked)[1], client.stream(CHAT, asked)
    assert body["prompt_token_ids"] == chunks[0]["prompt_token_ids"] == expected
    (choice,) = body["choices"]
    assert choice["message"]["content"] == oracle.decode(choice["token_ids"], skip_special_tokens=True)
    streamed = "".join(each["delta"].get("content") or "" for chunk in chunks for each in chunk["choices"])
    assert streamed == choice["message"]["content"]


def test_conversation_ends_in_one_way(client: Client):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    for given, code in (
        ({"continue_final_message": True}, "conflicting_keys"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "conflicting_keys"),
        ({"continue_final_message": "yes"}, "invalid_value"),
        ({"add_generation_prompt": 0}, "invalid_value"),
    ):
        for path in (CHAT, "/tokenize"):
            status, said, _ = client.ask(path, {"messages": messages, **given})
            assert (status, said["error"]["code"]) == (400, code)
            assert next(iter(given)) in said["error"]["message"]


@pytest.mark.finding(number="D3")
def test_wrong_tokenize_bodies_are_rejected(client: Client):
    for path, body, code in (
        ("/tokenize", {}, "missing_prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "conflicting_prompts"),
        ("/tokenize", {"prompt": 5}, "invalid_value"),
        ("/tokenize", {"promt": "a"}, "unknown_key"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "invalid_value"),
        ("/tokenize", {"prompt": "a" * 2_000_000}, "limit_exceeded"),
        ("/tokenize", b"[", "invalid_json"),
        ("/detokenize", {"tokens": "a"}, "invalid_value"),
        ("/detokenize", {"tokens": [1 << 70]}, "token_out_of_vocabulary"),
        ("/detokenize", {"tokens": [-1]}, "token_out_of_vocabulary"),
        ("/detokenize", {}, "invalid_value"),
        ("/detokenize", {"tokens": [5] * (MAX_CHARACTERS + 1)}, "limit_exceeded"),
    ):
        status, said, _ = client.ask(path, body)
        assert (status, said["error"]["code"]) == (400, code)
    assert client.ask("/detokenize", {"tokens": []})[1] == {"prompt": ""}


# Paths.


@pytest.mark.finding(number="D3")
def test_paths_have_vllm_names_and_others_are_404(client: Client, asked: openai.OpenAI):
    assert client.ask("/version", method="GET")[1] == {"version": version()}
    for method in ("GET", "POST"):
        assert Client(client.port, None).ask("/ping", method=method)[:2] == (200, {"status": "ok"})
    for path in ("/nothing", "/v1/nothing", "/v1", "/", "/v1/completions/x", "/tokenise"):
        for method in ("GET", "POST", "DELETE"):
            status, body, _ = client.ask(path, method=method)
            error = body["error"]
            assert (status, error["code"], error["type"]) == (404, "not_found", "invalid_request_error"), path
            assert "/v1/completions" in error["message"]
    for path, method, allowed in ((TEXT, "GET", "POST"), ("/tokenize", "PUT", "POST"), ("/v1/models", "POST", "GET")):
        status, body, headers = client.ask(path, method=method)
        assert (status, body["error"]["code"]) == (405, "method_not_allowed")
        assert allowed in headers["allow"]
    with pytest.raises(openai.NotFoundError):
        asked.images.generate(prompt="a")


@pytest.mark.finding(number="D3")
def test_scores_answer_under_all_their_names(tmp_path: Any):
    score = {"text_1": "a", "text_2": ["b", "c d"]}
    rerank = {"query": "a", "documents": ["b", "c d"]}
    paths = [("/v1/score", score), ("/score", score)]
    paths += [(path, rerank) for path in ("/v1/rerank", "/rerank", "/v2/rerank")]
    model = pooling_folder("last")
    rows = answers_of_job(tmp_path, model, [openai_row(path, path, body) for path, body in paths], num_blocks=64)
    with ServedHere(max_num_seqs=4, model=model, max_queued=12) as server:
        found = [server.client.ask(path, body) for path, body in paths]
    assert [status for status, _, _ in found] == [200] * len(paths)
    for bodies in ([each["response"]["body"] for each in rows], [body for _, body, _ in found]):
        first, second, *ranked = map(without_names, bodies)
        assert first == second
        assert ranked == [ranked[0]] * 3


# D15: the form of a completion.


@pytest.mark.gate("text-schema-*", "text-object-row", "text-choice-*")
@pytest.mark.finding(number="D15")
@pytest.mark.parametrize("way", ["whole", "stream", "row"])
@pytest.mark.parametrize(
    "form",
    [
        {"response_format": FORMAT},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"choice": ["yes", "no"]}},
    ],
    ids=["schema", "object", "choice"],
)
@pytest.mark.parametrize(
    "prompt", ["add 1 2 =", pytest.param([10, 11, 12], marks=pytest.mark.matrix)], ids=["text", "ids"]
)
def test_completion_keeps_to_its_format(client: Client, tmp_path: Any, way: str, form: JSON, prompt: Any):
    # Longer than any text of the schema: rounding could have moved the shorter limit into most draws.
    body = {"prompt": prompt, "max_tokens": 160, "temperature": 1.0, "seed": 2, **form}
    if way == "row":
        (answer,) = answers_of_job(tmp_path, MODEL, [openai_row("a", TEXT, body)])
        found = answer["response"]["body"]
    else:
        found = joined(client.stream(TEXT, body)) if way == "stream" else client.ask(TEXT, body)[1]
    (choice,) = found["choices"]
    if "choice" in form.get("structured_outputs", {}):
        assert choice["text"] in ("yes", "no")
    elif choice["finish_reason"] == "stop":
        value = json.loads(choice["text"])
        assert isinstance(value, dict)
        if form.get("response_format", FORMAT) == FORMAT:
            assert list(value) == ["age"]
            assert 0 <= value["age"] <= 99
    else:
        assert choice["text"].lstrip().startswith("{")
        assert form["response_format"]["type"] == "json_object", "whitespace and digits of the schema are bounded"


@pytest.mark.finding(number="D15")
def test_response_format_of_completion_equals_structured_outputs(client: Client):
    body = {"prompt": "add 1 2 =", "max_tokens": 60, "temperature": 1.0, "seed": 4}
    found = [
        client.ask(TEXT, {**body, **form})[1]["choices"]
        for form in ({"response_format": FORMAT}, {"structured_outputs": {"json": PERSON}})
    ]
    assert found[0] == found[1]
    free = client.ask(TEXT, {**body, "response_format": {"type": "text"}})[1]["choices"]
    assert free == client.ask(TEXT, body)[1]["choices"] != found[0]


@pytest.mark.finding(number="D15")
def test_wrong_format_of_completion_is_named(client: Client):
    for value, words in (
        ({"type": "xml"}, "must be an object with type text, json_object, json_schema"),
        ({"type": "json_schema"}, "response_format.json_schema=None must be an object"),
        ({"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nothing"}}}, "response_format: "),
    ):
        status, body, _ = client.ask(TEXT, {"prompt": "a", "response_format": value})
        assert status == 400
        assert words in body["error"]["message"]
