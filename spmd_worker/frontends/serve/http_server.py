"""uvicorn in its own thread, on a socket that was bound before anything was loaded."""

import asyncio
import ipaddress
import math
import socket
import threading
from collections.abc import Callable
from typing import Final

from spmd_worker.base.config.extras import raise_missing_package
from spmd_worker.base.errors import ConfigError
from spmd_worker.frontends.serve.responses import AsgiApp

MORE_CONNECTIONS: Final = 64
"""Connections in addition to one per open request: health checks, and idle ones that can be closed for others."""
_FLUSH_S: Final = 2


def require_server() -> None:
    """Raise ConfigError for a package of the extra `serve` that cannot be imported."""
    package = "python-multipart"
    try:
        import python_multipart  # noqa: F401

        package = "starlette"
        import starlette  # noqa: F401

        package = "uvicorn"
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise_missing_package(package, "serve", "the server", error)


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet. Raises ConfigError for an unavailable address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except (OSError, UnicodeError) as error:
        bound.close()
        raise _unavailable(host, port, error) from None
    return bound


def _unavailable(host: str, port: int, error: Exception) -> ConfigError:
    why = error.strerror if isinstance(error, OSError) else None
    return ConfigError(
        f"serve.host={host} with serve.port={port} is unavailable ({why or error}): use another host or port, or "
        f"port 0 for any"
    )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the host."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class HttpServer:
    """`most_requests` may be open at once; a client that reads nothing for `reader_s` is disconnected. The socket is
    closed when the server has stopped. `has_ended` is called, in the server's thread, when that ends for any reason.
    """

    def __init__(
        self,
        app: AsgiApp,
        bound: socket.socket,
        most_requests: int,
        reader_s: float,
        has_ended: Callable[[], None],
    ) -> None:
        import uvicorn

        from spmd_worker.frontends.serve.http_protocol import IDLE_S, AcceptingServer, HttpConnection

        if hasattr(socket, "TCP_USER_TIMEOUT"):
            # Else data left in buffers would keep a connection. Accepted ones inherit it.
            bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, math.ceil(1000 * reader_s))

        config = uvicorn.Config(
            app,
            loop="asyncio",
            http=HttpConnection,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            log_level="error",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=math.ceil(IDLE_S),
            timeout_graceful_shutdown=_FLUSH_S,
        )
        self._server = AcceptingServer(config, bound, most_requests + MORE_CONNECTIONS)
        self._socket, self._has_ended = bound, has_ended
        self._error: Exception | None = None
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="spmd-serve", daemon=True)

    def start(self) -> None:
        """Start: from now on clients are answered, or wait until the thread runs."""
        try:
            self._socket.listen()
        except OSError as error:
            # Another socket bound to the same address listened first.
            host, port = self._socket.getsockname()[:2]
            raise _unavailable(host, port, error) from None
        self._thread.start()

    def check(self) -> None:
        """Raise RuntimeError if the server has ended without `stop`."""
        if self._is_over and not self._server.should_exit:
            why = "unknown error" if self._error is None else str(self._error) or type(self._error).__name__
            raise RuntimeError(f"the server's thread has ended: {why}") from self._error

    def stop(self) -> None:
        """Stop; incomplete responses have a little time. Idempotent."""
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(3 * _FLUSH_S)

    def _run(self) -> None:
        try:
            asyncio.run(self._server.serve(sockets=[self._socket]))
        except Exception as error:  # `check` raises it in another thread
            self._error = error
        finally:
            self._is_over = True
            self._has_ended()
