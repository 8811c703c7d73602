"""KV connector of an engine (`cache.connector`): what it is made for, and what rank 0 finds outside."""

import logging
from collections.abc import Iterable
from dataclasses import asdict
from typing import Final

import torch

from kv_cache.block import BlockHash
from kv_cache.connectors.interface import ConnectorContext, KVConnector, SchedulerHalf
from kv_cache.outside_transfers import OutsideTransfers
from spmd_worker.base.version import code_fingerprint
from spmd_worker.model.adapters.source import read_adapter
from spmd_worker.model.weights.content_digest import content_digest
from spmd_worker.replica.lockstep.agreement import canonical
from spmd_worker.replica.scheduler.scheduler import Scheduler
from spmd_worker.replica.sequence.events import Admit, CommitWeights, Event, FoundBlocks
from spmd_worker.resolved import ResolvedRun
from spmd_worker.worker.worker_wrapper import connector_errors, new_connector

logger = logging.getLogger(__name__)

_IRRELEVANT: Final = (
    *("path", "dtype", "max_model_len", "load_format", "logprobs_mode", "head_dtype", "allow_nonfinite", "runner"),
    "pooling_type",
    *("classifier_from_token", "default_prompt_name", "allow_any_dimensions", "tool_call_format", "reasoning_format"),
    "chat_template",
    *("adapters", "max_cpu_loras", "lora_experts", "prompt_adapters", "max_prompt_adapters", "lora_merge"),
)
"""Keys of `model` on which no block depends, or that are topics of their own. A new key counts until it is here."""


def block_identity(resolved: ResolvedRun, arithmetic: str, weights: str) -> dict[str, str]:
    """Everything that a block's bytes depend on besides its name, by topic. `weights` is their `weights_digest`."""
    config, parallel = resolved.config, asdict(resolved.config.parallel)
    options = {key: value for key, value in asdict(config.model).items() if key not in _IRRELEVANT}
    # Replicas compute the same bits, a placement of experts is compared by its contents, and the order of sums is a
    # part of the arithmetic. A block has the heads and layers of a rank: it is another in each layout, of equal bits
    # too.
    parallel["data_parallel_size"], parallel["expert_placement"] = 1, None
    del parallel["invariant_tensor_parallel"], parallel["max_leaves"]
    return {
        "weights": weights,
        "model": _text(asdict(resolved.model_config)),
        "model options": _text(options),
        "dtype": resolved.dtype,
        "cache dtype": resolved.cache_dtype,
        "block size": f"{config.cache.block_size} tokens",
        "layout": _text(parallel),
        "experts": "" if resolved.layout.experts is None else _text(asdict(resolved.layout.experts)),
        "kernels": f"{config.executor.device_backend}, {arithmetic}; torch {torch.__version__}",
        "code": code_fingerprint(),
    }


def weights_digest(resolved: ResolvedRun) -> str:
    """Digest of the checkpoint's contents and those of an adapter merged into it. Raises OSError or AdapterError."""
    merged, pooling = resolved.config.model.merged_adapter, resolved.model_config.pooling
    if resolved.config.model.load_format == "dummy":
        digest = "dummy weights"
    else:
        digest = content_digest(resolved.model_folder, () if pooling is None else pooling.weight_folders)
    return digest if merged is None else f"{digest}, adapter {read_adapter(merged).digest:016x}"


def open_connector(resolved: ResolvedRun, identity: dict[str, str]) -> KVConnector:
    """The connector of this process's scheduler. Raises ConfigError."""
    config, layout = resolved.config.cache, resolved.layout
    assert config.connector is not None, config
    num_ranks = layout.tensor_parallel_size * layout.pipeline_parallel_size
    return new_connector(
        config.connector, ConnectorContext(dict(config.connector_options or {}), identity, 0, num_ranks)
    )


class OutsideBlocks:
    """Rank 0's view of the blocks outside; `half` is None on other ranks, which get events."""

    def __init__(self, connector: KVConnector, name: str, *, is_leader: bool) -> None:
        self.saves, self._name = connector.saves, name
        with connector_errors(name):
            self._half: SchedulerHalf | None = connector.scheduler_half() if is_leader else None
        self._has_warned = False

    def new_transfers(self) -> OutsideTransfers:
        return OutsideTransfers(saves=self.saves)

    def with_found(self, events: tuple[Event, ...], scheduler: Scheduler) -> tuple[Event, ...]:
        """The events of a step, with those of blocks that its new requests can load."""
        if self._half is None or not any(isinstance(event, Admit) for event in events):
            return events
        if not scheduler.cache.looks_outside:
            self._warn_once()
            return events
        is_found: dict[BlockHash, bool] = {}
        completed: list[Event] = []
        weight_version: int | None = None
        for event in events:
            if isinstance(event, CommitWeights):
                weight_version = event.version
            elif isinstance(event, Admit):
                hashes = scheduler.missing_prefix(event.request, weight_version)
                if not all(is_found.get(each) for each in hashes):
                    num_found = self._half.find(hashes)
                    # Known ones are looked for too: a limit evicts files, a producer replaces blocks.
                    is_known = [is_found.get(each, scheduler.cache.is_outside(each)) for each in hashes]
                    new = [each for each, known in zip(hashes[:num_found], is_known) if not known]
                    missing = [each for each, known in zip(hashes[num_found:], is_known[num_found:]) if known]
                    if new or missing:
                        is_found |= dict.fromkeys(hashes[:num_found], True) | dict.fromkeys(missing, False)
                        completed.append(FoundBlocks(tuple(new), tuple(missing)))
            completed.append(event)
        return tuple(completed)

    def close(self) -> None:
        half, self._half = self._half, None
        if half is not None:
            half.close()

    def _warn_once(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "cache.connector=%s is off until this engine ends: reset_prefix_cache, apply_model or "
                "set_weight_version was called, after which names of blocks may stand for other weights",
                self._name,
            )


def _text(value: Iterable[object]) -> str:
    return canonical(value).decode()
