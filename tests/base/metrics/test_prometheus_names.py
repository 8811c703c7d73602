"""Every value of a pool has its description in the file for Prometheus."""

from pathlib import Path

from timed_pools import World, make_pool

from spmd_worker.base.metrics.prometheus import PrometheusFile
from spmd_worker.frontends.batch.pool.pool_metrics import PoolValues, values
from spmd_worker.frontends.batch.pool.view import read_pool


def test_values_of_a_pool_are_written(tmp_path: Path):
    found = values(read_pool(make_pool(800, [World("one-1", 0, 100)], until_s=24.0)))
    PrometheusFile(tmp_path / "pool.prom").end({"rows": 800, **found}, is_complete=True)
    text = (tmp_path / "pool.prom").read_text()
    assert "spmd_worker_job_pool_rows 800.0\n" in text
    assert all(f"# HELP spmd_worker_job_{name} " in text for name, value in found.items() if value is not None)


def test_last_values_of_a_pool_are_fresh(tmp_path: Path):
    """The pool ends between two readings."""
    running, ended = (make_pool(800, [World("one-1", 0, 100)], until_s) for until_s in (24.0, float("inf")))
    pool = PoolValues(running, 1e6)
    assert pool(False) == {}
    file = PrometheusFile(tmp_path / "pool.prom", more=pool)
    file.update({"rows": 800})
    running.objects, running.folders = ended.objects, ended.folders
    file.end({"rows": 800}, is_complete=True)
    assert "spmd_worker_job_pool_merged 1.0\n" in (tmp_path / "pool.prom").read_text()


def test_pool_that_cannot_be_read_keeps_its_values():
    store = make_pool(800, [World("one-1", 0, 100)])
    pool = PoolValues(store, 1e6)
    before = pool(True)
    store.objects.clear()
    assert pool(True) == before != {}
