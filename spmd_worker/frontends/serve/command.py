"""The server's command: an OpenAI-compatible API on rank 0, over the engine of all ranks."""

import argparse
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from typing import Final

from spmd_worker.base.config.compose import as_yaml, shown_values
from spmd_worker.base.config.options import Key, keys_of
from spmd_worker.base.config.schema import RunConfig
from spmd_worker.base.errors import ConfigError, SpmdError
from spmd_worker.base.liveness.watchdog import Watchdog
from spmd_worker.base.process import check_limits
from spmd_worker.base.version import version
from spmd_worker.frontends.rank_program import (
    CommandParser,
    Drain,
    compose_command,
    describe_keys,
    fail,
    prepare_torch,
    run_rank,
    write_report,
)
from spmd_worker.frontends.serve.exchange import RequestExchange
from spmd_worker.frontends.serve.http_server import MORE_CONNECTIONS, bind, is_loopback, require_server
from spmd_worker.ranks.environment import RankEnvironment, read_rank_environment
from spmd_worker.resolved import find_model, highest_num_seqs
from spmd_worker.worker.memory.garbage import resume_collections

KEY_VARIABLE: Final = "SPMD_WORKER_API_KEY"

_OPTIONS: Final = "--host HOST, --port PORT, --api-key KEY, --help, --cfg job, --config-dir DIR or --version"

_MORE_S: Final = 10.0
"""A draining rank is ended this long after the requests' time limit."""

_USAGE: Final = """\
OpenAI-compatible API server over the engine of all ranks: rank 0 answers clients, the others
follow its steps.

usage: torchrun --nproc-per-node N -m spmd_worker.serve KEY=VALUE... [OPTION...]
       python -m spmd_worker.serve KEY=VALUE... [OPTION...]

  torchrun --nproc-per-node 2 -m spmd_worker.serve model.path=DIR parallel.tensor_parallel_size=2

  GROUP.KEY=VALUE    sets a key
  GROUP=NAME         applies a named set of values
  --host HOST        is serve.host=HOST, and --port PORT serve.port=PORT
  --api-key KEY      the key that clients send (Authorization: Bearer KEY); other users see it in
                     the process list, so prefer the environment variable SPMD_WORKER_API_KEY;
                     without either a random key is printed once
  --help             prints this and the common keys; --help=all every key
  --cfg job          prints the composed configuration, and exits
  --config-dir DIR   adds named sets: DIR/GROUP/NAME.yaml

paths: POST /v1/completions, /v1/chat/completions, /tokenize, /detokenize, for a pooling model
       /v1/embeddings, /v1/score, /v1/rerank (/score, /rerank, /v2/rerank), /classify, /pooling,
       for a model of speech /v1/audio/transcriptions, /v1/audio/translations; GET /v1/models,
       /version, /metrics, and without a key /health, /ping

exit codes: 0 ended by request; 1 failure; 70 the ranks diverged"""


def main(arguments: Sequence[str] | None = None, variables: Mapping[str, str] = os.environ) -> int:
    """`arguments` are the command line's without the program. Returns the exit code."""
    environment = RankEnvironment()
    try:
        environment = read_rank_environment()
        check_limits()
        return _act(_parse(sys.argv[1:] if arguments is None else arguments), environment, variables)
    except SpmdError as error:
        return fail(str(error), environment, error.exit_code)
    except KeyboardInterrupt:
        # Before the ranks run.
        return 1


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser("spmd_worker.serve", f"give KEY=VALUE, {_OPTIONS}")
    for name in ("host", "port", "api-key"):
        parser.add_argument(f"--{name}")
    return parser.parse(arguments)


def _act(command: argparse.Namespace, environment: RankEnvironment, variables: Mapping[str, str]) -> int:
    given = [
        f"serve.{name}={getattr(command, name)}" for name in ("host", "port") if getattr(command, name) is not None
    ]
    config = compose_command([*command.overrides, *given], command.config_dir, environment)
    if command.version:
        return write_report(lambda: f"spmd-worker {version()}", environment)
    if command.help:
        shows_all = command.help == "all"
        return write_report(lambda: describe_keys(_USAGE, config, command.config_dir, shows_all), environment)
    if command.cfg:
        return write_report(lambda: as_yaml(shown_values(config)).rstrip(), environment)
    return _run(config, environment, variables.get(KEY_VARIABLE) if command.api_key is None else command.api_key)


def _of_jobs() -> list[Key]:
    """Keys of `job` that name files, which a server neither reads nor writes; it knows prompts with images and audio.
    Other keys of jobs are ignored, so that a set of values may be a job's and a server's.
    """
    keys = [key for key in keys_of(RunConfig).values() if key.group == "job"]
    return [key for key in keys if key.option.is_path and not key.field.startswith("media_")]


def _run(config: RunConfig, environment: RankEnvironment, api_key: str | None) -> int:
    unused = [key.name for key in _of_jobs() if getattr(config.job, key.field) != key.default]
    if config.plan or unused:
        names = [*(["plan"] if config.plan else []), *unused]
        keys, them = " and ".join(names), "it" if len(names) == 1 else "them"
        raise ConfigError(f"{keys}: for launch.py alone, a server has no rows and makes no files: leave {them} out")
    require_server()
    host, port = config.serve.host, config.serve.port
    if api_key == "":
        # Perhaps of a shell variable that was not set: a random key would lock all clients out.
        raise ConfigError(f"{KEY_VARIABLE} or --api-key is empty: give a key, or neither of them for a random one")
    if api_key is not None and not (api_key.isascii() and api_key.isprintable() and " " not in api_key):
        raise ConfigError(f"{KEY_VARIABLE} or --api-key: a key is printable ASCII without spaces")
    if api_key is None and not is_loopback(host):
        raise ConfigError(
            f"serve.host={host} is reachable from other machines, which requires your own key: set {KEY_VARIABLE}, or "
            f"use serve.host=127.0.0.1"
        )
    # A download may take hours: before the watchdog starts.
    find_model(config)
    prepare_torch()
    # Imported here because it imports torch, which help does without.
    from spmd_worker.frontends.serve.server import Listener, serve

    resume_collections()
    max_media_bytes = config.job.media_window_gib * (1 << 30)
    exchange = RequestExchange(highest_num_seqs(config) + config.serve.max_queued, max_media_bytes)

    def answer(watchdog: Watchdog) -> None:
        listener = None
        if environment.is_leader:
            # One connection for each request that may wait.
            check_limits(exchange.max_sequences + MORE_CONNECTIONS)
            # Before the slow load of the model: the port may be in use. Watched, so that the other ranks learn of it.
            listener = Listener(bind(host, port), api_key or secrets.token_urlsafe(24), api_key is None)
        serve(config, environment, watchdog, exchange, listener)

    drain = Drain(lambda: exchange.end("the server is ending"), config.serve.drain_s + _MORE_S)
    return run_rank(config, environment, None, answer, drain)
