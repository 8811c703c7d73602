"""This runtime's two doors: a batch job of `/v1/embeddings` rows, and `LLM.embed`; each in a process of its own."""

import json
import shutil
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from embed_sides.memory import MemoryMarks

NUM_SAMPLE_ROWS = 1000
"""Whose vectors are compared."""

NUM_WARM_ROWS = 64


def texts_of(rows: Path) -> list[str]:
    with rows.open(encoding="utf-8") as stream:
        return [json.loads(line)["body"]["input"] for line in stream]


def run_job(options: Namespace) -> dict[str, Any]:
    """`launch.py` on the rows, from what is loaded to the file that is complete. What counts rows is watched, for the
    memory at each mark.
    """
    import launch
    from spmd_worker.frontends.batch.job_counts import JobCounts

    output = options.work / f"answers{options.output_format}"
    run_dir = options.work / "run"
    shutil.rmtree(run_dir, ignore_errors=True)
    output.unlink(missing_ok=True)
    marks, add = MemoryMarks(options.rows), JobCounts.add

    def counted(self: Any, answer: Any) -> None:
        if not self.rows:
            marks.begin()
        add(self, answer)
        marks.add(1)

    JobCounts.add = counted
    try:
        code = launch.main(
            [
                *(f"model.path={options.model}", f"model.dtype={options.dtype}", "device=cpu"),
                *(f"job.input={options.rows_file}", f"job.output={output}", f"job.run_dir={run_dir}"),
                *options.keys,
            ]
        )
    finally:
        JobCounts.add = add
    if code:
        raise SystemExit(code)
    metrics = json.loads((run_dir / "metrics.json").read_text())
    if metrics["error_rows"]:
        raise SystemExit(f"{metrics['error_rows']} of {options.rows} rows have no vector: see {output}")
    return {
        "seconds": metrics["wall_s"] - metrics["load_s"],
        "answering_s": metrics["generate_s"],
        "tokens": metrics["prompt_tokens"],
        "steps": metrics["steps"],
        "memory_mib": marks.mib,
        "sample": _sample_of(output),
    }


def run_embed(options: Namespace) -> dict[str, Any]:
    """One call of `LLM.embed` with all texts."""
    from spmd_worker import LLM

    texts, marks = texts_of(options.rows_file), MemoryMarks(options.rows)
    given = dict(key.split("=", 1) for key in options.keys)
    settings = {key.rpartition(".")[2]: int(value) if value.isdecimal() else value for key, value in given.items()}
    with LLM(options.model, dtype=options.dtype, device="cpu", **settings) as llm:
        llm.embed(texts[:NUM_WARM_ROWS], use_tqdm=False)
        marks.begin()
        began_s = time.perf_counter()
        outputs = llm.embed(texts, use_tqdm=marks.as_bar)
        seconds = time.perf_counter() - began_s
    return {
        "seconds": seconds,
        "tokens": sum(len(each.prompt_token_ids) for each in outputs),
        "memory_mib": marks.mib,
        "sample": [each.outputs.embedding for each in outputs[:NUM_SAMPLE_ROWS]],
    }


def _sample_of(output: Path) -> list[list[float]]:
    """The first vectors of a job's output, of either format."""
    if output.suffix == ".parquet":
        import pyarrow.parquet

        (batch, *_) = pyarrow.parquet.ParquetFile(output).iter_batches(NUM_SAMPLE_ROWS, columns=["embedding"])
        found: list[list[float]] = batch.column(0).to_pylist()
        return found
    with output.open(encoding="utf-8") as stream:
        lines = [line for line, _ in zip(stream, range(NUM_SAMPLE_ROWS))]
    return [json.loads(line)["response"]["body"]["data"][0]["embedding"] for line in lines]
