"""Calls that change weights: tensors by their checkpoint names, in one call or several, and their versions."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from spmd_worker.compat.key_names import speaks_keywords
from spmd_worker.engine.data_parallel.agreement import agree_to_compute, fail_call
from spmd_worker.engine.data_parallel.per_rank_prompts import PerRankCalls
from spmd_worker.engine.data_parallel.weights import broadcast_weights
from spmd_worker.engine.engine import Engine


@speaks_keywords  # what `weight_update` yields is called without LLM
class WeightCalls:
    """Methods of `LLM` that give it new weights."""

    def __init__(self, engine: Engine, turns: PerRankCalls) -> None:
        self._engine, self._turns = engine, turns

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Later prompts find nothing of what is cached now, on every rank; returns True. For weights that were changed
        in place, under the same version. Under torchrun the first rank of each replica speaks for it.

        Weights that were loaded since the last commit are committed, which every rank does: MissingWeightsError lists
        those of the model that were not loaded. Raises ValueError for `reset_running_requests` while requests of
        `llm_engine.add_request` are unanswered. What the host tier holds goes with or without `reset_connector`.
        """
        self._engine.changes.reset_prefix_cache(reset_running_requests)
        return True

    def set_weight_version(self, version: int) -> None:
        """Say that the weights were changed in place (by a `collective_rpc` of your own): what was cached is not found.

        Under torchrun the first rank of each replica speaks for it: call this on every rank. Any other number than the
        last that fits 64 bits will do; a trainer gives its step. Raises TypeError or ValueError for anything else.
        """
        self._engine.changes.set_weight_version(version)

    def start_weight_update(self, *, partial: bool = False) -> None:
        """New weights come, by `update_weights` or the model's own `load_weights`, and nothing is computed before
        `finish_weight_update`. `partial`: those that do not come stay as they are, which is an error otherwise.

        Without this and `finish_weight_update`, what was loaded is committed by the next `generate`, `chat`,
        `reset_prefix_cache` or `llm_engine.step`, and has to be all weights of the model. Checkpoint tensors that
        transformers has as buffers (`e_score_correction_bias`; `beta` and `eps` of Apertus) may be left out, as a
        trainer's `named_parameters()` does: they stay as they are, and are taken where they come.
        """
        with self._engine.calls.inside("start_weight_update"):
            self._engine.life.check_open()
            self._engine.changes.weights.hold(is_partial=partial)

    def update_weights(self, tensors: Iterable[tuple[str, torch.Tensor]] | None, *, source: int | None = None) -> None:
        """Load whole tensors by their checkpoint names: any of them, in any order, of any floating-point dtype, from
        any device. Every rank gives the same; nothing is exchanged. Each rank takes its slices, in place.

        Where one rank alone has them, `source` is that rank of this engine, on every rank, and the others give None:
        one tensor after the other is broadcast, through host memory.

        Raises RuntimeError while requests are being answered, and ValueError for an unknown name and a tensor that is
        misshapen, sharded or, unless the LLM has `allow_nonfinite`, not finite, which is not written; TypeError for
        what is not a name and a tensor.
        """
        with self._engine.calls.inside("update_weights"):
            self._engine.life.check_open()
            if source is not None:
                tensors = broadcast_weights(self._engine, self._turns, tensors, source)
            elif tensors is None:
                raise TypeError("tensors is None: give pairs of name and tensor, or the rank that has them as source")
            executor: Any = self._engine.executor  # with a worker in this process, unless it says why not
            executor.driver_worker.model_runner.model.load_weights(tensors)

    def finish_weight_update(self) -> None:
        """Commit what was loaded: nothing that was cached before is found. Every rank calls this.

        Raises MissingWeightsError that lists what was not loaded, CheckpointError for a head that differs from the
        embedding it is tied to, and RanksDisagreeError that names a weight of which ranks were given different tensors;
        load it again then.
        """
        with self._engine.calls.inside("finish_weight_update"):
            engine, updates = self._engine, self._engine.changes.weights
            engine.life.check_open()

            def prepare() -> None:
                engine.changes.commit_weights(is_partial=updates.release())

            self._turns.check_outside("finish_weight_update")
            agree_to_compute(engine, "finish_weight_update", prepare, {}, lambda _: None)

    @contextmanager
    def weight_update(self, *, partial: bool = False) -> Iterator[Callable[[str, torch.Tensor], None]]:
        """`with llm.weight_update() as load: load(name, tensor)`: as `start_weight_update`, `update_weights` one by
        one, and `finish_weight_update`. After an exception inside, which the other ranks hear of at the end of their
        block, all weights have to be loaded before anything is computed.
        """
        updates = self._engine.changes.weights
        updates.check_not_held()
        try:
            self.start_weight_update(partial=partial)
            yield lambda name, tensor: self.update_weights([(name, tensor)])
        except BaseException as error:
            if updates.is_held:
                updates.release()
                if not isinstance(error, GeneratorExit):
                    fail_call(self._engine, "finish_weight_update", error)
            raise
        self.finish_weight_update()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """All weights of the model, whole tensors by their checkpoint names: as `start_weight_update`, `update_weights`
        and `finish_weight_update`, with what these raise. MissingWeightsError lists those that did not come.
        """
        with self.weight_update() as load:
            for name, tensor in weights:
                load(name, tensor)
