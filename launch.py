"""The command: composes the configuration, then plans or runs on this rank.

    torchrun --nproc-per-node 2 launch.py model.path=DIR parallel.tensor_parallel_size=2 job.input=IN job.output=OUT

Installed, it is the command `spmd-worker` (`torchrun --no-python spmd-worker` for several ranks). Exit codes: 0 every
row has its output row; 1 the job failed; 70 the ranks diverged. Help, the composed configuration and every error are
printed once, by rank 0.
"""

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from spmd_worker.base.process import check_limits, end_with_launcher
from spmd_worker.base.standard_streams import open_standard_streams
from spmd_worker.worker.memory.garbage import hold_collections, resume_collections

if __name__ == "__main__" or Path(sys.argv[0]).name == "spmd-worker":
    # Before anything that takes long: a rank must not outlive its launcher.
    end_with_launcher()
    open_standard_streams()
    hold_collections()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Until `main` handles Ctrl-C: nothing has begun that it could interrupt.
        signal.signal(signal.SIGINT, signal.SIG_DFL)

from spmd_worker.base.config.compose import as_yaml, shown_values
from spmd_worker.base.config.schema import RunConfig
from spmd_worker.base.errors import ConfigError, SpmdError
from spmd_worker.base.metrics.log import configure_logging
from spmd_worker.base.urls import without_credentials
from spmd_worker.base.version import version
from spmd_worker.frontends.rank_program import (
    CommandParser,
    compose_command,
    describe_keys,
    fail,
    prepare_torch,
    run_rank,
    write_report,
)
from spmd_worker.model_config.families.listing import describe_families
from spmd_worker.ranks.environment import RankEnvironment, read_rank_environment
from spmd_worker.resolved import ResolvedRun, find_model, resolve_run

_PATH_OPTIONS: Final = {"input": "job.input", "output": "job.output"}
"""Options that set a key to a path, which the shell may complete."""
_OPTIONS: Final = "--help, --cfg job, --config-dir DIR, --input PATH, --output PATH or --version"

_USAGE: Final = """\
Offline LLM inference in the ranks that torchrun started: rows in, completions out.

usage: torchrun --nproc-per-node N {ranks} KEY=VALUE... [OPTION...]
       {alone} KEY=VALUE... [OPTION...]

  {alone} families
  {alone} plan=true model.path=DIR
  {alone} model.path=DIR job.input=IN job.output=OUT
  torchrun --nproc-per-node 2 {ranks} parallel.tensor_parallel_size=2 \\
      model.path=DIR job.input=IN job.output=OUT

  GROUP.KEY=VALUE    sets a key
  GROUP=NAME         applies a named set of values; experiment=NAME a complete named run
  --input PATH       is job.input=PATH, and --output PATH job.output=PATH
  plan=true          prints ranks, bytes and blocks, and exits without loading weights
  families           prints the supported and unsupported models, with the reasons, and exits
  --help             prints this and the common keys; --help=all every key
  --cfg job          prints the composed configuration, and exits
  --config-dir DIR   adds named sets: DIR/GROUP/NAME.yaml

exit codes: 0 every row has its output row; 1 the job failed, or plan=true rejects it;
            70 the ranks diverged"""


def main(arguments: Sequence[str] | None = None) -> int:
    """`arguments` are the command line's without the program. Returns the exit code."""
    environment = RankEnvironment()
    try:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        environment = read_rank_environment()
        check_limits()
        return _act(_parse(sys.argv[1:] if arguments is None else arguments), environment)
    except SpmdError as error:
        return fail(str(error), environment, error.exit_code)
    except KeyboardInterrupt:
        # Every rank gets the signal, so none has to wait for rank 0.
        text = "interrupted: finished rows are kept, and the same command resumes the job"
        return fail(text, environment) if environment.is_leader else 1


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser("spmd-worker", f"give KEY=VALUE, {_OPTIONS}")
    for name in _PATH_OPTIONS:
        parser.add_argument(f"--{name}")
    parser.add_argument("--multirun", "-m", action="store_true")
    return parser.parse(arguments)


