"""Decisions about adapters, which one rank takes for all: what a change of them drops, or why it is refused."""

from collections.abc import Callable
from dataclasses import replace

from spmd_worker.base.errors import AdapterError
from spmd_worker.replica.scheduler.adapter_registry import AdapterRegistry, RegisteredAdapter
from spmd_worker.replica.sequence.adapter_change import AdapterChange
from spmd_worker.replica.sequence.adapter_kind import PROMPT, AdapterKind, AdapterRequest
from spmd_worker.replica.sequence.events import AddAdapter, AddPromptAdapter
from spmd_worker.replica.sequence.lora_request import LoRARequest
from spmd_worker.replica.sequence.prompt_adapter_request import PromptAdapterRequest

NumRequests = Callable[[int], int]
"""Number of unanswered requests with a content."""


def plan_addition(
    registry: AdapterRegistry,
    request: AdapterRequest,
    staged: tuple[int, str],
    num_requests: NumRequests,
    is_wanted: Callable[[int], bool] = lambda _: False,
) -> AdapterChange:
    """The change that loads an adapter; `staged` is the digest of its content on this rank, or the reason why it cannot
    be used. What `is_wanted` or has requests does not give way.
    """
    int_id, (digest, problem) = request.adapter_id, staged
    num_tokens = request.prompt_adapter_num_virtual_tokens if isinstance(request, PromptAdapterRequest) else 0
    change = AdapterChange(int_id, request.name, request.local_path, digest, problem=problem, num_tokens=num_tokens)
    entry = registry.entries.get(int_id)
    if problem:
        return change
    if entry is not None and not _is_in_place(request) and (entry.name, entry.digest) != (request.name, digest):
        return replace(change, problem=taken(registry.kind, request, entry))
    replaced = (int_id,) if entry is not None else ()
    num_waiting = sum(map(num_requests, registry.unneeded(replaced, digest)))
    if num_waiting:
        what = f"{registry.kind.noun} {int_id} cannot be replaced"
        return replace(change, problem=unanswered(what, num_waiting))
    try:
        evicted = registry.victims(int_id, digest, lambda content: is_wanted(content) or num_requests(content) > 0)
    except AdapterError as error:
        return replace(change, problem=str(error))
    return replace(change, evicted=evicted, dropped=registry.unneeded((*replaced, *evicted), digest))


def plan_removal(registry: AdapterRegistry, int_id: int, num_requests: NumRequests) -> AdapterChange:
    """The change that removes a loaded adapter."""
    entry, dropped = registry.entries[int_id], registry.unneeded((int_id,))
    num_waiting = sum(map(num_requests, dropped))
    what = f"{registry.kind.noun} {int_id} ({entry.name!r}) cannot be removed"
    problem = unanswered(what, num_waiting) if num_waiting else ""
    return AdapterChange(int_id, entry.name, entry.path, entry.digest, (), dropped, problem)


def addition_of(kind: AdapterKind, change: AdapterChange) -> AddAdapter | AddPromptAdapter:
    """The event that takes effect with an addition."""
    known = (change.int_id, change.name, change.path, change.digest, change.evicted)
    return AddPromptAdapter(*known, change.num_tokens) if kind is PROMPT else AddAdapter(*known)


def taken(kind: AdapterKind, request: AdapterRequest, entry: RegisteredAdapter) -> str:
    """The refusal of an id that has another adapter."""
    in_place = "load_inplace=True, or " if isinstance(request, LoRARequest) else ""
    return (
        f"{kind.id_key}={entry.int_id} is loaded as {entry.name!r} from {entry.path or 'tensors'}, and this request "
        f"has {request.name!r} from {request.local_path or 'tensors'} with another name, folder or content: give "
        f"another id, or {in_place}call remove_{kind.call}({entry.int_id}) first"
    )


def unanswered(what: str, num_requests: int) -> str:
    """The refusal of what requests still need."""
    if num_requests == 1:
        return f"{what}: 1 request with it is unanswered; try again once it is answered, or abort it"
    return f"{what}: {num_requests} requests with it are unanswered; try again once they are answered, or abort them"


def _is_in_place(request: AdapterRequest) -> bool:
    return isinstance(request, LoRARequest) and request.load_inplace
