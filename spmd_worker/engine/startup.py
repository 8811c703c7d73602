"""Start of an engine: every rank builds its replica, after the ranks have compared everything that must be equal.

Configuration, code and model come first, then files and memory phase by phase, each agreed on by all ranks, so that the
failure of one rank is an error on every rank and no rank waits in vain.
"""

import json
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from importlib import metadata
from typing import Any, Final, TypeVar

import numpy
import tokenizers
import torch

from kv_cache.outside_transfers import OutsideTransfers
from spmd_worker.base.config.parallel import ParallelConfig
from spmd_worker.base.config.schema import RunConfig
from spmd_worker.base.config.speculation import SpeculativeConfig
from spmd_worker.base.errors import ConfigError, RankFailedError
from spmd_worker.base.liveness.heartbeat import BETWEEN_STEPS, CLOSING
from spmd_worker.base.liveness.watchdog import Watchdog
from spmd_worker.base.metrics.log import leave_to_rank_0
from spmd_worker.base.version import code_fingerprint
from spmd_worker.engine.adapters_at_start import EarlierAdapters, check_folders, load_at_start
from spmd_worker.engine.engine import Engine
from spmd_worker.engine.kv_connector import (
    OutsideBlocks,
    block_identity,
    open_connector,
    weights_digest,
)
from spmd_worker.executor.executor import Executor
from spmd_worker.media.media_root import resolved_media_root
from spmd_worker.model.adapters.source import read_adapter
from spmd_worker.model.weights.identity import file_identities, tensor_digests
from spmd_worker.model.weights.sampled_digest import state_digest
from spmd_worker.ops.default_device import host_by_default
from spmd_worker.ranks.communicator import single_group
from spmd_worker.ranks.environment import RankEnvironment, read_rank_environment
from spmd_worker.ranks.groups import world_environment
from spmd_worker.ranks.rank_watchdog import watch_guest
from spmd_worker.ranks.transport.channel import ControlChannel
from spmd_worker.ranks.transport.connect import open_step_channel
from spmd_worker.ranks.transport.membership import check_members, run_secret
from spmd_worker.replica.lockstep.agreement import canonical, check_equal
from spmd_worker.replica.lockstep.lockstep import Lockstep
from spmd_worker.replica.scheduler.adapter_registry import AdapterRegistry
from spmd_worker.replica.scheduler.allocator import PreemptionPolicy
from spmd_worker.replica.scheduler.factory import CacheSizes, new_scheduler
from spmd_worker.replica.scheduler.planner import SchedulerLimits
from spmd_worker.replica.scheduler.scheduler import Scheduler
from spmd_worker.resolved import ResolvedRun, resolve_again, resolve_run
from spmd_worker.resolved_draft import MTP
from spmd_worker.worker.device import check_gpus_not_shared, device_type
from spmd_worker.worker.memory.estimate import block_copy_tokens, model_snapshot_interval, slot_copy_tokens
from spmd_worker.worker.memory.media_memory import media_row_limits
from spmd_worker.worker.memory.plan import check_cache_setting, num_tier_blocks
from spmd_worker.worker.memory.window_groups import grouping_of

WATERMARK_BLOCKS_PER_SEQUENCE: Final = 1
"""Free blocks that admission leaves for each running sequence (`docs/internals/cache.md`)."""

_Engine = TypeVar("_Engine", bound=Engine)

BeforeLoad = Callable[[ControlChannel], None]


class NoWorkError(Exception):
    """Raised by `before_load` on every rank: the program ends well, without a model."""


def read_run(config: RunConfig) -> ResolvedRun:
    """Resolve a configuration for this process; reads the model's files once and starts nothing. Raises ConfigError,
    ModelConfigError or TokenizerError for an unsupported run.
    """
    leave_to_rank_0(read_rank_environment().rank)
    resolved = resolve_run(config, device_type(config.device))
    check_cache_setting(resolved)
    return resolved


