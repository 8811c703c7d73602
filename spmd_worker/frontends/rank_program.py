"""Common parts of the programs that run in torchrun's ranks: options, help, and the process around its work.

The process sets up logging, threads and cores, the watchdog and signals, and ends when its rank, or another, fails.
Rank 0 prints help and errors, once. Imports no torch before a rank runs.
"""

import argparse
import faulthandler
import inspect
import logging
import os
import re
import signal
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from spmd_worker.base.config.compose import compose_run, named_sets, repeated_keys, shown_values
from spmd_worker.base.config.options import command_text, groups_of, keys_of
from spmd_worker.base.config.schema import RunConfig
from spmd_worker.base.errors import DIVERGED_EXIT_CODE, ConfigError, SpmdError
from spmd_worker.base.files import describe_os_error
from spmd_worker.base.liveness.error_file import write_elastic_file
from spmd_worker.base.liveness.failure_diagnosis import is_secondary
from spmd_worker.base.liveness.flight_recorder import flight_recorder_variables
from spmd_worker.base.liveness.signals import EndingSignals
from spmd_worker.base.liveness.watchdog import Watchdog
from spmd_worker.base.process import outlive_parent
from spmd_worker.base.standard_streams import discard_output, is_full
from spmd_worker.base.urls import without_credentials
from spmd_worker.ranks.cores import look_at_node, share_cores, take_share, waiting_variables
from spmd_worker.ranks.environment import RankEnvironment
from spmd_worker.worker.memory.host import keep_freed_memory

logger = logging.getLogger(__name__)

CONF: Final = Path(__file__).resolve().parents[2] / "conf"

_HELP_COLUMNS: Final = 100
_MEANING_COLUMN: Final = 36
_LESS_MEMORY: Final = (
    "lower cache.num_blocks, cache.gpu_memory_utilization or scheduler.max_num_batched_tokens, or raise the "
    "limits of this process (ulimit)"
)

_PATIENCE_S: Final = 5.0
"""Time that a rank that failed like rank 0 waits for it to print the error."""

_SIGNALLED_S: Final = 3.5
"""Time that a signalled rank stays to learn the cause, or longer while it reports it: a diagnosis takes at most
`SETTLE_S` (3 s), and all ranks must end within 5 s of a kill.
"""


