"""Adapters that an engine has before its first step: those of the configuration, or of the engine that it replaces.

No request exists yet, so no event is needed: every rank loads the same adapters in the same order, and all compare the
digests of what they have read.
"""

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple

from spmd_worker.base.config.plain_values import plain_folder
from spmd_worker.base.config.schema import ModelOptions
from spmd_worker.base.errors import AdapterError, ConfigError, RankFailedError
from spmd_worker.executor.adapters import reason_of
from spmd_worker.executor.executor import Executor
from spmd_worker.model.adapters.prompt_adapter import read_prompt_adapter
from spmd_worker.model.adapters.source import read_peft_config
from spmd_worker.model_config.adapter_folder import adapter_folders
from spmd_worker.ranks.transport.channel import ControlChannel
from spmd_worker.replica.lockstep.agreement import canonical
from spmd_worker.replica.scheduler.adapter_registry import AdapterRegistry, RegisteredAdapter
from spmd_worker.replica.sequence.adapter_change import ADD_LORA, AdapterChange
from spmd_worker.replica.sequence.adapter_kind import LORA, PROMPT
from spmd_worker.replica.sequence.lora_request import LoRARequest
from spmd_worker.replica.sequence.prompt_adapter_request import ADD_PROMPT_ADAPTER, PromptAdapterRequest
from spmd_worker.resolved import ResolvedRun

logger = logging.getLogger(__name__)

_PHASE: Final = "loading the adapters"
_KINDS: Final = {ADD_LORA: LORA, ADD_PROMPT_ADAPTER: PROMPT}
_TENSORS: Final = "it was given as tensors: add it again"

Together = Callable[[str, Callable[[], Any]], Any]
"""Runs an action on every rank, in a named phase: if it fails on one, all raise RankFailedError that names it."""


def check_folders(model: ModelOptions) -> None:
    """Raise ConfigError for a folder of the configuration that is no adapter of its kind, or of too high a rank, before
    the model is loaded. Matrices of LoRA are not read.
    """
    for key, folder in adapter_folders(model).items():
        try:
            if key.startswith("model.prompt_adapters."):
                read_prompt_adapter(folder)
                continue
            rank = read_peft_config(folder).rank_of_all
        except AdapterError as error:
            raise ConfigError(f"{key}: {error}") from None
        except Exception as error:  # the other ranks must learn of any failure
            way_out = "save the adapter again"
            raise ConfigError(f"{key}: {folder} cannot be read: {type(error).__name__}: {error}: {way_out}") from error
        # A merged adapter needs no room.
        if key != "model.lora_merge" and rank > model.max_lora_rank:
            rule = f"above model.max_lora_rank={model.max_lora_rank}: raise it"
            raise ConfigError(f"{key}: {folder} has the rank {rank}, {rule}")


class EarlierAdapters(NamedTuple):
    """Those of an engine that is replaced, with this rank's own folders."""

    lora: tuple[RegisteredAdapter, ...]
    prompt: tuple[RegisteredAdapter, ...]


def load_at_start(
    resolved: ResolvedRun,
    executor: Executor,
    channel: ControlChannel,
    earlier: EarlierAdapters | None,
    together: Together,
) -> tuple[AdapterRegistry, AdapterRegistry]:
    """Load LoRA and prompt adapters and return their registries; `channel` is the engine's, of all replicas.

    Those of `model.adapters` and `model.prompt_adapters` are pinned and have ids from 1 on, in the order of their
    names; a failure ends the start. Of an `earlier` engine's, those from folders whose content has not changed are
    loaded again, pinned if they were, and the others are logged.
    """
    model = resolved.config.model
    limits = model.adapter_limits
    load = partial(_load_all, executor, channel, together)
    lora = AdapterRegistry()
    if limits is not None:
        together(_PHASE, partial(executor.collective_rpc, "leave_adapters_to_engine"))
        lora = AdapterRegistry(limits.max_cpu_loras, load(ADD_LORA, model.adapters, earlier and earlier.lora))
    given = (model.prompt_adapters, earlier and earlier.prompt)
    return lora, AdapterRegistry(model.max_prompt_adapters, load(ADD_PROMPT_ADAPTER, *given), PROMPT)


