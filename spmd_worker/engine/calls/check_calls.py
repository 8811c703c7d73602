"""Calls by which an engine checks itself and says how it computes: its weights and its numerical policy."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from spmd_worker.base.errors import CheckpointError, WeightMismatchError
from spmd_worker.base.numerical_policy import NumericalPolicy
from spmd_worker.engine.data_parallel.agreement import agree_to_compute
from spmd_worker.engine.data_parallel.per_rank_prompts import PerRankCalls
from spmd_worker.engine.engine import Engine
from spmd_worker.model.weights.weight_comparison import digest_of_all
from spmd_worker.replica.sequence.sleep_tags import WEIGHTS

Result = TypeVar("Result")


class CheckCalls:
    """Methods of `LLM` that compare what it has and how it computes with another engine or with files."""

    def __init__(self, engine: Engine, turns: PerRankCalls) -> None:
        self._engine, self._turns = engine, turns

    def numerical_policy(self) -> NumericalPolicy:
        """Implementation, version and constants of each region of the model, equal on every rank: `regions` by name, a
        `digest` of all, and `as_dict` for a JSON file. A run with the same digest has the same bits, on any layout; a
        trainer that keeps it sees when an engine computes otherwise, and `difference` says in which region.
        """
        self._engine.life.check_open()
        return self._engine.numerical_policy()

    def weights_digest(self) -> str:
        """One digest of `tensor_digests`, which has the same conditions and errors."""
        return digest_of_all(self.tensor_digests())

    def tensor_digests(self) -> dict[str, str]:
        """Digest of each tensor of the model by checkpoint name, as it is held now: equal on any layout if dtype, shape
        and all elements are. Every rank calls this. A quantised weight has that of its dequantised values. Tensors are
        read one by one. Weights that were loaded are committed first, as by `generate`.

        Raises CheckpointError, on every rank, naming tensor, slice and ranks, if two ranks that hold a slice hold
        different elements; RuntimeError while weights sleep, and MissingWeightsError for an incomplete update.
        """
        executor = self._engine.executor
        digests, error = self._check("tensor_digests", {}, lambda: executor.collective_rpc("get_weights_digests")[0])
        if error:
            raise CheckpointError(error)
        return dict(digests)

    def check_weights(self, path: str | Path | None = None) -> None:
        """Compare all weights, as they are held now, with what a fresh load from a folder or a name of the hub would
        hold, by default the run's own model: bit by bit, block by block, without a second copy. Every rank calls this.
        Quantised weights are compared with what the fresh ones are quantised to, and `lora_merge` is merged again.

        Raises WeightMismatchError, on every rank, naming the first tensor that differs, rank, slice and element;
        CheckpointError for files that cannot be compared: other names or shapes, a sharded state. Otherwise as
        `tensor_digests`.
        """
        executor, folder = self._engine.executor, None if path is None else str(path)
        difference, error = self._check(
            "check_weights", {"path": folder}, lambda: executor.collective_rpc("compare_weights", args=(folder,))[0]
        )
        if error:
            raise CheckpointError(error)
        if difference:
            raise WeightMismatchError(difference)

    def _check(self, call: str, settings: Mapping[str, str | None], check: Callable[[], Any]) -> Any:
        return with_complete_weights(self._engine, self._turns, call, settings, check)


def with_complete_weights(
    engine: Engine,
    turns: PerRankCalls,
    call: str,
    settings: Mapping[str, str | int | None],
    compute: Callable[[], Result],
) -> Result:
    """Result of `compute` between two steps, when all ranks agree on the call and weights that were loaded are
    committed. Raises RuntimeError while weights sleep, MissingWeightsError for an incomplete update.
    """
    with engine.calls.inside(call):
        engine.life.check_open()

        def prepare() -> None:
            if WEIGHTS in engine.executor.sleeping_tags:
                engine.life.check_awake()
            engine.changes.complete_weights()

        turns.check_outside(call)
        agree_to_compute(engine, call, prepare, settings, lambda _: None)
        # Commits and versions that were queued take effect.
        engine.changes.ended += engine.run_step()
        return compute()
