"""A server for tests: in this process, where a test may hold its steps, or the command on ranks; and a plain client.

Knows HTTP and how a server is started. Knows nothing of what answers should be.
"""

import http.client
import json
import re
import secrets
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ranks
from waiting import LIMIT_S, wait_until

from spmd_worker.base.config.schema import CacheConfig, ModelOptions, RunConfig, SchedulerConfig, ServeConfig
from spmd_worker.engine.startup import read_run, start_engine
from spmd_worker.frontends.serve.exchange import RequestExchange
from spmd_worker.frontends.serve.http_server import bind
from spmd_worker.frontends.serve.server import Listener, answer_clients

MODEL = ranks.REPOSITORY / "scripts" / "demo" / "model"
KEY = "tests-key"
JSON = dict[str, Any]


class Client:
    """Asks a server at `port` of this machine, with a connection for each request."""

    def __init__(self, port: int, key: str | None = KEY) -> None:
        self.port, self.key = port, key

    def send(
        self, path: str, body: Any = None, headers: Mapping[str, str] | None = None, method: str = "POST"
    ) -> http.client.HTTPConnection:
        """The connection, from which the response may be read. `body` is JSON, or bytes as they are."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        own = {} if self.key is None else {"Authorization": f"Bearer {self.key}"}
        connection.request(method, path, data, {**own, **(headers or {})})
        return connection

    def ask(self, *arguments: Any, **more: Any) -> tuple[int, JSON, Mapping[str, str]]:
        """Status, body and headers."""
        connection = self.send(*arguments, **more)
        response = connection.getresponse()
        content = response.read()
        connection.close()
        is_json = response.headers["content-type"] == "application/json"
        return response.status, json.loads(content) if is_json else {"text": content.decode()}, response.headers

    def stream(self, path: str, body: JSON, headers: Mapping[str, str] | None = None) -> list[JSON]:
        """The events of a stream, which must end as one should."""
        connection = self.send(path, {**body, "stream": True}, headers)
        response = connection.getresponse()
        assert (response.status, response.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        *events, last = read_events(response)
        connection.close()
        assert last == "[DONE]"
        return [json.loads(event) for event in events]

    def metric(self, name: str) -> float:
        text = self.ask("/metrics", method="GET")[1]["text"]
        return float(re.search(rf"(?m)^{re.escape(name)}(?:\{{.*\}})? (\S+)$", text)[1])


def read_events(response: http.client.HTTPResponse) -> list[str]:
    """Data of each event of a stream."""
    lines = response.read().decode().split("\n\n")
    assert lines.pop() == ""
    assert all(line.startswith("data: ") for line in lines), lines
    return [line.removeprefix("data: ") for line in lines]


def joined(chunks: list[JSON]) -> JSON:
    """The body made of a stream's chunks, as OpenAI describes them."""
    choices: dict[int, JSON] = {}
    body = {**chunks[0], "object": chunks[0]["object"].removesuffix(".chunk")}
    for chunk in chunks:
        assert {name: chunk[name] for name in ("id", "created", "model")} == {
            name: body[name] for name in ("id", "created", "model")
        }
        body["usage"] = chunk.get("usage")
        for part in chunk["choices"]:
            known = choices.setdefault(part["index"], {"index": part["index"], "logprobs": None})
            assert known.get("finish_reason") is None, "nothing comes after the end"
            known.update(finish_reason=part["finish_reason"], stop_reason=part["stop_reason"])
            if "delta" in part:
                join_delta(known, part["delta"])
            else:
                known["text"] = known.get("text", "") + part["text"]
            for name, values in (part["logprobs"] or {}).items():
                known["logprobs"] = known["logprobs"] or {}
                known["logprobs"][name] = known["logprobs"].get(name, []) + values
            if "sampling_mask" in part:
                mask = known.setdefault("sampling_mask", {"token_ids": [], "offsets": [0]})
                mask["offsets"] += [len(mask["token_ids"]) + each for each in part["sampling_mask"]["offsets"][1:]]
                mask["token_ids"] += part["sampling_mask"]["token_ids"]
    for choice in choices.values():
        message = choice.get("message", {})
        if message.get("content") == "" and len(message) > 2:
            # Before reasoning and calls nobody knows that no content will come.
            message["content"] = None
    return {**body, "choices": [choices[index] for index in sorted(choices)]}


def join_delta(known: JSON, delta: JSON) -> None:
    """Append a piece of a message; a call comes in one piece."""
    message = known.setdefault("message", {"role": delta.get("role"), "content": None})
    for name in ("content", "reasoning_content"):
        if delta.get(name) is not None:
            message[name] = (message.get(name) or "") + delta[name]
    for call in delta.get("tool_calls", ()):
        calls = message.setdefault("tool_calls", [])
        assert call["index"] == len(calls)
        calls.append({name: value for name, value in call.items() if name != "index"})


