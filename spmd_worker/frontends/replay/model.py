"""Recomputes the token ids of a step log on one rank, for a log of any number of ranks.

The plans are the log's, so every step computes exactly the same as in the run, if that added row-parallel sums as one
rank does, which is logged if not. Ids are compared with the log's, from which the next step continues: a different id
is reported once.

The log has the events that changed the workers, but not the weights that a trainer loaded: steps after new weights
cannot be recomputed.
"""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Final

from spmd_worker.base.config.parallel import ParallelConfig
from spmd_worker.base.config.schema import CacheConfig, ExecutorConfig, ModelOptions, RunConfig, SchedulerConfig
from spmd_worker.base.errors import AdapterError, ReplayError
from spmd_worker.executor.uniproc import UniProcExecutor
from spmd_worker.frontends.replay.replay import ReplayedStep, SampledPosition
from spmd_worker.frontends.replay.step_log import StepLogHeader
from spmd_worker.model.adapters.prompt_adapter import read_prompt_adapter
from spmd_worker.model.weights.sampled_digest import sampled_digests
from spmd_worker.ranks.environment import RankEnvironment
from spmd_worker.replica.sequence.adapter_change import ADD_LORA, REMOVE_LORA
from spmd_worker.replica.sequence.encoder_input import is_text
from spmd_worker.replica.sequence.events import (
    AddAdapter,
    AddPromptAdapter,
    Admit,
    CommitWeights,
    EndWorkerEvent,
    RemoveAdapter,
    RemovePromptAdapter,
    SetWeightVersion,
    WorkerEvent,
)
from spmd_worker.replica.sequence.lora_request import LoRARequest
from spmd_worker.replica.sequence.prompt_adapter_request import (
    ADD_PROMPT_ADAPTER,
    REMOVE_PROMPT_ADAPTER,
    PromptAdapterRequest,
)
from spmd_worker.replica.sequence.request import Request
from spmd_worker.replica.sequence.sampled import SampledIds
from spmd_worker.replica.sequence.sequence import SequenceKey
from spmd_worker.replica.sequence.sleep_tags import SLEEP, WAKE_UP
from spmd_worker.replica.sequence.step import StepPlan, StepResult
from spmd_worker.resolved import resolve_run

logger = logging.getLogger(__name__)

_ADAPTER_EVENTS: Final = (ADD_LORA, REMOVE_LORA, ADD_PROMPT_ADAPTER, REMOVE_PROMPT_ADAPTER)
_KEEP_ANSWERS: Final = frozenset({"start_profile", "stop_profile", SLEEP, WAKE_UP, *_ADAPTER_EVENTS})
"""Worker events that keep the weights, or are followed by a `CommitWeights`, or by an event of adapters."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """An id that differs between log and recomputation; None if only one of them has it."""

    step: int
    position: SampledPosition
    logged: int | None
    recomputed: int | None


@dataclass(frozen=True, slots=True)
class RecomputedStep:
    """One step's number of ids, and the ones that differ."""

    step: int
    num_token_ids: int
    mismatches: tuple[Mismatch, ...]


