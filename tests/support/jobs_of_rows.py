"""Rows as a job of this process: what it answers them. Knows nothing of what answers should be."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet

from spmd_worker.base.config.schema import (
    CacheConfig,
    JobConfig,
    ModelOptions,
    RunConfig,
    SamplingConfig,
    SchedulerConfig,
)
from spmd_worker.base.config.speculation import SpeculativeConfig
from spmd_worker.frontends.batch.job import run_job
from spmd_worker.ranks.environment import RankEnvironment


def openai_row(custom_id: str, url: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """A line of a batch in OpenAI's format."""
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def write_rows(folder: Path, rows: Iterable[Any]) -> None:
    """The folder's rows.jsonl; a row that is a string is a line as it is."""
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    (folder / "rows.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def read_rows(folder: Path, name: str = "out.jsonl") -> list[dict[str, Any]]:
    """Objects of a file of JSON lines."""
    return [json.loads(line) for line in (folder / name).read_text(encoding="utf-8").splitlines()]


def job_config(
    folder: Path,
    model: Path,
    *,
    num_blocks: int = 64,
    options: Mapping[str, Any] | None = None,
    sampling: Mapping[str, Any] | None = None,
    scheduler: SchedulerConfig | None = None,
    speculation: SpeculativeConfig | None = None,
    **job: Any,
) -> RunConfig:
    """A job on the CPU from the folder's rows.jsonl to its out.jsonl; `options` are further keys of `model`, `sampling`
    defaults of rows, `job` keys of `job`."""
    files = {"input": str(folder / "rows.jsonl"), "output": str(folder / "out.jsonl")}
    return RunConfig(
        model=ModelOptions(path=str(model), **(options or {})),
        cache=CacheConfig(num_blocks=num_blocks),
        sampling=SamplingConfig(**(sampling or {})),
        scheduler=scheduler or SchedulerConfig(),
        speculative_config=speculation or SpeculativeConfig(),
        job=JobConfig(**{**files, **job}),
        device="cpu",
    )


def run_here(config: RunConfig) -> None:
    """Run the job in this process, as its only rank."""
    run_job(config, RankEnvironment())


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
    write_rows(folder, rows)
    config = job_config(
        folder,
        model,
        num_blocks=num_blocks,
        options={"dtype": dtype, **(options or {})},
        scheduler=scheduler,
        speculation=speculation,
        output=str(folder / output),
        step_log=step_log,
        media_root=None if media_root is None else str(media_root),
    )
    run_here(config)
    if output.endswith(".parquet"):
        return list(pyarrow.parquet.read_table(folder / output).to_pylist())
    return read_rows(folder, output)