def without_names(body: JSON) -> JSON:
    """A body without id and creation time, for comparisons."""
    return {name: value for name, value in body.items() if name not in ("id", "created")}


class ServedHere:
    """An engine of one rank and its server, in threads of this process. Closed by `close`, or by leaving it."""

    def __init__(
        self,
        max_num_seqs: int = 8,
        num_blocks: int = 256,
        model: Path = MODEL,
        options: Mapping[str, Any] | None = None,
        **serve: Any,
    ) -> None:
        """`options` are further keys of `model`, the other keywords those of `serve`."""
        config = RunConfig(
            model=ModelOptions(path=str(model), dtype="float32", **(options or {})),
            cache=CacheConfig(num_blocks=num_blocks),
            scheduler=SchedulerConfig(max_num_seqs=max_num_seqs),
            serve=ServeConfig(**serve),
            device="cpu",
        )
        self.engine = start_engine(read_run(config))
        self._right_step = self.engine.step
        self.engine.step = self._step
        self._steps = threading.Condition()
        self._num_allowed: int | None = None
        self.exchange = RequestExchange(max_num_seqs + config.serve.max_queued)
        self.listener = Listener(bind("127.0.0.1", 0), KEY, False)
        # Whoever connects before the server's thread runs waits for it.
        self.listener.bound.listen()
        self.client = Client(self.listener.bound.getsockname()[1])
        self.thread = threading.Thread(target=self._run, name="tests-engine")
        self.error: BaseException | None = None
        self.thread.start()

    def allow(self, num_steps: int | None) -> None:
        """Allow this number of further steps; None: any."""
        with self._steps:
            self._num_allowed = num_steps
            self._steps.notify_all()

    def wait_for_steps(self) -> None:
        """Wait until the allowed steps have run."""
        wait_until(lambda: self._num_allowed == 0)

    def wait_for_steps_or_rest(self) -> None:
        """Wait for the allowed steps, or until the engine is idle, when it steps rarely."""
        wait_until(lambda: self._num_allowed == 0 or not self.engine.has_unfinished_requests())

    @property
    def num_used_blocks(self) -> int:
        return self.engine.scheduler.cache.num_used_blocks

    def close(self) -> None:
        self.allow(None)
        self.exchange.end("the test has ended")
        self.thread.join(LIMIT_S)
        self.engine.shutdown()

    def __enter__(self) -> "ServedHere":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            assert self.engine.watchdog is not None
            answer_clients(self.engine, self.engine.watchdog, self.exchange, self.listener)
        except RuntimeError as error:
            self.error = error

    def _step(self) -> Any:
        with self._steps:
            self._steps.wait_for(lambda: self._num_allowed is None or self._num_allowed > 0)
        outputs = self._right_step()
        with self._steps:
            if self._num_allowed is not None:
                self._num_allowed -= 1
        return outputs


class ServedRanks:
    """The command, or a `script` that runs it, on forked ranks; `folder` gets its log."""

    def __init__(self, folder: Path, num_ranks: int, *overrides: str, script: Path | None = None) -> None:
        self.folder, self._token = folder, secrets.token_hex(16)
        words = [
            *(("-m", "spmd_worker.serve") if script is None else (str(script),)),
            *(f"model.path={MODEL}", "model.dtype=float32", "device=cpu"),
            # The machine may be so busy that a request takes longer than the default.
            *("cache.num_blocks=512", "serve.port=0", "serve.drain_s=100", *overrides),
        ]
        environment = ranks.environment(self._token, {"SPMD_WORKER_API_KEY": KEY})
        self._log = open(folder / "log", "ab")  # noqa: SIM115  # closed with the server
        self.ranks = ranks.ForkedRanks(words, [0] * num_ranks, True, environment, folder, self._log, self._log)
        try:
            wait_until(self._is_serving)
        except BaseException:
            self.kill()
            raise
        self.url = re.search(r"serving model at (\S+)", self.log)[1]
        self.client = Client(int(re.search(r":(\d+)/", self.url)[1]))

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def _is_serving(self) -> bool:
        assert not self.ranks.has_ended(0.0), self.log
        return "serving model at" in self.log

    def send(self, number: int, *victims: int) -> None:
        for victim in victims:
            self.ranks.processes[victim].send_signal(number)

    def wait(self) -> tuple[int, ...]:
        """The exit codes, once all ranks have ended and no process is left."""
        assert self.ranks.has_ended(LIMIT_S), self.log
        wait_until(lambda: not ranks.processes_of(self._token))
        return self.ranks.exit_codes

    def kill(self) -> None:
        ranks.kill_all(self._token)
        self.ranks.has_ended(LIMIT_S)
        self._log.close()


@contextmanager
def served_ranks(folder: Path, num_ranks: int, *overrides: str, script: Path | None = None) -> Iterator[ServedRanks]:
    """Context of a server, for a test or a module."""
    server = ServedRanks(folder, num_ranks, *overrides, script=script)
    try:
        yield server
    finally:
        server.kill()
