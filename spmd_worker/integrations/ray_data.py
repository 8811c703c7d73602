"""Ray Data on this runtime: a dataset with columns of answers, from actors that own an engine each.

    import ray
    from spmd_worker.integrations.ray_data import answer_rows

    data = answer_rows(ray.data.read_parquet("rows.parquet"), "MODEL", prompt="question", sampling={"temperature": 0})

Answers are those of a job over the same rows, whatever blocks and batches Ray makes; rows that are sampled at random
need a key (`PipelineRows`). Bad rows have an error in their columns. An engine that fails is replaced in its actor, and
an actor that dies is started again by Ray, which gives it the rows again.
"""

import logging
from typing import Any, Final

from spmd_worker.base.config.extras import package_error

try:
    import pyarrow
    import ray
    from ray.data import ActorPoolStrategy, Dataset
except ImportError as error:
    raise package_error("ray", "ray", error) from error

from spmd_worker.base.errors import ConfigError
from spmd_worker.integrations.pipeline_rows import PipelineRows

logger = logging.getLogger(__name__)

_BATCH_ROWS: Final = 512


class RayRows:
    """Class for `Dataset.map_batches(RayRows, batch_format="pyarrow", ...)`, an engine in each of its actors. Arguments
    are those of `PipelineRows`, to be given as `fn_constructor_kwargs`.
    """

    def __init__(self, model: str, **options: Any) -> None:
        self._rows = PipelineRows(model, **options)
        self._rows.open()

    def __call__(self, batch: Any) -> Any:
        """The table with columns of answers. Raises ConfigError for another batch format."""
        if not isinstance(batch, pyarrow.Table):
            raise ConfigError(f"a batch is a {type(batch).__name__}: give map_batches batch_format='pyarrow'")
        return self._rows.answer_table(batch)


def answer_rows(
    dataset: Dataset,
    model: str,
    *,
    num_engines: int = 1,
    batch_size: int = _BATCH_ROWS,
    ray_options: dict[str, Any] | None = None,
    **options: Any,
) -> Dataset:
    """The dataset with columns of answers, by `num_engines` engines.

    An actor takes a GPU for each rank of its engine where the cluster has GPUs (or `device` says cuda), else a CPU;
    `ray_options` are further arguments of `map_batches`, such as `num_cpus` for more threads. All others are those of
    `PipelineRows`.
    """
    rows = PipelineRows(model, **options)
    reserved = {resource_of(options.get("device")): rows.num_ranks, **(ray_options or {})}
    num_cpus, most = num_engines * (reserved.get("num_cpus") or 0), ray.cluster_resources().get("CPU", 0)
    if num_cpus >= most > 0:
        logger.warning(
            "num_engines=%d engines reserve %g of the cluster's %g CPUs, and Ray's tasks that read and write wait for "
            "a free one: lower num_engines, unless the cluster grows",
            *(num_engines, num_cpus, most),
        )
    return dataset.map_batches(
        RayRows,
        fn_constructor_kwargs={"model": model, **options},
        batch_format="pyarrow",
        batch_size=batch_size,
        compute=ActorPoolStrategy(size=num_engines),
        udf_modifying_row_count=False,
        **reserved,
    )


def resource_of(device: str | None) -> str:
    """Ray's resource of a rank: its argument of `map_batches`."""
    if device in (None, "auto") and ray.cluster_resources().get("GPU", 0):
        device = "cuda"
    return "num_gpus" if device == "cuda" else "num_cpus"
