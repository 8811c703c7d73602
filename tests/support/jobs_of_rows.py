"""Rows as a job of this process: what it answers them. Knows nothing of what answers should be."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet

from spmd_worker.base.config.schema import CacheConfig, JobConfig, ModelOptions, RunConfig, SchedulerConfig
from spmd_worker.base.config.speculation import SpeculativeConfig
from spmd_worker.frontends.batch.job import run_job
from spmd_worker.ranks.environment import RankEnvironment


def openai_row(custom_id: str, url: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """A line of a batch in OpenAI's format."""
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def answers_of_job(
    folder: Path,
    model: Path,
    rows: Iterable[Any],
    output: str = "out.jsonl",
    *,
    dtype: str = "float32",
    num_blocks: int = 256,
    scheduler: SchedulerConfig | None = None,
    step_log: bool = False,
    options: Mapping[str, Any] | None = None,
    media_root: Path | None = None,
    speculation: SpeculativeConfig | None = None,
) -> list[dict[str, Any]]:
    """The job's output in `folder`, in the rows' order; `output` is a name that ends with .jsonl or .parquet;
    `options` are further keys of `model`; images are below `media_root`."""
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    config = RunConfig(
        model=ModelOptions(path=str(model), dtype=dtype, **(options or {})),
        cache=CacheConfig(num_blocks=num_blocks),
        scheduler=scheduler or SchedulerConfig(),
        speculative_config=speculation or SpeculativeConfig(),
        job=JobConfig(
            input=str(folder / "rows.jsonl"),
            output=str(folder / output),
            step_log=step_log,
            media_root=None if media_root is None else str(media_root),
        ),
        device="cpu",
    )
    run_job(config, RankEnvironment())
    if output.endswith(".parquet"):
        return list(pyarrow.parquet.read_table(folder / output).to_pylist())
    return [json.loads(line) for line in (folder / output).read_text().splitlines()]
