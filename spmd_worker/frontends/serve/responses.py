"""Responses as ASGI applications, and metrics in Prometheus' text format."""

from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any, Final

from spmd_worker.compat.metrics import Counter, Histogram, Metric, Vector
from spmd_worker.frontends.openai.row_writer import json_line

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = tuple[tuple[str, str], ...]

_ESCAPES: Final = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
"""Characters of a label's value that Prometheus reads with a backslash."""


class PlainResponse:
    """A short response, as an ASGI application."""

    def __init__(self, body: bytes, content_type: bytes, status: int = 200, headers: Headers = ()) -> None:
        self.body, self.status = body, status
        self.headers = (("content-type", content_type.decode()), ("content-length", str(len(body))), *headers)

    def messages(self) -> list[Message]:
        return [response_start(self.status, self.headers), response_part(self.body, more_body=False)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        for message in self.messages():
            await send(message)


class JsonResponse(PlainResponse):
    """A record as JSON."""

    def __init__(self, record: Mapping[str, Any], status: int = 200, headers: Headers = ()) -> None:
        super().__init__(json_line(record), b"application/json", status, headers)


def prometheus_text(metrics: Sequence[Metric | Vector | Histogram]) -> bytes:
    """Metrics in Prometheus' text format, version 0.0.4. Those of one name follow one another."""
    lines: list[str] = []
    headings: dict[str, None] = {}
    singles = (one for given in metrics for one in (given.by_position() if isinstance(given, Vector) else [given]))
    for each in singles:
        is_counter = isinstance(each, Counter)
        name = f"{each.name}_total" if is_counter else each.name
        kind = "histogram" if isinstance(each, Histogram) else "counter" if is_counter else "gauge"
        if name not in headings:
            headings[name] = None
            lines.append(f"# TYPE {name} {kind}")
        if isinstance(each, Histogram):
            buckets = {**{str(bound): number for bound, number in each.buckets.items()}, "+Inf": each.count}
            lines += [_sample(f"{name}_bucket", {**each.labels, "le": le}, number) for le, number in buckets.items()]
            lines += [_sample(f"{name}_sum", each.labels, each.sum), _sample(f"{name}_count", each.labels, each.count)]
        else:
            lines.append(_sample(name, each.labels, each.value))
    # A folder's name may have bytes that are not UTF-8.
    return ("\n".join(lines) + "\n").encode("utf-8", "replace")


def _sample(name: str, labels: Mapping[str, str], value: float) -> str:
    written = ",".join(f'{key}="{value.translate(_ESCAPES)}"' for key, value in labels.items())
    return f"{name}{f'{{{written}}}' if written else ''} {value}"


def response_start(status: int, headers: Headers) -> Message:
    """Start of a response; header names in lower case."""
    coded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
    return {"type": "http.response.start", "status": status, "headers": coded}


def response_part(body: bytes, *, more_body: bool = True) -> Message:
    """Part of a response's body, the last one unless `more_body`."""
    return {"type": "http.response.body", "body": body, "more_body": more_body}
