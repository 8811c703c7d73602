"""Clients that send too much, too little, or what servers understand differently; and who is answered beside them."""

import asyncio
import contextlib
import json
import logging
import socket
import threading
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from typing import Any

import openai
import pytest
import requests
from pooling_models import pooling_folder
from serving import JSON, KEY, MODEL, Client, ServedHere
from waiting import LIMIT_S, wait_until

from spmd_worker.frontends.openai.turns import Turns
from spmd_worker.frontends.serve import app, connections, http_protocol, http_server
from spmd_worker.frontends.serve.request_reader import RequestReader
from spmd_worker.tokenizer.template_process import LARGE_BYTES, IsolatedTemplate
from spmd_worker.tokenizer.tokenizer import Tokenizer

TEXT, CHAT, VECTORS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
SMALL = {"prompt": "add 1 2 =", "max_tokens": 4, "temperature": 0}
KEY_LINE = f"Authorization: Bearer {KEY}\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[ServedHere]:
    with ServedHere(max_queued=8) as served:
        yield served
        wait_until(lambda: served.num_used_blocks == 0 and served.exchange.num_sequences == 0)


@pytest.fixture
def client(server: ServedHere) -> Client:
    return server.client


def exchanged(port: int, *pieces: bytes) -> bytes:
    """All that the server says to what is sent, until it closes."""
    with socket.create_connection(("127.0.0.1", port), LIMIT_S) as connection:
        for piece in pieces:
            connection.sendall(piece)
        said = bytearray()
        while piece := connection.recv(1 << 16):
            said += piece
        return bytes(said)


def body_of(said: bytes) -> tuple[int, JSON]:
    head, _, body = said.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


# D17: what servers read differently.

POST = f"POST {TEXT} HTTP/1.1\r\nHost: a\r\n{KEY_LINE}"
CHUNKED = "4\r\n{}  \r\n0\r\n\r\n"
STRANGE = {
    "length and chunked": (f"{POST}Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n{CHUNKED}", 400),
    "chunked and length": (f"{POST}Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n{CHUNKED}", 400),
    "chunked in HTTP/1.0": (f"{POST}Transfer-Encoding: chunked\r\n\r\n{CHUNKED}".replace("/1.1", "/1.0"), 400),
    "two lengths": (f"{POST}Content-Length: 4\r\nContent-Length: 5\r\n\r\n{{}}   ", 400),
    "another coding": (f"{POST}Transfer-Encoding: gzip, chunked\r\n\r\n", 501),
    "a space before the colon": (f"{POST}Content-Length : 4\r\n\r\n{{}}  ", 400),
    "headers in one piece": (f"{POST}X: {'a' * 100_000}\r\n\r\n", 431),
    "headers in many lines": (f"{POST}{''.join(f'X{i}: b' + chr(13) + chr(10) for i in range(20_000))}\r\n", 431),
    "a target of 100 KB": (f"GET /{'a' * 100_000} HTTP/1.1\r\nHost: a\r\n{KEY_LINE}\r\n", 431),
    # More than asyncio reads at once: in one piece with the request behind it, it would be a header with two hosts.
    "half of 400 KB": (f"{POST}X: {'a' * 400_000}", 431),
}


@pytest.mark.finding(number="D17")
@pytest.mark.parametrize("name", STRANGE)
def test_request_that_servers_read_differently_is_rejected(client: Client, name: str):
    """A second request behind it is not answered."""
    sent, status = STRANGE[name]
    said = exchanged(client.port, sent.encode(), b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
    assert said.count(b"HTTP/1.1 ") == 1
    assert b"\r\nconnection: close\r\n" in said.lower()
    found, error = body_of(said)
    assert (found, error["type"]) == (status, "invalid_request_error")
    assert client.ask(TEXT, SMALL)[0] == 200


def test_plain_chunked_request_is_answered(client: Client):
    """Negative control."""
    data = json.dumps(SMALL)
    chunked = f"{POST}Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n{len(data):x}\r\n{data}\r\n0\r\n\r\n"
    assert exchanged(client.port, chunked.encode()).startswith(b"HTTP/1.1 200 ")


# D3: a body beyond the limit.

TOO_LONG = b'{"prompt": "' + b"a" * (40 << 20) + b'"}'


def by_urllib3(url: str, data: Any, headers: dict[str, str]) -> tuple[int, str]:
    answer = requests.post(url, data=data, headers=headers, timeout=LIMIT_S)
    return answer.status_code, answer.json()["error"]["code"]


def by_urllib(url: str, data: Any, headers: dict[str, str]) -> tuple[int, str]:
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=LIMIT_S)
    with refused.value as answer:
        return answer.code, json.load(answer)["error"]["code"]