def recompute(header: StepLogHeader, model_path: Path, steps: Iterable[ReplayedStep]) -> Iterator[RecomputedStep]:
    """Execute each step's plan and compare. `steps` begins with the first and is read lazily.

    Raises ConfigError or ModelConfigError for a model or device that is not available here, CheckpointError for
    weights, and ReplayError at the first step after a change of weights or workers that is not in the log.
    """
    executor = _start(header, model_path)
    last: ReplayedStep | None = None
    change = open_event = ""
    try:
        for step in steps:
            if step.plan.num_tokens and change:
                raise ReplayError(
                    f"step {step.plan.step} computes with {change}, which the log does not have: the steps before were "
                    f"recomputed"
                )
            if step.plan.block_ops.fetch:
                raise ReplayError(
                    f"step {step.plan.step} loads blocks by cache.connector, which the log does not have: the steps "
                    f"before were recomputed"
                )
            # Events take effect after the step.
            for event in step.events:
                if isinstance(event, WorkerEvent):
                    open_event = event.name
                elif isinstance(event, CommitWeights | SetWeightVersion):
                    change = f"the new weights of version {event.version} (step {step.plan.step})"
                elif isinstance(event, AddAdapter):
                    change = _add_adapter(executor, event) or change
                elif isinstance(event, RemoveAdapter):
                    executor.remove_lora(event.int_id)
                elif isinstance(event, AddPromptAdapter):
                    change = _add_prompt_adapter(executor, event) or change
                elif isinstance(event, RemovePromptAdapter):
                    executor.remove_prompt_adapter(event.int_id)
                elif isinstance(event, Admit) and len(event.request.rows) > (event.request.num_virtual_tokens > 0):
                    change = f"the embeddings of request {event.request.request_id} (prompt_embeds)"
                elif isinstance(event, Admit) and event.request.media and not _has_text(event.request):
                    kind = "images or audio" if event.request.encoder_input is None else "audio"
                    change = f"the {kind} of request {event.request.request_id}"
                elif isinstance(event, EndWorkerEvent) and not event.problem and open_event not in _KEEP_ANSWERS:
                    change = f"the changes of worker event {open_event!r} of step {step.plan.step}"
            _check_runner(executor, step)
            result = executor.execute_model(_with_ids(step.plan, last))
            last = step
            assert isinstance(result, StepResult), type(result)
            if step.sampled is not None:
                yield _compare(step, step.sampled, SampledIds(result.token_ids, result.num_token_ids))
    finally:
        executor.shutdown()


def _has_text(request: Request) -> bool:
    """Whether the only rows of a request are of a text, which the log has."""
    return request.encoder_input is not None and is_text(request.encoder_input)


def _add_adapter(executor: UniProcExecutor, event: AddAdapter) -> str:
    """Load an adapter as the run did. Returns what cannot be recomputed, or nothing."""
    what = f"LoRA adapter {event.int_id} ({event.name!r})"
    if not event.path:
        return f"the tensors of {what}"
    for int_id in event.evicted:
        executor.remove_lora(int_id)
    request = LoRARequest(event.name, event.int_id, event.path, load_inplace=True)
    try:
        if executor.adapters.stage(request) != (event.digest, ""):
            return f"{what}, whose folder {event.path} has another content than in the run"
        executor.add_lora(request)
    except AdapterError as error:
        return f"{what} ({error})"
    return ""


def _add_prompt_adapter(executor: UniProcExecutor, event: AddPromptAdapter) -> str:
    """Load a prompt adapter, otherwise as `_add_adapter`."""
    what = f"prompt adapter {event.int_id} ({event.name!r})"
    for int_id in event.evicted:
        executor.remove_prompt_adapter(int_id)
    try:
        adapter = read_prompt_adapter(event.path)
        if adapter.digest != event.digest:
            return f"{what}, whose folder {event.path} has another content than in the run"
        executor.add_prompt_adapter(PromptAdapterRequest(event.name, event.int_id, event.path, adapter.num_tokens))
    except AdapterError as error:
        return f"{what} ({error})"
    return ""


def _with_ids(plan: StepPlan, last: ReplayedStep | None) -> StepPlan:
    """The plan with the log's ids for the sequences that were scheduled ahead of them in the run."""
    if not plan.num_ahead:
        return plan
    assert last is not None, plan.step
    assert last.sampled is not None, plan.step
    sampled = zip(last.positions, last.sampled.rows(), strict=True)
    by_key = {SequenceKey(position.request_id, position.sample_index): ids for position, ids in sampled}
    # A sequence without an id has ended, and its computed token is not read.
    ids_ahead = [max(*by_key[key], 0) for key in plan.continuing[: plan.num_ahead]]
    num_ids = (1,) * plan.num_ahead + plan.continuing_num_ids if plan.continuing_num_ids else ()
    token_ids = (*ids_ahead, *plan.continuing_token_ids)
    return replace(plan, num_ahead=0, continuing_token_ids=token_ids, continuing_num_ids=num_ids)


