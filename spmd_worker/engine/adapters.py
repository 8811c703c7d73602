"""LoRA adapters of one engine: loaded, removed and pinned on all ranks together, between two steps.

An adapter is loaded by a worker event: every rank reads its own file, or has its own tensors, and compares the digest
of the content with rank 0's before any rank computes with it. Rank 0 alone decides what is evicted and what is refused,
because it alone knows the requests that wait; the others hear it with the event. Requests name an adapter by its
digest, so nothing is ever found under an id or a name that has other weights by now.
"""

import builtins
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from spmd_worker.base.config.adapter_limits import AdapterLimits
from spmd_worker.base.config.plain_values import plain_int, shown
from spmd_worker.base.errors import AdapterError, ConfigError, WorkerEventError
from spmd_worker.engine.call_guard import CallGuard
from spmd_worker.engine.changes import Changes, RunStep
from spmd_worker.engine.life import Life
from spmd_worker.engine.requests import Requests
from spmd_worker.executor.adapters import reason_of
from spmd_worker.executor.executor import Executor
from spmd_worker.executor.rpc_coding import decode_value, encode_value
from spmd_worker.ranks.transport.channel import ControlChannel
from spmd_worker.replica.scheduler.adapter_plans import addition_of, plan_addition, plan_removal, taken, unanswered
from spmd_worker.replica.scheduler.adapter_registry import RegisteredAdapter
from spmd_worker.replica.sequence.adapter_change import ADD_LORA, REMOVE_LORA, AdapterChange
from spmd_worker.replica.sequence.events import Event, PinAdapter, RemoveAdapter
from spmd_worker.replica.sequence.lora_request import LoRARequest, TensorSnapshot
from spmd_worker.replica.sequence.sequence import SequenceGroup


