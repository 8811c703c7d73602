"""Decisions about LoRA adapters, which one rank takes for all: what a change of them drops, or why it is refused."""

from collections.abc import Callable
from dataclasses import replace

from spmd_worker.base.errors import AdapterError
from spmd_worker.replica.scheduler.adapter_registry import AdapterRegistry, RegisteredAdapter
from spmd_worker.replica.sequence.adapter_change import AdapterChange
from spmd_worker.replica.sequence.events import AddAdapter
from spmd_worker.replica.sequence.lora_request import LoRARequest

NumRequests = Callable[[int], int]
"""Number of unanswered requests with a content."""


def plan_addition(
    registry: AdapterRegistry,
    request: LoRARequest,
    staged: tuple[int, str],
    num_requests: NumRequests,
    is_wanted: Callable[[int], bool] = lambda _: False,
) -> AdapterChange:
    """The change that loads an adapter; `staged` is the digest of its content on this rank, or the reason why it cannot
    be used. What `is_wanted` or has requests does not give way.
    """
    int_id, (digest, problem) = request.lora_int_id, staged
    change = AdapterChange(int_id, request.lora_name, request.lora_path, digest, problem=problem)
    entry = registry.entries.get(int_id)
    if problem:
        return change
    if entry is not None and not request.load_inplace and (entry.name, entry.digest) != (request.lora_name, digest):
        return replace(change, problem=taken(request, entry))
    replaced = (int_id,) if entry is not None else ()
    num_waiting = sum(map(num_requests, registry.unneeded(replaced, digest)))
    if num_waiting:
        return replace(change, problem=unanswered(f"adapter {int_id} cannot be replaced", num_waiting))
    try:
        evicted = registry.victims(int_id, digest, lambda content: is_wanted(content) or num_requests(content) > 0)
    except AdapterError as error:
        return replace(change, problem=str(error))
    return replace(change, evicted=evicted, dropped=registry.unneeded((*replaced, *evicted), digest))


def plan_removal(registry: AdapterRegistry, int_id: int, num_requests: NumRequests) -> AdapterChange:
    """The change that removes a loaded adapter."""
    entry, dropped = registry.entries[int_id], registry.unneeded((int_id,))
    num_waiting = sum(map(num_requests, dropped))
    what = f"adapter {int_id} ({entry.name!r}) cannot be removed"
    problem = unanswered(what, num_waiting) if num_waiting else ""
    return AdapterChange(int_id, entry.name, entry.path, entry.digest, (), dropped, problem)


def addition_of(change: AdapterChange) -> AddAdapter:
    """The event that takes effect with an addition."""
    return AddAdapter(change.int_id, change.name, change.path, change.digest, change.evicted)


def taken(request: LoRARequest, entry: RegisteredAdapter) -> str:
    """The refusal of an id that has another adapter."""
    return (
        f"lora_int_id={entry.int_id} is loaded as {entry.name!r} from {entry.path or 'tensors'}, and this request has "
        f"{request.lora_name!r} from {request.lora_path or 'tensors'} with another name, folder or content: give "
        f"another id, or load_inplace=True, or call remove_lora({entry.int_id}) first"
    )


def unanswered(what: str, num_requests: int) -> str:
    """The refusal of what requests still need."""
    return f"{what}: {num_requests} requests with it are unanswered; try again once they are, or abort them"