def pieces(data: bytes) -> Iterator[bytes]:
    for start in range(0, len(data), 1 << 20):
        yield data[start : start + (1 << 20)]


@pytest.mark.finding(number="D3")
@pytest.mark.parametrize("post", [by_urllib3, by_urllib])
@pytest.mark.parametrize("more", [{}, {"Connection": "close"}], ids=["kept", "closed"])
@pytest.mark.parametrize("has_length", [True, False])
def test_client_reads_413_of_body_beyond_limit(
    client: Client, post: Callable[..., tuple[int, str]], more: dict[str, str], has_length: bool
):
    """A server that closes over what it has not read resets the connection."""
    url, headers = f"http://127.0.0.1:{client.port}{TEXT}", {"Authorization": f"Bearer {KEY}", **more}
    data = TOO_LONG if has_length else pieces(TOO_LONG)
    assert post(url, data, headers) == (413, "line_too_long")


@pytest.mark.finding(number="D3")
@pytest.mark.parametrize(("path", "key", "status"), [(TEXT, "no", 401), ("/nothing", KEY, 404), ("/health", KEY, 405)])
def test_client_reads_error_response_to_long_body(client: Client, path: str, key: str, status: int):
    headers = {"Authorization": f"Bearer {key}", "Connection": "close"}
    answer = requests.post(f"http://127.0.0.1:{client.port}{path}", data=TOO_LONG, headers=headers, timeout=LIMIT_S)
    assert answer.status_code == status


@pytest.mark.finding(number="D3")
def test_openai_client_reads_413(client: Client):
    asked = openai.OpenAI(base_url=f"http://127.0.0.1:{client.port}/v1", api_key=KEY, max_retries=0)
    with pytest.raises(openai.APIStatusError) as refused:
        asked.completions.create(model="m", prompt="a" * (20 << 20))
    assert refused.value.status_code == 413


@pytest.mark.finding(number="D3")
def test_client_that_goes_on_sending_is_disconnected(server: ServedHere, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http_protocol, "LINGER_S", 0.2)
    with socket.create_connection(("127.0.0.1", server.client.port), LIMIT_S) as connection:
        head = f"{POST}Connection: close\r\nContent-Length: {1 << 40}\r\n\r\n"
        connection.sendall(head.encode())
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 413 ")
        endless = map(bytes, repeat(1 << 16))
        with pytest.raises(OSError):
            deque(map(connection.sendall, endless), maxlen=0)


# B7: connections that ask for nothing.


def idle_connections(port: int, num: int, sent: bytes = b"") -> list[socket.socket]:
    opened = []
    for _ in range(num):
        connection = socket.create_connection(("127.0.0.1", port), LIMIT_S)
        connection.sendall(sent)
        opened.append(connection)
    return opened


IDLE = {
    "nothing": b"",
    "half a header": f"{POST}Content-Le".encode(),
    "a whole request": f"GET /v1/models HTTP/1.1\r\nHost: a\r\n{KEY_LINE}\r\n".encode(),
    "a body to come, and no key": f"POST {TEXT} HTTP/1.1\r\nHost: a\r\nContent-Length: 99\r\n\r\n".encode(),
}


@pytest.mark.gate("half a header", "a whole request")
@pytest.mark.finding(number="B7")
@pytest.mark.parametrize("name", IDLE)
def test_idle_connections_keep_no_client_out(monkeypatch: pytest.MonkeyPatch, name: str):
    """Connections were counted, and at their limit all requests got 503."""
    monkeypatch.setattr(http_server, "MORE_CONNECTIONS", 8)
    with ServedHere(max_queued=4) as server, contextlib.ExitStack() as held:
        # 8 + 4 requests and 8 more.
        for connection in idle_connections(server.client.port, 60, IDLE[name]):
            held.enter_context(connection)
        for _ in range(3):
            assert server.client.ask("/health", method="GET")[0] == 200
            assert server.client.ask(TEXT, SMALL)[0] == 200