def start_engine(
    resolved: ResolvedRun,
    environment: RankEnvironment | None = None,
    watchdog: Watchdog | None = None,
    engine_class: type[_Engine] = Engine,  # type: ignore[assignment]  # mypy 1: no default of a type variable
    before_load: BeforeLoad | None = None,
) -> _Engine:
    """Build this rank's replica: device, groups, weights, cache, scheduler. Every rank of the layout calls this.
    `before_load` is called with the channel of all ranks; it may raise NoWorkError, which is raised here.

    `resolved` is from `read_run`. `watchdog` is the program's own, already started; the engine makes one otherwise.

    Raises ConfigError before it waits for other ranks; RanksDisagreeError and RankFailedError, the same on every rank,
    once the groups exist.
    """
    executor_config = resolved.config.executor
    environment = world_environment(
        environment or read_rank_environment(), resolved.layout.world_size, executor_config.timeout_s
    )
    executor_class = Executor.get_class(executor_config.backend, environment, resolved.layout.world_size)
    executor = executor_class(resolved, environment)
    if watchdog is None:
        num_ranks = resolved.layout.world_size if environment.is_launched else 1
        is_on_gpu = resolved.device_type == "cuda"
        watchdog = watch_guest(environment, num_ranks, executor_config.timeout_s, spins=is_on_gpu)
        watchdog.start()
    with host_by_default():
        return _start(resolved, executor, watchdog, executor.start, engine_class, before_load=before_load)


def restart_engine(engine: _Engine, parallel: ParallelConfig) -> _Engine:
    """Replace the engine by one of another layout over the same processes, with empty caches.

    Under a launcher the number of ranks is fixed; `multiproc` starts and ends processes. The ranks repeat all
    agreements of a start, numbers of blocks included. Ids of requests and calls continue; counters restart. Every rank
    of the world calls this. Raises RuntimeError while requests are unanswered and ConfigError for an unsupported
    layout, with the engine unchanged; any later failure is fatal.
    """
    engine.requests.check_idle()
    executor, watchdog = engine.executor, engine.watchdog
    assert watchdog is not None, "an engine that was started has one"
    resolved = resolve_again(engine.resolved, parallel)
    check_cache_setting(resolved)
    executor.check_layout(resolved.layout)
    engine.life.retire()
    set_up = partial(executor.reinitialize_distributed, resolved)
    adapters = EarlierAdapters(engine.adapters.loaded(), engine.prompt_adapters.loaded())
    restarted = _start(resolved, executor, watchdog, set_up, type(engine), adapters)
    # Each replica has its own counts: continue from their maximum.
    least = restarted.engine_channel.minimum((-engine.requests.num_requests, -engine.requests.num_unnamed))
    restarted.requests.restore_counts(-least[0], engine.requests.num_calls, -least[1])
    return restarted


@contextmanager
def _diagnosed(watchdog: Watchdog) -> Iterator[None]:
    """Block whose errors are reported to the other ranks, which may wait for this one, and name their cause."""
    try:
        yield
    except NoWorkError:
        if not watchdog.watched.exits:
            watchdog.stop()
        raise
    except BaseException as error:
        watchdog.fail(error)
        cause = watchdog.find_cause(error)
        if not watchdog.watched.exits:
            watchdog.stop()
        if cause is None:
            raise
        raise RankFailedError(cause) from error


