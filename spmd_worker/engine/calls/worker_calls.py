"""Calls of the workers themselves: methods by name or as functions, worker events, the profiler."""

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from spmd_worker.base.liveness.deferred_signals import host_signals
from spmd_worker.engine.data_parallel.agreement import agree_on_call
from spmd_worker.engine.data_parallel.per_rank_prompts import PerRankCalls
from spmd_worker.engine.engine import Engine
from spmd_worker.replica.sequence.events import ResetPrefixCache

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class WorkerCalls:
    """Methods of `LLM` that reach the workers of its executor."""

    def __init__(self, engine: Engine, turns: PerRankCalls) -> None:
        self._engine, self._turns = engine, turns

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Run a method on the workers of this LLM's executor, by name or as a callable that gets the worker; answers in
        rank order. Under torchrun each rank has one worker; with the multiproc backend, which takes names only, this
        process has them all. Raises what the executor raises: an error that says which rank and what.
        """
        wanted = _of_host(method) if callable(method) else method
        with self._engine.calls.inside("collective_rpc"):
            self._engine.life.check_not_closed()
            return self._engine.executor.collective_rpc(wanted, timeout, args, kwargs)

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        """Call `func` with this rank's shard of the model, as a torch module with the checkpoint's names.

        `named_parameters()`, `get_parameter(name)`, `state_dict()`, `load_state_dict(...)` and attributes
        (`model.model.layers[0].mlp.up_proj.weight`) show the checkpoint's tensors, or this rank's slices of them, and
        what `func` changes in them before it ends counts, a tied head included; `model.load_weights(pairs)` takes
        whole tensors by name, as `update_weights` does. `parameter.checkpoint_slice` says which slice one is: as text
        "rows 192 to 288 of 288", as `ranges`, and of a whole tensor `checkpoint_slice.of(tensor)`. It has no forward
        pass. Of a packed weight (those of the linear layers on the CPU) each parameter that is asked for is a copy,
        kept until `func` ends: where memory is short, ask for a few in each call.
        `collective_rpc("get_model_inspection")` shows shapes and slices without any. What was cached before is not
        found after it, changed or not.

        Raises ValueError for what cannot be changed, with nothing changed on this rank but weights that are shown in
        place (norms, the embedding; all where nothing is packed); where other ranks did not refuse in the same call,
        what computes next raises RanksDisagreeError on all, until all weights were loaded. Calls are told apart by
        their number, so every rank makes as many where some may be refused.
        """
        return self._engine.changes.apply_model(_of_host(func) if callable(func) else func)

    def worker_event(self, name: str, payload: Any = None, *, reset_prefix_cache: bool = False) -> list[Any]:
        """Change the state of all workers, between the same two steps on every rank, or of none.

        Every worker calls its method `prepare_NAME(payload)`; when all of them could, `commit_NAME`, and when one could
        not, `undo_NAME` on every rank (`WorkerBase`). Methods of your own come with `worker_extension_cls`. `payload`
        is what can cross processes: numbers, texts, bytes, lists, tuples, dicts. Under torchrun every rank calls this;
        requests of `llm_engine.add_request` go on meanwhile. Returns what the commits of this executor's workers
        returned, in rank order. `reset_prefix_cache`, for a change of what is computed: nothing that was cached before
        the commit is found after it. Raises WorkerEventError, on every rank, naming the lowest rank that refused and
        why; the LLM is as it was before.
        """
        return self._event(name, lambda: payload, reset_prefix_cache=reset_prefix_cache)

    def _event(self, name: str, payload: Callable[[], Any], *, reset_prefix_cache: bool = False) -> list[Any]:
        """A worker event. What `payload` raises, the other ranks hear of."""
        with self._engine.calls.inside("worker_event"):
            engine = self._engine
            engine.life.check_open()

            def prepare() -> tuple[str, Any, bool]:
                engine.changes.complete_weights()
                return name, payload(), reset_prefix_cache

            self._turns.check_outside("worker_event")
            _, agreed, _ = agree_on_call(engine, "worker_event", prepare)
            then = [ResetPrefixCache()] if reset_prefix_cache else []
            return engine.changes.worker_event(name, agreed, then, engine.run_step)

    def start_profile(self, folder: str | Path | None = None) -> None:
        """Record what every rank computes, with torch's profiler, until `stop_profile`. Raises WorkerEventError where a
        rank cannot write to `folder`, ValueError without one.
        """

        def payload() -> str:
            if folder is None:
                raise ValueError("start_profile needs the folder to write to: start_profile(folder)")
            return str(folder)

        self._event("start_profile", payload)

    def stop_profile(self) -> list[str]:
        """Write `trace.rank<N>.json` of every rank, for ui.perfetto.dev: the paths of this executor's workers. Raises
        WorkerEventError where no profile is running.
        """
        return self.worker_event("stop_profile")


def _of_host(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """A function of the host, called with the host's own handlers of signals."""

    @wraps(function)
    def called(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        with host_signals():
            return function(*args, **kwargs)

    return called