def _act(command: argparse.Namespace, environment: RankEnvironment) -> int:
    if command.overrides == ["families"]:
        return write_report(describe_families, environment)
    if command.multirun:
        raise ConfigError("--multirun is not supported: start the command once for each set of values")
    paths = {key: getattr(command, name) for name, key in _PATH_OPTIONS.items() if getattr(command, name) is not None}
    config = compose_command(command.overrides, command.config_dir, environment, paths)
    if command.version:
        return write_report(lambda: f"spmd-worker {version()}", environment)
    if command.help:
        shows_all = command.help == "all"
        return write_report(lambda: describe_keys(_usage(), config, command.config_dir, shows_all), environment)
    if command.cfg:
        return write_report(lambda: as_yaml(shown_values(config)).rstrip(), environment)
    return _plan(config, environment) if config.plan else _run(config, environment)


def _usage() -> str:
    """The usage, with the program as the user typed it: behind torchrun's options, and for a single rank."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if Path(sys.argv[0]).name == "spmd-worker":
        return _USAGE.format(ranks="--no-python spmd-worker", alone="spmd-worker")
    program = "-m launch" if spec is not None and spec.name == "launch" else "launch.py"
    return _USAGE.format(ranks=program, alone=f"python {program}")


def _plan(config: RunConfig, environment: RankEnvironment) -> int:
    """Print the layout and the memory plan, without weights, device and torch."""
    if not environment.is_leader:
        return 0
    # Imported here so that composing and --help stay fast.
    from spmd_worker.model.weights.weight_files import check_local_files
    from spmd_worker.worker.memory.plan_text import describe_plan, fold_plan, make_plan

    resolved = resolve_run(config, "cpu" if config.device == "auto" else config.device)
    if resolved.location.commit is None and config.model.load_format != "dummy":
        check_local_files(resolved.model_folder)
    plan = make_plan(resolved)
    write_report(lambda: without_credentials(fold_plan(describe_plan(plan))), environment)
    return 1 if plan.error_result else 0


def prefault_cache(config: RunConfig, environment: RankEnvironment) -> ResolvedRun | None:
    """Resolve a run on the CPU and begin to prefault its cache, before torch is imported. Returns the resolved run;
    None on a GPU, and for an error, which is found again, and reported, later.
    """
    from spmd_worker.frontends.batch.input.input_files import find_inputs, is_stream
    from spmd_worker.frontends.batch.prefault import prefault
    from spmd_worker.worker.memory.plan import cache_spec_of, check_cache_setting

    if config.device == "cuda" or (config.device == "auto" and Path("/proc/driver/nvidia").exists()):
        return None
    try:
        resolved = resolve_run(config, "cpu")
        check_cache_setting(resolved)
    except (SpmdError, OSError):
        return None
    computes_here = config.executor.backend in ("auto", "external_launcher", "uniproc")
    is_launched = environment.world_size == resolved.layout.world_size
    if computes_here and is_launched and config.job.input is not None and not is_stream(config.job.input):
        with contextlib.suppress(SpmdError, OSError):
            inputs, spec = find_inputs(config.job.input), cache_spec_of(resolved, environment.rank)
            prefault(config, spec, inputs, resolved.max_model_len, environment.local_world_size)
    return resolved


def _run(config: RunConfig, environment: RankEnvironment) -> int:
    # Before the model's files are read, which may log warnings.
    configure_logging(environment.rank, environment.world_size)
    # A download may take hours: before anything watches the ranks.
    find_model(config)
    # Before the tokenizer is read: its conversion may import torch.
    prepare_torch()
    resolved = prefault_cache(config, environment)
    # Imported here because it brings torch, which planning and help do without.
    from spmd_worker.frontends.batch.job import run_job
    from spmd_worker.frontends.batch.run_dir.shard import run_dir_of

    resume_collections()
    if config.job.private:
        os.umask(0o077)
    run_dir = run_dir_of(config.job)
    return run_rank(config, environment, run_dir, lambda watchdog: run_job(config, environment, watchdog, resolved))


if __name__ == "__main__":
    sys.exit(main())
