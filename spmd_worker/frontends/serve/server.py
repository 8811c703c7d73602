"""The server on one rank: every rank starts its engine; rank 0 answers clients, the others follow its steps."""

import logging
import socket
import sys
from dataclasses import dataclass
from functools import partial
from typing import Final

from spmd_worker.base.config.schema import RunConfig
from spmd_worker.base.errors import ConfigError
from spmd_worker.base.liveness.watchdog import Watchdog
from spmd_worker.base.remote_names import shown_name
from spmd_worker.engine.engine import Engine
from spmd_worker.engine.startup import read_run, start_engine
from spmd_worker.frontends.openai.engine_models import own_names, row_context
from spmd_worker.frontends.serve.app import ServerApp
from spmd_worker.frontends.serve.engine_loop import EngineLoop
from spmd_worker.frontends.serve.exchange import RequestExchange
from spmd_worker.frontends.serve.http_server import HttpServer
from spmd_worker.frontends.serve.request_reader import RequestReader
from spmd_worker.ranks.environment import RankEnvironment
from spmd_worker.ranks.topology import check_world_size

logger = logging.getLogger(__name__)

_FLUSH_S: Final = 1.0
"""Time for clients to read an error before the process ends."""


@dataclass(frozen=True, slots=True)
class Listener:
    """Rank 0's socket and key, before anything is loaded. `is_new_key`: the key was generated and must be printed."""

    bound: socket.socket
    api_key: str
    is_new_key: bool

    @property
    def url(self) -> str:
        """URL of the API, as clients use it."""
        host, port = self.bound.getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"


def serve(
    config: RunConfig,
    environment: RankEnvironment,
    watchdog: Watchdog,
    exchange: RequestExchange,
    listener: Listener | None,
) -> None:
    """Serve until `exchange` ends, which ends the other ranks too. `listener` is rank 0's.

    Raises ConfigError for an invalid run, and what a step raises.
    """
    if config.parallel.data_parallel_size > 1:
        raise ConfigError(
            f"parallel.data_parallel_size={config.parallel.data_parallel_size} cannot be served: a server has one "
            f"replica; start one server for each"
        )
    resolved = read_run(config)
    own_names(resolved)
    if environment.is_launched:
        check_world_size(resolved.layout, environment.world_size)
    engine: Engine = start_engine(resolved, environment, watchdog)
    try:
        if listener is None:
            engine.follow()
        else:
            answer_clients(engine, watchdog, exchange, listener)
    except BaseException as error:  # reported to the other ranks, before anything is taken down, and re-raised
        watchdog.fail(error)
        raise
    finally:
        engine.shutdown()


def answer_clients(engine: Engine, watchdog: Watchdog, exchange: RequestExchange, listener: Listener) -> None:
    """Rank 0's part, with an engine that the other ranks follow."""
    config = engine.config
    exchange.max_sequences = engine.max_num_seqs + config.serve.max_queued
    context = row_context(engine)
    reader, models = RequestReader(engine.default_sampling, context), context.models
    folders = {**(config.model.adapters or {}), **(config.model.prompt_adapters or {})}
    roots = {models.base: shown_name(config.model.path or models.base), **folders}
    app = ServerApp(exchange, reader, roots, listener.api_key, config.serve.reader_timeout_s)
    loop = EngineLoop(engine, exchange, config.serve.drain_s)
    # Without its server the engine would wait for ever.
    has_ended = partial(exchange.end, "the server's thread has ended")
    server = HttpServer(app.asgi, listener.bound, exchange.max_sequences, config.serve.reader_timeout_s, has_ended)

    def end_clients() -> None:
        exchange.fail("the server has failed: another rank is gone or hangs; the server's log names it")
        exchange.wait_until_closed(_FLUSH_S)

    # The watchdog ends this process if the main thread waits for a rank that is gone.
    watchdog.before_exit = end_clients
    server.start()
    logger.info("serving %s at %s", ", ".join(models.names), listener.url)
    if listener.is_new_key:
        # Never logged.
        text = f"API key for clients of {listener.url} (set SPMD_WORKER_API_KEY to choose it):"
        print(text, listener.api_key, file=sys.stderr, flush=True)
    try:
        loop.run()
        server.check()
    finally:
        exchange.wait_until_closed(_FLUSH_S)
        server.stop()
        app.close()
