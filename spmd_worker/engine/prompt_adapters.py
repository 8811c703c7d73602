"""Prompt adapters of one engine: loaded, removed and pinned on all ranks together, as LoRA adapters are."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from spmd_worker.base.config.plain_values import plain_int, shown
from spmd_worker.base.errors import AdapterError
from spmd_worker.engine.adapters import Adapters
from spmd_worker.replica.scheduler.adapter_plans import plan_removal
from spmd_worker.replica.scheduler.adapter_registry import RegisteredAdapter
from spmd_worker.replica.sequence.adapter_change import AdapterChange
from spmd_worker.replica.sequence.events import AddPromptAdapter, PinPromptAdapter, RemovePromptAdapter
from spmd_worker.replica.sequence.prompt_adapter_request import (
    ADD_PROMPT_ADAPTER,
    REMOVE_PROMPT_ADAPTER,
    PromptAdapterRequest,
    VirtualTokens,
)


class PromptAdapters(Adapters):
    """Every rank of an engine makes the same calls, in the same order; or rank 0 makes them while the others follow."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._registry = self._requests.prompt_adapters

    def add(self, request: PromptAdapterRequest) -> bool:  # type: ignore[override]  # another kind of request
        """Load a prompt adapter on every rank, or on none; returns True. Takes three steps, in which requests continue.

        An id that is loaded with the same name and content is kept. If `max_prompt_adapters` are loaded, the one that
        was used longest ago gives way: never a pinned one, nor one of unanswered requests. Raises TypeError for
        anything but a PromptAdapterRequest; AdapterError, on every rank that calls this, for an adapter that a rank
        cannot load, naming rank, file and reason, and for an id that has another adapter. Nothing is changed then.
        """
        with self._calls.inside("add_prompt_adapter"):
            self._check_call()
            self._check_request(request)
            number = request.prompt_adapter_id
            digest, problem = self._executor.prompt_adapters.stage(request)
            with self._change(partial(self._plan, request, digest, problem and f"rank 0: {problem}")) as change:
                event = AddPromptAdapter(
                    *(change.int_id, change.name, change.path, change.digest, change.evicted, change.num_tokens)
                )
                self._run_event(ADD_PROMPT_ADAPTER, change, event)
            self._note_path(number, request.prompt_adapter_local_path)
            return True

    def remove(self, int_id: int) -> bool:
        """Remove an adapter on every rank; returns whether it was loaded. Raises AdapterError while requests with it
        are unanswered, with their number.
        """
        with self._calls.inside("remove_prompt_adapter"):
            self._check_call()
            number = _checked_id(int_id)
            if number not in self._registry.entries:
                return False
            with self._change(partial(plan_removal, self._registry, number, self._requests.num_with_adapter)) as change:
                self._run_event(REMOVE_PROMPT_ADAPTER, change, RemovePromptAdapter(number))
            self._own_paths.pop(number, None)
            return True

    def pin(self, int_id: int) -> bool:
        """Keep an adapter from being evicted; returns True. Takes a step. Raises AdapterError unless it is loaded."""
        with self._calls.inside("pin_prompt_adapter"):
            self._check_call()
            number = _checked_id(int_id)
            if number not in self._registry.entries:
                raise AdapterError(f"prompt adapter {number} cannot be pinned: {self._loaded_words()}; add it first")
            self._calls.queue(PinPromptAdapter(number))
            self._changes.ended += self._run_step()
            return True

    def virtual_tokens(self, requests: Iterable[PromptAdapterRequest | None]) -> list[VirtualTokens | None]:
        """The virtual tokens of each row of a call, None without an adapter. One that is not loaded is added first,
        with the errors of `add`; what one row needs does not give way to another's.

        Raises AdapterError for an id that is loaded under another name, from another folder or with another number of
        virtual tokens, and for more adapters than `max_prompt_adapters`.
        """
        listed = list(requests)
        by_id: dict[int, PromptAdapterRequest] = {}
        for each in listed:
            if each is not None:
                self._check_request(each)
                if by_id.setdefault(each.prompt_adapter_id, each) != each:
                    raise AdapterError(
                        f"prompt_adapter_id={each.prompt_adapter_id} has two adapters: give each its own"
                    )
        if len(by_id) > self._registry.max_adapters:
            raise AdapterError(
                f"{len(by_id)} different prompt adapters are requested at once, and model.max_prompt_adapters="
                f"{self._registry.max_adapters} are loaded: raise it, or make several calls"
            )
        found: dict[int, VirtualTokens] = {}
        entries = self._registry.entries
        try:
            # Those that are loaded first: else one of them might give way to another.
            self._wanted = tuple(entries[key].digest for key in by_id if key in entries)
            for number, each in by_id.items():
                entry = entries.get(number)
                if entry is None:
                    self.add(each)
                    self._wanted = (*self._wanted, entries[number].digest)
                elif self._path_of(entry) != each.prompt_adapter_local_path or (entry.name != each.prompt_adapter_name):
                    raise AdapterError(_taken(each, entry.name, entry.path))
                found[number] = _virtual_tokens(entries[number])
                if each.prompt_adapter_num_virtual_tokens != found[number].num_tokens:
                    raise AdapterError(_other_number(each, found[number].num_tokens))
        finally:
            self._wanted = ()
        return [None if each is None else found[each.prompt_adapter_id] for each in listed]

    def of_name(self, name: str) -> VirtualTokens:
        """The virtual tokens of a loaded adapter; of several with one name, those of the one loaded last. Raises
        AdapterError.
        """
        entry = self._registry.of_name(name)
        if entry is None:
            raise AdapterError(f"prompt adapter {name!r} is not loaded: {self._loaded_words()}")
        return _virtual_tokens(entry)

    def _plan(self, request: PromptAdapterRequest, digest: int, problem: str) -> AdapterChange:
        number, name, path = (
            request.prompt_adapter_id,
            request.prompt_adapter_name,
            request.prompt_adapter_local_path,
        )
        num_tokens = request.prompt_adapter_num_virtual_tokens
        change = AdapterChange(number, name, path, digest, problem=problem, num_tokens=num_tokens)
        entry = self._registry.entries.get(number)
        if problem:
            return change
        if entry is not None and (entry.name, entry.digest) != (name, digest):
            return replace(change, problem=_taken(request, entry.name, entry.path))
        is_used = self._requests.num_with_adapter
        try:
            evicted = self._registry.victims(
                number, digest, lambda content: content in self._wanted or is_used(content) > 0
            )
        except AdapterError:
            problem = (
                f"{len(self._registry.digests)} prompt adapters are loaded, pinned or with unanswered requests, and "
                f"model.max_prompt_adapters is {self._registry.max_adapters}: raise it, or remove one first"
            )
            return replace(change, problem=problem)
        return replace(change, evicted=evicted, dropped=self._registry.unneeded(evicted, digest))

    def _check_call(self) -> None:
        self._life.check_open()
        self._changes.weights.check_not_held()

    def _check_request(self, request: Any) -> None:
        if not isinstance(request, PromptAdapterRequest):
            kind = type(request).__name__
            raise TypeError(f"prompt_adapter_request={shown(request)} is a {kind}: give a PromptAdapterRequest")


def _virtual_tokens(entry: RegisteredAdapter) -> VirtualTokens:
    return VirtualTokens(entry.digest, entry.num_tokens)


def _other_number(request: PromptAdapterRequest, known: int) -> str:
    return (
        f"prompt adapter {request.prompt_adapter_id} ({request.prompt_adapter_name!r}) has {known} virtual tokens: "
        f"prompt_adapter_num_virtual_tokens={request.prompt_adapter_num_virtual_tokens} must be that"
    )


def _taken(request: PromptAdapterRequest, name: str, path: str) -> str:
    number, other = request.prompt_adapter_id, request.prompt_adapter_local_path
    return (
        f"prompt_adapter_id={number} is loaded as {name!r} from {path}, and this request has "
        f"{request.prompt_adapter_name!r} from {other} with another name, folder or content: give another id, or call "
        f"remove_prompt_adapter({number}) first"
    )


def _checked_id(int_id: Any) -> int:
    number = plain_int(int_id)
    if number is None:
        raise TypeError(f"prompt_adapter_id={shown(int_id)} is a {type(int_id).__name__}: give a whole number")
    return number
