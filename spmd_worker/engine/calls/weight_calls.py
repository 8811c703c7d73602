"""Calls that change weights, in one call or several, by their checkpoint names; weight versions and cache resets."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.distributed import ProcessGroup

from spmd_worker.base.config.plain_values import required_bool
from spmd_worker.base.errors import CheckpointError, WeightMismatchError
from spmd_worker.compat.key_names import explain_in_keywords
from spmd_worker.compat.weight_transfer import check_init, is_request, read_request
from spmd_worker.engine.calls.check_calls import CheckCalls
from spmd_worker.engine.data_parallel.agreement import agree_to_compute, fail_call
from spmd_worker.engine.data_parallel.per_rank_prompts import PerRankCalls
from spmd_worker.engine.data_parallel.shards import BUCKET_BYTES, KnownPlans, ShardLoader
from spmd_worker.engine.data_parallel.trainer_digests import trainer_digests
from spmd_worker.engine.data_parallel.weights import broadcast_weights
from spmd_worker.engine.engine import Engine
from spmd_worker.engine.ipc_handles import shared_tensors
from spmd_worker.model.decoder import DecoderForCausalLM
from spmd_worker.model.weights.store import WeightStore
from spmd_worker.model.weights.tensor_checks import pairs_of
from spmd_worker.model.weights.weight_deltas import SparseWeightPatch, apply_deltas
from spmd_worker.ranks.transport.tensor_exchange import TensorExchange
from spmd_worker.replica.sequence.request import whole_number


@explain_in_keywords  # the function that `weight_update` yields is not a method of LLM
class WeightCalls:
    """Methods of `LLM` for new weights."""

    def __init__(self, engine: Engine, turns: PerRankCalls) -> None:
        self._engine, self._turns = engine, turns
        self._known_plans = KnownPlans()

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Invalidate the prefix cache on every rank, after weights were changed in place under the same version;
        returns True. Under torchrun the call of each replica's first rank takes effect.

        Every rank commits the weights that were loaded since the last commit: MissingWeightsError lists missing ones.
        Raises ValueError for `reset_running_requests` while requests of `llm_engine.add_request` are unanswered. The
        host tier is reset with or without `reset_connector`.
        """
        required_bool("reset_connector", reset_connector)
        self._engine.changes.reset_prefix_cache(required_bool("reset_running_requests", reset_running_requests))
        return True

    def set_weight_version(self, version: int) -> None:
        """Set the version of weights that were changed in place (by your own `collective_rpc`): cached blocks of other
        versions are not used.

        Under torchrun the call of each replica's first rank takes effect: call this on every rank. `version` is any
        64-bit number but the last one, such as a trainer's step. Raises TypeError or ValueError for anything else.
        """
        self._engine.changes.set_weight_version(version)

    def start_weight_update(self, *, partial: bool = False) -> None:
        """Begin an update by `update_weights` or the model's own `load_weights`; nothing is computed before
        `finish_weight_update`. With `partial`, weights that are not loaded keep their values; otherwise they are an
        error.

        Without this and `finish_weight_update`, loaded weights are committed by the next `generate`, `chat`,
        `reset_prefix_cache` or `llm_engine.step`, and must be all weights of the model. Checkpoint tensors that
        transformers has as buffers (`e_score_correction_bias`; `beta` and `eps` of Apertus) may be left out, as a
        trainer's `named_parameters()` does, and keep their values then.
        """
        with self._engine.calls.inside("start_weight_update"):
            self._engine.life.check_open()
            self._turns.check_outside("start_weight_update")
            self._engine.changes.weights.hold(is_partial=required_bool("partial", partial))

    def update_weights(
        self,
        tensors: Iterable[tuple[str, torch.Tensor]] | Any | None,
        *,
        source: int | None = None,
        group: ProcessGroup | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """Load tensors by their checkpoint names: any subset, in any order, of any floating-point dtype, from any
        device. Every rank passes the same full tensors; nothing is exchanged. Each rank copies its slices, in place.

        DTensors, such as the parameters of FSDP2, are loaded from their shards: every rank of `group`, by default of
        torch's default group, passes its own, in the same order. Each rank receives what its slices need, in steps of
        at most `bucket_bytes`, and never a complete tensor that is larger. With `group` every rank of it takes part,
        those without a shard too.

        If only one rank has the tensors, every rank passes its number in this engine as `source`, and the others pass
        None: the tensors are broadcast one by one, through host memory.

        Instead of `tensors`, vLLM's `WeightTransferUpdateRequest` or a dict `{"update_info": ...}` with `names`,
        `dtype_names`, `shapes` and `ipc_handles` gives tensors of another process on this node (`ipc_handle`).

        Raises RuntimeError while requests are in flight; ValueError for an unknown name and for a tensor that is
        misshapen or, unless the LLM has `allow_nonfinite`, not finite, which is not written; TypeError for anything but
        pairs of a name and a tensor; for shards RanksDisagreeError and RankFailedError, too.
        """
        with self._engine.calls.inside("update_weights"):
            self._engine.life.check_open()
            if source is not None:
                if group is not None:
                    raise ValueError("source and group: give source for tensors of one rank, or group for shards")
                tensors = broadcast_weights(self._engine, self._turns, tensors, source)
            elif tensors is None:
                raise TypeError("tensors is None: give pairs of name and tensor, or source, the rank that has them")
            elif is_request(tensors):
                tensors = list(shared_tensors(read_request(tensors)))
            elif isinstance(tensors, Mapping):
                tensors = pairs_of(tensors)
            store = self._store()
            num_bytes = whole_number("bucket_bytes", bucket_bytes)
            if num_bytes < 1:
                raise ValueError(f"bucket_bytes={num_bytes} must be at least 1")
            check = partial(self._turns.check_outside, "update_weights")
            loader = ShardLoader(
                store,
                self._exchange(group),
                self._engine.times.heartbeat,
                num_bytes,
                self._known_plans,
                takes_part=group is not None,
                check=check,
            )
            loader.load(tensors)

    def finish_weight_update(self) -> None:
        """Commit the loaded weights and invalidate the prefix cache. Every rank calls this.

        Raises MissingWeightsError that lists missing weights, CheckpointError for a head that differs from the
        embedding it is tied to, and RanksDisagreeError that names a weight of which ranks were given different tensors:
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
        """`with llm.weight_update() as load: load(name, tensor)`: `start_weight_update`, `update_weights` tensor by
        tensor, and `finish_weight_update`. After an exception in the block, which the other ranks raise at the end of
        theirs, what was loaded is open until the block runs again on every rank or all weights are loaded.
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

    def load_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        *,
        group: ProcessGroup | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        verify: bool = False,
    ) -> None:
        """Load all weights of the model, full tensors or shards by their checkpoint names: `start_weight_update`,
        `update_weights` and `finish_weight_update`, with their errors. MissingWeightsError lists missing weights.

        With `verify` the digests of what is held afterwards are compared with `digests_of(weights)`, and
        WeightMismatchError names the first tensor that differs; ValueError if weights are quantised.
        """
        if required_bool("verify", verify) and self._engine.config.model.quantization is not None:
            raise ValueError("verify compares what is held with the tensors given, which quantization rounds")
        given: list[tuple[str, torch.Tensor]] = []

        def noted() -> Iterator[tuple[str, torch.Tensor]]:
            # Inside the update: an error of one rank's weights is told to the others.
            for pair in pairs_of(weights):
                given.append(pair)
                yield pair

        with self.weight_update():
            self.update_weights(noted() if verify else weights, group=group, bucket_bytes=bucket_bytes)
        if verify:
            expected = self.digests_of(given, group=group)
            held = CheckCalls(self._engine, self._turns).tensor_digests()
            differing = next((name for name, digest in expected.items() if held[name] != digest), None)
            if differing is not None:
                raise WeightMismatchError(f"{differing}: what is held after the update differs from what was given")

    def digests_of(
        self, tensors: Iterable[tuple[str, torch.Tensor]], *, group: ProcessGroup | None = None
    ) -> dict[str, str]:
        """Digests that `tensor_digests` has once these tensors are loaded: of full tensors, or of DTensors from their
        shards, without a gather. Every rank of `group` calls this with its own, as `update_weights`.
        """
        with self._engine.calls.inside("digests_of"):
            self._engine.life.check_open()
            self._turns.check_outside("digests_of")
            return trainer_digests(self._store(), self._exchange(group), tensors)

    def apply_weight_deltas(
        self, deltas: Iterable[tuple[str, torch.Tensor] | SparseWeightPatch], *, base_digest: str
    ) -> None:
        """Change the weights that are held, whose `weights_digest` has to be `base_digest`, and commit them: pairs of a
        checkpoint name and a difference, a full tensor that is added in float32 and rounded once, or
        `SparseWeightPatch(name, indices, values, full_shape)`, which replaces elements. Every rank passes the same.

        Raises ValueError, before anything is written, for another base, an unknown name, a wrong shape or index and a
        quantised weight; otherwise as `finish_weight_update`.
        """
        found = CheckCalls(self._engine, self._turns).weights_digest()
        if found != base_digest:
            raise CheckpointError(
                f"base_digest={base_digest!r}, but the weights here have {found!r}: deltas of other weights would give "
                f"weights that no trainer has; call load_weights with all weights, then give deltas of those"
            )
        with self.weight_update(partial=True):
            apply_deltas(self._store(), deltas if isinstance(deltas, Mapping) else list(deltas), base_digest)

    def init_weight_transfer_engine(self, init_info: Any) -> None:
        """vLLM's first call of a weight transfer. IPC handles need none, so an empty `init_info` is accepted. Raises
        ValueError with the way out for other transports.
        """
        check_init(init_info)

    def _model(self) -> DecoderForCausalLM:
        # With a worker in this process; others raise an error that explains it.
        executor: Any = self._engine.executor
        found: DecoderForCausalLM = executor.driver_worker.model_runner.model
        return found

    def _store(self) -> WeightStore:
        return self._model().weights

    def _exchange(self, group: ProcessGroup | None) -> TensorExchange:
        return TensorExchange(group, next((each.device for each in self._model().parameters()), None))
