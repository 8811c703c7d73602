"""Checks a plan's comparisons of prefix-cache hits: what is compared exists, and is computed by the end of the step."""

from spmd_worker.replica.mirror.records import reject
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
        key = comparison.key
        if key not in ends:
            reject(plan, "hit_comparisons", "a sequence that is not in groups", "one that is", *key)
        end = ends[key]
        for copy in comparison.blocks:
            if not 0 <= copy.number < num_blocks:
                reject(plan, "hit_comparisons", f"block {copy.number}", f"from 0 to {num_blocks - 1}", *key)
            if not 0 <= copy.block_index < end // block_size * num_groups:
                reject(plan, "hit_comparisons", f"index {copy.block_index}", f"that of a block below token {end}", *key)
        for copy in comparison.states:
            if not 0 <= copy.number < num_slots:
                reject(plan, "hit_comparisons", f"slot {copy.number}", f"from 0 to {num_slots - 1}", *key)
            if (copy.block_index + 1) * block_size != end:
                reject(
                    plan,
                    "hit_comparisons",
                    f"the state after block {copy.block_index}",
                    f"that after token {end}",
                    *key,
                )


def check_repeated(plan: StepPlan) -> None:
    """Raise MirrorError for a row that the plan does not continue."""
    for row in plan.repeated_rows:
        if not 0 <= row < len(plan.continuing):
            reject(plan, "repeated_rows", row, f"from 0 to {len(plan.continuing) - 1}")
