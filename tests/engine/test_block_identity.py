"""Identity of blocks for KV connectors: another layout has other blocks, however equal the bits of its answers are."""

import pytest
from ranks import REPOSITORY

from spmd_worker.base.config.parallel import ParallelConfig
from spmd_worker.base.config.schema import CacheConfig, ModelOptions, RunConfig
from spmd_worker.engine.kv_connector import block_identity
from spmd_worker.resolved import ResolvedRun, resolve_run

MODEL = str(REPOSITORY / "scripts" / "demo" / "model")


def identity(cache_dtype: str = "auto", **parallel: object) -> dict[str, str]:
    config = RunConfig(ModelOptions(path=MODEL), ParallelConfig(**parallel), cache=CacheConfig(dtype=cache_dtype))
    resolved: ResolvedRun = resolve_run(config, "cpu")
    return block_identity(resolved, f"kernels; row-parallel sums {resolved.row_sums}", "weights")


@pytest.mark.parametrize(
    ("parallel", "topics"),
    [
        ({"data_parallel_size": 2}, set()),
        ({"invariant_tensor_parallel": True, "max_leaves": 64}, set()),
        ({"tensor_parallel_size": 2}, {"layout"}),
        ({"pipeline_parallel_size": 2}, {"layout"}),
        ({"max_leaves": 2}, {"kernels"}),
        ({"tensor_parallel_size": 8}, {"layout", "kernels"}),
        ({"cache_dtype": "fp8"}, {"cache dtype"}),
    ],
)
def test_blocks_differ_by_layout_and_order_of_sums(parallel: dict[str, object], topics: set[str]):
    """A block has the heads and layers of a rank. Keys that change no number change no identity."""
    plain, other = identity(), identity(**parallel)
    assert {key for key in plain if plain[key] != other[key]} == topics