class CommandParser(argparse.ArgumentParser):
    """Overrides and the options of every program. Raises ConfigError with `way_out` where argparse exits."""

    def __init__(self, program: str, way_out: str) -> None:
        super().__init__(prog=program, add_help=False, allow_abbrev=False)
        self._way_out = way_out
        self.add_argument("--help", "-h", action="store_const", const="common")
        # An option of its own: as a value of --help, it would also match the override after it.
        self.add_argument("--help=all", dest="help", action="store_const", const="all")
        self.add_argument("--version", action="store_true")
        self.add_argument("--cfg", "-c", choices=("job",))
        self.add_argument("--config-dir", "-cd", type=Path)
        self.add_argument("overrides", nargs="*")

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Options and overrides may be mixed."""
        command = self.parse_intermixed_args(arguments)
        if command.config_dir is not None and not command.config_dir.is_dir():
            raise ConfigError(f"--config-dir {command.config_dir} is not a folder: give one with GROUP/NAME.yaml")
        return command

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}: {_keys_of_options(message)}{self._way_out}")


def _keys_of_options(message: str) -> str:
    """The keys that vLLM's options in argparse's message are here; empty if it has none of them."""
    keys = {"model": "model.path"}
    for key in keys_of(RunConfig).values():
        keys |= {name: key.name for name in (key.keyword, *key.option.vllm_names) if name}
    options = dict.fromkeys(re.findall(r"(?<!\S)--([\w-]+)", message))
    found = [f"{keys[name]}=..." for name in (option.replace("-", "_") for option in options) if name in keys]
    return f"write {' '.join(found)}; " if found else ""


def compose_command(
    overrides: Sequence[str],
    config_dir: Path | None,
    environment: RankEnvironment,
    paths: Mapping[str, str] | None = None,
) -> RunConfig:
    """The run of a command line; rank 0 warns of keys with several values. Raises ConfigError."""
    config = compose_run(CONF, overrides, config_dir, paths)
    # Before logging is set up, which --help and --cfg do without.
    for text in repeated_keys(overrides, paths) if environment.is_leader else ():
        print(f"WARNING {without_credentials(text)}", file=sys.stderr, flush=True)
    return config


def write_report(text: Callable[[], str], environment: RankEnvironment) -> int:
    """Print it on rank 0. Returns the exit code."""
    if environment.is_leader:
        try:
            print(text(), flush=True)
        except BrokenPipeError:
            # The reader has closed the pipe, as in `spmd-worker --help | head`.
            discard_output()
        except OSError as error:
            discard_output()
            if not is_full(error):
                raise
            raise ConfigError(f"standard output: {error.strerror}: free space, or redirect it elsewhere") from None
    return 0


def describe_keys(usage: str, config: RunConfig, config_dir: Path | None, shows_all: bool) -> str:
    """`usage`, the named sets, and the keys with the values of `config`, names without users and queries: common or
    changed keys only, or all.
    """
    sets = named_sets([CONF, *([config_dir] if config_dir else [])])
    named = [f"{group}={', '.join(names)}" for group, names in sets.items() if names]
    lines = [usage, "", "named sets of values (GROUP=NAME)", *_wrapped("; ".join(named), 2)]
    lines += ["", "keys, with the values of this command line"]
    keys, groups, shown = keys_of(RunConfig), groups_of(RunConfig), shown_values(config)
    num_shown, shown_group = 0, None
    for key in keys.values():
        value = getattr(getattr(config, key.group) if key.group else config, key.field)
        if not (shows_all or key.option.is_common or value != key.default):
            continue
        if key.group != shown_group:
            shown_group = key.group
            heading = inspect.getdoc(groups[key.group]) if key.group else None
            lines += _wrapped((heading or "The device, and the seed of all rows.").removesuffix("."), 0)
        text = command_text(shown[key.group][key.field] if key.group else value)
        lines += _beside(f"  {key.name}={text}", key.option.meaning)
        num_shown += 1
    rest = "" if num_shown == len(keys) else ": --help=all prints every key"
    return "\n".join([*lines, "", f"{num_shown} of {len(keys)} keys{rest}"])


def _beside(setting: str, meaning: str) -> list[str]:
    """Two columns: the meaning next to the setting, or below one that is too long."""
    lines = _wrapped(meaning, _MEANING_COLUMN)
    if len(setting) < _MEANING_COLUMN:
        lines[0] = setting.ljust(_MEANING_COLUMN) + lines[0].lstrip()
        return lines
    return [setting, *lines]


def _wrapped(text: str, indent: int) -> list[str]:
    spaces = " " * indent
    return textwrap.wrap(text, _HELP_COLUMNS, initial_indent=spaces, subsequent_indent=spaces, break_on_hyphens=False)


@dataclass(frozen=True, slots=True)
class Drain:
    """Orderly end of a program on a signal: `begin` must not wait; a rank that runs `limit_s` later is ended."""

    begin: Callable[[], None]
    limit_s: float


def prepare_torch() -> None:
    """Set how torch's threads wait, before it is imported; no effect in a process that has imported it."""
    if "torch" not in sys.modules:
        os.environ.update(waiting_variables(os.environ))


