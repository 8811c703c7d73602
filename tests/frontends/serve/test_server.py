"""The server over an engine of one rank: answers are those of a job, refusals are OpenAI's, and clients may misbehave.

The steps of the engine are held where a test is about what happens between two of them.
"""

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from typing import Any

import openai
import pytest
from jobs_of_rows import answers_of_job, openai_row
from serving import JSON, KEY, MODEL, Client, ServedHere, joined, read_events, without_names
from waiting import LIMIT_S, wait_until

from spmd_worker.compat.metrics import Gauge
from spmd_worker.frontends.serve import app, command, http_protocol, request_reader
from spmd_worker.frontends.serve.app import Answer, ServerApp
from spmd_worker.frontends.serve.engine_loop import EngineLoop
from spmd_worker.frontends.serve.exchange import RequestExchange
from spmd_worker.frontends.serve.http_server import HttpServer, bind
from spmd_worker.frontends.serve.responses import Message, Scope, Send, prometheus_text
from spmd_worker.tokenizer.messages import InvalidRequestError

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = {"prompt": "copy a b c =", "max_tokens": 200, "ignore_eos": True, "temperature": 0}
USER = [{"role": "user", "content": "add 12 3 ="}]
REQUESTS = [
    (TEXT, {"prompt": "add 1 2 =", "max_tokens": 8, "temperature": 0}),
    (TEXT, {"prompt": [220, 15, 21], "max_tokens": 12, "temperature": 1.3, "seed": 5, "n": 2, "logprobs": 3}),
    (TEXT, {"prompt": "copy a b c =", "max_tokens": 40, "temperature": 1.5, "stop": ["b", "3 "], "logprobs": 1}),
    (TEXT, {"prompt": "é你😀", "max_tokens": 30, "temperature": 1.5}),
    (TEXT, {"prompt": "add 7 8 =", "max_tokens": 9, "best_of": 3, "n": 2, "temperature": 1.1}),
    (TEXT, {"prompt": "add 7 8 =", "max_tokens": 3, "model": "named", "user": "somebody", "prompt_logprobs": 1}),
    (TEXT, {"prompt": "é你😀", "max_tokens": 9, "n": 2, "temperature": 1.5, "top_k": 5, "return_sampling_mask": True}),
    (TEXT, {"prompt": "add 7 8 =", "max_tokens": 4, "n": 2, "logprobs": 0, "logprob_token_ids": [220, 15, 21]}),
    (CHAT, {"messages": USER, "max_tokens": 8, "temperature": 0}),
    (CHAT, {"messages": USER, "max_tokens": 4, "temperature": 0, "logprobs": True, "logprob_token_ids": [21, 220]}),
    (CHAT, {"messages": USER, "max_completion_tokens": 20, "temperature": 1.4, "n": 3, "logprobs": True}),
    (CHAT, {"messages": USER, "max_tokens": 6, "logprobs": True, "top_logprobs": 3, "ignore_eos": True}),
    (CHAT, {"messages": [{"role": "system", "content": "sums"}, *USER], "max_tokens": 30, "temperature": 1.6}),
]
CANNOT_STREAM = ("prompt_logprobs",)


@pytest.fixture(scope="module")
def server() -> Iterator[ServedHere]:
    with ServedHere(max_queued=8) as served:
        yield served
        assert served.thread.is_alive()
        wait_until(lambda: served.num_used_blocks == 0 and served.exchange.num_sequences == 0)


@pytest.fixture
def client(server: ServedHere) -> Client:
    return server.client


