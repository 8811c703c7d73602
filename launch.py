"""The command: compose the configuration, then plan or run on this rank.

    torchrun --nproc-per-node 2 launch.py model.path=DIR parallel.tensor_parallel_size=2 job.input=IN job.output=OUT

Installed, it is the command `spmd-worker` (`torchrun --no-python spmd-worker` for several ranks). Exit codes: 0 every
row has its output row; 1 the job failed; 70 the ranks diverged. Help, the composed configuration and every error are
printed once, by rank 0.
"""

import argparse
import faulthandler
import inspect
import logging
import os
import sys
import threading
import traceback
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NoReturn

from spmd_worker.process import check_limits, end_with_launcher, outlive_parent

if __name__ == "__main__" or Path(sys.argv[0]).name == "spmd-worker":
    # Before anything that takes its time: a rank must not outlive its launcher.
    end_with_launcher()

from spmd_worker.config.compose import as_plain, as_yaml, compose_run, named_sets
from spmd_worker.config.schema import RunConfig
from spmd_worker.distributed.cores import look_at_node, share_cores, take_share
from spmd_worker.distributed.environment import RankEnvironment, read_rank_environment
from spmd_worker.errors import DIVERGED_EXIT_CODE, ConfigError, SpmdError
from spmd_worker.liveness.failure_diagnosis import is_secondary
from spmd_worker.liveness.flight_recorder import flight_recorder_variables
from spmd_worker.liveness.signals import EndingSignals
from spmd_worker.liveness.watchdog import Watchdog
from spmd_worker.memory.host import keep_freed_memory
from spmd_worker.model_config.families.listing import describe_families
from spmd_worker.resolved import ResolvedRun, find_model, resolve_run
from spmd_worker.version import version

logger = logging.getLogger("spmd_worker.launch")

CONF: Final = Path(__file__).resolve().parent / "conf"

_PATH_OPTIONS: Final = {"input": "job.input", "output": "job.output"}
"""Options that are other words for a key, for paths as the shell gives them."""

_PATIENCE_S: Final = 5.0
"""How long a rank that failed like rank 0 waits for it to print the error, and a signalled one to learn the cause."""

_OPTIONS: Final = "--help, --cfg job, --config-dir DIR, --input PATH, --output PATH or --version"

_USAGE: Final = """\
Offline LLM inference in the ranks that torchrun started: rows in, completions out.

usage: torchrun --nproc-per-node N {ranks} KEY=VALUE... [--help] [--cfg job] [--config-dir DIR] [--version]
                [--input PATH] [--output PATH]
       {alone} KEY=VALUE...

  {alone} plan=true model.path=DIR
  {alone} families
  torchrun --nproc-per-node 2 {ranks} model.path=DIR parallel.tensor_parallel_size=2 job.input=IN job.output=OUT

  GROUP.KEY=VALUE    sets a key
  GROUP=NAME         takes a named set of values; experiment=NAME a whole named run
  --input PATH       is job.input=PATH, and --output PATH job.output=PATH
  plan=true          prints ranks, bytes and blocks, and exits without loading weights
  families           prints which models run, and which do not and why, and exits
  --cfg job          prints the configuration that the command line comes to, and exits
  --config-dir DIR   adds named sets: DIR/GROUP/NAME.yaml

exit codes: 0 every row has its output row; 1 the job failed; 70 the ranks diverged"""


def main(arguments: Sequence[str] | None = None) -> int:
    """`arguments` are the command line's without the program. Returns the exit code."""
    environment = RankEnvironment()
    try:
        environment = read_rank_environment()
        check_limits()
        return _act(_parse(sys.argv[1:] if arguments is None else arguments), environment)
    except SpmdError as error:
        return _fail(str(error), environment, error.exit_code)
    except KeyboardInterrupt:
        # Every rank gets the signal, so none has to wait for rank 0.
        text = "interrupted: what is finished is kept, and the same command goes on from there"
        return _fail(text, environment) if environment.is_leader else 1


