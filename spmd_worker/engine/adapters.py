"""Adapters of one engine: loaded, removed and pinned on all ranks together, between two steps.

An adapter is loaded by a worker event: every rank reads its own file, or has its own tensors, and compares the digest
of the content with rank 0's before any rank computes with it. Rank 0 alone decides what is evicted and what is refused,
because it alone knows the requests that wait; the others hear it with the event. Requests name an adapter by its
digest, so nothing is ever found under an id or a name that has other weights by now.
"""

import builtins
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from spmd_worker.base.config.plain_values import plain_int, shown
from spmd_worker.base.errors import AdapterError, WorkerEventError
from spmd_worker.engine.call_guard import CallGuard
from spmd_worker.engine.changes import Changes, RunStep
from spmd_worker.engine.life import Life
from spmd_worker.engine.requests import Requests
from spmd_worker.executor.adapters import ExecutorAdapters, reason_of
from spmd_worker.executor.rpc_coding import decode_value, encode_value
from spmd_worker.ranks.transport.channel import ControlChannel
from spmd_worker.replica.scheduler.adapter_plans import addition_of, plan_addition, plan_removal, taken, unanswered
from spmd_worker.replica.scheduler.adapter_registry import AdapterRegistry, RegisteredAdapter
from spmd_worker.replica.sequence.adapter_change import AdapterChange
from spmd_worker.replica.sequence.adapter_kind import PROMPT, AdapterRequest
from spmd_worker.replica.sequence.events import Event, PinAdapter, PinPromptAdapter, RemoveAdapter, RemovePromptAdapter
from spmd_worker.replica.sequence.sequence import SequenceGroup