def _check_runner(executor: UniProcExecutor, step: ReplayedStep) -> None:
    """Raise ReplayError for rows that the model's folder does not support: it is not the run's."""
    pools = executor.resolved.model_config.pooling is not None
    for event in step.events:
        if isinstance(event, Admit) and (event.request.pooling is not None) != pools:
            runner = "pooled" if event.request.pooling is not None else "generated"
            raise ReplayError(
                f"request {event.request.request_id} was {runner}, which this model folder does not support: give the "
                f"folder of the run, or replay without the model"
            )


def _start(header: StepLogHeader, model_path: Path) -> UniProcExecutor:
    config = RunConfig(
        model=ModelOptions(
            path=str(model_path),
            dtype=header.dtype,
            max_model_len=header.max_model_len,
            load_format=header.load_format,
            quantization=header.quantization,
            # Load the same weights as the run.
            allow_nonfinite=True,
            runner=header.runner,
            pooling_type=header.pooling_type,
            classifier_from_token=None if header.classifier_from_token is None else list(header.classifier_from_token),
            lora_merge=header.lora_merge,
            enable_lora=header.max_loras > 0,
            max_loras=header.max_loras or None,
            max_lora_rank=header.max_lora_rank or 1,
            max_cpu_loras=header.max_cpu_loras or None,
            # The run has checked its adapters.
            lora_experts=header.max_loras > 0,
            # As many as the run had: the executor evicts too.
            max_prompt_adapters=header.max_prompt_adapters or 1,
        ),
        parallel=ParallelConfig(
            invariant_tensor_parallel=True if header.num_leaves > 1 else None, max_leaves=header.num_leaves
        ),
        executor=ExecutorConfig(backend="uniproc"),
        cache=CacheConfig(
            dtype=header.cache_dtype,
            block_size=header.block_size,
            # Of all groups each; measured numbers are no multiples.
            num_blocks=-(-header.num_blocks // header.groups.num_groups) or None,
            window_groups=header.num_window_groups > 0,
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=header.max_num_seqs,
            max_num_batched_tokens=header.max_num_batched_tokens,
            enable_chunked_prefill=header.enable_chunked_prefill,
            max_encoder_len=header.max_encoder_len or None,
            async_scheduling=False,
        ),
        device=header.device,
        seed=header.seed,
    )
    resolved = resolve_run(config, header.device)
    found = sampled_digests(resolved)
    for name, digest in zip(header.weight_files, header.weight_digests):
        if found.get(name) != digest:
            raise ReplayError(
                f"{name} of {resolved.model_folder} has other weights than in the run: give --model the folder of the "
                f"run's, or replay without the model"
            )
    if resolved.row_sums != header.row_sums:
        logger.warning(
            "the run added row-parallel sums %s, and one rank adds them %s: last bits differ, so a token near a tie "
            "may differ without a fault",
            header.row_sums or "in another order",
            resolved.row_sums,
        )
    # `min_tokens` forbids the run's ids, which the folder may have changed since.
    model_config = replace(resolved.model_config, eos_token_ids=header.eos_token_ids)
    executor = UniProcExecutor(replace(resolved, model_config=model_config), RankEnvironment())
    executor.start()
    try:
        executor.load_model()
        if header.num_state_slots:
            slots = (header.num_state_slots, header.num_host_state_slots)
            executor.collective_rpc("initialize_states", args=slots)
        executor.initialize_from_config(header.num_blocks, header.num_host_blocks)
        if header.num_tier_blocks:
            executor.collective_rpc("initialize_host_tier", args=(header.num_tier_blocks,))
        faults = [_add_adapter(executor, each) for each in header.adapters]
        faults += [_add_prompt_adapter(executor, each) for each in header.prompt_adapters]
        for fault in filter(None, faults):
            raise ReplayError(f"the run had {fault}")
    except BaseException:
        executor.shutdown()
        raise
    return executor


def _compare(step: ReplayedStep, logged: SampledIds, recomputed: SampledIds) -> RecomputedStep:
    mismatches = tuple(
        Mismatch(step.plan.step, first._replace(position=first.position + offset), old, new)
        for first, old_ids, new_ids in zip(step.positions, logged.rows(), recomputed.rows(), strict=True)
        for offset, (old, new) in enumerate(zip_longest(old_ids, new_ids))
        if old != new
    )
    return RecomputedStep(step.plan.step, len(logged.token_ids), mismatches)
