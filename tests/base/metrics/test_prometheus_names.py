"""Every value of a pool has its description in the file for Prometheus."""

from pathlib import Path

from timed_pools import World, make_pool

from spmd_worker.base.metrics.prometheus import PrometheusFile
from spmd_worker.frontends.batch.pool.pool_metrics import values
from spmd_worker.frontends.batch.pool.view import read_pool


def test_values_of_a_pool_are_written(tmp_path: Path):
    found = values(read_pool(make_pool(800, [World("one-1", 0, 100)], until_s=24.0)))
    PrometheusFile(tmp_path / "pool.prom").end({"rows": 800, **found}, is_complete=True)
    text = (tmp_path / "pool.prom").read_text()
    assert "spmd_worker_job_pool_rows 800.0\n" in text
    assert all(f"# HELP spmd_worker_job_{name} " in text for name, value in found.items() if value is not None)