class Adapters:
    """Adapters of one kind. Every rank of an engine makes the same calls, in the same order; or rank 0 makes them while
    the others follow.
    """

    def __init__(
        self,
        on_workers: ExecutorAdapters,
        changes: Changes,
        calls: CallGuard,
        life: Life,
        requests: Requests,
        channels: tuple[ControlChannel, ControlChannel],
        registry: AdapterRegistry,
        run_step: Callable[[], RunStep | None],
    ) -> None:
        """`on_workers` are the executor's, `channels` those of the replica and of the engine; `run_step` returns the
        engine's.
        """
        self._on_workers, self._changes, self._calls, self._life = on_workers, changes, calls, life
        self._requests, self._registry, self._kind = requests, registry, registry.kind
        self._channel, self._engine_channel = channels
        self._weak_run_step = run_step
        self._own_paths: dict[int, tuple[int, str]] = {}
        """Number and folder of the adapters that this rank's own calls have loaded, by id: rank 0's folders may have
        other paths.
        """
        self._wanted: tuple[int, ...] = ()

    def prepare(self, requests: Iterable[Any] = ()) -> None:
        """Prepare a call that is to run once the ranks agree on it, in which `requests` are to be loaded: what fails on
        this rank alone fails here. Loaded weights are committed if they are complete.

        Raises what `add` does for a closed engine, an open update and invalid weights, and AdapterError for requests
        that differ from what is loaded under their ids.
        """
        self._check_call()
        self._commit_weights()
        self._check_loaded(self._by_id(requests))

    def add(self, request: AdapterRequest) -> bool:
        """Load an adapter on every rank, or on none; returns True. An id that is loaded with the same content is kept,
        one with another content is replaced with `load_inplace`. If as many as the limit are loaded, the one that was
        used longest ago gives way: never a pinned one, nor one of unanswered requests. Takes three steps, in which
        requests continue.

        Raises TypeError for a request of another kind; AdapterError, on every rank that calls this, for an adapter that
        a rank cannot load, naming rank, file and reason, for an id that has another adapter, and while unanswered
        requests need what would give way; ConfigError in a run without such adapters. Nothing is changed then.
        """
        with self._calls.inside(f"add_{self._kind.call}"):
            self._check_call()
            self._check_request(request)
            digest, problem = self._on_workers.stage(request)
            staged, num_with = (digest, problem and f"rank 0: {problem}"), self._requests.num_with_adapter
            plan = partial(plan_addition, self._registry, request, staged, num_with, self._wanted.__contains__)
            with self._change(plan) as change:
                self._run_event(f"add_{self._kind.call}", change, addition_of(self._kind, change))
            # Rank 0 has decided what gave way: uses may have been counted otherwise here, by another replica.
            for int_id in [each for each in self._own_paths if each not in self._registry.entries]:
                self._forget(int_id)
            entry = self._registry.entries[request.adapter_id]
            self._own_paths[entry.int_id] = (entry.number, request.local_path)
            return True

    def remove(self, int_id: int) -> bool:
        """Remove an adapter on every rank; returns whether it was loaded. Its weights are kept while another id has the
        same content.

        Raises AdapterError while requests with it are unanswered, with their number.
        """
        with self._calls.inside(f"remove_{self._kind.call}"):
            self._check_call()
            number = self._checked_id(int_id)
            if number not in self._registry.entries:
                return False
            with self._change(partial(plan_removal, self._registry, number, self._requests.num_with_adapter)) as change:
                event = (RemovePromptAdapter if self._kind is PROMPT else RemoveAdapter)(number)
                self._run_event(f"remove_{self._kind.call}", change, event)
            self._forget(number)
            return True

    def pin(self, int_id: int) -> bool:
        """Keep an adapter from being evicted; returns True. Takes a step. Raises AdapterError unless it is loaded."""
        with self._calls.inside(f"pin_{self._kind.call}"):
            self._check_call()
            number = self._checked_id(int_id)
            if number not in self._registry.entries:
                what = f"{self._kind.noun} {number} cannot be pinned"
                raise AdapterError(f"{what}: {self._loaded_words()}; add it first")
            self._calls.queue((PinPromptAdapter if self._kind is PROMPT else PinAdapter)(number))
            self._changes.ended += self._run_step()
            return True

    def list(self) -> set[int]:
        """Ids of the loaded adapters, the same on every rank."""
        return set(self._registry.entries)

    def loaded(self) -> tuple[RegisteredAdapter, ...]:
        """The loaded adapters, with the folders that this rank's callers name."""
        return tuple(replace(each, path=self._path_of(each)) for each in self._registry.entries.values())

    def _entry_of_name(self, name: str) -> RegisteredAdapter:
        """A loaded adapter; of several with one name, the one loaded last. Raises AdapterError."""
        entry = self._registry.of_name(name)
        if entry is None:
            raise AdapterError(f"{self._kind.noun} {name!r} is not loaded: {self._loaded_words()}")
        return entry

    def _by_id(self, requests: Iterable[Any]) -> dict[int, Any]:
        """The requests of one call by id. Raises AdapterError if they name more adapters than the limit, or two by one
        id.
        """
        by_id: dict[int, AdapterRequest] = {}
        for each in requests:
            self._check_request(each)
            known = by_id.setdefault(each.adapter_id, each)
            if not self._is_same(known, each):
                raise AdapterError(
                    f"{self._kind.id_key}={each.adapter_id} is that of {known} and of {each}: give each its own"
                )
        if len(by_id) > self._registry.max_adapters:
            raise AdapterError(
                f"{len(by_id)} different {self._kind.noun}s are requested at once, and {self._kind.limit_key}="
                f"{self._registry.max_adapters} may be loaded: raise it, or make several calls"
            )
        return by_id

    def _load(self, requests: Iterable[Any], *, is_prepared: bool) -> dict[int, RegisteredAdapter]:
        """Load those requests of one call that are not loaded; returns all of them by id. What one of them needs does
        not give way to another. Raises AdapterError, before anything is loaded, as `_by_id` and, unless `prepare` was
        called with these requests, `_check_loaded` do.
        """
        by_id = self._by_id(requests)
        if not is_prepared:
            self._check_loaded(by_id)
        entries, found = self._registry.entries, dict[int, RegisteredAdapter]()
        try:
            # Those that are loaded first: else one of them might give way to another.
            self._wanted = tuple(entries[key].digest for key in by_id if key in entries)
            for int_id, each in by_id.items():
                if self._must_load(each):
                    self.add(each)
                found[int_id] = entries[int_id]
                self._wanted = (*self._wanted, found[int_id].digest)
        finally:
            self._wanted = ()
        return found

    def _must_load(self, request: Any) -> bool:
        return request.adapter_id not in self._registry.entries

    def _check_loaded(self, by_id: Mapping[int, Any]) -> None:
        """Raise AdapterError for a request that differs from what is loaded under its id."""
        for int_id, each in by_id.items():
            if not self._must_load(each):
                self._check_entry(each, self._registry.entries[int_id])

    def _is_same(self, known: Any, other: Any) -> bool:
        """Whether two requests of one id name the same adapter."""
        return bool(known == other)

    def _check_entry(self, request: Any, entry: RegisteredAdapter) -> None:
        """Raise AdapterError unless `entry` is the adapter of a request."""
        if (entry.name, self._path_of(entry)) != (request.name, request.local_path):
            raise AdapterError(taken(self._kind, request, entry))

    def _forget(self, int_id: int) -> None:
        """Drop what this rank has noted of an adapter that is not loaded any more."""
        self._own_paths.pop(int_id, None)

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
            change = replace(change, problem=unanswered(f"{self._kind.noun}s cannot be dropped", num_waiting))
        return change

    def _run_event(self, name: str, change: AdapterChange, event: Event) -> None:
        self._commit_weights()
        self._changes.run_worker_event(name, change, [event], self._run_step)

    def _commit_weights(self) -> None:
        if not self._changes.weights.has_missing:
            self._changes.commit_weights()

    def _run_step(self) -> builtins.list[SequenceGroup]:
        run_step = self._weak_run_step()
        assert run_step is not None, "its engine runs this call"
        return run_step()

    def _check_call(self) -> None:
        self._life.check_open()
        self._changes.weights.check_not_held()

    def _check_request(self, request: Any) -> None:
        if not isinstance(request, self._kind.request_class):
            key, expected = self._kind.request_key, self._kind.request_class.__name__
            raise TypeError(f"{key}={shown(request)} is a {type(request).__name__}: give a {expected}")

    def _loaded_words(self) -> str:
        loaded = ", ".join([f"{each.int_id} ({each.name!r})" for each in self._registry.entries.values()])
        return f"loaded are {loaded}" if loaded else "none is loaded"

    def _checked_id(self, int_id: Any) -> int:
        number = plain_int(int_id)
        if number is None:
            kind = type(int_id).__name__
            raise TypeError(f"{self._kind.id_key}={shown(int_id)} is a {kind}: give a whole number")
        return number