@pytest.mark.finding(number="B7")
def test_busy_connections_are_kept_despite_idle_ones(monkeypatch: pytest.MonkeyPatch):
    """Connections whose requests wait are kept while idle ones come and go."""
    monkeypatch.setattr(http_server, "MORE_CONNECTIONS", 8)
    with ServedHere(max_queued=4) as server, contextlib.ExitStack() as held:
        server.allow(0)
        waiting = [server.client.send(TEXT, SMALL) for _ in range(12)]
        wait_until(lambda: server.exchange.num_sequences == 12)
        for connection in idle_connections(server.client.port, 60):
            held.enter_context(connection)
        assert server.client.ask("/health", method="GET")[0] == 200
        server.allow(None)
        assert [each.getresponse().status for each in waiting] == [200] * 12
        for each in waiting:
            each.close()


def test_connection_is_counted_once_while_it_joins():
    """A burst of more than half of the limit had connections closed before their requests were read."""

    async def run(bound: socket.socket, connect: Callable[[], None]) -> None:
        loop, all_are_open = asyncio.get_running_loop(), asyncio.Event()

        class Joined(asyncio.Protocol):
            def __init__(self, accepting: connections.Connections) -> None:
                self._accepting = accepting
                made.append(self)
                if len(made) == 3:
                    # Accepted in the iteration that opens the first three, after them.
                    loop.call_soon(connect)

            def connection_made(self, transport: Any) -> None:
                self._accepting.opened(transport)
                opened.append(transport)
                if len(opened) == 4:
                    all_are_open.set()

            def connection_lost(self, error: Exception | None) -> None:
                lost.append(self)

        made: list[Joined] = []
        opened: list[asyncio.Transport] = []
        lost: list[Joined] = []
        accepting = connections.Connections(bound, 4, Joined)
        accepting.start()
        await asyncio.wait_for(all_are_open.wait(), LIMIT_S)
        assert not any(each.is_closing() for each in opened)
        assert not lost
        accepting.stop()
        for each in opened:
            each.abort()

    with socket.create_server(("127.0.0.1", 0)) as bound, contextlib.ExitStack() as held:

        def connect() -> None:
            held.enter_context(socket.create_connection(bound.getsockname(), LIMIT_S))

        for _ in range(3):
            connect()
        asyncio.run(run(bound, connect))


class ScarceSocket:
    """Has no descriptors left for `num_failures` calls of `accept`, and says how many there were."""

    def __init__(self, own: socket.socket, num_failures: int) -> None:
        self._own, self.num_left, self.num_calls = own, num_failures, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def accept(self) -> Any:
        self.num_calls += 1
        if self.num_left:
            self.num_left -= 1
            raise OSError(24, "Too many open files")
        return self._own.accept()


@pytest.mark.finding(number="B7")
def test_lack_of_descriptors_is_logged_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    """The warning was logged thousands of times a second."""
    monkeypatch.setattr(connections, "_PAUSE_S", 0.01)
    made = connections.Connections.__init__
    sockets = []

    def make(self: Any, bound: Any, *arguments: Any) -> None:
        sockets.append(ScarceSocket(bound, 20))
        made(self, sockets[0], *arguments)

    monkeypatch.setattr(connections.Connections, "__init__", make)
    with caplog.at_level(logging.WARNING), ServedHere(max_queued=4) as server:
        assert server.client.ask("/health", method="GET")[0] == 200
    (said,) = [each.getMessage() for each in caplog.records if "no connection can be accepted" in each.getMessage()]
    assert "Too many open files" in said
    # Each time after a pause.
    assert sockets[0].num_left == 0
    assert not [each for each in caplog.records if each.name == "asyncio"]


# B2: large bodies.