def _load_all(
    executor: Executor,
    channel: ControlChannel,
    together: Together,
    event: str,
    folders: Mapping[str, str] | None,
    earlier: tuple[RegisteredAdapter, ...] | None,
) -> list[RegisteredAdapter]:
    """Load the adapters of one kind."""
    paths = {name: plain_folder(path) for name, path in sorted((folders or {}).items())}
    named = [RegisteredAdapter(index, name, paths[name], 0, True) for index, name in enumerate(paths, start=1)]
    wanted: Iterable[RegisteredAdapter] = named if earlier is None else earlier
    loaded = []
    for each in wanted:
        digest, num_tokens, reason = _read(event, each, executor, channel)
        if earlier is not None and not reason and digest != each.digest:
            reason = f"{each.path} has another content than before"
        if reason and earlier is not None:
            logger.warning("%s %d (%r) is not loaded any more: %s", _KINDS[event].noun, each.int_id, each.name, reason)
            (executor.adapters if event == ADD_LORA else executor.prompt_adapters).unstage()
            continue
        if reason:
            raise _failed(reason, channel)
        change = AdapterChange(each.int_id, each.name, each.path, digest, num_tokens=num_tokens)
        together(_PHASE, partial(_load, executor, event, change))
        loaded.append(replace(each, digest=digest, last_use=each.last_use or each.int_id, num_tokens=num_tokens))
    return loaded


def _read(event: str, adapter: RegisteredAdapter, executor: Executor, channel: ControlChannel) -> tuple[int, int, str]:
    """Digest and virtual tokens that every rank has read, and "", or why they have none in common: the same on every
    rank.
    """
    own = (0, 0, _TENSORS)
    if adapter.path:
        own = (_read_lora if event == ADD_LORA else _read_prompt_adapter)(adapter, executor)
    found = [json.loads(payload) for payload in channel.gather(canonical([*own, adapter.path]))]
    first, num_tokens = found[0][:2]
    for rank, (digest, _, problem, path) in enumerate(found):
        if problem:
            return 0, 0, problem if problem == _TENSORS else f"rank {rank}: {problem}"
        if digest != first:
            digests = f"{digest:016x} on rank {rank} ({path}) and {first:016x} on rank 0 ({found[0][3]})"
            what = f"the content of {_KINDS[event].noun} {adapter.name!r}"
            return 0, 0, f"{what} has the digest {digests}: give every rank the same"
    return first, num_tokens, ""


def _read_lora(adapter: RegisteredAdapter, executor: Executor) -> tuple[int, int, str]:
    digest, problem = executor.adapters.stage(LoRARequest(adapter.name, adapter.int_id, adapter.path))
    return digest, 0, problem


def _read_prompt_adapter(adapter: RegisteredAdapter, executor: Executor) -> tuple[int, int, str]:
    try:
        num_tokens = read_prompt_adapter(adapter.path).num_tokens
    except Exception as error:  # the other ranks must learn of any failure
        return 0, 0, str(error) if isinstance(error, AdapterError) else f"{type(error).__name__}: {error}"
    request = PromptAdapterRequest(adapter.name, adapter.int_id, adapter.path, num_tokens)
    digest, problem = executor.prompt_adapters.stage(request)
    return digest, num_tokens, problem


def _failed(reason: str, channel: ControlChannel) -> Exception:
    """The error that every rank raises."""
    if channel.size == 1:
        return AdapterError(reason)
    failed = RankFailedError(f"{_PHASE}: {reason}")
    failed.names_cause = True
    return failed


def _load(executor: Executor, event: str, change: AdapterChange) -> None:
    """Load what the workers have read. Raises AdapterError."""
    problem = executor.prepare_event(event, change)
    executor.end_event(is_committed=not problem)
    if problem:
        raise AdapterError(reason_of(problem))
