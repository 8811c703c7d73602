"""The ASGI application: OpenAI's paths, authentication, limits, and clients that disconnect.

Everything but /health and /ping needs the key. A request holds capacity from its headers on, which bounds the bodies in
memory, few of them large.
"""

import asyncio
import collections
import contextlib
import hmac
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Final, TypeVar

from spmd_worker.base.version import version
from spmd_worker.compat.metrics import Counter, Gauge, Metric
from spmd_worker.frontends.openai.audio_request import AUDIO_TASKS
from spmd_worker.frontends.openai.openai_body import JsonObject
from spmd_worker.frontends.openai.openai_request import URLS
from spmd_worker.frontends.openai.openai_stream import (
    DONE,
    AnswerName,
    ChunkWriter,
    error_body,
    event,
    response_body,
    status_of,
)
from spmd_worker.frontends.openai.row import EncodedRow
from spmd_worker.frontends.openai.row_outputs import RowOutputs
from spmd_worker.frontends.openai.row_writer import REJECTED
from spmd_worker.frontends.openai.turns import Ended, Turns, at_once, take_turn
from spmd_worker.frontends.serve.exchange import EndingError, NoCapacityError, OpenRequest, RequestExchange
from spmd_worker.frontends.serve.request_reader import RequestReader, ServedRow
from spmd_worker.frontends.serve.responses import (
    AsgiApp,
    Headers,
    JsonResponse,
    Message,
    PlainResponse,
    Receive,
    Scope,
    Send,
    prometheus_text,
    response_part,
    response_start,
)
from spmd_worker.frontends.serve.token_requests import DETOKENIZE_URL, TOKENIZE_URL, answer_tokens
from spmd_worker.replica.sequence.outputs import RequestOutput
from spmd_worker.tokenizer.messages import InvalidRequestError
from spmd_worker.tokenizer.template_process import LARGE_BYTES

if TYPE_CHECKING:
    from starlette.requests import Request

logger = logging.getLogger(__name__)

BODY_S: Final = 60.0
_MAX_LARGE: Final = 4
"""Most bodies of more than `LARGE_BYTES` in memory; they are read and encoded apart from the others."""
_MEDIA_MARKS: Final = (b'"image', b'"video', b'"input_audio', b'"audio')
"""Marks of bodies with images or audio, whose preparing takes long: such bodies are read apart."""
_TEXTS_A_TURN: Final = 16
"""Texts of a body that are encoded before those of the next body in the queue."""
_RETRY_AFTER_S: Final = 1
_OPEN_PATHS: Final = ("/health", "/ping")
_PATHS: Final = (*URLS, TOKENIZE_URL, DETOKENIZE_URL, "/v1/models", *_OPEN_PATHS, "/version", "/metrics")
_MAX_CUSTOM_ID: Final = 512
_REQUEST_ID: Final = b"x-request-id"
_NO_RETRY: Final = ("x-should-retry", "false")
"""OpenAI's clients obey it."""


_Read = TypeVar("_Read")


class _DisconnectedError(Exception):
    """The client has left, or reads too slowly."""