WAYS = {
    "text": (TEXT, lambda text: {"prompt": text}),
    "ids": (TEXT, lambda text: {"prompt": [1] * (len(text) // 4)}),
    "chat": (CHAT, lambda text: {"messages": [{"role": "user", "content": text}]}),
    "messages": (CHAT, lambda text: {"messages": [{"role": "user", "content": "hello"}] * (len(text) // 64)}),
}


@pytest.mark.finding(number="B2")
@pytest.mark.parametrize("way", WAYS)
def test_long_text_is_not_encoded(client: Client, monkeypatch: pytest.MonkeyPatch, way: str):
    encode = Tokenizer.encode

    def short_alone(tokenizer: Tokenizer, text: str, *arguments: Any, **more: Any) -> Any:
        assert len(text) < 1 << 18, "a long text is encoded"
        return encode(tokenizer, text, *arguments, **more)

    monkeypatch.setattr(Tokenizer, "encode", short_alone)
    path, body = WAYS[way]
    status, said, _ = client.ask(path, body("word and more " * 40_000))
    assert (status, said["error"]["code"]) == (400, "prompt_too_long")


class HeldReader:
    """Holds the reading of large bodies, or of those with `mark`; counts them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, mark: bytes | None = None) -> None:
        self.may_read, self.num_begun, self._mark = threading.Event(), 0, mark
        self._read = RequestReader.read_in_turns
        monkeypatch.setattr(RequestReader, "read_in_turns", lambda *arguments: self.read(*arguments))

    def read(self, reader: RequestReader, index: int, url: str, data: bytes, *more: Any) -> Turns[Any]:
        if len(data) > LARGE_BYTES if self._mark is None else self._mark in data:
            self.num_begun += 1
            assert self.may_read.wait(LIMIT_S)
        return (yield from self._read(reader, index, url, data, *more))


@pytest.mark.finding(number="B2")
def test_small_request_does_not_wait_for_long_ones(monkeypatch: pytest.MonkeyPatch):
    reader, body = HeldReader(monkeypatch), {"prompt": "a b " * 30_000}
    with ServedHere(max_queued=8) as server:
        large = [server.client.send(TEXT, body)]
        wait_until(lambda: reader.num_begun == 1)
        large += [server.client.send(TEXT, body) for _ in range(5)]
        # A client that leaves before its request is one has given nothing up.
        wait_until(lambda: server.exchange.num_sequences == 6)
        assert server.client.ask(TEXT, SMALL)[0] == 200
        # Of a client that leaves nothing is encoded any more; the one that is being read holds its place.
        for each in large[1:]:
            each.close()
        wait_until(lambda: server.exchange.num_sequences == 1)
        reader.may_read.set()
        assert large[0].getresponse().status == 400
        large[0].close()
        assert reader.num_begun == 1
        assert server.client.metric("spmd_worker_serve_aborted_total") == 5


def test_text_does_not_wait_for_images(monkeypatch: pytest.MonkeyPatch):
    reader = HeldReader(monkeypatch, mark=b"image_url")
    part = {"type": "image_url", "image_url": {"url": "a.png"}}
    with ServedHere(max_queued=8) as server:
        sent = [server.client.send(CHAT, {"messages": [{"role": "user", "content": [part]}]}) for _ in range(2)]
        wait_until(lambda: reader.num_begun == 2)
        assert server.client.ask(TEXT, SMALL)[0] == 200
        reader.may_read.set()
        assert [each.getresponse().status for each in sent] == [400, 400]
        for each in sent:
            each.close()


def sent_texts(body: JSON, found: JSON) -> list[str]:
    """Texts of a completion that repeats its prompts; of vectors, in their order, those that were sent."""
    if "choices" in found:
        return [choice["text"] for choice in found["choices"]]
    assert [each["index"] for each in found["data"]] == list(range(len(body["input"])))
    return list(body["input"])


@pytest.mark.parametrize("way", ["prompts", "texts"])
def test_request_is_encoded_between_texts_of_another(monkeypatch: pytest.MonkeyPatch, way: str):
    """Regression: a small body of 2,048 texts held the one thread that encodes until all were encoded."""
    texts = [f"add {number} 3 =" for number in range(90)]
    path, key, more = (TEXT, "prompt", {"echo": True, "max_tokens": 0}) if way == "prompts" else (VECTORS, "input", {})
    encoded, may_go_on, calls = list[str](), threading.Event(), list[Any]()
    encode, in_pool = Tokenizer.encode, app._in_pool

    def held(tokenizer: Tokenizer, text: str, *arguments: Any, **named: Any) -> Any:
        encoded.append(text)
        assert text != texts[3] or may_go_on.wait(LIMIT_S)
        return encode(tokenizer, text, *arguments, **named)

    async def counted(*arguments: Any) -> Any:
        calls.append(arguments)
        return await in_pool(*arguments)

    monkeypatch.setattr(Tokenizer, "encode", held)
    monkeypatch.setattr(app, "_in_pool", counted)
    model = MODEL if way == "prompts" else pooling_folder("last")
    with ServedHere(max_queued=96, model=model) as server, ThreadPoolExecutor(2) as pool:
        many = {key: texts, **more}
        asked = [pool.submit(server.client.ask, path, many)]
        wait_until(lambda: encoded[-1:] == texts[3:4])
        asked.append(pool.submit(server.client.ask, path, {key: "one", **more}))
        # The loop queues the call before it hears of the first turn's end.
        wait_until(lambda: len(calls) == 2)
        may_go_on.set()
        (status, found, _), (other, *_) = [each.result(LIMIT_S) for each in asked]
        assert (status, other, sent_texts(many, found)) == (200, 200, texts)
        assert encoded.index("one") == app._TEXTS_A_TURN < len(texts)
        assert [each for each in encoded if each != "one"] == texts
        # A server that ends answers after the turn. Its last step waits for `close`.
        server.allow(0)
        encoded.clear()
        may_go_on.clear()
        ended = pool.submit(server.client.ask, path, many)
        wait_until(lambda: encoded[-1:] == texts[3:4])
        server.exchange.end("the test ends it")
        may_go_on.set()
        status, found, _ = ended.result(LIMIT_S)
    assert (status, found["error"]["message"], len(encoded)) == (503, "the test ends it", app._TEXTS_A_TURN)


@pytest.mark.finding(number="B2")
def test_few_long_bodies_are_in_memory_at_once(monkeypatch: pytest.MonkeyPatch):
    reader = HeldReader(monkeypatch)
    monkeypatch.setattr(app, "BODY_S", 1e6)
    data = json.dumps({"prompt": "a b " * 300_000}).encode()
    with ServedHere(max_queued=8) as server:
        sending = [threading.Thread(target=server.client.ask, args=(TEXT, data)) for _ in range(6)]
        for each in sending:
            each.start()
        wait_until(lambda: server.exchange.num_sequences == 6 and reader.num_begun == 1)
        # Four have a place; what the others have sent is in buffers of the system.
        assert server.client.ask(TEXT, SMALL)[0] == 200
        reader.may_read.set()
        for each in sending:
            each.join(LIMIT_S)
        assert reader.num_begun == 6


@pytest.mark.finding(number="B2")
def test_small_conversation_does_not_wait_for_long_one():
    """They were rendered in turns."""
    template = IsolatedTemplate("{{ messages[0].content }}", {})
    assert template.render([{"role": "user", "content": "a" * (2 * LARGE_BYTES)}]) == "a" * (2 * LARGE_BYTES)
    with template._for_large._lock:
        assert template.render([{"role": "user", "content": "b"}]) == "b"


@pytest.mark.stress
@pytest.mark.timed
@pytest.mark.finding(number="B2")
@pytest.mark.parametrize("way", ["text", "chat"])
def test_small_request_is_fast_during_four_long_ones(server: ServedHere, way: str):
    import time

    path, body = WAYS[way]
    data = json.dumps(body("word and more " * (15_000_000 // 14))).encode()
    large = [threading.Thread(target=server.client.ask, args=(path, data)) for _ in range(4)]
    for each in large:
        each.start()
    took_s = [0.0]
    while any(each.is_alive() for each in large):
        began_s = time.monotonic()
        assert server.client.ask(TEXT, SMALL)[0] == 200
        took_s.append(time.monotonic() - began_s)
    print(f"SMALL REQUEST beside four {way} bodies: {max(took_s):.2f} s at most, of {len(took_s)}")
    assert max(took_s) < 1.0
