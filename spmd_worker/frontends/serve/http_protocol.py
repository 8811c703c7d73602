"""HTTP/1.1 on one connection: uvicorn's protocol over h11, with stricter parsing, and with time limits.

idle        no request yet, part of a header, or the last response is complete: closed after a while
busy        a request is being answered: the application bounds the time
lingering   its response is complete and its request is not: further bytes are read and dropped, because a
            connection that is closed over unread bytes is reset, and the client may never read the response
"""

import asyncio
import sys
from typing import Any, Final, Protocol

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from spmd_worker.frontends.openai.openai_stream import error_body
from spmd_worker.frontends.openai.row_writer import json_line

HEADER_BYTES: Final = 32 * 1024
"""Most bytes of a request's line and headers."""
HEADER_S: Final = 30.0
"""Time limit for a request's complete header, from the connection or the last response on."""
LINGER_S: Final = 30.0
"""Time limit of a lingering connection."""

_WORDS: Final = {
    400: ("invalid_http", "the request is not valid HTTP/1.1"),
    431: ("headers_too_large", f"the request's line and headers are more than {HEADER_BYTES} bytes"),
    501: ("invalid_http", "the request has a Transfer-Encoding that is not supported: use chunked, or Content-Length"),
}


class ConnectionList(Protocol):
    """Listener for all connections of a server."""

    def opened(self, connection: "HttpConnection") -> None:
        """A connection was opened, idle."""

    def idle(self, connection: "HttpConnection") -> None:
        """It may be closed when another needs its descriptor."""

    def busy(self, connection: "HttpConnection") -> None:
        """It must not be closed."""

    def closed(self, connection: "HttpConnection") -> None:
        """Its descriptor is free, or about to be."""


class HttpConnection(H11Protocol):
    """`list_` is notified of its state."""

    def __init__(self, list_: ConnectionList, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.conn = _StrictConnection(h11.SERVER, HEADER_BYTES)
        self._list = list_
        self._deadline: asyncio.TimerHandle | None = None
        self._socket: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """Start idle."""
        self._socket = transport
        lingering: Any = _LingeringTransport(transport, self)
        super().connection_made(lingering)
        self._list.opened(self)
        self._arm(HEADER_S)

    def data_received(self, data: bytes) -> None:
        """Drop what arrives while it lingers."""
        if not self.transport.is_closing():
            super().data_received(data)

    def handle_events(self) -> None:
        """Mark as busy once a header is complete."""
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            self._list.busy(self)

    def eof_received(self) -> None:
        """End a lingering connection: its client has sent everything."""
        if self.transport.is_closing():
            self.end()

    def on_response_complete(self) -> None:
        """Mark as idle before the next request, which may have arrived already, begins."""
        if not self.transport.is_closing():
            self._list.idle(self)
            self._arm(HEADER_S)
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer a request that h11 rejected, in OpenAI's format, and close."""
        problem = sys.exception()
        hint = problem.error_status_hint if isinstance(problem, h11.RemoteProtocolError) else 400
        status = hint if hint in _WORDS else 400
        code, words = _WORDS[status]
        # h11's own texts are about its states; ours name the rule.
        words = str(problem) if isinstance(problem, _RefusedRequestError) else words
        body = json_line(error_body(code, words))
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            # A response has begun: the client cannot get an error.
            self.transport.close()
            return
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        for event in (h11.Response(status_code=status, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client, or a time limit, has ended it."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._list.closed(self)
        super().connection_lost(exc)

    def linger(self) -> None:
        """Stop sending; for a while drop what arrives."""
        self._list.idle(self)
        self._arm(LINGER_S)

    @property
    def is_amid_request(self) -> bool:
        """Whether more of a request may come."""
        return self.conn.their_state in (h11.SEND_BODY, h11.ERROR)

    def end(self) -> None:
        """Abort the connection."""
        if self._socket is not None:
            self._socket.abort()

    def _arm(self, limit_s: float) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(limit_s, self._end_if_idle)

    def _end_if_idle(self) -> None:
        if self.transport.is_closing():
            self.end()
        elif self.cycle is None or self.cycle.response_complete:
            self.transport.close()


class _LingeringTransport:
    """A transport that closes only its own direction while its client may still send."""

    def __init__(self, socket: asyncio.Transport, connection: HttpConnection) -> None:
        self._socket, self._connection = socket, connection
        self._lingers = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def is_closing(self) -> bool:
        return self._lingers or self._socket.is_closing()

    def close(self) -> None:
        if self.is_closing() or not self._connection.is_amid_request:
            self._socket.close()
            return
        self._lingers = True
        self._socket.write_eof()
        self._socket.resume_reading()
        self._connection.linger()


class _RefusedRequestError(h11.RemoteProtocolError):
    """A request that h11 accepts and this server rejects."""


class _StrictConnection(h11.Connection):
    """Rejects ambiguous requests, and headers beyond the limit that arrived in one piece."""

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            _check(event)
        return event


def _check(request: h11.Request) -> None:
    names = [name for name, _ in request.headers]
    if b"transfer-encoding" in names and b"content-length" in names:
        raise _RefusedRequestError("the request has Content-Length and Transfer-Encoding: send one of them", 400)
    if b"transfer-encoding" in names and request.http_version < b"1.1":
        raise _RefusedRequestError("the request is HTTP/1.0, which has no Transfer-Encoding: use Content-Length", 400)
    # Size on the wire: `name: value` and a line end each.
    if len(request.target) + sum(len(name) + len(value) + 4 for name, value in request.headers) > HEADER_BYTES:
        raise _RefusedRequestError(_WORDS[431][1], 431)
