"""Row-parallel sums in words: their order, which is a part of the name of a run's arithmetic, and the tensor-parallel
sizes that add in it. Runs with equal names have equal bits, if their kernels are the same. Needs no torch.
"""

import logging
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

from spmd_worker.base.config.parallel import ParallelConfig
from spmd_worker.base.errors import ConfigError
from spmd_worker.base.metrics.log import SAME_ON_EVERY_RANK
from spmd_worker.model_config.model_config import ModelConfig
from spmd_worker.ranks.expert_layout import ExpertLayout
from spmd_worker.ranks.leaves import obstacle_to
from spmd_worker.ranks.topology import RankLayout

logger = logging.getLogger(__name__)

_SIZE: Final = "tensor_parallel_size"


def row_sums_name(layout: RankLayout, *, has_experts: bool, is_exact: bool, has_adapters: bool) -> str:
    """Order of row-parallel sums, and the sizes that add so. `is_exact`: they are integers, which adapters' are
    not.
    """
    size = layout.tensor_parallel_size
    if is_exact and not has_adapters:
        return f"exactly (any {_SIZE})"
    head = "exactly, and those of adapters " if is_exact else ""
    if layout.has_leaves:
        return f"{head}in {_leaves(layout.num_leaves)} ({_SIZE} {_listed(_same_sizes(layout.num_leaves))})"
    return f"{head}by {size} ranks{_expert_words(layout.experts) if has_experts else ''} ({_SIZE} {size})"


def log_same_sizes(parallel: ParallelConfig, model_config: ModelConfig, layout: RankLayout) -> None:
    """Log the sizes that have the bits of one rank; warn if the run's has others, or raise ConfigError if the
    configuration wants these. For a layout whose ranks add by a tree.
    """
    key = f"parallel.{_SIZE}={layout.tensor_parallel_size}"
    words, sizes = _leaves_words(parallel, model_config, layout), _same_sizes(layout.num_leaves)
    if layout.has_leaves:
        given = (f"parallel.{_SIZE} {_listed(sizes)}", _leaves(layout.num_leaves))
        logger.info("answers have the same bits with %s (%s)", *given, extra=SAME_ON_EVERY_RANK)
        return
    others = f"sizes with the bits of one rank are {_listed(sizes, 'and')}"
    others = others if len(sizes) > 1 else "no other size has the bits of one rank"
    if parallel.invariant_tensor_parallel:
        raise ConfigError(
            f"parallel.invariant_tensor_parallel=true is not possible with {key}: row-parallel sums have {words}; "
            f"{others}. Choose parallel.{_SIZE} {_listed(sizes)}, or leave parallel.invariant_tensor_parallel out"
        )
    text = "%s: answers have bits of their own, which may differ from those of one rank: row-parallel sums have %s; %s"
    logger.warning(text, key, words, others, extra=SAME_ON_EVERY_RANK)


def describe_row_sums(parallel: ParallelConfig, model_config: ModelConfig, layout: RankLayout, name: str) -> str:
    """The line of a plan. `name` is the run's `row_sums_name`."""
    if name.startswith("exactly"):
        return f"row-parallel sums are added {name}"
    words, sizes = _leaves_words(parallel, model_config, layout), _same_sizes(layout.num_leaves)
    if not layout.has_leaves:
        return f"row-parallel sums are added {name}, with bits of their own: those of one rank have {words}"
    same = f"parallel.{_SIZE} {_listed(sizes)}" if len(sizes) > 1 else "one rank alone"
    return f"row-parallel sums have {words}: the same bits with {same}"


def _leaves_words(parallel: ParallelConfig, model_config: ModelConfig, layout: RankLayout) -> str:
    """The number of leaves, and the reason why there are no more."""
    count = layout.num_leaves
    if count == parallel.max_leaves:
        return f"{_leaves(count)}, as parallel.max_leaves allows"
    reason = obstacle_to(model_config, 2 * count) or "parallel.invariant_tensor_parallel is off"
    return f"{_leaves(count)}, since {reason}"


def _same_sizes(num_leaves: int) -> list[int]:
    """Sizes with the bits of one rank: the number is a power of two, and each smaller one divides the model."""
    return [1 << power for power in range(num_leaves.bit_length())]


def _leaves(count: int) -> str:
    return "1 leaf" if count == 1 else f"{count} leaves"


def _listed(sizes: Sequence[int], word: str = "or") -> str:
    *first, last = map(str, sizes)
    return f"{', '.join(first)} {word} {last}" if first else last


def _expert_words(experts: ExpertLayout | None) -> str:
    """Share of experts of ranks without complete leaves, on which the order of a sum depends."""
    if experts is None:
        return ", columns of experts"
    if experts.is_exact:
        return ", complete experts"
    return f", experts placed {blake2b(repr(experts.owners).encode(), digest_size=4).hexdigest()}"