def run_rank(
    config: RunConfig,
    environment: RankEnvironment,
    run_dir: Path | None,
    work: Callable[[Watchdog], None],
    drain: Drain | None = None,
) -> int:
    """Run this rank's `work`, watched; `run_dir` gets stacks and error records. Without `drain` a signal ends the rank
    at once. Returns the exit code, or ends the process if all ranks end together.
    """
    # Imported here because it brings torch, which planning and help do without.
    from spmd_worker.base.metrics.log import configure_logging
    from spmd_worker.ranks.rank_watchdog import watch_program
    from spmd_worker.worker.device import device_type

    keep_freed_memory()
    configure_logging(environment.rank, environment.world_size)
    if not faulthandler.is_enabled() and sys.__stderr__ is not None:
        # Stacks of a crash in native code.
        faulthandler.enable(sys.__stderr__)
    is_on_gpu = device_type(config.device) == "cuda"
    _share_the_node(environment, is_on_gpu, run_dir)
    watchdog = watch_program(environment, config.executor.timeout_s, run_dir, spins=is_on_gpu)
    # The launcher sends the others SIGTERM once a rank has ended: they stay a while to learn the cause.
    patience_s = _SIGNALLED_S if environment.world_size > 1 else 0.0
    begin, limit_s = (None, 0.0) if drain is None else (drain.begin, drain.limit_s)
    signals = EndingSignals(
        *(lambda: watchdog.before_exit(), watchdog.signalled, patience_s, begin, limit_s),
        is_reporting=lambda: watchdog.is_reporting,
        # Of several ranks the diagnosis says which received it.
        report=_report_signal if environment.world_size == 1 and drain is None else lambda number: None,
    )
    signals.install()
    watchdog.start()
    # From now on the watchdog checks the launcher, and ends this rank with its finished rows kept.
    outlive_parent()
    # The caller's process may continue after a single rank. A launcher ends one of several ranks, with our handlers.
    restores_handlers = environment.world_size == 1
    try:
        work(watchdog)
    except KeyboardInterrupt:
        # A second Ctrl-C, and an exit that takes long, are still handled.
        restores_handlers = False
        raise
    except SpmdError as error:
        if not error.is_known_to_all:
            return _end(error, environment, watchdog)
        watchdog.fail(error)
        code = fail(str(error), environment, error.exit_code, signals.is_ending)
        if code == DIVERGED_EXIT_CODE:
            # Exit at once: diverged ranks cannot close their groups in step.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        return code
    except OSError as error:
        return _end(error, environment, watchdog)
    except Exception as error:  # a bug, but for memory: its traceback is needed, and the other ranks must not wait
        if environment.world_size == 1 and not _is_out_of_memory(error):
            watchdog.fail(error)
            raise
        if not _is_out_of_memory(error) and not is_secondary(error):
            traceback.print_exception(error)
        return _end(error, environment, watchdog)
    finally:
        watchdog.stop()
        if restores_handlers:
            signals.uninstall()
    return 0


def fail(message: str, environment: RankEnvironment, code: int = 1, is_ending: threading.Event | None = None) -> int:
    """Print an error once, on rank 0, or on another rank if rank 0 has no error; returns `code`. The end of torchrun's
    summary has the error too. `is_ending` is set when the launcher ends this rank because rank 0 has left.
    """
    message, rank = without_credentials(message), environment.rank
    # The launcher ends all ranks when one has ended: another one must not end rank 0 before it has printed.
    if not environment.is_leader and (is_ending or threading.Event()).wait(_PATIENCE_S):
        return code
    print(f"{'' if environment.is_leader else f'[rank {rank}] '}error: {message}", file=sys.stderr, flush=True)
    write_elastic_file(message, message, time.time())
    return code


def _report_signal(number: int) -> None:
    text = f"error: received {signal.Signals(number).name}: the same command resumes the job"
    # Below the bar of a terminal.
    print(f"{os.linesep if sys.stderr.isatty() else ''}{text}", file=sys.stderr, flush=True)


def _end(error: Exception, environment: RankEnvironment, watchdog: Watchdog) -> int:
    """End this rank because of an error that other ranks do not know; the failure diagnosis reports it to them."""
    watchdog.fail(error)
    if environment.world_size == 1:
        text = f"out of memory ({error}): {_LESS_MEMORY}" if _is_out_of_memory(error) else describe_os_error(error)
        return fail(text, environment)
    return watchdog.leave(1)


def _is_out_of_memory(error: Exception) -> bool:
    """Whether numpy, Python or torch could not allocate, stacks of threads too. Some errors have no class of their
    own.
    """
    import torch

    is_one = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return is_one or any(words in str(error) for words in ("DefaultCPUAllocator", "can't start new thread"))


def _share_the_node(environment: RankEnvironment, is_on_gpu: bool, run_dir: Path | None) -> None:
    """Set this rank's threads and cores, and NCCL's output folder, before torch computes or makes groups."""
    import torch

    share = share_cores(look_at_node(), environment.local_rank, environment.local_world_size, os.environ)
    take_share(share, torch.set_num_threads, binds=not is_on_gpu)
    if is_on_gpu and run_dir is not None:
        os.environ.update(flight_recorder_variables(os.environ, run_dir))
    if environment.is_leader and environment.local_world_size > 1:
        logger.info("%s", share.reason)
