"""Values of a pool for Prometheus."""

from spmd_worker.frontends.batch.pool.pool_progress import make_progress
from spmd_worker.frontends.batch.pool.view import PoolState


def values(state: PoolState) -> dict[str, float | None]:
    """Values by name, which base/metrics/prometheus.py describes; None for one that is unknown."""
    progress = make_progress(state)
    return {
        "pool_rows": state.job.num_rows,
        "pool_rows_done": state.num_rows_done,
        "pool_rows_allocated": state.num_rows_allocated,
        "pool_rows_per_second": progress.rows_per_s,
        "pool_output_tokens_per_second": progress.tokens_per_s,
        "pool_seconds_left": progress.left_s,
        "pool_workers_alive": len(progress.with_status("alive", "slow")),
        "pool_workers_slow": len(progress.with_status("slow")),
        "pool_workers_dead": len(progress.with_status("dead")),
        "pool_workers_ended": len(progress.with_status("ended", "failed", "left")),
        "pool_ranges_open": len(state.open_ranges),
        "pool_ranges_waiting": len(progress.waiting_ranges),
        "pool_merged": int(state.merged is not None),
    }