def _start(
    resolved: ResolvedRun,
    executor: Executor,
    watchdog: Watchdog,
    set_up: Callable[[], None],
    engine_class: type[_Engine],
    earlier: EarlierAdapters | None = None,
    before_load: BeforeLoad | None = None,
) -> _Engine:
    """`earlier`: adapters of the engine that this one replaces."""
    config = resolved.config
    with _diagnosed(watchdog):
        # Step 0 again after a restart: a start may take any time.
        watchdog.heartbeat.enter("joining the other ranks", 0)
        set_up()
        channel: ControlChannel = getattr(executor, "channel", None) or ControlChannel(single_group())
        engine_channel: ControlChannel = getattr(executor, "engine_channel", None) or channel
        try:
            watchdog.join_run(check_members(engine_channel, run_secret()))
            # No two ranks of the engine, of any replica, may share a GPU.
            gpus = engine_channel.gather(canonical([each.gpu_identity for each in executor.reports()]))
            check_gpus_not_shared([identity for each in gpus for identity in json.loads(each)])
            if before_load is not None:
                before_load(engine_channel)
            max_num_seqs, sizes, outside = _load(resolved, executor, channel, engine_channel, watchdog, earlier)
            watchdog.heartbeat.enter("agreeing on the start")
            together = partial(_together, engine_channel, watchdog)
            least = channel.minimum((int(all(each.keeps_histories for each in executor.reports())),))
            adapters = load_at_start(resolved, executor, engine_channel, earlier, together)
            transfers = None if outside is None else outside.new_transfers()
            given = (max_num_seqs, sizes, adapters, transfers)
            speculation = _agreed_speculation(resolved, executor, channel, engine_channel)
            scheduler = _new_replica(resolved, *given, *speculation, keeps_histories=bool(least[0]))
            if config.executor.digest_every:
                # Known once the kernels are built and the memory is measured. Replicas may differ in their number of
                # blocks, but must compute the same bits.
                names = ("num_blocks", "num_host_blocks", "block_size")
                sizes_of_caches = {name: getattr(scheduler.cache, name) for name in names}
                sizes_of_caches |= {"max_num_seqs": max_num_seqs, "num_state_slots": sizes.num_state_slots}
                check_equal("caches", channel.gather(canonical(sizes_of_caches)))
                _check_kernels(executor, engine_channel)
            # The channel last: it starts a thread.
            step_channel = None
            if channel.size > 1:
                environment = executor.environment
                is_one_node = environment.local_world_size == environment.world_size
                address = None if is_one_node else environment.master_address
                step_channel = open_step_channel(channel, address, config.executor.timeout_s)
            lockstep = Lockstep(step_channel, config.executor.digest_every, scheduler.limits.num_in_flight)
        except BaseException as error:
            # Before the groups are closed, which may take a while.
            if isinstance(error, NoWorkError):
                watchdog.heartbeat.enter(CLOSING)
            else:
                watchdog.fail(error)
            executor.shutdown()
            raise
        watchdog.heartbeat.enter(BETWEEN_STEPS)
        return engine_class(resolved, executor, channel, engine_channel, lockstep, scheduler, watchdog, outside)


def _check_kernels(executor: Executor, engine_channel: ControlChannel) -> None:
    """Raise RanksDisagreeError unless all workers of all replicas compute the same bits."""
    own = [{"arithmetic": each.arithmetic, **each.numerical_policy.get("regions", {})} for each in executor.reports()]
    reports = [json.loads(each) for each in engine_channel.gather(canonical(own))]
    check_equal("kernels", [canonical(each) for of_rank in reports for each in of_rank])


def _load(
    resolved: ResolvedRun,
    executor: Executor,
    channel: ControlChannel,
    engine_channel: ControlChannel,
    watchdog: Watchdog,
    earlier: EarlierAdapters | None,
) -> tuple[int, CacheSizes, OutsideBlocks | None]:
    """Load the model and allocate the cache, each phase agreed on by all replicas; returns this replica's maximum
    number of sequences and sizes, and its view of a connector. Folders that may have gone since are not checked again
    after an `earlier` engine.
    """
    config = resolved.config
    together = partial(_together, engine_channel, watchdog)
    if earlier is None:
        # Other ranks need not see the folder of media.
        media_root = config.job.media_root if engine_channel.rank == 0 else None
        together("checking the folder of media", partial(resolved_media_root, media_root))
        together("checking the adapters", partial(check_folders, config.model))
    if config.executor.digest_every:
        _agree_on_start(engine_channel, watchdog, resolved)
    together("loading the model", executor.load_model)
    together("checking the workers", partial(_check_workers, resolved, executor))
    counts = together("sizing the cache", executor.determine_num_available_blocks)
    num_tier = num_tier_blocks(resolved, max(executor.collective_rpc("get_cache_block_size_bytes")))
    has_states = resolved.model_config.has_states
    of_states = together("sizing the states", executor.determine_num_state_slots) if has_states else (0, 0, 0)
    # Each number fits on every rank, together with the other minimums.
    least = channel.minimum((*counts, num_tier, *of_states))
    num_blocks, num_host_blocks, num_tier, num_seqs, num_snapshots, num_host_slots = least
    of_states = (num_seqs + num_snapshots, num_host_slots)
    sizes = CacheSizes(num_blocks, num_host_blocks, num_tier, *of_states, grouping_of(resolved).groups)
    if has_states:
        slots = (sizes.num_state_slots, sizes.num_host_state_slots)
        together("sizing the states", partial(executor.collective_rpc, "initialize_states", args=slots))
    allocate = partial(executor.initialize_from_config, sizes.num_blocks, sizes.num_host_blocks)
    together("allocating the cache", allocate)
    if sizes.num_tier_blocks:
        allocate_tier = partial(executor.collective_rpc, "initialize_host_tier", args=(sizes.num_tier_blocks,))
        together("allocating the host tier", allocate_tier)
    outside = None
    if config.cache.connector is not None:
        outside = _connect(resolved, executor, channel, engine_channel, together)
    together("warming up", partial(executor.collective_rpc, "compile_or_warm_up_model"))
    return num_seqs or resolved.max_num_seqs, sizes, outside


