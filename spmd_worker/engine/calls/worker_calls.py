"""Calls that reach the workers: their methods, worker events, sleep and the profiler."""

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from spmd_worker.base.liveness.deferred_signals import host_signals
from spmd_worker.compat.adapter_requests import check_request
from spmd_worker.engine.adapters import Adapters
from spmd_worker.engine.data_parallel.agreement import agree_on_call
from spmd_worker.engine.data_parallel.per_rank_prompts import PerRankCalls
from spmd_worker.engine.engine import Engine
from spmd_worker.replica.sequence.adapter_kind import PROMPT
from spmd_worker.replica.sequence.events import ResetPrefixCache
from spmd_worker.replica.sequence.lora_request import LoRARequest
from spmd_worker.replica.sequence.prompt_adapter_request import PromptAdapterRequest
from spmd_worker.replica.sequence.sleep_tags import WAIT, checked_level, checked_mode, checked_tags

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
        """Run a method on the workers of this LLM's executor, by name or as a callable that gets the worker; results in
        rank order. Under torchrun each rank has one worker; with the multiproc backend, which takes names only, this
        process has all of them. Raises the executor's error, which names the rank.
        """
        wanted = _with_host_signals(method) if callable(method) else method
        with self._engine.calls.inside("collective_rpc"):
            self._engine.life.check_not_closed()
            if not isinstance(args, Sequence) or isinstance(args, str | bytes):
                raise TypeError(f"args is a {type(args).__name__}: give a list of arguments")
            if not isinstance(kwargs, Mapping | None):
                raise TypeError(f"kwargs is a {type(kwargs).__name__}: give a dict of arguments")
            return self._engine.executor.collective_rpc(wanted, timeout, args, kwargs)

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        """Call `func` with this rank's shard of the model, as a torch module with the checkpoint's names.

        `named_parameters()`, `get_parameter(name)`, `state_dict()`, `load_state_dict(...)` and attributes
        (`model.model.layers[0].mlp.up_proj.weight`) give the checkpoint's tensors, or this rank's slices of them.
        Changes that `func` makes in them, also to a tied head, are applied when it returns; `model.load_weights(pairs)`
        takes full tensors by name, as `update_weights` does. `parameter.checkpoint_slice` is the slice of a parameter:
        as text "rows 192 to 288 of 288", as `ranges`, and of a full tensor `checkpoint_slice.of(tensor)`. The module
        has no forward pass. A parameter of a packed weight (linear layers on the CPU) is a copy, made on access and
        kept until `func` returns: access a few per call if memory is short. `get_model_inspection` reports shapes
        and slices without copies. The prefix cache is invalidated, even without a change.

        Raises ValueError for an invalid change, with nothing changed on this rank but weights that are not copies
        (norms, the embedding; all if nothing is packed); unless all ranks rejected the same call, the next call that
        computes raises RanksDisagreeError on all of them, until all weights were loaded. Calls are matched by their
        number, so every rank makes the same number of calls if some may be rejected.
        """
        if not callable(func):
            raise TypeError(f"func is a {type(func).__name__}: give a function that gets the model")
        return self._engine.changes.apply_model(_with_host_signals(func))

    def get_model_inspection(self) -> str:
        """Text that shows this rank's model: its modules, and the slices of the checkpoint that it has."""
        first, *_ = self.collective_rpc("get_model_inspection")
        return str(first)

    def worker_event(self, name: str, payload: Any = None, *, reset_prefix_cache: bool = False) -> list[Any]:
        """Change the state of all workers between the same two steps on every rank, or of none.

        Every worker calls its method `prepare_NAME(payload)`; if all of them could, `commit_NAME`, else `undo_NAME` on
        every rank (`WorkerBase`). Own methods are added with `worker_extension_cls`. `payload` consists of numbers,
        strings, bytes, lists, tuples and dicts. Under torchrun every rank calls this; requests of
        `llm_engine.add_request` continue meanwhile. Returns the results of the commits of this executor's workers, in
        rank order. `reset_prefix_cache`, for a change that affects results, invalidates the prefix cache with the
        commit. Raises WorkerEventError, on every rank, naming the lowest rank that could not prepare and its reason;
        the LLM is unchanged.
        """
        return self._event(name, lambda: payload, reset_prefix_cache=reset_prefix_cache)

    def _event(self, name: str, payload: Callable[[], Any], *, reset_prefix_cache: bool = False) -> list[Any]:
        """Run a worker event. An error of `payload` is reported to the other ranks."""
        with self._engine.calls.inside("worker_event"):
            engine = self._engine

            def prepare() -> dict[str, Any]:
                engine.changes.complete_weights()
                return {"name": name, "payload": payload(), "reset_prefix_cache": reset_prefix_cache}

            agreed = self._agree("worker_event", prepare)["payload"]
            then = [ResetPrefixCache()] if reset_prefix_cache else []
            return engine.changes.worker_event(name, agreed, then, engine.run_step)

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load a LoRA adapter on every rank, or on none; returns True. Every rank of the engine calls this with the
        same name and id, and with its own folder, or its own full tensors, of the same content. Requests of
        `llm_engine.add_request` continue meanwhile.

        An id that is loaded with the same content is kept, one with another content is replaced with `load_inplace`
        between two steps. If `max_cpu_loras` are loaded, the one that was used longest ago gives way: never a pinned
        one, nor one of unanswered requests.

        Raises TypeError for anything but a LoRARequest; AdapterError, a ValueError, on every rank, for an adapter that
        a rank cannot load, naming rank, file and reason, for an id that has another adapter, and while unanswered
        requests need what would give way; ConfigError in a run without `enable_lora`. Nothing is changed then.
        """

        def prepare() -> tuple[str, int, bool]:
            if not isinstance(lora_request, LoRARequest):
                raise TypeError(f"lora_request is a {type(lora_request).__name__}: give a LoRARequest")
            self._engine.adapters.prepare()
            return lora_request.lora_name, lora_request.lora_int_id, lora_request.load_inplace

        with self._engine.calls.inside("add_lora"):
            self._agree("add_lora", prepare)
            return self._engine.adapters.add(lora_request)

    def remove_lora(self, lora_id: int) -> bool:
        """Remove an adapter from every rank; returns whether it was loaded. Every rank calls this. Raises AdapterError
        while requests with it are unanswered, with their number.
        """
        with self._engine.calls.inside("remove_lora"):
            adapters = self._engine.adapters
            return adapters.remove(self._agree_on_adapter("remove_lora", adapters, lora_id))

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter from being evicted; returns True. Every rank calls this. Raises AdapterError unless it is
        loaded.
        """
        with self._engine.calls.inside("pin_lora"):
            adapters = self._engine.adapters
            return adapters.pin(self._agree_on_adapter("pin_lora", adapters, lora_id))

    def list_loras(self) -> set[int]:
        """Ids of the loaded adapters, the same on every rank."""
        return self._engine.adapters.list()

    def add_prompt_adapter(self, prompt_adapter_request: PromptAdapterRequest) -> bool:
        """Load a prompt adapter on every rank, or on none; returns True. Every rank calls this with the same name and
        id, and with its own folder of the same content. Requests of `llm_engine.add_request` continue meanwhile.

        The folder is PEFT's, of PROMPT_TUNING, P_TUNING or PREFIX_TUNING. An id that is loaded with the same name and
        content is kept. If `max_prompt_adapters` are loaded, the one that was used longest ago gives way: never a
        pinned one, nor one of unanswered requests. Raises TypeError for anything but a PromptAdapterRequest;
        AdapterError, a ValueError, on every rank, for an adapter that a rank cannot load, naming rank, file and reason,
        and for an id that has another adapter. Nothing is changed then.
        """

        def prepare() -> tuple[str, int, int]:
            check_request(prompt_adapter_request, PROMPT)
            if prompt_adapter_request is None:
                raise TypeError("prompt_adapter_request is None: give a PromptAdapterRequest")
            self._engine.prompt_adapters.prepare()
            number, count = prompt_adapter_request.adapter_id, prompt_adapter_request.prompt_adapter_num_virtual_tokens
            return prompt_adapter_request.name, number, count

        with self._engine.calls.inside("add_prompt_adapter"):
            self._agree("add_prompt_adapter", prepare)
            return self._engine.prompt_adapters.add(prompt_adapter_request)

    def remove_prompt_adapter(self, prompt_adapter_id: int) -> bool:
        """Remove a prompt adapter from every rank; returns whether it was loaded. Every rank calls this. Raises
        AdapterError while requests with it are unanswered, with their number.
        """
        with self._engine.calls.inside("remove_prompt_adapter"):
            adapters = self._engine.prompt_adapters
            return adapters.remove(self._agree_on_adapter("remove_prompt_adapter", adapters, prompt_adapter_id))

    def pin_prompt_adapter(self, prompt_adapter_id: int) -> bool:
        """Keep a prompt adapter from being evicted; returns True. Every rank calls this. Raises AdapterError unless it
        is loaded.
        """
        with self._engine.calls.inside("pin_prompt_adapter"):
            adapters = self._engine.prompt_adapters
            return adapters.pin(self._agree_on_adapter("pin_prompt_adapter", adapters, prompt_adapter_id))

    def list_prompt_adapters(self) -> set[int]:
        """Ids of the loaded prompt adapters, the same on every rank."""
        return self._engine.prompt_adapters.list()

    def sleep(self, level: int = 1, mode: str | None = None, reset_connector: bool = True) -> None:
        """Release memory until `wake_up`, on every rank or on none; every rank calls this. `level` 1 keeps the weights,
        in host memory, and drops the cache; 2 drops both. Adapters are kept, in host memory. On the CPU, level 1 leaves
        the weights where they are. The prefix cache is invalidated. Each rank's bytes and seconds are logged. Level 0
        releases nothing: generation pauses, with the cache as it is. `reset_connector` is accepted for vLLM and has no
        effect: the host tier is invalidated too, and a connector's blocks are named by the weights' version.

        While asleep, `reset_prefix_cache` and `set_weight_version` can be called, and `load_weights` once the weights
        are awake; a second `sleep` is allowed, and level 2 after 1 drops the weights. Calls that compute raise
        RuntimeError. No option needs to be set before.

        `mode` says what becomes of unanswered requests, as in `pause_generation`; `wake_up` ends the pause. None is
        "keep" at level 0. At the others unanswered requests are an error then, unless generation is paused: what is
        kept is computed again after `wake_up`, and `resume_generation`. With several replicas "wait" is a call of
        `pause_generation` before.

        Raises ValueError for another level or mode, RuntimeError for unanswered requests, with their number, and
        MissingWeightsError if only some weights were loaded (level 2 drops them instead); nothing sleeps then.
        """
        with self._engine.calls.inside("sleep", is_alone=True):

            def prepare() -> dict[str, Any]:
                number = checked_level(level, least=0)
                may_wait = self._engine.config.parallel.data_parallel_size == 1
                self._check_idle(may_have_requests=number == 0 or (mode is not None and (may_wait or mode != WAIT)))
                agreed = {"level": number, "mode": mode if mode is None else checked_mode(mode)}
                # An error behind the exchange would leave the other ranks waiting. Requests may end before the commit.
                if number == 1 and not self._engine.requests.has_unfinished:
                    self._engine.changes.commit_weights()
                elif number == 1:
                    self._engine.changes.weights.check_complete()
                return agreed

            self._engine.sleep(**self._agree("sleep", prepare))

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocate the released memory again, in the same sizes: all of it, or that of `tags`, "weights" and
        "kv_cache", in any order; what is awake is skipped. Every rank calls this. A pause that `sleep` began ends when
        nothing sleeps, unless weights are missing then: call `resume_generation` once they are loaded.

        After `sleep(level=2)` all weights are missing but those that an update may leave out (see
        `start_weight_update`), which keep their values: until the others were loaded (`load_weights`, `update_weights`,
        `collective_rpc("reload_weights")`), calls that compute raise MissingWeightsError that lists those that were
        not. A complete set of loaded weights is committed.

        Raises ValueError for other tags, and WorkerEventError if a rank has too little memory, naming the rank and the
        bytes; all ranks are unchanged and can try again.
        """
        with self._engine.calls.inside("wake_up", is_alone=True):

            def prepare() -> dict[str, Any]:
                self._check_idle(may_have_requests=False)
                waking = checked_tags(tags)
                has_missing = self._engine.changes.weights.has_missing
                if not has_missing:
                    self._engine.changes.commit_weights()
                # Whether a pause ends, which takes a step, depends on them.
                return {"tags": waking, "has_missing_weights": has_missing}

            self._engine.wake_up(self._agree("wake_up", prepare)["tags"])

    def start_profile(self, folder: str | Path | None = None) -> None:
        """Profile every rank with torch's profiler until `stop_profile` or the end of this LLM, which writes too.
        Raises WorkerEventError if a rank cannot write to `folder`, ValueError without a folder.
        """

        def payload() -> str:
            if folder is None:
                raise ValueError("start_profile needs the folder to write to: start_profile(folder)")
            return str(folder)

        self._event("start_profile", payload)

    def stop_profile(self) -> list[str]:
        """Write `trace.rank<N>.json` on every rank, for ui.perfetto.dev; returns the paths of this executor's workers.
        Raises WorkerEventError if no profile was started.
        """
        return self.worker_event("stop_profile")

    def _check_idle(self, *, may_have_requests: bool) -> None:
        self._engine.life.check_open()
        if not (may_have_requests or self._engine.pauses.is_paused):
            self._engine.requests.check_idle_or_asleep()
        self._engine.changes.weights.check_not_held()

    def _agree_on_adapter(self, call: str, adapters: Adapters, int_id: int) -> int:
        def prepare() -> int:
            adapters.prepare()
            return int_id

        return self._agree(call, prepare)

    def _agree(self, call: str, prepare: Callable[[], _Result]) -> _Result:
        self._engine.life.check_open()
        self._turns.check_outside(call)
        return agree_on_call(self._engine, call, prepare)


def _with_host_signals(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """The caller's function, run with the caller's own signal handlers."""

    @wraps(function)
    def called(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        with host_signals():
            return function(*args, **kwargs)

    return called
