"""Rank environment from torchrun's variables: this process's rank, the world, the store's address.

Reads the environment once and never writes it.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from spmd_worker.base.errors import ConfigError

_LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE")
"""Variables with the number of ranks on this node: torchrun's, and those of MPI's launchers."""
_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class RankEnvironment:
    """This process among the ranks; a process that no launcher started is rank 0 of 1.

    A launcher that does not set the number of ranks on this node (`is_local_size_known`) is assumed to have one node,
    unless `world_environment` finds more.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    is_launched: bool = False
    master_address: str | None = None
    is_local_size_known: bool = True

    @property
    def is_leader(self) -> bool:
        """Whether this rank alone touches the outside world."""
        return self.rank == 0


def read_rank_environment(variables: Mapping[str, str] = os.environ) -> RankEnvironment:
    """Read torchrun's variables. Raises ConfigError when some are missing."""
    if "RANK" not in variables or "WORLD_SIZE" not in variables:
        return RankEnvironment()
    missing = [name for name in _NEEDED if name not in variables]
    if missing:
        raise ConfigError(
            f"RANK is set but {', '.join(missing)} is not: start with torchrun, or unset RANK and WORLD_SIZE"
        )
    local_size = next((name for name in _LOCAL_SIZES if name in variables), None)
    return RankEnvironment(
        rank=_number(variables, "RANK"),
        world_size=_number(variables, "WORLD_SIZE"),
        local_rank=_number(variables, "LOCAL_RANK"),
        local_world_size=_number(variables, local_size or "WORLD_SIZE"),
        is_launched=True,
        master_address=variables["MASTER_ADDR"],
        is_local_size_known=local_size is not None,
    )


def _number(variables: Mapping[str, str], name: str) -> int:
    text = variables[name]
    if not text.isdigit():
        raise ConfigError(f"{name}={text!r} must be a whole number, as torchrun sets it")
    return int(text)