class _Parser(argparse.ArgumentParser):
    """Raises where argparse would print, on every rank, and exit."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}: give KEY=VALUE, {_OPTIONS}")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(prog="spmd-worker", add_help=False, allow_abbrev=False)
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--version", action="store_true")
    parser.add_argument("--cfg", "-c", choices=("job",))
    parser.add_argument("--config-dir", "-cd", type=Path)
    for name in _PATH_OPTIONS:
        parser.add_argument(f"--{name}")
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("overrides", nargs="*")
    return parser.parse_intermixed_args(arguments)


def _act(command: argparse.Namespace, environment: RankEnvironment) -> int:
    if command.overrides == ["families"]:
        return _write_report(describe_families, environment)
    if command.multirun:
        raise ConfigError(
            "--multirun cannot run: a command runs one job; start the command once for each set of values"
        )
    if command.config_dir is not None and not command.config_dir.is_dir():
        raise ConfigError(f"--config-dir {command.config_dir} is not a folder: give one that holds GROUP/NAME.yaml")
    paths = {key: getattr(command, name) for name, key in _PATH_OPTIONS.items() if getattr(command, name) is not None}
    config = compose_run(CONF, command.overrides, command.config_dir, paths)
    if command.version:
        return _write_report(lambda: f"spmd-worker {version()}", environment)
    if command.help:
        return _write_report(lambda: _help(config, command.config_dir), environment)
    if command.cfg:
        return _write_report(lambda: as_yaml(config).rstrip(), environment)
    return _plan(config, environment) if config.plan else _run(config, environment)


def _write_report(text: Callable[[], str], environment: RankEnvironment) -> int:
    if environment.is_leader:
        try:
            print(text(), flush=True)
        except BrokenPipeError:
            # The reader has seen enough, as in `spmd-worker --help | head`.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _help(config: RunConfig, config_dir: Path | None) -> str:
    sets = named_sets([CONF, *([config_dir] if config_dir else [])])
    width = max(len(group) for group in sets)
    ranks, alone = _program()
    lines = [_USAGE.format(ranks=ranks, alone=alone), "", "named sets of values (GROUP=NAME)", ""]
    lines += [f"  {group:<{width}}  {', '.join(names) or '(none)'}" for group, names in sets.items()]
    lines += ["", "keys, with the values of this command line", ""]
    return "\n".join([*lines, *_described_keys(config)])


def _program() -> tuple[str, str]:
    """What follows torchrun's options, and what starts one rank; as the user typed it."""
    if Path(sys.argv[0]).name == "spmd-worker":
        return "--no-python spmd-worker", "spmd-worker"
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    is_module = spec is not None and spec.name == "launch"
    return ("-m launch", "python -m launch") if is_module else ("launch.py", "python launch.py")


def _described_keys(config: RunConfig) -> list[str]:
    """The configuration as YAML, each group under what its dataclass says of it."""
    lines: list[str] = []
    hints = typing.get_type_hints(RunConfig)
    for name, value in as_plain(config).items():
        if isinstance(value, dict):
            lines += [f"  # {line}".rstrip() for line in (inspect.getdoc(hints[name]) or "").splitlines()]
        lines += [f"  {line}" for line in as_yaml({name: value}).splitlines()]
    return lines


def _plan(config: RunConfig, environment: RankEnvironment) -> int:
    """Print the layout and the memory plan: no weights, no device, no torch."""
    if not environment.is_leader:
        return 0
    # Imported here so that composing and --help stay quick.
    from spmd_worker.memory.plan_text import describe_plan, make_plan

    resolved = resolve_run(config, "cpu" if config.device == "auto" else config.device)
    return _write_report(lambda: describe_plan(make_plan(resolved)), environment)


def prefault_cache(config: RunConfig, environment: RankEnvironment) -> ResolvedRun | None:
    """On the CPU: read the run, and begin to commit the cache's memory, while torch is not there yet. Returns what was
    read; None on a GPU, and where something is wrong, which is found again, and reported, later.
    """
    from spmd_worker.batch.input.input_files import find_inputs, is_stream
    from spmd_worker.batch.prefault import prefault
    from spmd_worker.memory.plan import cache_spec_of, check_cache_setting

    is_on_gpu = config.device == "cuda" or (config.device == "auto" and Path("/proc/driver/nvidia").exists())
    if is_on_gpu:
        return None
    try:
        resolved = resolve_run(config, "cpu")
        check_cache_setting(resolved)
    except (SpmdError, OSError):
        return None
    computes_here = config.executor.backend in ("auto", "external_launcher", "uniproc")
    if not computes_here or environment.world_size != resolved.layout.world_size:
        return resolved
    if config.job.input is not None and not is_stream(config.job.input):
        try:
            inputs, spec = find_inputs(config.job.input), cache_spec_of(resolved, environment.rank)
            prefault(config, spec, inputs, resolved.max_model_len, environment.local_world_size)
        except (SpmdError, OSError):
            return resolved
    return resolved


