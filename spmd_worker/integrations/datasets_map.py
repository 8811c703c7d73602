"""Hugging Face `datasets` on this runtime: `Dataset.map` with an engine, and with its cache.

    from spmd_worker.integrations.datasets_map import DatasetRows

    with DatasetRows("MODEL", prompt="question", sampling={"temperature": 0}) as rows:
        data = rows.answer_dataset(data)

Order is kept. A row's key is its column `key`, else `index`, else its number in the dataset, so answers are those of a
job over the same rows. The map's fingerprint is a digest of all that answers depend on (model files, configuration,
code): an equal map is read from the cache of `datasets`, without an engine, and a changed checkpoint is computed again.
"""

import functools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final

import torch

from spmd_worker.base.errors import ConfigError
from spmd_worker.compat.engine_args import run_config
from spmd_worker.engine.startup import package_versions, read_run
from spmd_worker.frontends.batch.run_dir.adapter_digests import adapter_digests
from spmd_worker.frontends.batch.run_dir.manifest import make_manifest
from spmd_worker.frontends.batch.run_dir.media_answers import media_answers
from spmd_worker.integrations.pipeline_rows import PipelineRows, has_engine, sampling_by_name
from spmd_worker.model_config.gguf.files import linked_files
from spmd_worker.ranks.cores import look_at_node, share_cores, take_share

_BATCH_ROWS: Final = 1000
_DEVICES: Final = "CUDA_VISIBLE_DEVICES"
_PROCESSES: Final = "SPMD_WORKER_MAP_PROCESSES"
"""Variable with the process that maps and the number of those that compute for it: an argument would be part of the
map's fingerprint.
"""
_FIRST_PROCESS: Final = os.getpid()


class DatasetRows(PipelineRows):
    """Function for `map(..., batched=True, with_indices=True, with_rank=True)`, as `answer_dataset` calls it. Arguments
    are those of `PipelineRows`.
    """

    answers_depend_on: str | None = None
    """Part of the fingerprint, set by `answer_dataset`."""

    def answer_dataset(
        self, dataset: Any, *, batch_size: int = _BATCH_ROWS, num_proc: int | None = None, **options: Any
    ) -> Any:
        """The dataset with columns of answers. `options` are further arguments of `map`, such as `remove_columns`.

        With `num_proc` each process has an engine of its own: on GPUs, those of its rank, with its share of this
        process's cores. Raises ConfigError if this process has a running engine, whose threads a forked one would lack.
        """
        from datasets import IterableDataset

        if num_proc is not None and has_engine():
            raise ConfigError(
                f"num_proc={num_proc} forks this process, which has a running engine: close() it, or give none"
            )
        with sampling_by_name():
            self.answers_depend_on = answers_depend_on(self.model, self.options)
        if not isinstance(dataset, IterableDataset):
            options |= {"num_proc": num_proc, "with_rank": True}
        if dataset.features is not None:
            options.setdefault("features", self._features(dataset, options.get("remove_columns") or ()))
        with _told_processes(num_proc or 1):
            return dataset.map(self, batched=True, batch_size=batch_size, with_indices=True, **options)

    def _features(self, dataset: Any, removed: Sequence[str] | str) -> Any:
        """Types of the result's columns: those of answers are text, also if the first batches have none."""
        from datasets import Features, Value

        left_out = [removed] if isinstance(removed, str) else list(removed)
        kept = {name: kind for name, kind in dataset.features.items() if name not in left_out}
        return Features(kept | {name: Value("string") for name in self.names})

    def __call__(
        self, batch: Mapping[str, Sequence[Any]], indices: Sequence[int], rank: int | None = None
    ) -> dict[str, list[str | None]]:
        """Columns of answers to a batch. `rank` is the process's, None without processes."""
        names = list(batch)
        rows = [dict(zip(names, values, strict=True)) for values in zip(*[batch[name] for name in names], strict=True)]
        keyed = [self.keyed(row, index) for row, index in zip(rows, indices, strict=True)]
        # With one process datasets gives no rank, and a map that ended early may go on in this process with one.
        num_processes, rank = _num_processes(), rank or 0
        if not num_processes:
            return self.columns_of(keyed)
        if not self.is_open and self.options.get("device") != "cpu":
            choose_devices(rank, self.num_ranks)
        return _engine_thread(os.getpid(), rank, num_processes).submit(self.columns_of, keyed).result()

    def __enter__(self) -> "DatasetRows":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _num_processes() -> int:
    """Number of processes that compute for another one, if this is one of them; else 0."""
    told = os.environ.get(_PROCESSES)
    first, count = map(int, told.split()) if told else (_FIRST_PROCESS, 1)
    return 0 if os.getpid() == first else count


@functools.cache
def _engine_thread(process: int, rank: int, num_processes: int) -> ThreadPoolExecutor:
    """Thread of this process, of rank `rank` of a map, that computes. The first one would wait forever, if its parent
    had computed before the fork, for OpenMP's threads, which a process does not inherit.
    """
    del process  # a forked one has its parent's threads by name alone
    share = share_cores(look_at_node(), rank, num_processes, os.environ)
    return ThreadPoolExecutor(1, "engine", lambda: take_share(share, torch.set_num_threads, binds=False))


@contextmanager
def _told_processes(num_processes: int) -> Iterator[None]:
    os.environ[_PROCESSES] = f"{os.getpid()} {num_processes}"
    try:
        yield
    finally:
        os.environ.pop(_PROCESSES, None)


def choose_devices(rank: int, num_ranks: int) -> None:
    """Leave this process the GPUs of the engine of process `rank`, which has `num_ranks`, of those that it may use."""
    given = os.environ.get(_DEVICES, "")
    names = given.split(",") if given else [str(number) for number in range((rank + 1) * num_ranks)]
    own = names[rank * num_ranks : (rank + 1) * num_ranks]
    if len(own) < num_ranks:
        raise ConfigError(f"{_DEVICES}={given}: process {rank} of num_proc needs {num_ranks} more: lower num_proc")
    os.environ[_DEVICES] = ",".join(own)


def answers_depend_on(model: str, options: Mapping[str, Any]) -> str:
    """All that answers of an engine with these options depend on, besides the rows: a job's manifest. Reads the model's
    files, and starts nothing. Raises the errors of `LLM` for options that cannot run.
    """
    resolved = read_run(run_config({"model": model, **options}))
    manifest = make_manifest(
        *(resolved, package_versions(), None if resolved.tokenizer is None else resolved.tokenizer.fingerprint()),
        inputs=None,
        adapters=adapter_digests(resolved.config.model),
        media=media_answers(resolved),
    )
    # A few changed weights may lie between the manifest's samples: files of another time are computed again.
    folder = resolved.model_folder
    weights = [(path.name, path.stat()) for path in (*sorted(folder.rglob("*.safetensors")), *linked_files(folder))]
    files = [(name, status.st_size, status.st_mtime_ns) for name, status in weights]
    return json.dumps([manifest["answers"], files], sort_keys=True, default=str)
