"""The command: compose the configuration with Hydra, then plan or run on this rank.

    torchrun --nproc-per-node 2 launch.py model.path=DIR parallel.tensor_parallel_size=2 job.input=IN job.output=OUT

Exit codes: 0 every row has its output row; 1 the job failed; 70 the ranks diverged. Help, the composed configuration
and every error are printed once, by rank 0. Past this file nobody sees Hydra.
"""

import os
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from spmd_worker.config import ConfigError, RunConfig
from spmd_worker.config_compose import register_schema, to_run_config
from spmd_worker.model_shape import ModelConfigError, read_model_shape
from spmd_worker.parallel.environment import RankEnvironment, read_rank_environment

if TYPE_CHECKING:
    from collections.abc import Callable

CONF = str(Path(__file__).resolve().parent / "conf")


def main() -> int:
    """Returns the exit code."""
    environment = read_rank_environment()
    config = _quietly(_compose, environment)
    if config is None:
        return 0
    try:
        return _plan(config, environment) if config.plan else _run(config, environment)
    except (ConfigError, ModelConfigError) as error:
        return _fail(str(error), environment)


def _compose() -> RunConfig | None:
    """Hydra's work; None when it only printed something (--help, --cfg). Raises SystemExit for what it refuses."""
    composed: list[DictConfig] = []
    register_schema()
    hydra.main(version_base="1.3", config_path=CONF, config_name="config")(composed.append)()
    if not composed:
        return None
    try:
        return to_run_config(composed[0])
    except (ConfigError, OmegaConfBaseException) as error:
        # Hydra has returned: what is left is a value that a rule of ours refuses.
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None


def _quietly(compose: "Callable[[], RunConfig | None]", environment: RankEnvironment) -> RunConfig | None:
    """What Hydra prints, it prints on every rank; let only rank 0 be heard."""
    if environment.is_leader:
        return compose()
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        return compose()


def _plan(config: RunConfig, environment: RankEnvironment) -> int:
    """Print the layout and the memory plan: no weights, no device, no torch."""
    if not environment.is_leader:
        return 0
    # Imported here so that composing and --help stay quick.
    from spmd_worker.memory.plan import describe_plan, resolve_dtype
    from spmd_worker.parallel.layout import RankLayout, check_divides

    if config.model.path is None:
        raise ConfigError("model.path is not set: give a Hugging Face model folder (config.json is enough for a plan)")
    shape = read_model_shape(Path(config.model.path))
    parallel = config.parallel
    layout = RankLayout(parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.data_parallel_size)
    check_divides(layout, shape)
    device = "cpu" if config.device == "auto" else config.device
    print(describe_plan(config, shape, layout, resolve_dtype(config, shape, device)))
    return 0


def _run(config: RunConfig, environment: RankEnvironment) -> int:
    # Imported here because it brings torch, which planning and help do without.
    from spmd_worker.batch.job import JobError, run_job
    from spmd_worker.lockstep.errors import (
        DIVERGED_EXIT_CODE,
        RankFailedError,
        RanksDisagreeError,
        ReplicaDivergedError,
    )
    from spmd_worker.observability.log import configure_logging
    from spmd_worker.tokenizer import TokenizerError
    from spmd_worker.weights.safetensors_header import CheckpointError
    from spmd_worker.worker.device import DeviceError

    configure_logging(environment.rank, environment.world_size)
    try:
        run_job(config, environment)
    except (ReplicaDivergedError, RanksDisagreeError) as error:
        _fail(str(error), environment)
        return DIVERGED_EXIT_CODE
    except (RankFailedError, JobError) as error:
        return _fail(str(error), environment)
    except (OSError, DeviceError, TokenizerError, CheckpointError) as error:
        return _fail(str(error), environment, is_own=True)
    return 0


def _fail(message: str, environment: RankEnvironment, *, is_own: bool = False) -> int:
    """Print an error once: rank 0 speaks for all, and another rank only of an error that is its own."""
    if environment.is_leader:
        print(f"error: {message}", file=sys.stderr, flush=True)
    elif is_own:
        print(f"[rank {environment.rank}] error: {message}", file=sys.stderr, flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main())
