"""Forms with files: what the client of OpenAI sends, and what is no form."""

import contextlib
import io
import random
from typing import Any

import httpx2
import openai
import pytest

from spmd_worker.frontends.serve.audio_form import body_of_form
from spmd_worker.frontends.serve.multipart import FormField, is_multipart, read_form
from spmd_worker.tokenizer.messages import InvalidRequestError

TYPE = "multipart/form-data; boundary=b"
HEAD = b'Content-Disposition: form-data; name="a"\r\n\r\n'


class Recorded(httpx2.BaseTransport):
    """Keeps the last request."""

    def __init__(self) -> None:
        self.requests: list[httpx2.Request] = []

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        request.read()
        self.requests.append(request)
        return httpx2.Response(200, json={"text": "a"})


def sent(content: bytes, name: str = "speech.wav", **more: Any) -> tuple[bytes, str]:
    """Body and type of what OpenAI's client sends."""
    transport = Recorded()
    client = openai.OpenAI(api_key="a", base_url="http://a/v1", http_client=httpx2.Client(transport=transport))
    client.audio.transcriptions.create(model="m", file=(name, io.BytesIO(content)), **more)
    (request,) = transport.requests
    assert is_multipart(request.headers["content-type"])
    return request.content, request.headers["content-type"]


def test_form_of_the_client_is_read_back() -> None:
    chance = random.Random(3)
    for content in (b"", b"\r\n--", b"--b--\r\n", chance.randbytes(5000), bytes(range(256)) * 4):
        more: dict[str, Any] = {"language": "en", "temperature": 0.5, "prompt": "Grüße\r\n", "response_format": "text"}
        fields = read_form(*sent(content, **more, timestamp_granularities=["segment"]))
        assert body_of_form(fields) == {
            "file": content,
            "model": "m",
            **more,
            "timestamp_granularities": ["segment"],
        }


def test_odd_name_of_a_file_changes_nothing() -> None:
    (field,) = [each for each in read_form(*sent(b"x", 'a"b é.wav')) if each.name == "file"]
    assert field.value == b"x"


@pytest.mark.parametrize("around", [(b"", b"\r\n"), (b"\r\n", b""), (b"", b"\r\nepilogue")])
def test_text_around_the_parts_is_skipped(around: tuple[bytes, bytes]) -> None:
    body = around[0] + b"--b\r\n" + HEAD + b"1\r\n--b \t\r\n" + HEAD + b"\r\n--b--" + around[1]
    assert read_form(body, TYPE) == [FormField("a", "1"), FormField("a", "")]


@pytest.mark.parametrize(
    ("body", "content_type", "words"),
    [
        (b"", TYPE, "no last boundary"),
        (b"--b\r\n" + HEAD + b"1", TYPE, "no last boundary"),
        (b"--b", TYPE, "no last boundary"),
        (b"--bc\r\n" + HEAD + b"1\r\n--bc--", TYPE, "is no form"),
        (b"--c\r\n" + HEAD + b"1\r\n--c--", TYPE, "is no form"),
        (b"--b\r\nContent-Type: a/b\r\n\r\n1\r\n--b--", TYPE, "Content-Disposition"),
        (b"--b\r\n\r\n1\r\n--b--", TYPE, "Content-Disposition"),
        (b"--b\r\nA: " + b"x" * 5000 + b"\r\n\r\n1\r\n--b--", TYPE, "header size"),
        (b"--b\r\n" + b"A: x\r\n" * 50 + b"\r\n1\r\n--b--", TYPE, "header count"),
        (b"--b\r\nContent-Transfer-Encoding: zip\r\n" + HEAD + b"1\r\n--b--", TYPE, "Transfer-Encoding"),
        ((b"--b\r\n" + HEAD + b"1\r\n") * 101 + b"--b--", TYPE, "more than 100 parts"),
        (b"--b--", "multipart/form-data", "boundary="),
        (b"--b--", f"multipart/form-data; boundary={'b' * 71}", "boundary="),
    ],
)
def test_bodies_that_are_no_form_are_refused(body: bytes, content_type: str, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        read_form(body, content_type)


def test_file_whose_name_is_not_read_is_bytes() -> None:
    """urllib3 1 sent names that are not ASCII as filename* alone."""
    head = b"Content-Disposition: form-data; name=\"file\"; filename*=utf-8''%C3%A9.wav\r\n\r\n"
    assert read_form(b"--b\r\n" + head + b"R\xff\r\n--b--", TYPE) == [FormField("file", b"R\xff")]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ([FormField("model", "a"), FormField("model", "b")], "twice"),
        ([FormField("prompt", b"")], "is a file, or not UTF-8"),
        ([FormField("temperature", "warm")], "must be a number"),
        ([FormField("seed", "true")], "must be a number"),
        ([FormField("seed", "[" * 100_000)], "must be a number"),
    ],
)
def test_fields_with_bad_values_are_refused(fields: list[FormField], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        body_of_form(fields)


def test_random_cuts_never_break_the_reader() -> None:
    body, content_type = sent(b"\r\n--" * 50, language="en")
    chance = random.Random(4)
    for _ in range(300):
        start, stop = sorted(chance.choices(range(len(body) + 1), k=2))
        cut = body[:start] + body[stop:]
        with contextlib.suppress(InvalidRequestError):
            read_form(cut, content_type)