def _connect(
    resolved: ResolvedRun,
    executor: Executor,
    channel: ControlChannel,
    engine_channel: ControlChannel,
    together: Callable[[str, Callable[[], Any]], Any],
) -> OutsideBlocks:
    """Make both halves of the connector: rank 0's first, which may make what the others open."""
    name = resolved.config.cache.connector
    assert name is not None, resolved.config.cache
    is_first = engine_channel.rank == 0
    own = together("reading the weights' digest", partial(weights_digest, resolved) if is_first else str)
    weights = engine_channel.gather(own.encode())[0].decode()
    identity = block_identity(resolved, executor.reports()[0].arithmetic, weights)
    connector = together("making the connector", partial(open_connector, resolved, identity))
    outside: OutsideBlocks = together(
        "opening the connector", partial(OutsideBlocks, connector, name, is_leader=channel.rank == 0)
    )
    args = (name, dict(resolved.config.cache.connector_options or {}), identity)
    together("connecting the workers", partial(executor.collective_rpc, "initialize_connector", args=args))
    return outside


def _check_workers(resolved: ResolvedRun, executor: Executor) -> None:
    """Raise RuntimeError for a device that does not compute, ConfigError for an unsuitable worker class."""
    executor.check_health()
    config, pooling = resolved.config, resolved.model_config.pooling
    key, task = f"executor.worker_cls={config.executor.worker_cls}", "generate" if pooling is None else pooling.task
    if task not in executor.supported_tasks:
        known = ", ".join(executor.supported_tasks) or "nothing"
        kind = "generates" if pooling is None else "pools"
        raise ConfigError(f"{key} supports {known} on every rank, but not {task}: name a class that {kind}")
    for rank, spec in enumerate(executor.get_kv_cache_specs()):
        if spec.block_size != config.cache.block_size:
            raise ConfigError(
                f"{key} has blocks of {spec.block_size} tokens on worker {rank}, but cache.block_size is "
                f"{config.cache.block_size}: they must be equal"
            )


def _new_replica(
    resolved: ResolvedRun,
    max_num_seqs: int,
    sizes: CacheSizes,
    adapters: tuple[AdapterRegistry, AdapterRegistry],
    outside: OutsideTransfers | None,
    speculation: SpeculativeConfig | None,
    num_lookahead_tokens: int,
    *,
    keeps_histories: bool,
) -> Scheduler:
    """This rank's replica of the scheduler, empty."""
    config, model_config = resolved.config, resolved.model_config
    dtype, device = resolved.dtype, resolved.device_type
    block_size, block_dtype_bytes = config.cache.block_size, resolved.block_dtype_bytes
    copy_tokens = block_copy_tokens(model_config, dtype, block_size, device, block_dtype_bytes)
    copy_tokens /= sizes.groups.num_groups
    limits = SchedulerLimits(
        max_num_seqs,
        config.scheduler.max_num_batched_tokens,
        config.scheduler.enable_chunked_prefill,
        config.cache.enable_prefix_caching,
        PreemptionPolicy(config.scheduler.preemption_mode, copy_tokens, slot_copy_tokens(model_config, dtype, device)),
        WATERMARK_BLOCKS_PER_SEQUENCE,
        config.parallel.pipeline_parallel_size,
        resolved.num_steps_ahead,
        keeps_histories,
        0 if config.model.adapter_limits is None else config.model.adapter_limits.max_loras,
        model_snapshot_interval(model_config, dtype, block_dtype_bytes),
        media_row_limits(resolved),
        config.cache.verify_hits,
        config.executor.verify_steps,
        speculation,
        num_lookahead_tokens,
        model_config.vocab_size,
    )
    given = (config.cache.block_size, model_config.eos_token_ids, resolved.max_model_len, resolved.tokenizer)
    return new_scheduler(limits, sizes, *given, *adapters, outside)


