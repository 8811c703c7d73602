"""moto's S3 over HTTP in a thread, with faults: throttled, reset in mid body, or answered into a closed socket."""

import contextlib
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b

KEY, SECRET = "PLANTEDKEYID", "plantedsecretvalue"
_THROTTLED = (
    b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
)


@dataclass
class S3Server:
    """`fault(number, method, path)` names the fault of a request: "throttle" (nothing is done), "reset" (half of the
    answer), "lost" (done, and no answer), or None.
    """

    requests: list[tuple[str, str]] = field(default_factory=list)
    fault: Callable[[int, str, str], str | None] | None = None
    has_conditions: bool = True
    """Whether a conditional write is one."""
    bucket: str = ""
    """URL of the test's bucket."""

    def start(self) -> None:
        from moto.server import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import WSGIRequestHandler, make_server

        class Quiet(WSGIRequestHandler):
            protocol_version = "HTTP/1.1"

            def log(self, *_: object) -> None:
                return

        self._moto = DomainDispatcherApplication(create_backend_app)
        self._lock = threading.Lock()
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True, request_handler=Quiet)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def _answer(self, environ, start_response):
        if environ["PATH_INFO"].startswith("/moto-api"):
            return self._moto(environ, start_response)
        if not self.has_conditions:
            environ.pop("HTTP_IF_NONE_MATCH", None)
        with self._lock:
            self.requests.append((environ["REQUEST_METHOD"], f"{environ['PATH_INFO']}?{environ['QUERY_STRING']}"))
            fault = self.fault and self.fault(len(self.requests), *self.requests[-1])
            if fault == "throttle":
                with contextlib.suppress(OSError):
                    environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
                headers = [("Content-Type", "application/xml"), ("Content-Length", str(len(_THROTTLED)))]
                start_response("503 Slow Down", headers)
                return [] if environ["REQUEST_METHOD"] == "HEAD" else [_THROTTLED]
            # One at a time: the real S3 decides between two conditional writes, and moto looks and then writes.
            body = b"".join(self._moto(environ, start_response))
        if fault in ("reset", "lost"):
            return self._broken(environ, body if fault == "reset" else b"")
        return [body]

    def _broken(self, environ, body):
        if body:
            yield body[: len(body) // 2]
        with contextlib.suppress(OSError):
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)

    def environment(self) -> dict[str, str]:
        """Variables by which fsspec and botocore find it."""
        return {
            "FSSPEC_S3_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def stop(self) -> None:
        self._server.shutdown()


def use_server(server: S3Server, monkeypatch, test: str):
    """Let fsspec's s3 find the server, in this process and in those it starts, for one test."""
    import fsspec.config

    from spmd_worker.base import remote_store

    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(fsspec.config.conf, "s3", {"endpoint_url": server.url})
    monkeypatch.setattr(remote_store, "_FIRST_PAUSE_S", 0.0)
    server.fault, server.has_conditions = None, True
    bucket = f"b{blake2b(test.encode(), digest_size=8).hexdigest()}"
    server.bucket = f"s3://{bucket}"
    remote_store.open_store(f"{server.bucket}/x").fs.call_s3("create_bucket", Bucket=bucket)
    server.requests.clear()
    yield server
    server.fault = None