def _run(config: RunConfig, environment: RankEnvironment) -> int:
    # A download may take hours: before anything watches the ranks.
    find_model(config)
    resolved = prefault_cache(config, environment)
    # Imported here because it brings torch, which planning and help do without.
    from spmd_worker.batch.job import run_job
    from spmd_worker.batch.run_dir.job_files import run_dir_of
    from spmd_worker.distributed.rank_watchdog import watch_program
    from spmd_worker.metrics.log import configure_logging
    from spmd_worker.worker.device import device_type

    keep_freed_memory()
    if config.job.private:
        os.umask(0o077)
    configure_logging(environment.rank, environment.world_size)
    if not faulthandler.is_enabled() and sys.__stderr__ is not None:
        # Stacks of a crash in native code.
        faulthandler.enable(sys.__stderr__)
    is_on_gpu = device_type(config.device) == "cuda"
    _share_the_node(config, environment, is_on_gpu)
    watchdog = watch_program(environment, config.executor.timeout_s, run_dir_of(config.job), spins=is_on_gpu)
    # When a rank has ended, the launcher sends the others SIGTERM: they stay a while to learn the cause.
    patience_s = _PATIENCE_S if environment.world_size > 1 else 0.0
    signals = EndingSignals(lambda: watchdog.before_exit(), watchdog.signalled, patience_s)
    signals.install()
    watchdog.start()
    # From now on the watchdog looks for the launcher, and ends this rank with its finished rows kept.
    outlive_parent()
    try:
        run_job(config, environment, watchdog, resolved)
    except SpmdError as error:
        if not error.is_known_to_all:
            return _end(error, environment, watchdog)
        watchdog.fail(error)
        code = _fail(str(error), environment, error.exit_code, signals.is_ending)
        return _leave_together(code) if code == DIVERGED_EXIT_CODE else code
    except OSError as error:
        return _end(error, environment, watchdog)
    except Exception as error:  # a fault of ours: its traceback is wanted, and the other ranks must not wait
        if environment.world_size == 1:
            raise
        if not is_secondary(error):
            traceback.print_exception(error)
        return _end(error, environment, watchdog)
    finally:
        watchdog.stop()
    if environment.world_size == 1:
        # The caller's process may go on. Among others a launcher ends it, which must not meet the handlers of before.
        signals.uninstall()
    return 0


def _end(error: Exception, environment: RankEnvironment, watchdog: Watchdog) -> int:
    """End this rank after an error that concerns all: with several ranks the failure diagnosis names the cause."""
    if environment.world_size == 1:
        return _fail(str(error), environment)
    watchdog.fail(error)
    return watchdog.leave(1)


def _share_the_node(config: RunConfig, environment: RankEnvironment, is_on_gpu: bool) -> None:
    """Threads and cores for this rank, and where NCCL writes: both before torch computes or makes groups."""
    import torch

    from spmd_worker.batch.run_dir.job_files import run_dir_of

    share = share_cores(look_at_node(), environment.local_rank, environment.local_world_size, os.environ)
    take_share(share, torch.set_num_threads, binds=not is_on_gpu)
    if is_on_gpu:
        os.environ.update(flight_recorder_variables(os.environ, run_dir_of(config.job)))
    if environment.is_leader and environment.local_world_size > 1:
        logger.info("%s", share.reason)


def _leave_together(exit_code: int) -> NoReturn:
    """Exit at once with this code, waiting for nobody: the ranks that diverged cannot close their groups in step."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def _fail(message: str, environment: RankEnvironment, code: int = 1, is_ending: threading.Event | None = None) -> int:
    """Print an error once: rank 0 does, and another rank where rank 0 has no error. Returns `code`.

    `is_ending` is set when the launcher wants this rank to end, because rank 0 has left.
    """
    if environment.is_leader:
        print(f"error: {message}", file=sys.stderr, flush=True)
        return code
    # Ending first could end rank 0 before it has printed: the launcher ends all ranks when one has ended.
    if not (is_ending or threading.Event()).wait(_PATIENCE_S):
        print(f"[rank {environment.rank}] error: {message}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
