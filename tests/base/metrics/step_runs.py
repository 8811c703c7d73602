"""Steps made by hand, for tests of what is written and drawn of them."""

from spmd_worker.base.metrics.step_stats import StepStats

NUM_BLOCKS = 10

QUIET = StepStats(
    step=1,
    start_us=0,
    schedule_us=100,
    lockstep_us=200,
    execute_us=600,
    apply_us=50,
    num_rows=2,
    num_waiting=1,
    num_swapped=0,
    num_tokens=12,
    num_decode_tokens=2,
    num_sampled_tokens=2,
    num_blocks_used=4,
    num_blocks_cached=3,
    num_blocks_free=3,
    num_host_blocks_used=0,
    num_swapped_out=0,
    num_recomputed=0,
    num_swapped_in=0,
    num_cached_tokens=0,
    num_finished=0,
)
"""A step of 950 microseconds in which nothing special happens."""


def quiet_steps(num_steps: int, every_us: int = 1_000) -> list[StepStats]:
    return [QUIET._replace(step=index + 1, start_us=index * every_us) for index in range(num_steps)]


def pressed_steps() -> list[StepStats]:
    """Six steps with each kind of event; step 4 is the slowest, for the other ranks."""
    steps = quiet_steps(6, every_us=10_000)
    full = {"num_blocks_used": NUM_BLOCKS, "num_blocks_cached": 0, "num_blocks_free": 0}
    steps[1] = steps[1]._replace(num_cached_tokens=256, **full)
    steps[2] = steps[2]._replace(num_swapped_out=2, num_host_blocks_used=5, num_swapped=2, num_waiting=3, **full)
    steps[3] = steps[3]._replace(num_recomputed=1, lockstep_us=9_000, num_host_blocks_used=5, num_swapped=2, **full)
    steps[4] = steps[4]._replace(num_swapped_in=2, num_finished=1)
    return steps
