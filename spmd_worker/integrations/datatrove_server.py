"""datatrove's `InferenceRunner` on this runtime's server, which it starts, watches and starts again.

    from datatrove.pipeline.inference.run_inference import InferenceConfig
    from spmd_worker.integrations.datatrove_server import SpmdInferenceRunner

    config = InferenceConfig(
        server_type="custom", model_name_or_path="MODEL", tp=2, model_kwargs={"cache.num_blocks": 4096}
    )
    runner = SpmdInferenceRunner(rollout_fn=rollout, config=config, output_writer=writer)

`model_kwargs` are keys of the configuration, as on a command line. A payload may have `custom_id` beside the keys of a
body: its answer is then that of a job's row with this custom_id. Without it equal payloads have equal answers, so
rollouts of one document need a `seed` or a `custom_id` each.
"""

import asyncio
import json
import os
import secrets
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final

from spmd_worker.base.config.extras import package_error

try:
    from datatrove.pipeline.inference.run_inference import InferenceConfig, InferenceRunner
    from datatrove.pipeline.inference.servers import InferenceServer
    from datatrove.pipeline.inference.types import InferenceError
    from datatrove.utils.logging import logger
except ImportError as error:
    raise package_error("datatrove", "datatrove", error) from error

from spmd_worker.base.errors import ConfigError
from spmd_worker.frontends.serve.command import KEY_VARIABLE

_HOST: Final = "127.0.0.1"
_MAX_RESTARTS: Final = 10
_BUSY: Final = (429, 503)


class SpmdServer(InferenceServer):  # type: ignore[misc]  # datatrove is no dependency
    """The server of one task, in a process of its own: worker processes of it are its ranks. Raises ConfigError for
    `dp`: each of datatrove's tasks has a server.
    """

    def __init__(self, config: InferenceConfig, rank: int) -> None:
        if config.dp != 1:
            raise ConfigError(f"dp={config.dp}: a server has one replica here; leave it out, and run more tasks")
        super().__init__(config, rank)
        self._key = secrets.token_urlsafe(24)
        self._is_ending = False
        self._server_process: asyncio.subprocess.Process

    async def start_server(self) -> asyncio.subprocess.Process:
        """Start the process."""
        self._is_ending = False
        # Not in the command: other users see that.
        environment = {**os.environ, KEY_VARIABLE: self._key}
        path = self._get_log_file_path()
        with ExitStack() as opened:
            log = None
            if path is not None:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                log = opened.enter_context(open(path, "ab"))
            command = command_of(self.config, self._port)
            return await asyncio.create_subprocess_exec(*command, env=environment, stdout=log, stderr=log)

    async def monitor_health(self) -> None:
        """Start a server that dies again, once it was ready; datatrove sends its requests again meanwhile."""
        for _ in range(_MAX_RESTARTS):
            code = await self._server_process.wait()
            if self._is_ending or not self._server_ready.done():
                return
            logger.warning(f"the server ended with {code}: it is started again")
            self._server_process = await self.start_server()
        await self._server_process.wait()

    async def server_cleanup(self) -> None:
        """End the process, for good."""
        self._is_ending = True
        await super().server_cleanup()

    async def is_ready(self) -> bool:
        """Whether the server accepts requests."""
        with suppress(OSError):
            return (await self._ask("GET", "/health", {}))[0] == 200
        return False

    async def _make_request(self, payload: dict[str, Any]) -> dict[str, Any]:
        """The response's body. Raises ConnectionError, after which datatrove asks again, while the server is busy or
        not there, InferenceError for a rejected request.
        """
        body = {key: value for key, value in payload.items() if key != "custom_id"}
        custom_id = payload.get("custom_id")
        headers = {} if custom_id is None else {"X-Custom-Id": str(custom_id)}
        path = "/v1/chat/completions" if self.config.use_chat else "/v1/completions"
        status, answer = await self._ask("POST", path, headers, json.dumps(body).encode())
        if status in _BUSY:
            raise ConnectionError(f"status {status}")
        if status != 200:
            # datatrove finds the word in its text, to skip bad requests.
            raise InferenceError(None, f"BadRequestError {status}: {answer.decode(errors='replace')}", payload=payload)
        found: dict[str, Any] = json.loads(answer)
        return found

    async def _ask(self, method: str, path: str, headers: dict[str, str], body: bytes = b"") -> tuple[int, bytes]:
        """Status and body. Raises OSError, also for a response that breaks off."""
        reader, writer = await asyncio.open_connection(_HOST, self._port)
        try:
            more = {**headers, "Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
            more |= {"Host": _HOST, "Content-Length": str(len(body)), "Connection": "close"}
            lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in more.items()), "", ""]
            writer.write("\r\n".join(lines).encode("latin-1") + body)
            await writer.drain()
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            lengths = [line.split(":")[1] for line in head if line.lower().startswith("content-length:")]
            return int(head[0].split()[1]), await reader.readexactly(int(lengths[0]))
        except asyncio.IncompleteReadError as error:
            raise ConnectionError("the server ended within a response") from error
        finally:
            writer.close()


class SpmdInferenceRunner(InferenceRunner):  # type: ignore[misc]  # datatrove is no dependency
    """datatrove's runner with this server, whatever `server_type` its configuration names."""

    def _init_server(self, rank: int) -> SpmdServer:
        return SpmdServer(self.config, rank)


def command_of(config: InferenceConfig, port: int) -> list[str]:
    """The command that starts the server of a configuration."""
    keys = {
        "model.path": config.model_name_or_path,
        "model.max_model_len": config.model_max_context,
        "parallel.tensor_parallel_size": config.tp,
        "parallel.pipeline_parallel_size": config.pp,
        "serve.max_queued": config.max_concurrent_generations,
        **(config.model_kwargs or {}),
    }
    given = [f"{key}={value}" for key, value in keys.items()]
    return [sys.executable, "-m", "spmd_worker.serve", *given, "--host", _HOST, "--port", str(port)]
