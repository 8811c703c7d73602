"""What the programs of ours that run in torchrun's ranks share: options, help, and this process around its work.

Around the work: logging, threads and cores, the watchdog, signals, and how a rank ends when it, or another, fails. Help
and every error are printed once, by rank 0. Imports no torch before a rank runs.
"""

import argparse
import faulthandler
import inspect
import logging
import os
import sys
import textwrap
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from spmd_worker.base.config.compose import named_sets
from spmd_worker.base.config.options import command_text, groups_of, keys_of
from spmd_worker.base.config.schema import RunConfig
from spmd_worker.base.errors import DIVERGED_EXIT_CODE, ConfigError, SpmdError
from spmd_worker.base.liveness.failure_diagnosis import is_secondary
from spmd_worker.base.liveness.flight_recorder import flight_recorder_variables
from spmd_worker.base.liveness.signals import EndingSignals
from spmd_worker.base.liveness.watchdog import Watchdog
from spmd_worker.base.process import outlive_parent
from spmd_worker.ranks.cores import look_at_node, share_cores, take_share, waiting_variables
from spmd_worker.ranks.environment import RankEnvironment
from spmd_worker.worker.memory.host import keep_freed_memory

logger = logging.getLogger(__name__)

CONF: Final = Path(__file__).resolve().parents[2] / "conf"

_PATIENCE_S: Final = 5.0
"""How long a rank that failed like rank 0 waits for it to print the error."""

_SIGNALLED_S: Final = 3.5
"""How long a signalled rank stays to learn the cause, and longer where it is telling it then: a diagnosis takes
`SETTLE_S` (3 s) at most, and within 5 s of a kill all ranks are to be gone.
"""


