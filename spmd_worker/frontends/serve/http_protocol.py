"""HTTP/1.1 on one connection: uvicorn's protocol over h11, with stricter parsing, and with time limits.

idle        no request yet, part of a header, or the last response is complete: closed after a while
busy        a request is being answered: the application bounds the time
lingering   its response is complete and its request is not: further bytes are read and dropped, because a
            connection that is closed over unread bytes is reset, and the client may never read the response
"""

import asyncio
import socket
import sys
from typing import Any, Final

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from spmd_worker.frontends.openai.openai_stream import error_body
from spmd_worker.frontends.openai.row_writer import json_line
from spmd_worker.frontends.serve.connections import Connections

HEADER_BYTES: Final = 32 * 1024
HEADER_S: Final = 30.0
"""Time limit for the first request's complete header, from the connection on."""
IDLE_S: Final = 75.0
"""The same of the next request, from the last response on. Longer than clients and proxies keep a connection (httpx
5 s, others up to 60): they would send a request on one that is being closed.
"""
LINGER_S: Final = 30.0

_MESSAGES: Final = {
    400: ("invalid_http", "the request is not valid HTTP/1.1"),
    431: ("headers_too_large", f"the request's line and headers are more than {HEADER_BYTES} bytes"),
    501: ("invalid_http", "the request has a Transfer-Encoding that is not supported: use chunked, or Content-Length"),
}


class HttpConnection(H11Protocol):
    """Reports its state to `connections`."""

    _socket: asyncio.Transport

    def __init__(self, connections: Connections, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.conn = _StrictConnection(h11.SERVER, HEADER_BYTES)
        self._connections = connections
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        self._socket = transport
        lingering: Any = _LingeringTransport(transport, self)
        super().connection_made(lingering)
        self._connections.opened(self._socket)
        self._arm(HEADER_S)

    def data_received(self, data: bytes) -> None:
        """Drop what arrives while it lingers."""
        if not self.transport.is_closing():
            super().data_received(data)

    def handle_events(self) -> None:
        """Mark as busy once a header is complete."""
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            self._connections.busy(self._socket)

    def eof_received(self) -> None:
        """End a lingering connection: its client has sent everything."""
        if self.transport.is_closing():
            self._socket.abort()

    def on_response_complete(self) -> None:
        """Mark as idle before the next request, which may have arrived already, begins."""
        if not self.transport.is_closing():
            self._connections.idle(self._socket)
            self._arm(IDLE_S)
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer a request that h11 rejected, in OpenAI's format, and close."""
        problem = sys.exception()
        hint = problem.error_status_hint if isinstance(problem, h11.RemoteProtocolError) else 400
        status = hint if hint in _MESSAGES else 400
        code, message = _MESSAGES[status]
        # h11's own texts are about its states; ours name the rule.
        message = str(problem) if isinstance(problem, _StrictnessError) else message
        body = json_line(error_body(code, message))
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            # A response has begun: the client cannot get an error.
            self.transport.close()
            return
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        for event in (h11.Response(status_code=status, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._connections.closed(self._socket)
        super().connection_lost(exc)

    def linger(self) -> None:
        """Stop sending; for a while drop what arrives."""
        self._connections.idle(self._socket)
        self._arm(LINGER_S)

    @property
    def is_amid_request(self) -> bool:
        """Whether more of a request may come."""
        return self.conn.their_state in (h11.SEND_BODY, h11.ERROR)

    def _arm(self, limit_s: float) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(limit_s, self._end_if_idle)

    def _end_if_idle(self) -> None:
        if self.transport.is_closing():
            self._socket.abort()
        elif self.cycle is None or self.cycle.response_complete:
            self.transport.close()


class _LingeringTransport:
    """A transport that closes only its own direction while its client may still send."""

    def __init__(self, transport: asyncio.Transport, connection: HttpConnection) -> None:
        self._socket, self._connection = transport, connection
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


class _StrictnessError(h11.RemoteProtocolError):
    """A request that h11 accepts and this server rejects."""


class _StrictConnection(h11.Connection):
    """Rejects ambiguous requests, and headers beyond the limit that arrived in one piece."""

    def next_event(self) -> Any:
        event = super().next_event()
        if not isinstance(event, h11.Request):
            return event
        names = [name for name, _ in event.headers]
        if b"transfer-encoding" in names and b"content-length" in names:
            raise _StrictnessError("the request has Content-Length and Transfer-Encoding: send one of them", 400)
        if b"transfer-encoding" in names and event.http_version < b"1.1":
            raise _StrictnessError("the request is HTTP/1.0, which has no Transfer-Encoding: use Content-Length", 400)
        # Size on the wire: `name: value` and a line end each.
        if len(event.target) + sum(len(name) + len(value) + 4 for name, value in event.headers) > HEADER_BYTES:
            raise _StrictnessError(_MESSAGES[431][1], 431)
        return event


class AcceptingServer(uvicorn.Server):
    """uvicorn's server over `Connections`."""

    def __init__(self, config: uvicorn.Config, bound: socket.socket, max_connections: int) -> None:
        super().__init__(config)
        self._bound, self._max_connections = bound, max_connections
        self._connections: Connections | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        self._connections = Connections(self._bound, self._max_connections, self._new_connection)
        self._connections.start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._connections is not None:
            self._connections.stop()
        await super().shutdown(sockets)

    def _new_connection(self, connections: Connections) -> HttpConnection:
        state: dict[str, Any] = self.lifespan.state
        return HttpConnection(connections, self.config, self.server_state, state)
