"""LoRA adapters that an engine has before its first step: those of `model.adapters`, or of the engine that it replaces.

No request exists yet, so no event is needed: every rank loads the same adapters in the same order, and all compare the
digests of what they have read.
"""

import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, Final

from spmd_worker.base.config.plain_values import plain_folder
from spmd_worker.base.errors import AdapterError, RankFailedError
from spmd_worker.executor.adapters import reason_of
from spmd_worker.executor.executor import Executor
from spmd_worker.ranks.transport.channel import ControlChannel
from spmd_worker.replica.lockstep.agreement import canonical
from spmd_worker.replica.scheduler.adapter_registry import AdapterRegistry, RegisteredAdapter
from spmd_worker.replica.sequence.adapter_change import ADD_LORA, AdapterChange
from spmd_worker.replica.sequence.lora_request import LoRARequest
from spmd_worker.resolved import ResolvedRun

logger = logging.getLogger(__name__)

_PHASE: Final = "loading the adapters"

Together = Callable[[str, Callable[[], Any]], Any]
"""Runs an action on every rank, in a named phase: if it fails on one, all raise RankFailedError that names it."""


def load_at_start(
    resolved: ResolvedRun,
    executor: Executor,
    channel: ControlChannel,
    earlier: tuple[RegisteredAdapter, ...] | None,
    together: Together,
) -> AdapterRegistry:
    """Load the adapters and return their registry; `channel` is the engine's, of all replicas.

    Those of `model.adapters` are pinned and have ids from 1 on, in the order of their names; a failure ends the start.
    Of an `earlier` engine's, those from folders whose content has not changed are loaded again, and the others are
    logged.
    """
    model = resolved.config.model
    limits = model.adapter_limits
    if limits is None:
        return AdapterRegistry()
    together(_PHASE, partial(executor.collective_rpc, "leave_adapters_to_engine"))
    paths = {name: plain_folder(path) for name, path in sorted((model.adapters or {}).items())}
    named = [RegisteredAdapter(index, name, paths[name], 0, True) for index, name in enumerate(paths, start=1)]
    wanted: Iterable[RegisteredAdapter] = named if earlier is None else earlier
    loaded = []
    for each in wanted:
        # The ranks' own folders: rank 0's may have another path.
        mine = replace(each, path=paths.get(each.name, each.path)) if each.is_pinned else each
        digest, reason = _read(mine, executor, channel)
        if earlier is not None and not reason and digest != each.digest:
            reason = f"{mine.path} has another content than before"
        if reason and earlier is not None:
            logger.warning("adapter %d (%r) is not loaded any more: %s", each.int_id, each.name, reason)
            executor.adapters.unstage()
            continue
        if reason:
            raise _failed(reason, channel)
        change = AdapterChange(each.int_id, each.name, mine.path, digest)
        together(_PHASE, partial(_load, executor, change))
        loaded.append(replace(mine, digest=digest, last_use=each.last_use or each.int_id))
    return AdapterRegistry(limits.max_cpu_loras, loaded)


def _read(adapter: RegisteredAdapter, executor: Executor, channel: ControlChannel) -> tuple[int, str]:
    """The digest that every rank has read, and "", or why they have no common one: the same on every rank."""
    if not adapter.path:
        return 0, "it was given as tensors: add it again"
    own = executor.adapters.stage(LoRARequest(adapter.name, adapter.int_id, adapter.path))
    found = [json.loads(payload) for payload in channel.gather(canonical([*own, adapter.path]))]
    first = found[0][0]
    for rank, (digest, problem, path) in enumerate(found):
        if problem:
            return 0, f"rank {rank}: {problem}"
        if digest != first:
            digests = f"{digest:016x} on rank {rank} ({path}) and {first:016x} on rank 0 ({found[0][2]})"
            return 0, f"the content of adapter {adapter.name!r} has the digest {digests}: give every rank the same"
    return first, ""


def _failed(reason: str, channel: ControlChannel) -> Exception:
    """The error that every rank raises."""
    if channel.size == 1:
        return AdapterError(reason)
    failed = RankFailedError(f"{_PHASE}: {reason}")
    failed.names_cause = True
    return failed


def _load(executor: Executor, change: AdapterChange) -> None:
    """Load what the workers have read. Raises AdapterError."""
    problem = executor.prepare_event(ADD_LORA, change)
    executor.end_event(is_committed=not problem)
    if problem:
        raise AdapterError(reason_of(problem))