class CommandParser(argparse.ArgumentParser):
    """Overrides, and the options that every program has. Raises ConfigError where argparse would print, on every rank,
    and exit; `way_out` is the end of its sentence.
    """

    def __init__(self, program: str, way_out: str) -> None:
        super().__init__(prog=program, add_help=False, allow_abbrev=False)
        self._way_out = way_out
        self.add_argument("--help", "-h", action="store_const", const="common")
        # An option by itself: as a value of --help, the override behind it would be one too.
        self.add_argument("--help=all", dest="help", action="store_const", const="all")
        self.add_argument("--version", action="store_true")
        self.add_argument("--cfg", "-c", choices=("job",))
        self.add_argument("--config-dir", "-cd", type=Path)
        self.add_argument("overrides", nargs="*")

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Options and overrides may be mixed."""
        command = self.parse_intermixed_args(arguments)
        if command.config_dir is not None and not command.config_dir.is_dir():
            raise ConfigError(f"--config-dir {command.config_dir} is not a folder: give one that holds GROUP/NAME.yaml")
        return command

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}: {self._way_out}")


def write_report(text: Callable[[], str], environment: RankEnvironment) -> int:
    """Print it on rank 0. Returns the exit code."""
    if environment.is_leader:
        try:
            print(text(), flush=True)
        except BrokenPipeError:
            # The reader has seen enough, as in `spmd-worker --help | head`.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def describe_keys(usage: str, config: RunConfig, config_dir: Path | None, shows_all: bool) -> str:
    """`usage`, the named sets of values, and the keys with the values of `config`: those that people set and those that
    have another value than the default, or all.
    """
    sets = named_sets([CONF, *([config_dir] if config_dir else [])])
    width = max(len(group) for group in sets)
    lines = [usage, "", "named sets of values (GROUP=NAME)", ""]
    lines += [f"  {group:<{width}}  {', '.join(names) or '(none)'}" for group, names in sets.items()]
    lines += ["", "keys, with the values of this command line"]
    keys, groups = keys_of(RunConfig), groups_of(RunConfig)
    num_shown, group = 0, ""
    for key in keys.values():
        value = getattr(getattr(config, key.group) if key.group else config, key.field)
        if not (shows_all or key.option.is_common or value != key.default):
            continue
        if not num_shown or key.group != group:
            group = key.group
            lines += ["", *([f"  # {inspect.getdoc(groups[group])}"] if group else [])]
        meaning = textwrap.fill(key.option.meaning, 106, initial_indent=" " * 6, subsequent_indent=" " * 6)
        lines += [f"  {key.name}={command_text(value)}", meaning]
        num_shown += 1
    rest = "" if num_shown == len(keys) else ": --help=all prints every key"
    return "\n".join([*lines, "", f"{num_shown} of {len(keys)} keys{rest}"])


@dataclass(frozen=True, slots=True)
class Drain:
    """How a program ends by itself when it is asked to: `begin` must not wait. A rank that has not ended `limit_s`
    later ends as one that was signalled does.
    """

    begin: Callable[[], None]
    limit_s: float


def prepare_torch() -> None:
    """Before torch is imported: how its threads wait. Without effect in a process that has imported it."""
    if "torch" not in sys.modules:
        os.environ.update(waiting_variables(os.environ))


def run_rank(
    config: RunConfig,
    environment: RankEnvironment,
    run_dir: Path | None,
    work: Callable[[Watchdog], None],
    drain: Drain | None = None,
) -> int:
    """Do this rank's `work`, watched. Returns the exit code, or ends the process where the ranks end together.

    `run_dir` is where stacks and error records go. Without `drain` a signal ends the rank at once.
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
    # When a rank has ended, the launcher sends the others SIGTERM: they stay a while to learn the cause.
    patience_s = _SIGNALLED_S if environment.world_size > 1 else 0.0
    begin, limit_s = (None, 0.0) if drain is None else (drain.begin, drain.limit_s)
    signals = EndingSignals(
        lambda: watchdog.before_exit(),
        watchdog.signalled,
        patience_s,
        begin,
        limit_s,
        is_reporting=lambda: watchdog.is_reporting,
    )
    signals.install()
    watchdog.start()
    # From now on the watchdog looks for the launcher, and ends this rank with its finished rows kept.
    outlive_parent()
    # Of a rank alone the caller's process may go on. Among others a launcher ends it, which must not meet the handlers
    # of before.
    goes_on = environment.world_size == 1
    try:
        work(watchdog)
    except KeyboardInterrupt:
        # A second Ctrl-C, and a way out that takes long, are still acted on.
        goes_on = False
        raise
    except SpmdError as error:
        if not error.is_known_to_all:
            return _end(error, environment, watchdog)
        watchdog.fail(error)
        code = fail(str(error), environment, error.exit_code, signals.is_ending)
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
        if goes_on:
            signals.uninstall()
    return 0


def fail(message: str, environment: RankEnvironment, code: int = 1, is_ending: threading.Event | None = None) -> int:
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


def _end(error: Exception, environment: RankEnvironment, watchdog: Watchdog) -> int:
    """End this rank after an error that concerns all: with several ranks the failure diagnosis names the cause."""
    if environment.world_size == 1:
        return fail(str(error), environment)
    watchdog.fail(error)
    return watchdog.leave(1)


def _share_the_node(environment: RankEnvironment, is_on_gpu: bool, run_dir: Path | None) -> None:
    """Threads and cores for this rank, and where NCCL writes: both before torch computes or makes groups."""
    import torch

    share = share_cores(look_at_node(), environment.local_rank, environment.local_world_size, os.environ)
    take_share(share, torch.set_num_threads, binds=not is_on_gpu)
    if is_on_gpu and run_dir is not None:
        os.environ.update(flight_recorder_variables(os.environ, run_dir))
    if environment.is_leader and environment.local_world_size > 1:
        logger.info("%s", share.reason)


def _leave_together(exit_code: int) -> NoReturn:
    """Exit at once with this code, waiting for nobody: the ranks that diverged cannot close their groups in step."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