def _agreed_speculation(
    resolved: ResolvedRun, executor: Executor, channel: ControlChannel, engine_channel: ControlChannel
) -> tuple[SpeculativeConfig | None, int]:
    """`SchedulerLimits.speculation` and `num_lookahead_tokens`; the tokens of a step are those of rank 0's device."""
    config = resolved.config.speculative_config
    if not config.is_on:
        return None, 0
    reports = executor.reports()
    step_tokens = int(engine_channel.gather(str(reports[0].step_tokens).encode())[0])
    (least,) = channel.minimum((-max(each.num_lookahead_tokens for each in reports),))
    return replace(config, max_step_tokens=config.max_step_tokens or step_tokens), -least


def package_versions() -> dict[str, str]:
    """Versions of Python and of the packages that affect results."""
    versions = {module.__name__: str(module.__version__) for module in (numpy, tokenizers, torch)}
    # Not imported: it is slow to import, and only structured outputs need it.
    with suppress(metadata.PackageNotFoundError):
        versions["llguidance"] = metadata.version("llguidance")
    return {"python": platform.python_version(), **versions}


def _agree_on_start(channel: ControlChannel, watchdog: Watchdog, resolved: ResolvedRun) -> None:
    """Compare configuration, code and model. Only rank 0 uses the settings of outputs and clients."""
    draft = resolved.draft
    settings = asdict(resolved.config)
    del settings["job"], settings["serve"]
    # The memory budget may differ: the ranks agree on the minimum number of blocks.
    del settings["cache"]["gpu_memory_utilization"]
    # So may folders: the contents of files are compared.
    settings["model"]["path"] = settings["model"]["lora_merge"] = settings["parallel"]["expert_placement"] = None
    settings["speculative_config"]["model"] = None
    for key in ("adapters", "prompt_adapters"):
        settings["model"][key] = sorted(settings["model"][key] or ())
    value = {
        "config": settings,
        "code": code_fingerprint(),
        "packages": package_versions(),
        "model": asdict(resolved.model_config),
        "draft": None if draft is None else asdict(draft) | {"location": None},
        "experts": None if resolved.layout.experts is None else asdict(resolved.layout.experts),
        "default sampling": asdict(resolved.default_sampling),
        "tokenizer": resolved.tokenizer.fingerprint() if resolved.tokenizer is not None else None,
    }
    check_equal("settings", channel.gather(canonical(value)))
    merged = resolved.config.model.merged_adapter
    if merged is not None:
        read = _together(channel, watchdog, "reading the adapter", partial(read_adapter, merged))
        check_equal("adapters", channel.gather(canonical({"model.lora_merge": read.digest})))
    if resolved.config.model.load_format != "dummy":
        _agree_on_weights(channel, watchdog, resolved, "weights")
        if draft is not None and draft.method != MTP:
            _agree_on_weights(channel, watchdog, resolved.of_draft, "weights of speculative_config.model")


def _agree_on_weights(channel: ControlChannel, watchdog: Watchdog, resolved: ResolvedRun, subject: str) -> None:
    """Compare weights: by the identity of files if all ranks read the same ones, else by content, tensor by tensor."""
    folder, pooling = resolved.model_folder, resolved.model_config.pooling
    inside = () if pooling is None else pooling.weight_folders
    is_state = resolved.config.model.load_format == "sharded_state"
    contents = partial(state_digest, folder) if is_state else partial(tensor_digests, folder, inside)
    read = partial(_together, channel, watchdog, "reading the checkpoint")
    identities = channel.gather(canonical(read(partial(file_identities, folder, inside, is_state=is_state))))
    if len(dict.fromkeys(identities)) == 1:
        return
    # The first of the ranks that share files reads them for all.
    is_first = identities.index(identities[channel.rank]) == channel.rank
    gathered = channel.gather(canonical(read(contents if is_first else dict)))
    check_equal(subject, [gathered[identities.index(identity)] for identity in identities])


def _together(channel: ControlChannel, watchdog: Watchdog, phase: str, action: Callable[[], Any]) -> Any:
    """Run `action` on every rank; if it fails on any, all raise RankFailedError that names the first rank and error."""
    result, problem = None, ""
    watchdog.heartbeat.enter(phase)
    try:
        result = action()
    except (ValueError, OSError, RuntimeError, MemoryError) as error:
        if channel.size == 1:
            raise
        problem = f"{type(error).__name__}: {error}"
        watchdog.fail(error, phase)
    for rank, other in enumerate(channel.gather(problem.encode("utf-8", "replace"))):
        if other:
            failed = RankFailedError(f"rank {rank} failed while {phase}: {other.decode('utf-8', 'replace')}")
            failed.names_cause = True
            raise failed
    return result
