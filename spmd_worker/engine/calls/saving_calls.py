"""Calls that save the model as it is now, weights that were loaded since the start included."""

from collections.abc import Callable
from pathlib import Path

from spmd_worker.engine.calls.check_calls import with_complete_weights
from spmd_worker.engine.data_parallel.per_rank_prompts import PerRankCalls
from spmd_worker.engine.engine import Engine
from spmd_worker.worker.save_options import DEFAULT_SIZE, saved_folder, size_in_bytes


class SavingCalls:
    """Methods of `LLM` that write its weights to files."""

    def __init__(self, engine: Engine, turns: PerRankCalls) -> None:
        self._engine, self._turns = engine, turns

    def save_sharded_state(
        self, path: str | Path, pattern: str | None = None, max_size: int | str | None = None
    ) -> None:
        """Save each rank's parameters, for `load_format="sharded_state"` and the same layout and dtype. Every rank
        calls this; the folder must be one that all of them see. Configuration and tokenizer are copied.

        The folder is written completely or not at all: killed at any time, the process leaves the old folder or the new
        one. An existing folder must be empty, or one that was saved before. `pattern` names the files of a rank, by
        default model-rank-{rank}-part-{part}.safetensors, or with pipeline stages
        model-pp-{pp_rank}-tp-{tp_rank}-part-{part}.safetensors; `max_size` is the maximum of a file, bytes or text such
        as "5GB". Requests of `llm_engine.add_request` continue afterwards.

        Weights that were loaded are committed first, as by `generate`. Raises RuntimeError while weights sleep or
        within an update, MissingWeightsError for an incomplete one, ValueError or TypeError for invalid arguments, and
        SaveError, on every rank, for a disk that is full and weights that are held quantised (`quantization`, experts
        as stored).
        """
        size, folder = size_in_bytes(max_size), saved_folder(path)
        executor = self._engine.executor

        def save() -> None:
            executor.save_sharded_state(folder, pattern, size, self._engine.scheduler.weight_version)

        self._save("save_sharded_state", folder, {"pattern": pattern, "max_size": size}, save)

    def save_checkpoint(self, path: str | Path, max_size: int | str | None = DEFAULT_SIZE) -> None:
        """Save the model as a checkpoint in the hub's names, which transformers and every layout here open. The first
        rank writes the tensors of all ranks, in files of at most `max_size` with an index; tensors of the model's
        folder that are not used here are copied. Weights have the dtype of the run, and so says config.json; those of a
        quantised checkpoint are saved as they were dequantised.

        Calls, folder and errors are those of `save_sharded_state`.
        """
        size, folder = size_in_bytes(max_size), saved_folder(path)
        executor = self._engine.executor
        self._save("save_checkpoint", folder, {"max_size": size}, lambda: executor.save_checkpoint(folder, size))

    def save_streamed(self, path: str | Path) -> None:
        """`save_checkpoint` into one file that is read by several threads in large parts and packed meanwhile: starting
        from it takes no more memory than the weights and 64 MiB (on the CPU, without `quantization`). `load_format`
        auto recognises it.

        Calls, folder and errors are those of `save_sharded_state`.
        """
        folder, executor = saved_folder(path), self._engine.executor
        self._save("save_streamed", folder, {}, lambda: executor.save_streamed(folder))

    def _save(self, call: str, folder: Path, settings: dict[str, str | int | None], save: Callable[[], None]) -> None:
        with_complete_weights(self._engine, self._turns, call, {"path": str(folder), **settings}, save)