class Adapters:
    """Every rank of an engine makes the same calls, in the same order; or rank 0 makes them while the others follow."""

    def __init__(
        self,
        executor: Executor,
        changes: Changes,
        calls: CallGuard,
        life: Life,
        requests: Requests,
        channels: tuple[ControlChannel, ControlChannel],
        limits: AdapterLimits | None,
        run_step: Callable[[], RunStep | None],
    ) -> None:
        """`channels` are those of the replica and of the engine; `limits` None is a run without adapters. `run_step`
        returns the engine's.
        """
        self._executor, self._changes, self._calls, self._life = executor, changes, calls, life
        self._requests, self._registry = requests, requests.adapters
        self._channel, self._engine_channel = channels
        self._limits, self._weak_run_step = limits, run_step
        self._own_paths: dict[int, tuple[int, str]] = {}
        """Number and folder of the adapters that this rank's own calls have loaded, by id: rank 0's folders may have
        other paths.
        """
        self._loaded_requests: dict[int, tuple[int, LoRARequest]] = {}
        """Number and request of the adapters that this rank's own calls have loaded, by id."""
        self._wanted: tuple[int, ...] = ()

    def add(self, request: LoRARequest) -> bool:
        """Load an adapter on every rank, or on none; returns True. An id that is loaded with the same content is kept,
        one with another content is replaced with `load_inplace`. If `max_cpu_loras` are loaded, the one that was used
        longest ago gives way: never a pinned one, nor one of unanswered requests. Takes three steps, in which requests
        continue.

        Raises TypeError for anything but a LoRARequest; AdapterError, on every rank that calls this, for an adapter
        that a rank cannot load, naming rank, file and reason, for an id that has another adapter, and while unanswered
        requests need what would give way; ConfigError in a run without `enable_lora`. Nothing is changed then.
        """
        with self._calls.inside("add_lora"):
            self._check_call()
            self._check_request(request)
            digest, problem = self._executor.adapters.stage(request)
            staged, num_with = (digest, problem and f"rank 0: {problem}"), self._requests.num_with_adapter
            plan = partial(plan_addition, self._registry, request, staged, num_with, self._wanted.__contains__)
            with self._change(plan) as change:
                self._run_event(ADD_LORA, change, addition_of(change))
            self._note_path(request.lora_int_id, request.lora_path)
            self._loaded_requests[request.lora_int_id] = (self._own_paths[request.lora_int_id][0], request)
            # Trainers push each policy under a new id: tensors of those that gave way must not pile up.
            for int_id in change.evicted:
                self._own_paths.pop(int_id, None)
                self._loaded_requests.pop(int_id, None)
            return True

    def remove(self, int_id: int) -> bool:
        """Remove an adapter on every rank; returns whether it was loaded. Its weights are kept while another id has the
        same content.

        Raises AdapterError while requests with it are unanswered, with their number.
        """
        with self._calls.inside("remove_lora"):
            self._check_call()
            number = _checked_id(int_id)
            if number not in self._registry.entries:
                return False
            with self._change(partial(plan_removal, self._registry, number, self._requests.num_with_adapter)) as change:
                self._run_event(REMOVE_LORA, change, RemoveAdapter(number))
            self._own_paths.pop(number, None)
            self._loaded_requests.pop(number, None)
            return True

    def pin(self, int_id: int) -> bool:
        """Keep an adapter from being evicted; returns True. Takes a step. Raises AdapterError unless it is loaded."""
        with self._calls.inside("pin_lora"):
            self._check_call()
            number = _checked_id(int_id)
            if number not in self._registry.entries:
                raise AdapterError(f"adapter {number} cannot be pinned: {self._loaded_words()}; add it first")
            self._calls.queue(PinAdapter(number))
            self._changes.ended += self._run_step()
            return True

    def list(self) -> set[int]:
        """Ids of the loaded adapters, the same on every rank."""
        return set(self._registry.entries)

    def loaded(self) -> tuple[RegisteredAdapter, ...]:
        """The loaded adapters, with the folders that this rank's callers name."""
        return tuple(replace(each, path=self._path_of(each)) for each in self._registry.entries.values())

    def digest_of(self, request: LoRARequest | None) -> int:
        """The number by which a `Request` names the adapter; 0 for None. An adapter that is not loaded, or is to be
        loaded again (`load_inplace`), is added first, with the errors of `add`.

        Raises AdapterError if the id is loaded under another name, from another folder, or with other tensors.
        """
        return self.digests_of([request])[0]

    def digests_of(self, requests: Iterable[LoRARequest | None]) -> tuple[int, ...]:
        """`digest_of` for the requests of one call: what one of them needs does not give way to another. Raises
        AdapterError, before anything is loaded, if they name more adapters than `max_cpu_loras`, or two by one id.
        """
        listed = list(requests)
        if not any(each is not None for each in listed):
            return (0,) * len(listed)
        self._check_call()
        by_id: dict[int, LoRARequest] = {}
        for each in listed:
            if each is not None:
                self._check_request(each)
                known = by_id.setdefault(each.lora_int_id, each)
                if known is not each and (known != each or known.lora_tensors is not each.lora_tensors):
                    raise AdapterError(
                        f"lora_int_id={each.lora_int_id} is that of {known} and of {each}: give each its own"
                    )
        if len(by_id) > self._registry.max_adapters:
            raise AdapterError(
                f"{len(by_id)} different adapters are requested at once, and model.max_cpu_loras="
                f"{self._registry.max_adapters} are loaded: raise it, or make several calls"
            )
        digests: dict[int, int] = {0: 0}
        try:
            # Those that are loaded first: else one of them might give way to another.
            self._wanted = tuple(
                [entry.digest for key in by_id if (entry := self._registry.entries.get(key)) is not None]
            )
            for int_id, each in by_id.items():
                digests[int_id] = self._loaded_digest(each)
                self._wanted = (*self._wanted, digests[int_id])
        finally:
            self._wanted = ()
        return tuple([digests[0 if each is None else each.lora_int_id] for each in listed])

    def digest_of_name(self, name: str) -> int:
        """The number of a loaded adapter; of several with one name, of the one loaded last. Raises AdapterError."""
        entry = self._registry.of_name(name)
        if entry is None:
            raise AdapterError(f"adapter {name!r} is not loaded: {self._loaded_words()}")
        return entry.digest

    def _loaded_digest(self, request: LoRARequest) -> int:
        entry = self._registry.entries.get(request.lora_int_id)
        if entry is None or request.load_inplace:
            self.add(request)
            return self._registry.entries[request.lora_int_id].digest
        is_same = (entry.name, self._path_of(entry)) == (request.lora_name, request.lora_path)
        if is_same and request.lora_tensors is not None and not self._is_loaded_snapshot(request, entry):
            # A trainer changes its tensors in place.
            is_same = self._executor.adapters.stage(request)[0] == entry.digest
            self._executor.adapters.unstage()
        if not is_same:
            raise AdapterError(taken(request, entry))
        return entry.digest

    def _is_loaded_snapshot(self, request: LoRARequest, entry: RegisteredAdapter) -> bool:
        """Whether a request has the snapshot that this rank's own call has loaded under the id."""
        number, last = self._loaded_requests.get(request.lora_int_id, (-1, request))
        is_same = request.lora_tensors is last.lora_tensors and request.peft_config is last.peft_config
        return number == entry.number and is_same and isinstance(request.lora_tensors, TensorSnapshot)

    def _note_path(self, int_id: int, path: str) -> None:
        """Note the folder from which this rank's own call has loaded an adapter."""
        self._own_paths[int_id] = (self._registry.entries[int_id].number, path)

    def _path_of(self, entry: RegisteredAdapter) -> str:
        """Folder by which this rank's callers name a loaded adapter."""
        number, path = self._own_paths.get(entry.int_id, (-1, ""))
        # Else it was loaded at the start, or by rank 0 while this rank followed.
        return path if number == entry.number else entry.path

    @contextmanager
    def _change(self, plan: Callable[[], AdapterChange]) -> Iterator[AdapterChange]:
        """Block of a worker event. No request can be added meanwhile for what it drops."""
        with self._calls.lock:
            change = plan()
            self._requests.leaving_adapters = change.dropped
        try:
            if self._engine_channel.size > self._channel.size:
                change = self._agree(change)
            yield change
        except WorkerEventError as error:
            raise AdapterError(reason_of(error.problem)) from None
        finally:
            self._requests.leaving_adapters = ()

    def _agree(self, own: AdapterChange) -> AdapterChange:
        """The first replica's decision, for all replicas; a replica with requests for what is dropped refuses it."""
        is_first = self._engine_channel.rank == 0
        with self._life.exchanging():
            payload = self._engine_channel.broadcast(encode_value(own) if is_first else None)
        change: AdapterChange = decode_value(payload)
        with self._calls.lock:
            num_waiting = sum(map(self._requests.num_with_adapter, change.dropped))
            self._requests.leaving_adapters = () if num_waiting else change.dropped
        if num_waiting and not change.problem:
            change = replace(change, problem=unanswered("adapters cannot be dropped", num_waiting))
        return change

    def _run_event(self, name: str, change: AdapterChange, event: Event) -> None:
        if not self._changes.weights.has_missing:
            self._changes.commit_weights()
        self._changes.run_worker_event(name, change, [event], self._run_step)

    def _run_step(self) -> builtins.list[SequenceGroup]:
        run_step = self._weak_run_step()
        assert run_step is not None, "its engine runs this call"
        return run_step()

    def _check_call(self) -> None:
        self._life.check_open()
        self._changes.weights.check_not_held()
        if self._limits is None:
            raise ConfigError("this run has no adapters: set model.enable_lora=true, or name some in model.adapters")

    def _check_request(self, request: Any) -> None:
        if not isinstance(request, LoRARequest):
            raise TypeError(f"lora_request={shown(request)} is a {type(request).__name__}: give a LoRARequest")

    def _loaded_words(self) -> str:
        loaded = ", ".join([f"{each.int_id} ({each.name!r})" for each in self._registry.entries.values()])
        return f"loaded are {loaded}" if loaded else "none is loaded"


def _checked_id(int_id: Any) -> int:
    number = plain_int(int_id)
    if number is None:
        raise TypeError(f"lora_int_id={shown(int_id)} is a {type(int_id).__name__}: give a whole number")
    return number