class ServerApp:
    """`asgi` is the application. `roots` maps the name of each model of `reader` to its folder. `reader_s` is the time
    that a client may leave sent data unread.
    """

    def __init__(
        self, exchange: RequestExchange, reader: RequestReader, roots: Mapping[str, str], api_key: str, reader_s: float
    ) -> None:
        self.exchange, self.reader, self.reader_s = exchange, reader, reader_s
        self.model_name = reader.context.models.base
        self._roots = dict(roots)
        self.num_answered = self.num_aborted = 0
        self._errors: dict[int, int] = collections.Counter()
        self._api_key = api_key.encode()
        self._indices = count()
        self._started_s = int(time.time())
        # Encoded in turns outside the loop, which must not wait for a chat template.
        self._pool = ThreadPoolExecutor(1, "spmd-encode")
        self._large_pool = ThreadPoolExecutor(1, "spmd-encode-large")
        self._media_pool = ThreadPoolExecutor(_MAX_LARGE, "spmd-encode-media")
        self._large = asyncio.Semaphore(_MAX_LARGE)
        self._routes = _routes(self)

    async def asgi(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application: without a key even unknown paths are not revealed."""
        if scope["type"] != "http":
            return
        send = _with_request_id(send)
        if scope["path"] not in _OPEN_PATHS and not self._has_key(scope):
            self._errors[401] += 1
            message = "give the server's key: Authorization: Bearer KEY"
            response = JsonResponse(error_body("invalid_api_key", message), 401, (("www-authenticate", "Bearer"),))
            await response(scope, receive, send)
            return
        await self._routes(scope, receive, send)

    def close(self) -> None:
        """Shut down without waiting for prompts that are being encoded."""
        for pool in (self._pool, self._large_pool, self._media_pool):
            pool.shutdown(wait=False, cancel_futures=True)

    async def answer(self, request: "Request") -> AsgiApp:
        """Answer a completion or a chat completion, complete or streamed, vectors, scores or a transcript."""
        return await self._with_capacity(request, self._answer)

    async def tokens(self, request: "Request") -> AsgiApp:
        """Answer `/tokenize` or `/detokenize` like vLLM."""
        return await self._with_capacity(request, self._tokens)

    async def _with_capacity(
        self, request: "Request", respond: Callable[["Request", "Reservation"], Awaitable[AsgiApp]]
    ) -> AsgiApp:
        """Call `respond` with capacity for one sequence, which it frees unless it raises; errors are answered."""
        reservation = Reservation(self.exchange)
        try:
            reservation.add(1)
            return await respond(request, reservation)
        except BaseException as error:
            reservation.free()
            if isinstance(error, InvalidRequestError | NoCapacityError | EndingError):
                return self.error_response(error)
            if isinstance(error, _DisconnectedError):
                self.num_aborted += 1
                return _no_response
            raise

    async def _answer(self, request: "Request", reservation: "Reservation") -> AsgiApp:
        arrived_s = time.monotonic()
        served = await self._read(request)
        most = self.exchange.max_sequences
        if served.num_sequences > most and served.must_fit:
            raise InvalidRequestError(
                f"the request has {served.num_sequences} sequences but the server's capacity is {most}: send fewer at "
                f"once (scheduler.max_num_seqs and serve.max_queued)",
                "limit_exceeded",
            )
        reservation.add(min(served.num_sequences, most) - 1, served.num_media_bytes)
        return Answer(self, served, reservation, arrived_s)

    async def _tokens(self, request: "Request", reservation: "Reservation") -> AsgiApp:
        answer = partial(answer_tokens, self.reader, request.url.path)
        body = await self._read_by(request, lambda data: at_once(lambda: answer(data)))
        reservation.free()
        return JsonResponse(body)

    async def version(self, request: "Request") -> AsgiApp:
        return JsonResponse({"version": version()})

    async def models(self, request: "Request") -> AsgiApp:
        name = request.path_params.get("name")
        if not name:
            return JsonResponse({"object": "list", "data": [self._model(each) for each in self._roots]})
        if name not in self._roots:
            message = f"unknown model {name[:100]!r}: use {', '.join(self._roots)}"
            return self.error_response(InvalidRequestError(message, "not_found"))
        return JsonResponse(self._model(name))

    def _model(self, name: str) -> JsonObject:
        """A model in the format of vLLM's list: the parent of an adapter is the base model."""
        return {
            "id": name,
            "object": "model",
            "created": self._started_s,
            "owned_by": "spmd-worker",
            "root": self._roots[name],
            "parent": None if name == self.model_name else self.model_name,
            "max_model_len": self.reader.context.engine.max_model_len,
        }

    async def health(self, request: "Request") -> AsgiApp:
        """Respond with 200 while requests are accepted."""
        ending = self.exchange.ending
        return JsonResponse({"status": "ending", "reason": ending}, 503) if ending else JsonResponse({"status": "ok"})

    async def metrics(self, request: "Request") -> AsgiApp:
        exchange = self.exchange
        histograms = [] if exchange.histograms is None else exchange.histograms.metrics()
        own: list[Metric] = [
            Gauge("spmd_worker_serve_sequences", exchange.num_sequences),
            Gauge("spmd_worker_serve_most_sequences", exchange.max_sequences),
            Counter("spmd_worker_serve_answered", self.num_answered),
            Counter("spmd_worker_serve_aborted", self.num_aborted),
            *(
                Counter("spmd_worker_serve_refused", number, {"status": str(status)})
                for status, number in sorted(self._errors.items())
            ),
        ]
        return PlainResponse(
            prometheus_text([*exchange.metrics, *histograms, *own]), b"text/plain; version=0.0.4; charset=utf-8"
        )

    async def no_such(self, request: "Request", error: Exception) -> AsgiApp:
        """Answer an unknown path or method."""
        asked = f"{request.method} {request.url.path[:100]}"
        if getattr(error, "status_code", 404) == 404:
            message = f"{asked}: unknown path: use one of {', '.join(_PATHS)}"
            return self.error_response(InvalidRequestError(message, "not_found"))
        allowed = (getattr(error, "headers", None) or {}).get("Allow", "")
        invalid = InvalidRequestError(f"{asked}: unsupported method: use {allowed}", "method_not_allowed")
        return self.error_response(invalid, (("allow", allowed),))

    async def broken(self, request: "Request", error: Exception) -> AsgiApp:
        """Answer an internal error; the server logs it."""
        return self.error_response(InvalidRequestError("internal server error: see the server's log", "server_error"))

    def _has_key(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        kind, _, key = (given[0] if len(given) == 1 else b"").partition(b" ")
        return hmac.compare_digest(key.strip(), self._api_key) and kind.lower() == b"bearer"

    async def _read(self, request: "Request") -> ServedRow:
        custom_id = request.headers.get("x-custom-id")
        if custom_id is not None and not (0 < len(custom_id) <= _MAX_CUSTOM_ID and custom_id.isascii()):
            raise InvalidRequestError(f"X-Custom-Id must be 1 to {_MAX_CUSTOM_ID} characters of ASCII", "invalid_value")
        read = partial(self.reader.read_in_turns, next(self._indices), request.url.path)
        content_type = request.headers.get("content-type", "")
        return await self._read_by(request, lambda data: read(data, custom_id, content_type))

    async def _read_by(self, request: "Request", read: Callable[[bytes], Turns[_Read]]) -> _Read:
        """Parse the body with `read`, in a thread that takes turns with other bodies."""
        async with contextlib.AsyncExitStack() as held:
            data = await self._body(request, held)
            # A path takes few bytes, and its image may take seconds.
            pool = self._large_pool if len(data) > LARGE_BYTES else self._pool
            has_media = request.url.path in AUDIO_TASKS or any(mark in data for mark in _MEDIA_MARKS)
            pool = self._media_pool if has_media else pool
            turns = read(data)

            def take() -> Ended[_Read] | None:
                # Others have had their turns since the last one.
                self.exchange.check_accepts()
                return take_turn(turns, _TEXTS_A_TURN)

            while (ended := await _in_pool(pool, take, request.receive)) is None:
                pass
            return ended.result

    async def _body(self, request: "Request", held: contextlib.AsyncExitStack) -> bytes:
        """The request's body. A large one holds one of `_MAX_LARGE` slots until `held` ends."""
        most = self.reader.context.limits.num_line_bytes
        too_long = InvalidRequestError(f"the body is longer than limits.max_line_bytes={most}", "line_too_long")
        encoding = request.headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            rejected = f"Content-Encoding={encoding[:100]!r} is not supported: send the body without compression"
            raise InvalidRequestError(rejected, "unsupported_value")
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced[:20]) > most:
            raise too_long
        loop = asyncio.get_running_loop()
        data, is_large, until_s = bytearray(), False, loop.time() + BODY_S
        while True:
            try:
                async with asyncio.timeout_at(until_s):
                    message = await request.receive()
            except TimeoutError:
                raise InvalidRequestError(f"the body did not arrive in {BODY_S:g} s", "body_too_slow") from None
            if message["type"] != "http.request":
                raise _DisconnectedError
            data += message.get("body", b"")
            if len(data) > most:
                raise too_long
            if len(data) > LARGE_BYTES and not is_large:
                is_large, waits_since_s = True, loop.time()
                # Meanwhile the client's further bytes are not read.
                await held.enter_async_context(self._large)
                until_s += loop.time() - waits_since_s
            if not message.get("more_body", False):
                return bytes(data)

    def error_response(self, error: Exception, headers: tuple[tuple[str, str], ...] = ()) -> JsonResponse:
        """Response to a rejected request: by its own fault, for lack of capacity, or at the server's end."""
        if isinstance(error, NoCapacityError):
            message = f"{self.exchange.num_sequences} sequences are not answered yet: retry later (serve.max_queued)"
            error, headers = (
                InvalidRequestError(str(error) or message, "rate_limit_exceeded"),
                (("retry-after", str(_RETRY_AFTER_S)),),
            )
        if isinstance(error, EndingError):
            error = InvalidRequestError(str(error), "server_failed")
        assert isinstance(error, InvalidRequestError), error
        status = status_of(error.code)
        # Clients would send it again, and the same request fails again.
        headers = (*headers, _NO_RETRY) if status == 500 else headers
        return JsonResponse(self.error_record(error), status, headers)

    def error_record(self, error: InvalidRequestError) -> JsonObject:
        """Body of an error, which is counted."""
        self._errors[status_of(error.code)] += 1
        return error_body(error.code, str(error), error.param)


class Reservation:
    """Capacity of the exchange that one request holds."""

    def __init__(self, exchange: RequestExchange) -> None:
        self._exchange, self._num, self._num_media_bytes = exchange, 0, 0

    def add(self, num: int, num_media_bytes: int = 0) -> None:
        """Reserve `num` more sequences, and bytes of images and audio. Raises NoCapacityError or EndingError, with what
        is held unchanged.
        """
        self._exchange.reserve(num, num_media_bytes)
        self._num += num
        self._num_media_bytes += num_media_bytes

    def free(self) -> None:
        """Free all of them. Idempotent."""
        self._exchange.free(self._num, self._num_media_bytes)
        self._num = self._num_media_bytes = 0


class Answer:
    """The response to one request, which arrived at `arrived_s`. At its end the request is closed in the engine and its
    capacity freed.
    """

    def __init__(self, app: ServerApp, served: ServedRow, reservation: Reservation, arrived_s: float) -> None:
        self._arrived_s = arrived_s
        self._app, self._served, self._reservation = app, served, reservation
        self._name = AnswerName(served.request_id or secrets.token_hex(12), int(time.time()), app.model_name)
        self._headers = ((_REQUEST_ID.decode(), self._name.request),)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app, loop = self._app, asyncio.get_running_loop()
        is_streamed, rows = self._served.stream.is_streamed, self._served.rows
        requests = [OpenRequest(row, is_streamed, loop, arrived_s=self._arrived_s) for row in rows]
        submitted: list[OpenRequest] = []
        try:
            for request in requests:
                app.exchange.submit(request)
                submitted.append(request)
        except EndingError as error:
            for request in submitted:
                app.exchange.close(request)
            self._reservation.free()
            await app.error_response(error)(scope, receive, send)
            return
        work = loop.create_task(self._respond(requests, send))
        gone = loop.create_task(_until_gone(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                app.num_aborted += 1
        finally:
            for request in requests:
                app.exchange.close(request)
            self._reservation.free()
            for task in (work, gone):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError, _DisconnectedError):
                await work

    async def _respond(self, requests: list[OpenRequest], send: Send) -> None:
        respond = self._stream if self._served.stream.is_streamed else self._respond_once
        is_answered = await respond(requests, send)
        self._app.num_answered += is_answered

    async def _respond_once(self, requests: list[OpenRequest], send: Send) -> bool:
        outputs = [await self._app.exchange.newest(request) for request in requests]
        failed = next((output for output in outputs if output.error is not None), None)
        if failed is not None:
            response: PlainResponse = self._app.error_response(_failure(failed), self._headers)
        else:
            response = _complete(response_body(self._served.rows, outputs, self._name), self._headers)
        for message in response.messages():
            await self._send(send, message)
        return failed is None

    async def _stream(self, requests: list[OpenRequest], send: Send) -> bool:
        headers = (("content-type", "text/event-stream; charset=utf-8"), ("cache-control", "no-store"))
        await self._send(send, response_start(200, (*headers, *self._headers)))
        writers = self._writers()
        ended: dict[int, RequestOutput] = {}
        waiting = {asyncio.ensure_future(self._app.exchange.newest(each)): i for i, each in enumerate(requests)}
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                # In the order of the prompts.
                data = b""
                for index, output in sorted((waiting.pop(each), each.result()) for each in done):
                    assert isinstance(output, RequestOutput), output
                    if output.error is not None:
                        data = event(self._app.error_record(_failure(output)))
                        await self._send(send, response_part(data, more_body=False))
                        return False
                    data += b"".join(map(event, writers[index].chunks(output)))
                    if output.finished:
                        ended[index] = output
                    else:
                        waiting[asyncio.ensure_future(self._app.exchange.newest(requests[index]))] = index
                if data and waiting:
                    await self._send(send, response_part(data))
            if self._served.stream.includes_usage:
                data += event(writers[0].last_chunk([ended[index] for index in sorted(ended)]))
            await self._send(send, response_part(data + DONE, more_body=False))
            return True
        finally:
            for each in waiting:
                each.cancel()

    def _writers(self) -> list[ChunkWriter]:
        """One writer per prompt, with the index of its first choice."""
        writers, first_index, options = [], 0, self._served.stream
        for row in self._served.rows:
            assert isinstance(row, EncodedRow), "pooling rows are not streamed"
            usage = (options.includes_usage, options.counts_in_chunks)
            writers.append(ChunkWriter(row, self._name, *usage, first_index=first_index))
            first_index += row.sampling.n
        return writers

    async def _send(self, send: Send, message: Message) -> None:
        """Send, waiting while the client does not read. Raises _DisconnectedError after `reader_s`."""
        try:
            async with asyncio.timeout(self._app.reader_s):
                await send(message)
        except TimeoutError:
            self._app.num_aborted += 1
            raise _DisconnectedError from None


def _routes(app: ServerApp) -> AsgiApp:
    from starlette.applications import Starlette
    from starlette.routing import Route

    routes = [
        Route("/v1/models", app.models),
        Route("/v1/models/{name:path}", app.models),
        Route("/health", app.health),
        Route("/ping", app.health, methods=["GET", "POST"]),
        Route("/version", app.version),
        Route("/metrics", app.metrics),
        *(Route(path, app.answer, methods=["POST"]) for path in URLS),
        *(Route(path, app.tokens, methods=["POST"]) for path in (TOKENIZE_URL, DETOKENIZE_URL)),
    ]
    handlers: Any = {404: app.no_such, 405: app.no_such, 500: app.broken}
    routed: AsgiApp = Starlette(routes=routes, exception_handlers=handlers)
    return routed


def _failure(output: RequestOutput | RowOutputs) -> InvalidRequestError:
    return InvalidRequestError(output.error or "", output.error_code or REJECTED)


def _complete(body: JsonObject | str, headers: Headers) -> PlainResponse:
    if isinstance(body, str):
        return PlainResponse(body.encode("utf-8", "replace"), b"text/plain; charset=utf-8", 200, headers)
    return JsonResponse(body, 200, headers)


def _with_request_id(send: Send) -> Send:
    """`send` that gives every response, errors too, the header that OpenAI's clients report as its id."""

    async def named(message: Message) -> None:
        if message["type"] == "http.response.start" and all(name != _REQUEST_ID for name, _ in message["headers"]):
            message["headers"] = [*message["headers"], (_REQUEST_ID, secrets.token_hex(12).encode())]
        await send(message)

    return named


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


async def _no_response(scope: Scope, receive: Receive, send: Send) -> None:
    """Empty response to a client that has left."""


async def _in_pool(pool: ThreadPoolExecutor, call: Callable[[], _Read], receive: Receive) -> _Read:
    """Result of `call` in `pool`. Raises _DisconnectedError if the client leaves: a call that has not begun is
    cancelled, and a running one is awaited, because it holds memory until its end.
    """
    loop = asyncio.get_running_loop()
    future = pool.submit(call)
    result = asyncio.wrap_future(future)
    gone = loop.create_task(_until_gone(receive))
    try:
        await asyncio.wait((result, gone), return_when=asyncio.FIRST_COMPLETED)
        if not result.done():
            if not future.cancel():
                await asyncio.wait((result,))
            raise _DisconnectedError
        return await result
    finally:
        gone.cancel()
        result.cancel()