@pytest.fixture
def roomy(server: ServedHere, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for all of `REQUESTS` at once: on a slow machine none may be answered when the last arrives."""
    num_sequences = sum(max(body.get("n", 1), body.get("best_of", 1)) for _, body in REQUESTS)
    assert num_sequences > server.exchange.max_sequences, "without need"
    monkeypatch.setattr(server.exchange, "max_sequences", 2 * num_sequences)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[JSON]:
    """A job's answers to the same bodies."""
    folder = tmp_path_factory.mktemp("job")
    rows = [openai_row(f"row {index}", url, body) for index, (url, body) in enumerate(REQUESTS)]
    return [without_names(answer["response"]["body"]) for answer in answers_of_job(folder, MODEL, rows)]


def ask_all(client: Client, how: Callable[[int], JSON], order: list[int]) -> list[JSON]:
    """All at once, in an order of their own; the answers in the order of the requests."""
    with ThreadPoolExecutor(len(order)) as pool:
        answers = dict(zip(order, pool.map(how, order)))
    return [answers[index] for index in sorted(order)]


def name_of(index: int) -> dict[str, str]:
    return {"X-Custom-Id": f"row {index}"}


@pytest.mark.usefixtures("roomy")
@pytest.mark.guarantee("Server: a job's answers; who leaves frees blocks")
def test_concurrent_requests_equal_job_bit_for_bit(client: Client, expected: list[JSON]):
    def whole(index: int) -> JSON:
        status, body, headers = client.ask(*REQUESTS[index], name_of(index))
        assert status == 200, body
        assert body["id"].endswith(headers["x-request-id"])
        return without_names(body)

    assert ask_all(client, whole, list(range(len(REQUESTS)))) == expected


@pytest.mark.usefixtures("roomy")
def test_joined_streams_equal_complete_answers(client: Client, expected: list[JSON]):
    indices = [index for index, (_, body) in enumerate(REQUESTS) if not any(key in body for key in CANNOT_STREAM)]

    def streamed(index: int) -> JSON:
        url, body = REQUESTS[index]
        chunks = client.stream(url, {**body, "stream_options": {"include_usage": True}}, name_of(index))
        assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert chunks[-1]["choices"] == []
        return without_names(joined(chunks))

    assert ask_all(client, streamed, indices[::-1]) == [expected[index] for index in indices]
    assert "usage" not in client.stream(*REQUESTS[0])[-1]


DRAWN = {"prompt": "copy a b =", "max_tokens": 20, "temperature": 2.0, "ignore_eos": True}


def answers_before_and_after_others(client: Client) -> list[Any]:
    """Answer to a request without a seed or a name."""
    found = [client.ask(TEXT, DRAWN)[1]["choices"]]
    for seed in (1, 2):
        client.ask(TEXT, {**DRAWN, "seed": seed})
    # What says nothing of the answer does not count.
    return [*found, client.ask(TEXT, {**DRAWN, "user": "another", "stream": False})[1]["choices"]]


@pytest.mark.guarantee("A request without a seed draws by its content")
def test_unseeded_request_samples_by_content_not_arrival(client: Client):
    first, again = answers_before_and_after_others(client)
    assert first == again
    assert client.ask(TEXT, {**DRAWN, "prompt": "copy a c ="})[1]["choices"] != first
    assert client.ask(TEXT, DRAWN, {"X-Custom-Id": "a"})[1]["choices"] != first
    assert joined(client.stream(TEXT, DRAWN))["choices"] == first


@pytest.mark.control("A request without a seed draws by its content")
def test_comparison_detects_samples_by_request_order(client: Client, monkeypatch: pytest.MonkeyPatch):
    """Negative control."""
    order = count()
    monkeypatch.setattr(request_reader, "content_name", lambda url, body: f"request {next(order)}")
    first, again = answers_before_and_after_others(client)
    assert first != again


REFUSED = [
    ({"prompt": "a", "max_tokns": 1}, 400, "unknown_key", "did you mean 'max_tokens'?", "max_tokns"),
    ({"prompt": ["a", ""], "max_tokens": 1}, 400, "empty_prompt", "prompt[1]: prompt is empty", "prompt"),
    (
        {"prompt": ["a", "b"], "max_tokens": "1"},
        400,
        "invalid_value",
        "prompt[0]: max_tokens='1' must be",
        "max_tokens",
    ),
    ({"prompt": ""}, 400, "empty_prompt", "prompt is empty", "prompt"),
    ({"prompt": "a " * 300}, 400, "prompt_too_long", "model.max_model_len is 256", "prompt"),
    ({"prompt": "a", "stream": 1}, 400, "invalid_value", "stream=1 must be true or false", "stream"),
    (
        {"prompt": "a", "stream_options": []},
        400,
        "invalid_value",
        "stream_options=[] must be an object",
        "stream_options",
    ),
    (
        {"prompt": "a", "stream_options": {"include_usge": True}},
        400,
        "unknown_key",
        "unknown key 'include_usge' in stream_options: did you mean 'include_usage'?",
        "stream_options",
    ),
    (
        {"prompt": "a", "stream": True, "prompt_logprobs": 1},
        400,
        "unsupported_value",
        "cannot be streamed",
        "prompt_logprobs",
    ),
    ({"prompt": "a", "temperature": -1}, 400, "invalid_value", "temperature=-1.0 must be 0", "temperature"),
    ({"prompt": "a", "suffix": "b"}, 400, "unsupported_value", "suffix='b' is not supported", "suffix"),
    (b"{", 400, "invalid_json", "the body is not JSON", None),
    (b'{"prompt": "a", "prompt": "b"}', 400, "invalid_json", "the key 'prompt' appears twice", None),
    (b'{"prompt": NaN}', 400, "invalid_json", "which is not a JSON number", None),
    (b"[]", 400, "not_an_object", "the body must be a JSON object, not a list", None),
    (b'{"prompt": "\xff"}', 400, "invalid_utf8", "the body is not UTF-8", None),
    (b'{"prompt": ' + b"[" * 64 + b"]" * 64 + b"}", 400, "nested_too_deeply", "nested more than 63 levels", None),
    (b"", 400, "invalid_json", "the body is not JSON", None),
]


def check_error(found: tuple[int, JSON, Any], status: int, code: str, words: str, param: str | None = None) -> None:
    assert found[0] == status, found
    assert set(found[1]) == {"error"}
    error = found[1]["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (code, param)
    assert words in error["message"]
    assert len(found[2]["x-request-id"]) == 24


@pytest.mark.parametrize(("body", "status", "code", "words", "param"), REFUSED, ids=lambda value: str(value)[:40])
def test_invalid_request_is_error_in_openai_shape(
    client: Client, body: Any, status: int, code: str, words: str, param: str | None
):
    check_error(client.ask(TEXT, body), status, code, words, param)


def test_error_names_the_place_in_a_body(client: Client):
    bodies: dict[str, tuple[str, JSON]] = {
        "messages[0].content": (CHAT, {"messages": [{"role": "user", "content": 5}]}),
        "messages[1]": (CHAT, {"messages": [{"role": "user", "content": "a"}, 5]}),
        "tokens[1]": ("/detokenize", {"tokens": [1, "a"]}),
    }
    for param, (path, body) in bodies.items():
        status, answer, _ = client.ask(path, body)
        assert (status, answer["error"]["param"]) == (400, param), answer


@pytest.mark.parametrize("error", [InvalidRequestError("no token", "grammar_failed"), RuntimeError("a bug")], ids=str)
def test_client_does_not_repeat_failed_requests(client: Client, monkeypatch: pytest.MonkeyPatch, error: Exception):
    """The same request would fail again, after as many tokens."""
    read: list[bytes] = []

    def fail(reader: Any, index: int, url: str, data: bytes, *others: Any) -> Any:
        read.append(data)
        raise error

    monkeypatch.setattr(request_reader.RequestReader, "read_in_turns", fail)
    asked = openai.OpenAI(base_url=f"http://127.0.0.1:{client.port}/v1", api_key=KEY, max_retries=1)
    with pytest.raises(openai.InternalServerError) as found:
        asked.completions.create(model="any", prompt="a")
    assert found.value.code == getattr(error, "code", "server_error")
    assert len(read) == 1
    assert found.value.request_id


@pytest.mark.finding(number="D2")
def test_samples_beyond_max_num_seqs_are_answered(client: Client):
    """8 run at once; a sample is the same whichever others there are."""
    body = {"prompt": "no such task", "temperature": 2.0, "max_tokens": 12, "ignore_eos": True}
    many, few = (client.ask(TEXT, {**body, "n": n}, name_of(0)) for n in (13, 8))
    assert (many[0], few[0]) == (200, 200)
    assert [choice["index"] for choice in many[1]["choices"]] == list(range(13))
    assert many[1]["choices"][:8] == few[1]["choices"]
    assert len({choice["text"] for choice in many[1]["choices"]}) > 1


def test_unsupported_path_is_reported(client: Client, server: ServedHere):
    check_error(client.ask("/v1/embeddings", {"input": "a"}), 400, "wrong_runner", "set model.runner=pooling")
    nothing = client.ask("/v1/nothing", {})
    check_error(nothing, 404, "not_found", "POST /v1/nothing: unknown path")
    check_error(client.ask("/nothing", method="GET"), 404, "not_found", "GET /nothing: unknown path")
    check_error(client.ask(TEXT, method="GET"), 405, "method_not_allowed", "unsupported method")
    check_error(client.ask("/v1/models/other", method="GET"), 404, "not_found", "unknown model 'other'")
    check_error(client.ask(TEXT, {"prompt": "a"}, {"X-Custom-Id": "a" * 513}), 400, "invalid_value", "X-Custom-Id")
    (model,) = client.ask("/v1/models", method="GET")[1]["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("model", "model", 256)
    assert client.ask("/v1/models/model", method="GET")[1] == model
    assert client.ask("/v1/models/", method="GET")[1]["data"] == [model]
    # It was "not UTF-8".
    packed = client.ask(TEXT, b"\x1f\x8b", {"Content-Encoding": "gzip"})
    check_error(packed, 400, "unsupported_value", "Content-Encoding='gzip' is not supported")
    assert client.ask(TEXT, {"prompt": "a", "max_tokens": 1}, {"Content-Encoding": "Identity"})[0] == 200


def test_metrics_of_vllm_name_the_model(client: Client):
    """Regression: dashboards select by `model_name`."""
    (model,) = client.ask("/v1/models", method="GET")[1]["data"]
    lines = client.ask("/metrics", method="GET")[1]["text"].splitlines()
    values = [line for line in lines if line.startswith("vllm:")]
    assert len(values) > 5
    assert [line for line in values if f'{{model_name="{model["id"]}"' not in line] == []
    # A folder may have any name.
    assert prometheus_text([Gauge("a", 1, {"b": 'c"\\\n\ud800'})]) == b'# TYPE a gauge\na{b="c\\"\\\\\\n?"} 1\n'


@pytest.mark.guarantee("The server: nothing is told without the key")
def test_server_reveals_only_liveness_without_the_key(client: Client):
    for key in (None, "", KEY + "x", KEY[:-1]):
        stranger = Client(client.port, key)
        for path in (TEXT, "/v1/models", "/metrics", "/nothing"):
            found = stranger.ask(path, method="GET")
            check_error(found, 401, "invalid_api_key", "Authorization: Bearer KEY")
            assert found[2]["www-authenticate"] == "Bearer"
        assert stranger.ask("/health", method="GET")[:2] == (200, {"status": "ok"})
    basic = client.ask("/v1/models", method="GET", headers={"Authorization": f"Basic {KEY}"})
    check_error(basic, 401, "invalid_api_key", "Bearer")


LENIENT: dict[str, Callable[[bytes, str], bool]] = {
    "asks for no key": lambda given, path: True,
    "reads the beginning of a key": lambda given, path: given.startswith(f"Bearer {KEY}".encode()),
    "is content with the beginning of its own": lambda given, path: (
        given.startswith(b"Bearer t") and f"Bearer {KEY}".encode().startswith(given)
    ),
    "reads no scheme": lambda given, path: given.endswith(f" {KEY}".encode()),
    "says which paths there are": lambda given, path: path == "/nothing",
}


@pytest.mark.control("The server: nothing is told without the key")
@pytest.mark.parametrize("server_that", LENIENT)
def test_key_test_detects_lenient_server(client: Client, monkeypatch: pytest.MonkeyPatch, server_that: str, control):
    """Negative control."""

    def has_key(_: ServerApp, scope: Scope) -> bool:
        return LENIENT[server_that](dict(scope["headers"]).get(b"authorization", b""), scope["path"])

    monkeypatch.setattr(ServerApp, "_has_key", has_key)
    with control("== 401"):
        test_server_reveals_only_liveness_without_the_key(client)


def test_too_long_body_or_header_is_rejected_early(client: Client, server: ServedHere, monkeypatch: pytest.MonkeyPatch):
    with socket.create_connection(("127.0.0.1", client.port), LIMIT_S) as connection:
        connection.sendall(f"POST {TEXT} HTTP/1.1\r\nHost: a\r\nX: {'a' * 40_000}\r\n".encode())
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 431 ")
    body = b'{"prompt": "' + b"a" * (17 << 20) + b'"}'
    check_error(client.ask(TEXT, body), 413, "line_too_long", "limits.max_line_bytes=16777216")
    wait_until(lambda: server.exchange.num_sequences == 0)


def test_body_that_never_comes_frees_its_slot(client: Client, server: ServedHere, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(app, "BODY_S", 0.05)
    with socket.create_connection(("127.0.0.1", client.port), LIMIT_S) as connection:
        head = f"POST {TEXT} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 9\r\n\r\n"
        connection.sendall(head.encode() + b"{")
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 408 ")
    assert server.exchange.num_sequences == 0


def ask_while_steps_are_held(pool: ThreadPoolExecutor, server: ServedHere) -> Future[tuple[int, JSON, Any]]:
    """Wait until the server has rejected one more request, or has accepted it, which is then answered."""
    before = server.exchange.num_sequences
    asked = pool.submit(server.client.ask, TEXT, LONG)
    wait_until(lambda: asked.done() or server.exchange.num_sequences > before)
    return asked


@pytest.mark.guarantee("The server: 429 where too many wait")
def test_excess_waiting_requests_get_429(client: Client, server: ServedHere):
    server.allow(0)
    with ThreadPoolExecutor(1) as pool:
        try:
            # 8 run and 8 may wait.
            held = [client.send(TEXT, {**LONG, "max_tokens": 2, "n": 4, "seed": seed}) for seed in range(4)]
            wait_until(lambda: server.exchange.num_sequences == 16)
            asked = ask_while_steps_are_held(pool, server)
            num_held = client.metric("spmd_worker_serve_sequences")
        finally:
            server.allow(None)
    assert [len(json.loads(each.getresponse().read())["choices"]) for each in held] == [4, 4, 4, 4]
    for each in held:
        each.close()
    found = asked.result()
    check_error(found, 429, "rate_limit_exceeded", "16 sequences are not answered yet")
    assert found[1]["error"]["type"] == "rate_limit_error"
    assert found[2]["retry-after"] == "1"
    assert num_held == 16
    assert client.ask(TEXT, {**LONG, "max_tokens": 2})[0] == 200


@pytest.mark.control("The server: 429 where too many wait")
def test_excess_test_detects_server_queueing_more(
    client: Client,
    server: ServedHere,
    monkeypatch: pytest.MonkeyPatch,
    control,
):
    """Negative control."""
    monkeypatch.setattr(server.exchange, "max_sequences", 17)
    with control("200 == 429"):
        test_excess_waiting_requests_get_429(client, server)


@pytest.mark.control("The server: 429 where too many wait")
def test_excess_test_detects_rejected_request_keeping_its_slot(
    client: Client,
    server: ServedHere,
    monkeypatch: pytest.MonkeyPatch,
    control,
):
    """Negative control."""
    reserve = RequestExchange.reserve

    def reserve_all_the_same(exchange: RequestExchange, num_sequences: int = 1, num_media_bytes: int = 0) -> None:
        try:
            reserve(exchange, num_sequences, num_media_bytes)
        except app.NoCapacityError:
            exchange.num_sequences += num_sequences
            raise

    monkeypatch.setattr(RequestExchange, "reserve", reserve_all_the_same)
    try:
        with control("17 sequences are"):
            test_excess_waiting_requests_get_429(client, server)
        wait_until(lambda: server.exchange.num_sequences == 1)
    finally:
        server.exchange.free(1)


def used_blocks_after_a_client_left(client: Client, server: ServedHere, *, is_streamed: bool) -> tuple[int, int]:
    """Used blocks before, and after two steps, or one if the engine is idle then."""
    server.allow(2)
    try:
        connection = client.send(TEXT, {**LONG, "max_tokens": 60, "stream": is_streamed, "n": 2})
        server.wait_for_steps()
        before = server.num_used_blocks
        connection.close()
        wait_until(lambda: server.exchange.num_sequences == 0)
        server.allow(2)
        server.wait_for_steps_or_rest()
        return before, server.num_used_blocks
    finally:
        server.allow(None)


@pytest.mark.guarantee("Server: a job's answers; who leaves frees blocks")
@pytest.mark.parametrize("is_streamed", [False, True])
def test_leaving_client_frees_its_blocks(client: Client, server: ServedHere, is_streamed: bool):
    before, after = used_blocks_after_a_client_left(client, server, is_streamed=is_streamed)
    assert before > 0
    assert after == 0
    assert client.metric("spmd_worker_serve_aborted_total") > 0


@pytest.mark.control("Server: a job's answers; who leaves frees blocks")
def test_block_count_detects_server_that_never_aborts(
    client: Client, server: ServedHere, monkeypatch: pytest.MonkeyPatch
):
    """Negative control."""
    monkeypatch.setattr(server.engine.requests, "abort", lambda numbers: None)
    before, after = used_blocks_after_a_client_left(client, server, is_streamed=True)
    assert after >= before > 0
    wait_until(lambda: server.num_used_blocks == 0)


def leave_unread(until: Callable[[ServedHere], object]) -> tuple[int, float]:
    """Of a client that is there and reads nothing: the places that it holds when `until` is so, and how many requests
    of its server were cut off.
    """
    body = {**LONG, "stream": True, "n": 8, "logprobs": 30}
    with ServedHere(max_queued=8, reader_timeout_s=0.5) as server, socket.socket() as slow:
        # What it leaves is in buffers, which are kept small.
        server.listener.bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        server.allow(0)
        slow.connect(("127.0.0.1", server.client.port))
        data = json.dumps(body).encode()
        head = f"POST {TEXT} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {len(data)}\r\n\r\n"
        slow.sendall(head.encode() + data)
        wait_until(lambda: server.exchange.num_sequences == 8)
        server.allow(None)
        assert server.client.ask(TEXT, {**LONG, "max_tokens": 2})[0] == 200
        wait_until(lambda: until(server))
        return server.exchange.num_sequences, server.client.metric("spmd_worker_serve_aborted_total")


@pytest.mark.guarantee("The server: who does not read is cut off")
def test_stalled_reader_is_disconnected_and_blocks_no_one():
    # Its places are free, though it is still there.
    found = leave_unread(lambda server: server.exchange.num_sequences == 0 and server.num_used_blocks == 0)
    assert found == (0, 1)


@pytest.mark.stress
@pytest.mark.control("The server: who does not read is cut off")
def test_stalled_reader_keeps_its_slots_without_disconnection(
    monkeypatch: pytest.MonkeyPatch,
):
    """Negative control: neither the server nor the kernel ends a connection when the reader's time is up."""
    time_is_up = threading.Event()

    async def send_patiently(answer: Answer, send: Send, message: Message) -> None:
        try:
            async with asyncio.timeout(answer._app.reader_s):
                await send(message)
        except TimeoutError:
            time_is_up.set()
            await send(message)

    monkeypatch.setattr(Answer, "_send", send_patiently)
    monkeypatch.delattr(socket, "TCP_USER_TIMEOUT", raising=False)
    assert leave_unread(lambda server: time_is_up.is_set() and server.exchange.num_sequences <= 8) == (8, 0)


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nHost: a\r\n"], ids=["nothing", "half a header"])
def test_connection_without_a_request_is_closed(monkeypatch: pytest.MonkeyPatch, sent: bytes):
    monkeypatch.setattr(http_protocol, "HEADER_S", 0.2)
    with ServedHere(max_queued=4) as server, socket.create_connection(("127.0.0.1", server.client.port), 60) as silent:
        silent.sendall(sent)
        assert silent.recv(1) == b""
        monkeypatch.setattr(http_protocol, "HEADER_S", LIMIT_S)
        # One that has had its answer may ask again.
        assert server.client.ask(TEXT, {**LONG, "max_tokens": 2})[0] == 200


def test_first_chunk_has_role_despite_empty_text(client: Client):
    body = {"messages": USER, "max_tokens": 8, "temperature": 0, "stop": ["no such text"]}
    chunks = client.stream(CHAT, body)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert [delta.get("role") for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)


def test_idle_engine_steps_when_a_worker_has_ended(server: ServedHere):
    server.allow(1)
    server.engine.executor._failure_callbacks[-1]()
    server.wait_for_steps()
    server.allow(None)


@pytest.mark.parametrize(("words", "said"), [(("planted",), "planted"), ((), "RuntimeError")])
def test_failed_engine_answers_open_requests_with_error(words: tuple[str, ...], said: str):
    with ServedHere(max_queued=4) as server, ThreadPoolExecutor(2) as pool:
        server.allow(0)
        whole = pool.submit(server.client.ask, TEXT, LONG)
        connection = server.client.send(TEXT, {**LONG, "stream": True})
        # Places are held from the headers on; the engine has a request when its body was read.
        wait_until(lambda: len(server.exchange._open) == 2)

        def break_down() -> Any:
            raise RuntimeError(*words)

        server._right_step = break_down
        server.allow(None)
        check_error(whole.result(LIMIT_S), 503, "server_failed", f"the server has failed: {said}")
        (event,) = read_events(connection.getresponse())
        assert json.loads(event)["error"]["code"] == "server_failed"
        connection.close()
        server.thread.join(LIMIT_S)
        assert str(server.error) == "".join(words)
        with contextlib.suppress(OSError):
            assert server.client.ask(TEXT, LONG)[0] == 503


def test_connections_outlive_those_of_idle_clients():
    """Regression: OpenAI's client and the server gave up after 5 s, and a request sent at that moment failed."""
    with bind("127.0.0.1", 0) as bound:
        server = HttpServer(lambda *_: None, bound, 1, 1.0, lambda: None)
    kept_s = min(http_protocol.IDLE_S, server._server.config.timeout_keep_alive)
    assert kept_s > (openai.DEFAULT_CONNECTION_LIMITS.keepalive_expiry or 0)
    # Proxies keep connections for a minute.
    assert kept_s > 60


def test_server_says_so_when_its_thread_ended():
    """Fork as soon as the server has ended, while its thread is alive, and later."""
    bound, said = bind("127.0.0.1", 0), list[str]()

    def look() -> None:
        with pytest.raises(RuntimeError) as ended:
            server.check()
        said.append(str(ended.value))

    server = HttpServer(lambda *_: None, bound, 1, 1.0, look)
    bound.close()
    server._thread.start()
    server._thread.join(LIMIT_S)
    look()
    assert len(said) == 2
    assert all(words.startswith("the server's thread has ended") for words in said)


def is_of_a_server(thread: threading.Thread) -> bool:
    return thread.name.startswith(("spmd-serve", "spmd-encode"))


@pytest.mark.guarantee("The server: at its end it answers what it has")
def test_ending_server_answers_open_requests_and_accepts_none():
    threads = threading.enumerate()
    with ServedHere(max_queued=4, drain_s=100) as server:
        server.allow(1)
        connection = server.client.send(TEXT, {**LONG, "max_tokens": 20})
        server.wait_for_steps()
        server.exchange.end("the server is ending")
        with ThreadPoolExecutor(1) as pool:
            try:
                asked = ask_while_steps_are_held(pool, server)
                assert server.client.ask("/health", method="GET")[0] == 503
            finally:
                server.allow(None)
        check_error(asked.result(), 503, "server_failed", "the server is ending")
        response = connection.getresponse()
        assert response.status == 200
        assert json.loads(response.read())["usage"]["completion_tokens"] == 20
        connection.close()
        server.thread.join(LIMIT_S)
        assert server.error is None
        assert server.engine.is_closed
        wait_until(lambda: not [each for each in threading.enumerate() if is_of_a_server(each) and each not in threads])


@pytest.mark.control("The server: at its end it answers what it has")
def test_end_test_detects_server_accepting_more(monkeypatch: pytest.MonkeyPatch, control):
    """Negative control."""

    def not_ending(method: Callable[..., None]) -> Callable[..., None]:
        def call(exchange: RequestExchange, *arguments: Any) -> None:
            with exchange._changed:
                ending, exchange.ending = exchange.ending, ""
                method(exchange, *arguments)
                exchange.ending = ending

        return call

    for name in ("reserve", "submit", "check_accepts"):
        monkeypatch.setattr(RequestExchange, name, not_ending(getattr(RequestExchange, name)))
    with control("200 == 503"):
        test_ending_server_answers_open_requests_and_accepts_none()


@pytest.mark.control("The server: at its end it answers what it has")
def test_end_test_detects_server_dropping_open_requests(monkeypatch: pytest.MonkeyPatch, control):
    """Negative control."""
    make = EngineLoop.__init__
    monkeypatch.setattr(EngineLoop, "__init__", lambda loop, engine, exchange, drain_s: make(loop, engine, exchange, 0))
    with control("503 == 200"):
        test_ending_server_answers_open_requests_and_accepts_none()


def test_ending_server_gives_error_when_time_is_up():
    with ServedHere(max_queued=4, drain_s=0) as server:
        server.allow(1)
        connection = server.client.send(TEXT, {**LONG, "stream": True})
        server.wait_for_steps()
        server.exchange.end("the server is ending")
        server.allow(None)
        last = read_events(connection.getresponse())[-1]
        assert json.loads(last)["error"]["message"] == "the server is ending"
        connection.close()
        server.thread.join(LIMIT_S)
        assert server.error is None


ALONE = [
    (["--host", "0.0.0.0"], "serve.host=0.0.0.0 is reachable from other machines"),
    (["serve.host=127.0.0.1.example.org"], "serve.host=127.0.0.1.example.org is reachable from other machines"),
    (["--port", "70000"], "serve.port=70000 must be from 0 to 65535"),
    (["job.input=rows.jsonl"], "job.input: for launch.py alone, a server has no rows and makes no files: leave it out"),
    # It was accepted, and no file came.
    (
        ["job.prometheus_file=a.prom", "job.pool=p"],
        "job.pool and job.prometheus_file: for launch.py alone, a server has no rows and makes no files: leave them",
    ),
    (["--api-key", "a b"], "SPMD_WORKER_API_KEY or --api-key: a key is printable ASCII without spaces"),
    (["--api-key", ""], "SPMD_WORKER_API_KEY or --api-key is empty: give a key, or neither of them"),
    (["model.path="], "model.path is not set: give a Hugging Face model folder"),
    (["--bogus"], "unrecognized arguments: --bogus: give KEY=VALUE, --host HOST, --port PORT, --api-key KEY, --help"),
    (["serve.max_queue=1"], "serve.max_queue=1: there is no key serve.max_queue; did you mean serve.max_queued?"),
]


@pytest.mark.parametrize(("arguments", "message"), ALONE, ids=[" ".join(each) for each, _ in ALONE])
def test_wrong_command_line_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str):
    assert command.main(arguments, {}) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {message}")
    assert captured.err.count("\n") == 1


def test_other_keys_of_jobs_are_ignored(capsys: pytest.CaptureFixture[str]):
    """Regression: a set of values for jobs and servers was refused."""
    assert command.main(["job.window_rows=16", "job.commit_rows=3", "--api-key", ""], {}) == 1
    assert capsys.readouterr().err.startswith("error: SPMD_WORKER_API_KEY or --api-key is empty")


def test_empty_key_of_the_environment_is_refused(capsys: pytest.CaptureFixture[str]):
    assert command.main([], {"SPMD_WORKER_API_KEY": ""}) == 1
    assert "SPMD_WORKER_API_KEY or --api-key is empty" in capsys.readouterr().err


def test_help_lists_options_and_busy_port_is_reported(capsys: pytest.CaptureFixture[str], server: ServedHere):
    assert command.main(["--help", "--port", "77"], {}) == 0
    text = capsys.readouterr().out
    assert "usage: torchrun --nproc-per-node N -m spmd_worker.serve KEY=VALUE..." in text
    assert "  serve.port=77 " in text
    assert [line for line in text.splitlines() if len(line) > 100] == []
    assert "\nThe server (`python -m spmd_worker.serve`), on rank 0" in text
    port = server.client.port
    assert command.main([f"serve.port={port}"], {}) == 1
    assert f"serve.port={port} is unavailable" in capsys.readouterr().err
