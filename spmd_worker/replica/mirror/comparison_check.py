"""Checks a plan's comparisons of prefix-cache hits: what is compared exists, and is computed by the end of the step."""

from typing import NoReturn

from spmd_worker.replica.mirror.records import MirrorError
from spmd_worker.replica.sequence.hit_comparison import HitComparison
from spmd_worker.replica.sequence.step import StepPlan


def check_comparisons(plan: StepPlan, num_blocks: int, block_size: int, num_slots: int, num_groups: int = 1) -> None:
    """Raise MirrorError, before anything has changed, for a comparison that cannot be made. The plan's groups are
    checked already; there are `num_blocks` blocks and `num_slots` slots of states on the device, and tables have
    entries of `num_groups` groups of layers.
    """
    if not plan.hit_comparisons:
        return
    ends = {
        (group.request_id, data.sample_index): data.num_computed_tokens + data.num_scheduled_tokens
        for group in plan.groups
        for data in group.sequences
    }
    for comparison in plan.hit_comparisons:
        if comparison.key not in ends:
            _reject(plan, comparison, "a sequence that is not in groups", "one that is")
        end = ends[comparison.key]
        for copy in comparison.blocks:
            if not 0 <= copy.number < num_blocks:
                _reject(plan, comparison, f"block {copy.number}", f"from 0 to {num_blocks - 1}")
            if not 0 <= copy.block_index < end // block_size * num_groups:
                _reject(plan, comparison, f"index {copy.block_index}", f"that of a block below token {end}")
        for copy in comparison.states:
            if not 0 <= copy.number < num_slots:
                _reject(plan, comparison, f"slot {copy.number}", f"from 0 to {num_slots - 1}")
            if (copy.block_index + 1) * block_size != end:
                _reject(plan, comparison, f"the state after block {copy.block_index}", f"that after token {end}")


def check_repeated(plan: StepPlan) -> None:
    """Raise MirrorError for a row that the plan does not continue."""
    for row in plan.repeated_rows:
        if not 0 <= row < len(plan.continuing):
            raise MirrorError(
                f"step {plan.step}: field repeated_rows is {row}, the mirror expects from 0 to "
                f"{len(plan.continuing) - 1}"
            )


def _reject(plan: StepPlan, comparison: HitComparison, value: str, expected: str) -> NoReturn:
    where = f"step {plan.step}, request {comparison.key.request_id}, sample {comparison.key.sample_index}"
    raise MirrorError(f"{where}: field hit_comparisons is {value}, the mirror expects {expected}")
