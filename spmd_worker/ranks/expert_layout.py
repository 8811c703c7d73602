"""Expert placement: the rank of a tensor-parallel group that holds each expert, if ranks do not share columns."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from spmd_worker.base import files
from spmd_worker.base.config.parallel import ParallelConfig
from spmd_worker.base.errors import ConfigError
from spmd_worker.base.metrics.log import SAME_ON_EVERY_RANK
from spmd_worker.model_config.model_config import ModelConfig

logger = logging.getLogger(__name__)

PLACEMENTS: Final = ("linear", "round_robin")


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """`owners` has the rank of each expert, per layer or once for all layers. `is_exact`: expert outputs are gathered
    and added in their order on every rank, so that bits do not depend on the placement.
    """

    owners: tuple[tuple[int, ...], ...]
    is_exact: bool = False

    def owners_of(self, layer: int) -> tuple[int, ...]:
        return self.owners[layer] if len(self.owners) > 1 else self.owners[0]


def expert_layout_of(parallel: ParallelConfig, model_config: ModelConfig) -> ExpertLayout | None:
    """The layout of a configuration; None if ranks share the columns of each expert or, with a warning, if there are no
    experts. Raises ConfigError.
    """
    counts = {layer.experts.num_experts for layer in model_config.layers if layer.experts is not None}
    if not parallel.enable_expert_parallel:
        return None
    if not counts:
        logger.warning(
            "parallel.enable_expert_parallel=true has no effect: %s has no experts",
            model_config.architecture,
            extra=SAME_ON_EVERY_RANK,
        )
        return None
    (count,) = counts
    size, placement = parallel.tensor_parallel_size, parallel.expert_placement
    _warn_of_unshared_experts(size, parallel.data_parallel_size, count)
    if placement == "linear":
        # Nearly equal parts, earlier ones bigger.
        base, extra = divmod(count, size)
        owners = [[rank for rank in range(size) for _ in range(base + (rank < extra))]]
    elif placement == "round_robin":
        owners = [[number % size for number in range(count)]]
    else:
        owners = _owners_in(Path(placement), count, size, model_config.num_layers)
    return ExpertLayout(tuple(map(tuple, owners)), parallel.invariant_experts)


def _warn_of_unshared_experts(size: int, num_replicas: int, count: int) -> None:
    """Warn of layouts that differ from vLLM's, where replicas share experts too."""
    if size > 1 and num_replicas == 1:
        return
    if size == 1:
        message = (
            "parallel.enable_expert_parallel=true has no effect with parallel.tensor_parallel_size=1: experts are "
            "shared among the ranks of a tensor-parallel group, so each rank has all %d of them%s: raise "
            "parallel.tensor_parallel_size to share them"
        )
    else:
        message = (
            f"parallel.enable_expert_parallel=true shares experts among the {size} ranks of a tensor-parallel group "
            f"only: all %d of them are in every replica%s: raise parallel.tensor_parallel_size, and lower "
            f"parallel.data_parallel_size, for fewer on each rank"
        )
    replicas = f" (parallel.data_parallel_size={num_replicas})" if num_replicas > 1 else ""
    logger.warning(message, count, replicas, extra=SAME_ON_EVERY_RANK)


def _owners_in(path: Path, count: int, size: int, num_layers: int) -> list[list[int]]:
    where = f"parallel.expert_placement={path}"
    try:
        owners: Any = files.parse_json_object(files.read_regular_file(path)).get("owners")
    except (OSError, files.JsonError) as error:
        raise ConfigError(
            f"{where} is neither {' nor '.join(PLACEMENTS)}, and cannot be read as a JSON file: {error}"
        ) from None
    lists = owners if isinstance(owners, list) and owners and isinstance(owners[0], list) else [owners]
    is_valid = all(
        isinstance(each, list) and len(each) == count and all(type(rank) is int and 0 <= rank < size for rank in each)
        for each in lists
    )
    if len(lists) not in (1, num_layers) or not is_valid:
        raise ConfigError(
            f'{where} must be {{"owners": [...]}} with one rank from 0 to {size - 1} for each of the {count} experts, '
            f"or {num_layers} such lists, one a layer"
        )
    return lists
